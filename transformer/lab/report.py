"""Writes a verdict as files: an HTML page, Markdown, CSV tables, and figures as PNG and PDF."""

import csv
import hashlib
import io
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from transformer.files import write_atomic
from transformer.lab import effects, figures, page, report_scaling, report_tables as tables, results
from transformer.lab.page import Section
from transformer.lab.profiles import measured_text
from transformer.lab.report_tuning import Tuning
from transformer.lab.results import Results, RunResult
from transformer.lab.study import load_study
from transformer.lab.tuning import search
from transformer.lab.verdict import Verdict, derive_verdict
from transformer.output import count, event
from transformer.units import kind


def judge(
    folders: Sequence[Path], metric: str, baseline: str, higher_is_better: bool | None
) -> tuple[Verdict, list[Section]]:
    """Returns the verdict on runs (of a tuned sweep, on the tuned arms; of a ladder, with a compute
    multiplier first), and the sections on tuning and scaling."""
    read = lambda these: results.read(these, metric, baseline, higher_is_better)
    verdict_of = lambda these: derive_verdict(read(these)._replace(folders=tuple(folders)))
    more, tuned = [], folders[0] / "tuned"
    if len(folders) == 1 and any(tuned.glob("*/seed-*/metrics.jsonl")):
        study, verdict = load_study(folders[0]), verdict_of([tuned])
        untuned = verdict_of(folders) if any(run.folder.exists() for run in study.runs) else None
        tuning = Tuning(study.sweep, search(study)[0], verdict, untuned)
        doubts, added, more = tuning.doubts, tuning.sentences, [tuning.section()]
        lead = f"With each arm tuned{' (some optima are uncertain)' * bool(doubts)}: "
    else:
        verdict, doubts, added = verdict_of(folders), [], []
        lead = "Without tuning: " if (study := verdict.results.study) and study.sweep.tune else ""
    answer, *rest = verdict.sentences
    if lead:
        answer = lead + answer.replace("Averaged", "averaged", 1).replace("It is", "it is", 1)
    verdict = verdict._replace(sentences=(answer, *doubts, *added, *rest))
    if scaling := report_scaling.section(verdict.results):
        more = [scaling, *more]
        verdict = verdict._replace(sentences=(*scaling.lines[:1], *verdict.sentences))
    return verdict, more


def sections(verdict: Verdict) -> list[Section]:
    """Returns the sections of a report, in order. To add one, add it to this list."""
    results, shown, curves = verdict.results, figures.answer(verdict), figures.curves(verdict)
    seeds = {"by_arm": shown.pop("by_arm")} if len(shown) > 1 else {}
    timed = {"loss_by_time": curves.pop("loss_by_time")} if "loss_by_time" in curves else {}
    disturbed, other = tables.disturbances(results), tables.measured(verdict)
    study, evaluated, costs = results.study, [], tables.cost(verdict, not disturbed)
    for name in dict.fromkeys(x.evaluator for x in verdict.profiles):
        profiles = [x for x in verdict.profiles if x.evaluator == name]
        drawn = {k: figure for x in profiles for k, figure in figures.profile(verdict, x).items()}
        numbers = {x.name: tables.of_profile(x) for x in profiles}
        evaluated.append(Section(f"Evaluator {name}", (), drawn, numbers=numbers, folded=True))
    speeds = [["arm", "tokens/s"], *([x.name, tables.speed(x)] for x in results.arms.values())]
    slow = Section("Speed, disturbed", disturbed, timed, [speeds], folded=True)
    return [
        Section("", verdict.sentences[1:], shown),
        Section("Results", (), {}, [tables.outcome(verdict)]),
        Section("Left out or damaged", results.left_out),
        Section("Seeds", (), seeds | figures.interactions(verdict)),
        Section("Effects", (), {}, effects.tables(verdict.effects)),
        Section("Setup", about(results)),
        Section("Scans", (), figures.scanned(verdict), tables.scanned(verdict)),
        Section("Training", (), curves | ({} if disturbed else timed)),
        Section("Cost", (), {}, [costs]),
        slow if disturbed else Section(""),
        Section("Other metrics", (), {}, [other] if other else []),
        *evaluated,
        Section("Arms", (), {}, [tables.of_arms(results)]),
        Section("Provenance", tables=[provenance(results)], code=reproduction_commands(results)),
        Section(study.file, code=study.text, folded=True) if study else Section(""),
    ]


