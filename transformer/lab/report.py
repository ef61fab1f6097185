"""Writes a verdict as files: an HTML page, Markdown, CSV tables, and figures as PNG and PDF."""

import csv
import dataclasses
import html
import io
import itertools
from collections.abc import Sequence
from pathlib import Path

from transformer.files import write_atomic
from transformer.lab import effects, figures, page, report_scaling, report_tables as tables, results
from transformer.lab.page import Section
from transformer.lab.report_about import about, provenance, reproduction_commands, study_of
from transformer.lab.report_tuning import Tuning
from transformer.lab.speed import disturbances
from transformer.lab.study import load_study
from transformer.lab.tuning import search
from transformer.lab.verdict import Verdict, derive_verdict


def judge(
    folders: Sequence[Path], metric: str, baseline: str, higher_is_better: bool | None
) -> tuple[Verdict, list[Section]]:
    """Reads runs. Returns their verdict, and the sections on tuning and scaling.

    If a sweep is tuned, the verdict is that on the tuned arms. Otherwise, it is that on the arms at
    the settings of the file. The verdict on a ladder starts with a compute multiplier.
    """

    def verdict_of(folder: Path | None) -> Verdict:
        read = results.read([folder] if folder else folders, metric, baseline, higher_is_better)
        return derive_verdict(dataclasses.replace(read, folders=tuple(folders)))

    more, tuned = [], folders[0] / "tuned"
    if len(folders) == 1 and any(tuned.glob("*/seed-*/metrics.jsonl")):
        study, verdict, untuned = load_study(folders[0]), verdict_of(tuned), None
        if any(run.folder.exists() for run in study.runs):
            untuned = verdict_of(None)
        tuning = Tuning(study.sweep, search(study)[0], verdict, untuned)
        answer, *rest = verdict.sentences
        sentences = (f"With each arm tuned: {answer}", *tuning.sentences, *rest)
        verdict, more = dataclasses.replace(verdict, sentences=sentences), [tuning.section()]
    else:
        verdict = verdict_of(None)
    if scaling := report_scaling.section(verdict.results):
        more, answer = [scaling, *more], scaling.lines[:1] or verdict.sentences[:1]
        verdict = dataclasses.replace(verdict, sentences=(*answer, *verdict.sentences[1:]))
    return verdict, more


def sections(verdict: Verdict) -> list[Section]:
    """Returns the sections of a report, in order. To add one, add it to this list."""
    results, shown, curves = verdict.results, figures.answer(verdict), figures.curves(verdict)
    seeds = {"by_arm": shown.pop("by_arm")} if len(shown) > 1 else {}
    timed = {"loss_by_time": curves.pop("loss_by_time")} if "loss_by_time" in curves else {}
    disturbed, other, study = disturbances(results), tables.measured(verdict), study_of(results)
    slow = Section("Speed, disturbed", disturbed, timed, [tables.speed(verdict)], folded=True)
    return [
        Section("", verdict.sentences[1:], shown, note=tables.LOGIC),
        Section("Results", (), {}, [tables.outcome(verdict)], tables.NOTE),
        Section("Left out or damaged", results.left_out),
        Section("Seeds", (), seeds | figures.interactions(verdict)),
        Section("Effects", (), {}, effects.tables(verdict.effects)),
        Section("Setup", about(results)),
        Section("Scans", (), figures.scanned(verdict), tables.scanned(verdict), tables.SCANNED),
        Section("Training", (), curves | ({} if disturbed else timed)),
        Section("Cost", (), {}, [tables.cost(verdict, not disturbed)], tables.COST),
        slow if disturbed else Section(""),
        Section("Other metrics", (), {}, [other] if other else []),
        *(
            Section(
                f"Evaluator {name}",
                figures={k: v for x in group for k, v in figures.profile(verdict, x).items()},
                numbers={x.name: tables.of_profile(x) for x in group},
                folded=True,
            )
            for name, group in verdict.by_evaluator.items()
        ),
        Section("Arms", (), {}, [tables.of_arms(results)]),
        Section("Provenance", tables=[provenance(results)], code=reproduction_commands(results)),
        Section(study.file, code=study.text, folded=True) if study else Section(""),
    ]


def write(verdict: Verdict, folder: Path, more: Sequence[Section] = ()) -> Path:
    """Writes the files of the report, and returns the path of the page.

    `more` are sections that follow the results.
    """
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
    write_atomic(folder / "report.md", markdown(verdict, parts))
    links = " ".join(f'<a href="{name}.csv">{name}.csv</a>' for name in files)
    links = f"<p class=note>Files: {links} <a href=report.md>report.md</a></p>"
    write_atomic(folder / "index.html", as_html(verdict, parts, links))
    return folder / "index.html"


def _title(verdict: Verdict) -> str:
    return verdict.results.sweep.question or verdict.results.title


def _numbered(parts: Sequence[Section]) -> list[tuple[Section, int]]:
    """Returns each section with the number of its first figure."""
    counts = itertools.accumulate((len(part.figures) for part in parts), initial=1)
    return list(zip(parts, counts, strict=False))


def markdown(verdict: Verdict, parts: Sequence[Section]) -> str:
    """Returns the report as Markdown, for the appendix of a paper."""
    lines = [f"# {_title(verdict)}", "", f"**{verdict.sentences[0]}**", ""]
    return "\n".join([*lines, *(x for part, n in _numbered(parts) for x in part.markdown(n))])


def as_html(verdict: Verdict, parts: Sequence[Section], links: str = "") -> str:
    """Returns the report as one self-contained HTML file."""
    title, answer = _title(verdict), html.escape(verdict.sentences[0])
    top = [f"<h1>{html.escape(title)}</h1>", f"<p class=verdict>{answer}</p>"]
    rest = [part.html(n) for part, n in _numbered(parts)]
    return page.document(title, page.STYLE, [*top, *rest, links])
