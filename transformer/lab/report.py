"""Writes a verdict as files: an HTML page, Markdown, CSV tables, and figures as PNG and PDF."""

import base64
import csv
import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from transformer.files import write_atomic
from transformer.lab import report_tables as tables
from transformer.lab.figures import draw
from transformer.lab.report_about import _study, about, provenance, reproduction_commands
from transformer.lab.report_scaling import NONE, Section, section
from transformer.lab.verdict import Verdict

STYLE = Path(__file__).with_name("report.css").read_text()


def write(verdict: Verdict, folder: Path) -> Path:
    """Writes the files of the report, and returns the path of the page."""
    scaling = section(verdict.results)
    figures = {**scaling.figures, **draw(verdict)}
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, (caption, figure) in figures.items():
        pictures[name] = (caption, png(figure))
        (folder / "figures" / f"{name}.png").write_bytes(pictures[name][1])
        figure.savefig(folder / "figures" / f"{name}.pdf")
    for name, rows in {**tables.as_csv(verdict), **scaling.csv}.items():
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_atomic(folder / f"{name}.csv", text.getvalue())
    write_atomic(folder / "report.md", markdown(verdict, scaling))
    page = folder / "index.html"
    write_atomic(page, as_html(verdict, pictures, scaling))
    return page


def png(figure: Figure) -> bytes:
    """Returns a figure as a PNG file."""
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def markdown(verdict: Verdict, scaling: Section = NONE) -> str:
    """Returns the report as Markdown, for the appendix of a paper."""
    results = verdict.results
    lines = [f"# {results.sweep.question or results.title}", ""]
    lines += [*(f"- {line}" for line in verdict.sentences), "", *about(results), ""]
    lines += scaling.markdown(_rows)
    if verdict.scans:
        lines += [*_rows(tables.scanned(verdict)), "", tables.SCANNED, ""]
    for rows in tables.of_results(verdict):
        lines += [*_rows(rows), ""]
    lines += [tables.NOTE, "", *_rows(tables.of_arms(results)), ""]
    for profile in verdict.profiles:
        rows = _rows(tables.of_profile(profile))
        lines += [f"{profile.caption} ({profile.y_label}):", "", *rows, ""]
    if results.left_out:
        lines += ["Left out or damaged:", "", *(f"- {line}" for line in results.left_out), ""]
    lines += ["## Provenance", "", *(f"- {name}: {x}" for name, x in provenance(results)), ""]
    lines += ["```", reproduction_commands(results), "```", ""]
    return "\n".join(lines)


def _rows(table: list[list[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    head, *rows = table
    cell = lambda text: text.replace("|", "\\|")
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(map(cell, row))} |" for row in (head, rule, *rows)]


def as_html(
    verdict: Verdict, pictures: Mapping[str, tuple[str, bytes]], scaling: Section = NONE
) -> str:
    """Returns the report as one self-contained HTML file."""
    results, escape = verdict.results, html.escape
    title = results.sweep.question or results.title
    numbers = {
        profile.name: f"<details><summary>numbers ({escape(profile.y_label)})</summary>"
        f"{_table(tables.of_profile(profile))}</details>"
        for profile in verdict.profiles
    }
    figure = lambda name, caption, content: (
        f"<figure>{image(caption, content)}"
        f"<figcaption>{escape(caption)}</figcaption>{numbers.get(name, '')}</figure>"
    )
    sentences = "".join(f"<li>{escape(line)}</li>" for line in verdict.sentences)
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<ul class=verdict>{sentences}</ul>",
        f"<p class=about>{escape(' '.join(about(results)))}</p>",
        *scaling.html(_table),
        *_results_html(verdict),
        "<h2>Figures</h2><div class=figures>",
        *(figure(name, *picture) for name, picture in pictures.items()),
        "</div>",
        "<h2>Arms</h2>",
        _table(tables.of_arms(results), classes=(1, 2)),
        "<h2>Provenance</h2>",
        _table([("", ""), *provenance(results)], classes=(1,)),
        f"<pre>{escape(reproduction_commands(results))}</pre>",
    ]
    if (study := _study(results)) and study.text:
        parts.append(
            f"<details><summary>{escape(study.file)}</summary>"
            f"<pre>{escape(study.text)}</pre></details>"
        )
    return document(title, STYLE, parts)


def document(title: str, style: str, parts: Sequence[str]) -> str:
    """Returns a self-contained HTML page."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>\n{style}</style>\n"
        + "\n".join([*parts, "</html>\n"])
    )


def image(alt: str, content: bytes) -> str:
    """Returns an HTML element that contains a PNG file."""
    data = base64.b64encode(content).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'


def _results_html(verdict: Verdict) -> list[str]:
    """Returns the tables of the scans and results, and the list of what was left out."""
    parts = []
    if verdict.scans:
        parts += ["<h2>Scans</h2>", _table(tables.scanned(verdict))]
        parts += [f"<p class=note>{html.escape(tables.SCANNED)}</p>"]
    parts += ["<h2>Results</h2>", *map(_table, tables.of_results(verdict))]
    parts += [f"<p class=note>{html.escape(tables.NOTE)}</p>"]
    if left_out := verdict.results.left_out:
        parts += ["<h2>Left out or damaged</h2><ul>"]
        parts += [*(f"<li>{html.escape(line)}</li>" for line in left_out), "</ul>"]
    return parts


def _table(table: Sequence[Sequence[str]], classes: tuple[int, ...] = ()) -> str:
    """Returns a table as HTML. `classes` are the indices of columns with left-aligned text."""
    (head, *rows), escape = table, html.escape
    cells = lambda row: "".join(
        f"<td{' class=text' if n in classes else ''}>{escape(x)}</td>" for n, x in enumerate(row)
    )
    heads = "".join(f"<th>{escape(x)}</th>" for x in head)
    best = lambda row: " class=best" if row[0].endswith(" *") else ""
    body = "".join(f"<tr{best(row)}>{cells(row)}</tr>" for row in rows)
    parts = f"<thead><tr>{heads}</tr></thead><tbody>{body}</tbody>"
    return f"<div class=wide><table>{parts}</table></div>"