def write(verdict: Verdict, folder: Path, more: Sequence[Section] = ()) -> Path:
    """Writes the report, with the sections `more` after the results. Returns the page's path."""
    parts = [part for part in sections(verdict) if part]
    parts[2:2] = more
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    for name, (_, figure) in itertools.chain.from_iterable(x.figures.items() for x in parts):
        figure.savefig(folder / "figures" / f"{name}.png")
        figure.savefig(folder / "figures" / f"{name}.pdf")
    files = tables.as_csv(verdict) | {k: rows for part in parts for k, rows in part.csv.items()}
    for name, rows in files.items():
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_atomic(folder / f"{name}.csv", text.getvalue())
    write_atomic(folder / "report.md", rendered("report.md", verdict, parts))
    write_atomic(folder / "index.html", rendered("report.html", verdict, parts, files))
    return folder / "index.html"


def rendered(template: str, verdict: Verdict, parts: Sequence[Section], files=()) -> str:
    """Returns the report as HTML (report.html) or as Markdown, for the appendix of a paper."""
    results, answer = verdict.results, verdict.sentences[0]
    values = {"title": results.title, "answer": answer, "scope": scope(results), "files": files}
    return page.render(template, sections=parts, counter=itertools.count(1), **values)


def scope(results: Results) -> str:
    """Returns the sizes of a comparison: of models, training and text."""
    span = lambda xs: " to ".join(f"{x:,}" for x in dict.fromkeys((min(xs), max(xs))))
    configs = [run.config for run in results.runs]
    sizes = [arm.parameters for arm in results.arms.values() if arm.parameters]
    parameters = f"{span(sizes)} parameters, " if sizes else ""
    texts = sorted({str(x.data.corpus or x.data.train or "a mixture") for x in configs})
    steps = f"{span([config.train.steps for config in configs])} steps of {' and '.join(texts)}"
    rates = [config.optimizer.learning_rate for config in configs]
    same = " in all arms" * (min(rates) == max(rates))
    return f"{parameters}{steps}, learning rate {span(rates)}{same}"


def about(results: Results) -> list[str]:
    """Returns sentences on the setup: varied fields, seeds, metric and declared differences."""
    sweep, runs = results.sweep, results.runs
    fields = [field for field in sweep.fields if field != "arm"]
    lines = [f"Varied: {', '.join(fields)}." if fields else "Individual runs are compared."]
    paired = "some arms lack seeds, so each comparison uses the seeds that both arms have"
    if all(set(arm.runs) == set(sweep.seeds) for arm in results.arms.values()):
        paired = "all arms have the same seeds"
        if len({str(_reads(run)) for run in runs}) == 1:
            paired += ", and therefore the same text in the same order"
    seeds = f", seeds {', '.join(map(str, sweep.seeds))}; {paired}."
    if len(sweep.seeds) < 2:
        seeds = " of one seed: the variation between seeds is unknown, so there are no intervals."
    lines.append(f"{count(len(results.arms), 'arm')}, {count(len(runs), 'run')}{seeds}")
    part, better = measured_text(results, sweep.metric), sweep.higher_is_better
    metric = [sweep.metric, kind(sweep.metric, results.predicts_tokens).unit, part and f"on {part}"]
    metric_is = f"{', '.join(filter(None, metric))}; {'higher' if better else 'lower'}"
    lines += [f"Primary metric: {metric_is} is better.", *_texts(results)]
    lines += [f"Declared difference in {name}: {why}." for name, why in sweep.declared.items()]
    lines += [f"Control arm {arm}: {reason}." for arm, reason in sweep.controls.items()]
    if sweep.match:
        matched = "FLOPs per token" if sweep.match == "flops" else sweep.match
        lines.append(f"Arms match the baseline in {matched}.")
    return lines


