"""A verdict as files: one page that opens from disk, Markdown for a paper's appendix, tables as CSV, pictures as PNG and PDF."""

import base64
import csv
import hashlib
import html
import io
import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from transformer.files import write_whole
from transformer.lab.figures import draw
from transformer.lab.profiles import Profile, reads
from transformer.lab.results import Results, Run
from transformer.lab.scans import CLOSE
from transformer.lab.statistics import mean
from transformer.lab.study import Study, load_study
from transformer.lab.verdict import Verdict, p_value, signed, spell, validated
from transformer.parallel.sharding import human_bytes
from transformer.runs.metrics import human_count
from transformer.units import kind, of_tokens, unit

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 1rem 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ccc; }
p.about, figcaption, .note { color: #555; font-size: .9rem; }
ul.verdict { padding-left: 1.1rem; } ul.verdict li { margin: .35rem 0; }
.wide { overflow-x: auto; margin-bottom: 1rem; background: linear-gradient(to left, #fff 1.5rem, #fff0) right / 3rem 100% no-repeat local,
  linear-gradient(to left, #0003, #0000) right / .8rem 100% no-repeat scroll; }  /* a shadow where there is more to the right */
 table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th { white-space: normal; min-width: 3.5rem; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
td.text { text-align: left; white-space: normal; min-width: 12rem; overflow-wrap: anywhere; }
tr.best td:first-child { font-weight: 650; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); gap: 1.5rem; }
figure { margin: 0; min-width: 0; } summary { color: #555; font-size: .9rem; cursor: pointer; } figure img { width: 100%; height: auto; }
pre { background: #f4f4f4; padding: .6rem .8rem; overflow-x: auto; font-size: .85rem; }
@media print { body { max-width: none; font-size: 10pt; padding: 0; } .wide { overflow: visible; } table { font-size: 7.5pt; }
  h2 { break-after: avoid; } figure, tr, pre { break-inside: avoid; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .figures { display: block; } figure { display: inline-block; width: 48%; margin: 0 1% 1rem 0; vertical-align: top; }
  th:first-child, td:first-child { position: static; } }
"""


def write(verdict: Verdict, folder: Path) -> Path:
    """Writes the report's files; returns the page."""
    figures = draw(verdict)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, (said, figure) in figures.items():
        image = io.BytesIO()
        figure.savefig(image, format="png")
        (folder / "figures" / f"{name}.png").write_bytes(image.getvalue())
        figure.savefig(folder / "figures" / f"{name}.pdf")
        pictures[name] = (said, image.getvalue())
    for name, rows in tables(verdict).items():
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_whole(folder / f"{name}.csv", text.getvalue())
    write_whole(folder / "report.md", markdown(verdict))
    page = folder / "index.html"
    write_whole(page, as_html(verdict, pictures))
    return page


# ---- the parts, of which page and Markdown are made


def about(results: Results) -> list[str]:
    """What was asked and what varied."""
    sweep, runs = results.sweep, sum(len(arm.runs) for arm in results.arms.values())
    fields = [field for field in sweep.fields if field != "arm"]
    lines = [f"Varied: {', '.join(fields)}." if fields else "Runs compared with each other."]
    same = all(set(arm.runs) == set(sweep.seeds) for arm in results.arms.values())
    same_text = (
        len({str(_reads(run)) for arm in results.arms.values() for run in arm.runs.values()}) == 1
    )
    paired = (
        "; all arms have the same seeds"
        if same
        else "; not every arm has every seed, and those that both have are compared"
    )
    paired += ", and so the same text in the same order" if same and same_text else ""
    lines.append(
        f"{len(results.arms)} arms, {runs} runs, seeds {', '.join(map(str, sweep.seeds))}{paired}."
        if len(sweep.seeds) > 1
        else f"{len(results.arms)} arms, {runs} runs of one seed: nothing is known of how much another seed would change, so there are no intervals."
    )
    said = [
        sweep.metric,
        unit(sweep.metric, results.asks_for_tokens),
        f"on {part}" if (part := reads(results, sweep.metric)) else "",
    ]
    lines.append(
        f"Decides: {', '.join(filter(None, said))}; {'higher' if sweep.higher_is_better else 'lower'} is better."
    )
    texts = {
        str(run.manifest.get("data", {}).get("test", {}).get("sha256"))
        for arm in results.arms.values()
        for run in arm.runs.values()
    }
    lines += (
        ["Arms are judged on texts of their own, which belongs to what was asked."]
        if len(texts) > 1
        else []
    )
    lines += [f"Declared: arms differ in {name}: {why}." for name, why in sweep.declared.items()]
    lines += [f"Control: {arm}: {why}." for arm, why in sweep.controls.items()]
    objectives = {
        str(run.manifest.get("data", {}).get("objective"))
        for arm in results.arms.values()
        for run in arm.runs.values()
    }
    if len(objectives) > 1 and of_tokens(sweep.metric, results.asks_for_tokens):
        lines.append(
            f"Arms have objectives of their own ({', '.join(sorted(objectives))}), so {sweep.metric} is not of the same tokens in all of them."
        )
    dropped = {
        arm.name: next(
            (
                _counts(run.tested["left_out"])
                for run in arm.runs.values()
                if run.tested.get("left_out")
            ),
            "nothing",
        )
        for arm in results.arms.values()
    }
    if len(set(dropped.values())) > 1:
        lines.append(
            f"Of the test text arms leave out: {'; '.join(f'{name} {what}' for name, what in dropped.items())}."
        )
    lines += (
        [f"Arms were sized equal in {'FLOPs a token' if sweep.match == 'flops' else sweep.match}."]
        if sweep.match
        else []
    )
    return lines


def _counts(of: Mapping) -> str:
    return ", ".join(f"{why} {count:,}" for why, count in of.items())


def _reads(run: Run) -> tuple:
    """What the order of a run's text hangs on, beside its seed."""
    told = run.manifest.get("data", {})
    model = run.config.model
    return (
        told.get("train", {}).get("sha256"),
        told.get("tokenizer_sha256"),
        told.get("objective"),
        run.config.data,
        model.family,
        model.prefix_lm,
    )


def outcome(verdict: Verdict) -> list[list[str]]:
    """The table of arms, for a person: what came out."""
    sweep, rows = verdict.results.sweep, []
    for name, row in verdict.rows.items():
        one, arm = row.to_baseline, row.arm
        difference = ["-", "-", "-"]
        if one is not None and one.mean.count > 1:
            low, high = (signed(x, one.mean.half) for x in (one.mean.low, one.mean.high))
            difference = [
                signed(one.mean.mean, one.mean.half),
                f"{low} to {high}",
                p_value(one.p).removeprefix("p ").removeprefix("= "),
            ]
        reaches = "-" if one is None or not row.reaches.seeds else "never"
        if one is not None and row.reaches.count:
            reaches = f"{row.reaches.share:.0%} of its steps" + (
                f", {row.reaches.count} of {row.reaches.seeds} seeds"
                if row.reaches.count < row.reaches.seeds
                else ""
            )
        seeds = str(row.value.count) + (
            f" ({one.mean.count} paired)"
            if one is not None and one.mean.count < row.value.count
            else ""
        )
        diverged = f"{len(arm.diverged)} of {len(arm.runs)}" if arm.diverged else "-"
        rows.append(
            [
                name + (" *" if row.among_best else ""),
                spell(row.value),
                *difference,
                seeds,
                diverged,
                reaches,
            ]
        )
    head = [
        "arm",
        f"{sweep.metric} ± 95 %",
        f"minus {sweep.baseline}",
        "95 % interval",
        "p",
        "seeds",
        "diverged",
        f"{validated(verdict.results)} as good as the baseline's last after",
    ]
    return [head, *rows]


def cost(verdict: Verdict) -> list[list[str]]:
    """The table of arms, for a person: what they took."""
    rows = [["arm", "parameters", "FLOP a token", "tokens/s", "memory", "attention"]]
    for name, row in verdict.rows.items():
        arm = row.arm
        together = {run.together for run in arm.runs.values()}
        mark = f" ({' or '.join(map(str, sorted(together)))} together)" if together - {1} else ""
        attention = sorted(
            {
                backend
                for run in arm.runs.values()
                for backend in run.manifest.get("attention_backends", {})
            }
        )
        known = lambda x, text, more="": "-" if not x or math.isnan(x) else text(x) + more
        rows.append([
            name, known(arm.parameters, "{:,}".format), known(arm.flops, human_count), known(row.tokens_per_second, human_count, mark),
            known(row.memory, human_bytes, mark), " + ".join(attention) or "-",
        ])  # fmt: skip
    return rows


def measured(verdict: Verdict) -> list[list[str]]:
    """The table of arms, for a person: what else the test says, but for what is a profile; empty where there is nothing."""
    arms, decides = verdict.results.arms, verdict.results.sweep.metric
    names = {name for arm in arms.values() for run in arm.runs.values() for name in run.names}
    names = sorted(
        name
        for name in names
        if name.startswith("test/")
        and name != decides
        and not re.search(r"/\d+(/|$)|/sentences", name)
    )
    rows = [
        [name, *(spell(mean(list(arm.values(metric).values()))) for metric in names)]
        for name, arm in arms.items()
    ]
    heads = [
        f"{metric} ({part})" if (part := reads(verdict.results, metric)) else metric
        for metric in names
    ]
    return [["arm", *heads], *rows] if names else []


SIZED = {"parameters": "model.d_ff", "flops": "model.d_ff", "time": "train.steps"}
"""What arms are sized equal by (lab/guard.py)."""


def arms_table(results: Results) -> list[list[str]]:
    """What each arm sets, and what it was sized to."""
    rows = [["arm", "what it sets", "diverged (seed)"]]
    for name, arm in results.arms.items():
        said = [f"{field} = {value}" for field, value in arm.changes.items() if field != "arm"] or [
            "as it is"
        ]
        if (sized := SIZED.get(results.sweep.match)) and arm.runs:
            parent, field = sized.split(".")
            said.append(
                f"sized to {sized} = {getattr(getattr(next(iter(arm.runs.values())).config, parent), field):,}"
            )
        rows.append(
            [
                name,
                ", ".join(said),
                ", ".join(f"{seed} at step {step:,}" for seed, step in arm.diverged.items()) or "-",
            ]
        )
    return rows


def scanned(verdict: Verdict) -> list[list[str]]:
    """The table of numbers that the sweep went through."""
    rows = [
        [
            "field",
            "arms",
            "values",
            "best",
            verdict.results.sweep.metric,
            f"within {CLOSE:.0%}",
            "no seed failed",
            "sensitivity",
        ]
    ]
    for one in verdict.scans:
        known = lambda x, text: "-" if math.isnan(x) else text.format(x)
        ends = lambda pair: f"{pair[0]:g} to {pair[1]:g}" if pair else "-"
        rows.append([
            one.field, one.setting or "all", ends((min(one.points), max(one.points))), f"{one.best:g}", spell(one.points[one.best]),
            ends(one.close), ends(one.stable), known(one.sensitivity, "{:.3f}"),
        ])  # fmt: skip
    return rows


PLACES = 9
"""Columns that a profile's table has at most; all are in profiles.csv."""


def profile_table(profile: Profile) -> list[list[str]]:
    """An arm a row, a place a column."""
    places = profile.places
    if len(places) > PLACES:
        places = [places[round(n * (len(places) - 1) / (PLACES - 1))] for n in range(PLACES)]
    rows = [
        [name, *(spell(line[at]) if at in line else "-" for at in places)]
        for name, line in profile.lines.items()
    ]
    return [[profile.x_label, *map(str, places)], *rows]


SCANNED = (
    "Sensitivity (Wortsman et al. 2023): the mean loss over all values, that of a failed run being the loss of knowing nothing, log V, less the loss at "
    "the best. A run fails that diverges or ends with more than log V; ranges are those around the best value, without a gap."
)

NOTE = (
    "* the best, and arms that cannot be told from it. Means over seeds with 95 % t intervals; differences seed by seed, paired t-test, "
    "p corrected by Holm for the number of comparisons; the best is found in the same numbers, so of equal arms some one is told from it in 6 to 10 studies of 100 instead of 5; an interval is of its comparison alone, so it may leave out zero where p does not tell. "
    "Speed is of one run and memory of its process, on the machine below; (n together): n runs were one program and shared it."
)


def provenance(results: Results) -> list[tuple[str, str]]:
    """Where the numbers come from."""
    runs = [run for arm in results.arms.values() for run in arm.runs.values()]
    told = lambda key: sorted({str(run.manifest.get(key, "")) for run in runs} - {""})
    versions = sorted(
        {
            f"{name} {version}"
            for run in runs
            for name, version in run.manifest.get("versions", {}).items()
        }
    )
    devices = sorted(
        {
            f"{len(run.manifest.get('devices', []))} x {(run.manifest.get('devices') or ['?'])[0]}"
            for run in runs
        }
    )
    test = runs[0].manifest.get("data", {}).get("test", {}) if runs else {}
    study = _study(results)
    return [
        *(
            [
                (
                    "experiment",
                    f"{study.file}, sha256 {hashlib.sha256(study.text.encode()).hexdigest()[:16]}",
                )
            ]
            if study and study.text
            else []
        ),
        (
            "code",
            ", ".join(f"transformer {version}" for version in told("transformer"))
            + f"; commit {', '.join(one[:12] + '+' * one.endswith('+') for one in told('commit'))}",
        ),
        ("versions", f"Python {', '.join(told('python'))}; {', '.join(versions)}"),
        ("devices", ", ".join(devices)),
        (
            "tested on",
            f"{test.get('examples', '?')} examples, sha256 {str(test.get('sha256', '?'))[:16]}",
        ),
        (
            "tokenizer",
            ", ".join(
                sorted(
                    {
                        str(run.manifest.get("data", {}).get("tokenizer_sha256", "?"))[:16]
                        for run in runs
                    }
                )
            ),
        ),
    ]


def again(results: Results) -> str:
    """The commands that give it again."""
    where = " ".join(map(str, results.folders))
    compared = ["python", "-m", "transformer", "compare", *map(str, results.folders)]
    of = (study := _study(results)) and study.sweep
    if not of or of.metric != results.sweep.metric:
        compared.append(f"--metric={results.sweep.metric}")
    if not of or of.baseline != results.sweep.baseline:
        compared.append(f"--baseline={results.sweep.baseline}")
    if (
        known := kind(results.sweep.metric)
    ) is None or known.higher != results.sweep.higher_is_better:
        compared.append(
            "--higher-is-better" if results.sweep.higher_is_better else "--lower-is-better"
        )
    lines = [shlex.join(compared)]
    if study:
        asked = [f"--config={study.file}"] * bool(study.file) + [
            f"--config.{key}={value}" for key, value in study.overrides.items()
        ]
        lines.insert(
            0, shlex.join(["python", "-m", "transformer", "sweep", *asked, f"--workdir={where}"])
        )
    return "\n".join(lines)


def _study(results: Results) -> Study | None:
    there = len(results.folders) == 1 and (results.folders[0] / "sweep.json").exists()
    return load_study(results.folders[0]) if there else None


def tables(verdict: Verdict) -> dict[str, list[list]]:
    """CSV: the summary in full precision, every run's last metrics, and the curves."""
    results, blank = verdict.results, lambda x: "" if isinstance(x, float) and math.isnan(x) else x
    head = [
        "arm",
        "mean",
        "low",
        "high",
        "seeds",
        "diverged",
        "difference",
        "difference_low",
        "difference_high",
        "p_corrected",
        "parameters",
        "flops_per_token",
    ]
    rows = [head]
    for name, row in verdict.rows.items():
        one = row.to_baseline
        more = [one.mean.mean, one.mean.low, one.mean.high, one.p] if one else [""] * 4
        rows.append(
            [
                blank(x)
                for x in (
                    name,
                    row.value.mean,
                    row.value.low,
                    row.value.high,
                    row.value.count,
                    len(row.arm.diverged),
                    *more,
                    row.arm.parameters,
                    row.arm.flops,
                )
            ]
        )
    runs = [
        (name, seed, run) for name, arm in results.arms.items() for seed, run in arm.runs.items()
    ]
    names = sorted({name for *_, run in runs for name in run.names})
    last = [["arm", "seed", "diverged_at", *names]]
    last += [
        [name, seed, run.diverged or "", *(blank(run.last(key)) for key in names)]
        for name, seed, run in runs
    ]
    curves = [["arm", "seed", "step", "metric", "value"]]
    curves += [
        [name, seed, step, key, value]
        for name, seed, run in runs
        for key in ("train/loss", "eval/loss")
        for step, value in run.curve(key)
    ]
    places = [["profile", "arm", "place", "mean", "low", "high", "seeds"]]
    for profile in verdict.profiles:
        for name, line in profile.lines.items():
            places += [
                [profile.name, name, at, *map(blank, (one.mean, one.low, one.high, one.count))]
                for at, one in line.items()
            ]
    return {"summary": rows, "runs": last, "curves": curves} | (
        {"profiles": places} if verdict.profiles else {}
    )


def markdown(verdict: Verdict) -> str:
    """For a paper's appendix."""
    results = verdict.results
    lines = [
        f"# {results.sweep.question or results.title}",
        "",
        *(f"- {line}" for line in verdict.sentences),
        "",
        *about(results),
        "",
    ]
    if verdict.scans:
        lines += [*_rows(scanned(verdict)), "", SCANNED, ""]
    for rows in filter(None, (outcome(verdict), cost(verdict), measured(verdict))):
        lines += [*_rows(rows), ""]
    lines += [NOTE, "", *_rows(arms_table(results)), ""]
    for profile in verdict.profiles:
        lines += [f"{profile.said} ({profile.y_label}):", "", *_rows(profile_table(profile)), ""]
    if results.left_out:
        lines += ["Left out or damaged:", "", *(f"- {line}" for line in results.left_out), ""]
    lines += [
        "## Where it comes from",
        "",
        *(f"- {name}: {said}" for name, said in provenance(results)),
        "",
        "```",
        again(results),
        "```",
        "",
    ]
    return "\n".join(lines)


def _rows(table: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    head, *rows = table
    cell = lambda text: text.replace("|", "\\|")
    return [
        "| " + " | ".join(map(cell, row)) + " |"
        for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows)
    ]


def as_html(verdict: Verdict, pictures: Mapping[str, tuple[str, bytes]]) -> str:
    """One file, which asks for nothing else."""
    results, escape = verdict.results, html.escape
    table = lambda head, rows, classes=(): (
        "<div class=wide><table><thead><tr>" + "".join(f"<th>{escape(x)}</th>" for x in head) + "</tr></thead><tbody>"
        + "".join(f"<tr{' class=best' if row[0].endswith(' *') else ''}>" + "".join(f"<td{' class=text' if n in classes else ''}>{escape(x)}</td>" for n, x in enumerate(row)) + "</tr>" for row in rows)
        + "</tbody></table></div>"
    )  # fmt: skip
    settings = arms_table(results)
    numbers = {
        one.name: f"<details><summary>numbers ({escape(one.y_label)})</summary>{table(*_split(profile_table(one)))}</details>"
        for one in verdict.profiles
    }
    figure = lambda name, said, image: (
        f'<figure><img alt="{escape(said)}" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        f"<figcaption>{escape(said)}</figcaption>{numbers.get(name, '')}</figure>"
    )
    parts = [
        f"<h1>{escape(results.sweep.question or results.title)}</h1>",
        "<ul class=verdict>" + "".join(f"<li>{escape(line)}</li>" for line in verdict.sentences) + "</ul>",
        f"<p class=about>{escape(' '.join(about(results)))}</p>",
        *(["<h2>Scans</h2>", table(*_split(scanned(verdict))), f"<p class=note>{escape(SCANNED)}</p>"] if verdict.scans else []),
        "<h2>Results</h2>", table(*_split(outcome(verdict))), table(*_split(cost(verdict))),
        *([table(*_split(more))] if (more := measured(verdict)) else []), f"<p class=note>{escape(NOTE)}</p>",
        *(["<h2>Left out or damaged</h2><ul>", *(f"<li>{escape(line)}</li>" for line in results.left_out), "</ul>"] if results.left_out else []),
        "<h2>Figures</h2><div class=figures>", *(figure(name, *picture) for name, picture in pictures.items()), "</div>",
        "<h2>Arms</h2>", table(*_split(settings), classes=(1, 2)),
        "<h2>Where it comes from</h2>", table(["", ""], [[name, said] for name, said in provenance(results)], classes=(1,)),
        f"<pre>{escape(again(results))}</pre>",
        *([f"<details><summary>{escape(study.file)}</summary><pre>{escape(study.text)}</pre></details>"] if (study := _study(results)) and study.text else []),
    ]  # fmt: skip
    title = escape(results.sweep.question or results.title)
    return (
        '<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def _split(rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return rows[0], rows[1:]
