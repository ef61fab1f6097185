"""Describes a study for a report: its arms, its provenance and the commands to reproduce it."""

import hashlib
import shlex
from collections.abc import Mapping

from transformer.lab.profiles import measured_text
from transformer.lab.results import Results, RunResult
from transformer.lab.study import Study, load_study
from transformer.output import count, event
from transformer.units import kind, of_tokens, unit


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
    metric = [sweep.metric, unit(sweep.metric, results.predicts_tokens), part and f"on {part}"]
    metric_is = f"{', '.join(filter(None, metric))}; {'higher' if better else 'lower'}"
    lines.append(f"Primary metric: {metric_is} is better.")
    lines += _texts(results)
    lines += [f"Declared difference in {name}: {why}." for name, why in sweep.declared.items()]
    lines += [f"Control arm {arm}: {reason}." for arm, reason in sweep.controls.items()]
    if sweep.match:
        matched = "FLOPs per token" if sweep.match == "flops" else sweep.match
        lines.append(f"Arms match the baseline in {matched}.")
    return lines


def _of_data(run: RunResult) -> Mapping:
    return run.manifest.get("data", {})


def _texts(results: Results) -> list[str]:
    """Returns sentences on arms that are tested on different texts, tokens or parts of a text."""
    sweep, lines = results.sweep, []
    if len({str(_of_data(run).get("test", {}).get("sha256")) for run in results.runs}) > 1:
        lines.append("Arms are tested on different texts, as the sweep varies or declares.")
    objectives = {str(_of_data(run).get("objective")) for run in results.runs}
    if len(objectives) > 1 and of_tokens(sweep.metric, results.predicts_tokens):
        lines.append(
            f"Arms have different objectives ({', '.join(sorted(objectives))}), "
            f"so {sweep.metric} is not measured on the same tokens in all arms."
        )
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
    data, model = _of_data(run), run.config.model
    texts = (data.get("train", {}).get("sha256"), data.get("tokenizer_sha256"))
    return (*texts, data.get("objective"), run.config.data, model.family, model.prefix_lm)


def provenance(results: Results) -> list[tuple[str, str]]:
    """Returns a table of file, code, versions, devices, test text and tokenizer."""
    runs, study = results.runs, study_of(results)
    recorded = lambda key: sorted({str(run.manifest.get(key, "")) for run in runs} - {""})
    joined = lambda texts: ", ".join(sorted(texts))
    file, text = (study.file, study.text) if study else ("", "")
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    pairs = [("experiment", f"{file}, sha256 {digest}")] if text else []
    code = ", ".join(f"transformer {version}" for version in recorded("transformer"))
    commits = ", ".join(x[:12] + "+" * x.endswith("+") for x in recorded("commit"))
    versions = [run.manifest.get("versions", {}).items() for run in runs]
    packages = joined({f"{name} {version}" for items in versions for name, version in items})
    devices = [run.manifest.get("devices") or [] for run in runs]
    test = _of_data(runs[0]).get("test", {}) if runs else {}
    digest = str(test.get("sha256", "?"))[:16]
    tokenizers = {str(_of_data(run).get("tokenizer_sha256", "?"))[:16] for run in runs}
    return [
        ("", ""),
        *pairs,
        ("code", f"{code}; commit {commits}"),
        ("versions", f"Python {', '.join(recorded('python'))}; {packages}"),
        ("devices", joined({f"{len(names)} x {[*names, '?'][0]}" for names in devices})),
        ("tested on", f"{test.get('examples', '?')} examples, sha256 {digest}"),
        ("tokenizer", joined(tokenizers)),
    ]


def reproduction_commands(results: Results) -> str:
    """Returns the commands that reproduce the report."""
    compare = ["python", "-m", "transformer", "compare", *map(str, results.folders)]
    sweep = (study := study_of(results)) and study.sweep
    if not sweep or sweep.metric != results.sweep.metric:
        compare.append(f"--metric={results.sweep.metric}")
    if not sweep or sweep.baseline != results.sweep.baseline:
        compare.append(f"--baseline={results.sweep.baseline}")
    metric_kind, higher = kind(results.sweep.metric), results.sweep.higher_is_better
    if metric_kind is None or metric_kind.higher != higher:
        compare.append("--higher-is-better" if higher else "--lower-is-better")
    if not study:
        return shlex.join(compare)
    options = [f"--config={study.file}"] * bool(study.file)
    options += [f"--config.{key}={value}" for key, value in study.overrides.items()]
    command = ["python", "-m", "transformer", "sweep", *options, f"--workdir={results.folders[0]}"]
    return f"{shlex.join(command)}\n{shlex.join(compare)}"


def study_of(results: Results) -> Study | None:
    """Returns the study of a sweep; None for runs that are not of one."""
    is_sweep = len(results.folders) == 1 and (results.folders[0] / "sweep.json").exists()
    return load_study(results.folders[0]) if is_sweep else None
