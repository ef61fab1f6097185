"""Writes a verdict as files: an HTML page, Markdown, CSV tables, and figures as PNG and PDF."""

import base64
import csv
import html
import io
from collections.abc import Mapping
from pathlib import Path

from transformer.files import write_atomic
from transformer.lab.figures import draw
from transformer.lab.report_about import _study, about, provenance, reproduction_commands
from transformer.lab.report_tables import (
    NOTE,
    SCANNED,
    arms_table,
    cost,
    measured,
    outcome,
    profile_table,
    scanned,
    tables,
)
from transformer.lab.verdict import Verdict

STYLE = Path(__file__).with_name("report.css").read_text()


def write(verdict: Verdict, folder: Path) -> Path:
    """Writes the files of the report, and returns the path of the page."""
    figures = draw(verdict)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    pictures = {}
    for name, (caption, figure) in figures.items():
        image = io.BytesIO()
        figure.savefig(image, format="png")
        (folder / "figures" / f"{name}.png").write_bytes(image.getvalue())
        figure.savefig(folder / "figures" / f"{name}.pdf")
        pictures[name] = (caption, image.getvalue())
    for name, rows in tables(verdict).items():
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(rows)
        write_atomic(folder / f"{name}.csv", text.getvalue())
    write_atomic(folder / "report.md", markdown(verdict))
    page = folder / "index.html"
    write_atomic(page, as_html(verdict, pictures))
    return page


def markdown(verdict: Verdict) -> str:
    """Returns the report as Markdown, for the appendix of a paper."""
    results = verdict.results
    lines = [f"# {results.sweep.question or results.title}", ""]
    lines += [*(f"- {line}" for line in verdict.sentences), "", *about(results), ""]
    if verdict.scans:
        lines += [*_rows(scanned(verdict)), "", SCANNED, ""]
    for rows in filter(None, (outcome(verdict), cost(verdict), measured(verdict))):
        lines += [*_rows(rows), ""]
    lines += [NOTE, "", *_rows(arms_table(results)), ""]
    for profile in verdict.profiles:
        lines += [f"{profile.caption} ({profile.y_label}):", "", *_rows(profile_table(profile)), ""]
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


def as_html(verdict: Verdict, pictures: Mapping[str, tuple[str, bytes]]) -> str:
    """Returns the report as one self-contained HTML file."""
    results, escape = verdict.results, html.escape
    settings = arms_table(results)
    numbers = {
        profile.name: f"<details><summary>numbers ({escape(profile.y_label)})</summary>"
        f"{_table(*_split(profile_table(profile)))}</details>"
        for profile in verdict.profiles
    }
    figure = lambda name, caption, image: (
        f'<figure><img alt="{escape(caption)}" '
        f'src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        f"<figcaption>{escape(caption)}</figcaption>{numbers.get(name, '')}</figure>"
    )
    sentences = "".join(f"<li>{escape(line)}</li>" for line in verdict.sentences)
    parts = [
        f"<h1>{escape(results.sweep.question or results.title)}</h1>",
        f"<ul class=verdict>{sentences}</ul>",
        f"<p class=about>{escape(' '.join(about(results)))}</p>",
        *_results_html(verdict),
        "<h2>Figures</h2><div class=figures>",
        *(figure(name, *picture) for name, picture in pictures.items()),
        "</div>",
        "<h2>Arms</h2>",
        _table(*_split(settings), classes=(1, 2)),
        "<h2>Provenance</h2>",
        _table(["", ""], [[name, text] for name, text in provenance(results)], classes=(1,)),
        f"<pre>{escape(reproduction_commands(results))}</pre>",
    ]
    if (study := _study(results)) and study.text:
        parts.append(
            f"<details><summary>{escape(study.file)}</summary>"
            f"<pre>{escape(study.text)}</pre></details>"
        )
    title = escape(results.sweep.question or results.title)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>\n{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
    )


def _results_html(verdict: Verdict) -> list[str]:
    """Returns the tables of the scans and results, and the list of what was left out."""
    parts = []
    if verdict.scans:
        parts += ["<h2>Scans</h2>", _table(*_split(scanned(verdict)))]
        parts += [f"<p class=note>{html.escape(SCANNED)}</p>"]
    parts += ["<h2>Results</h2>", _table(*_split(outcome(verdict))), _table(*_split(cost(verdict)))]
    if metrics := measured(verdict):
        parts += [_table(*_split(metrics))]
    parts += [f"<p class=note>{html.escape(NOTE)}</p>"]
    if left_out := verdict.results.left_out:
        parts += ["<h2>Left out or damaged</h2><ul>"]
        parts += [*(f"<li>{html.escape(line)}</li>" for line in left_out), "</ul>"]
    return parts


def _table(head: list[str], rows: list[list[str]], classes: tuple[int, ...] = ()) -> str:
    """Returns a table as HTML. `classes` are the indices of columns with left-aligned text."""
    escape = html.escape
    cells = lambda row: "".join(
        f"<td{' class=text' if n in classes else ''}>{escape(x)}</td>" for n, x in enumerate(row)
    )
    heads = "".join(f"<th>{escape(x)}</th>" for x in head)
    best = lambda row: " class=best" if row[0].endswith(" *") else ""
    body = "".join(f"<tr{best(row)}>{cells(row)}</tr>" for row in rows)
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f"<div class=wide>{table}</div>"


def _split(rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return rows[0], rows[1:]