def _texts(results: Results) -> list[str]:
    """Returns sentences on arms that are tested on different texts, tokens or parts of a text."""
    sweep, lines = results.sweep, []
    if len({str(run.data("test", "sha256")) for run in results.runs}) > 1:
        lines.append("Arms are tested on different texts, as the sweep varies or declares.")
    objectives = {str(run.data("objective")) for run in results.runs}
    if len(objectives) > 1 and kind(sweep.metric, results.predicts_tokens).of_tokens:
        tokens = f"{sweep.metric} is not measured on the same tokens in all arms"
        names = ", ".join(sorted(objectives))
        lines.append(f"Arms have different objectives ({names}), so {tokens}.")
    excluded = {}
    for arm in results.arms.values():
        left_out = [x for run in arm.runs.values() if (x := run.tested.get("left_out"))]
        counts = [event(number, text) for text, number in left_out[0].items()] if left_out else []
        excluded[arm.name] = ", ".join(counts) or "nothing"
    if len(set(excluded.values())) > 1:
        by_arm = "; ".join(f"{name} ({counts})" for name, counts in excluded.items())
        lines.append(f"Excluded from the test text, by arm: {by_arm}.")
    return lines


def _reads(run: RunResult) -> tuple:
    """Returns everything that determines the order of a run's text, except its seed."""
    config, texts = run.config, (run.data("train", "sha256"), run.data("tokenizer_sha256"))
    fields = (config.data, config.model.family, config.model.prefix_lm)
    return (*texts, run.data("objective"), *fields)


def provenance(results: Results) -> list[tuple[str, str]]:
    """Returns a table of file, code, versions, devices, test text and tokenizer."""
    runs, study = results.runs, results.study
    recorded = lambda key: sorted({str(run.manifest.get(key, "")) for run in runs} - {""})
    joined = lambda texts: ", ".join(sorted(texts))
    pairs = []
    if study and study.text:
        digest = hashlib.sha256(study.text.encode()).hexdigest()[:16]
        pairs = [("experiment", f"{study.file}, sha256 {digest}")]
    code = ", ".join(f"transformer {version}" for version in recorded("transformer"))
    commits = ", ".join(x[:12] + "+" * x.endswith("+") for x in recorded("commit"))
    versions = [run.manifest.get("versions", {}).items() for run in runs]
    packages = joined({f"{name} {version}" for items in versions for name, version in items})
    devices = [run.manifest.get("devices") or [] for run in runs]
    examples, digest = (runs[0].data("test", key) or "?" for key in ("examples", "sha256"))
    return [
        ("", ""), *pairs, ("code", f"{code}; commit {commits}"),
        ("versions", f"Python {', '.join(recorded('python'))}; {packages}"),
        ("devices", joined({f"{len(names)} x {[*names, '?'][0]}" for names in devices})),
        ("tested on", f"{examples} examples, sha256 {str(digest)[:16]}"),
        ("tokenizer", joined({str(run.data("tokenizer_sha256") or "?")[:16] for run in runs})),
    ]  # fmt: skip


def reproduction_commands(results: Results) -> str:
    """Returns the commands that reproduce the report."""
    compare = ["python", "-m", "transformer", "compare", *map(str, results.folders)]
    sweep = (study := results.study) and study.sweep
    if not sweep or sweep.metric != results.sweep.metric:
        compare.append(f"--metric={results.sweep.metric}")
    if not sweep or sweep.baseline != results.sweep.baseline:
        compare.append(f"--baseline={results.sweep.baseline}")
    higher = results.sweep.higher_is_better
    if kind(results.sweep.metric).higher != higher:
        compare.append("--higher-is-better" if higher else "--lower-is-better")
    if not study:
        return shlex.join(compare)
    options = [f"--config={study.file}"] * bool(study.file)
    options += [f"--config.{key}={value}" for key, value in study.overrides.items()]
    command = ["python", "-m", "transformer", "sweep", *options, f"--workdir={results.folders[0]}"]
    command += ["--untuned"] * bool(study.sweep.tune)
    return f"{shlex.join(command)}\n{shlex.join(compare)}"
