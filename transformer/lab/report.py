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

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; }
body { max-width: 62rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 1rem 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ccc; }
p.about, figcaption, .note { color: #555; font-size: .9rem; }
ul.verdict { padding-left: 1.1rem; } ul.verdict li { margin: .35rem 0; }
.wide { overflow-x: auto; margin-bottom: 1rem; background:  /* a shadow where the table continues */
  linear-gradient(to left, #fff 1.5rem, #fff0) right / 3rem 100% no-repeat local,
  linear-gradient(to left, #0003, #0000) right / .8rem 100% no-repeat scroll; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
th, td { padding: .3rem .7rem .3rem 0; text-align: right; white-space: nowrap; }
th, td { border-bottom: 1px solid #e4e4e4; vertical-align: top; }
th { white-space: normal; min-width: 3.5rem; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
td.text { text-align: left; white-space: normal; min-width: 12rem; overflow-wrap: anywhere; }
tr.best td:first-child { font-weight: 650; }
.figures { display: grid; gap: 1.5rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 25rem), 1fr)); }
figure { margin: 0; min-width: 0; } figure img { width: 100%; height: auto; }
summary { color: #555; font-size: .9rem; cursor: pointer; }
pre { background: #f4f4f4; padding: .6rem .8rem; overflow-x: auto; font-size: .85rem; }
@media print {
  body { max-width: none; font-size: 10pt; padding: 0; } .wide { overflow: visible; }
  table { font-size: 7.5pt; } h2 { break-after: avoid; }
  figure, tr, pre { break-inside: avoid; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
  .figures { display: block; }
  figure { display: inline-block; width: 48%; margin: 0 1% 1rem 0; vertical-align: top; }
  th:first-child, td:first-child { position: static; }
}
"""


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
        lines += [f"{profile.caption} ({profile.y_label}):", "", *_rows(profile_table(profile)), ""]
    if results.left_out:
        lines += ["Left out or damaged:", "", *(f"- {line}" for line in results.left_out), ""]
    lines += [
        "## Provenance",
        "",
        *(f"- {name}: {value}" for name, value in provenance(results)),
        "",
        "```",
        reproduction_commands(results),
        "```",
        "",
    ]
    return "\n".join(lines)


def _rows(table: list[list[str]]) -> list[str]:
    """Returns the lines of a table in Markdown."""
    head, *rows = table
    cell = lambda text: text.replace("|", "\\|")
    return [
        "| " + " | ".join(map(cell, row)) + " |"
        for row in (head, ["---", *["---:"] * (len(head) - 1)], *rows)
    ]


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
        f"<title>{title}</title><style>{STYLE}</style>\n" + "\n".join(parts) + "\n</html>\n"
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
    return (
        "<div class=wide><table><thead><tr>"
        + "".join(f"<th>{escape(x)}</th>" for x in head)
        + "</tr></thead><tbody>"
        + "".join(
            f"<tr{' class=best' if row[0].endswith(' *') else ''}>{cells(row)}</tr>" for row in rows
        )
        + "</tbody></table></div>"
    )


def _split(rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    return rows[0], rows[1:]
