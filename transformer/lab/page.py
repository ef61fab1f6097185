"""Self-contained HTML pages: their frame, sections, tables and figures."""

import base64
import dataclasses
import html
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

STYLE, SCRIPT = (Path(__file__).with_name(f"report.{kind}").read_text() for kind in ("css", "js"))
Table = Sequence[Sequence[str]]


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a report, left out if empty. `figures` maps names to captions and figures."""

    title: str
    lines: Sequence[str] = ()
    figures: Mapping[str, tuple[str, Figure]] = dataclasses.field(default_factory=dict)
    tables: Sequence[Table] = ()
    note: str = ""
    code: str = ""
    numbers: Mapping[str, Table] = dataclasses.field(default_factory=dict)  # plotted, by figure
    csv: Mapping[str, Sequence] = dataclasses.field(default_factory=dict)  # name -> rows of a file
    folded: bool = False  # collapsed in the page

    def __bool__(self) -> bool:
        return any((self.lines, self.figures, self.tables, self.code))

    def html(self, counter: Iterator[int]) -> str:
        """Returns HTML. The counter numbers the figures."""
        escape, pictures = html.escape, []
        for (name, (caption, drawn)), n in zip(self.figures.items(), counter, strict=False):
            files = [(kind, f"figures/{name}.{kind.lower()}") for kind in ("PNG", "PDF")]
            links = " ".join(f'<a href="{escape(file)}">{kind}</a>' for kind, file in files)
            table = table_html(self.numbers[name]) if name in self.numbers else ""
            more = f"<details><summary>numbers</summary>{table}</details>" * bool(table)
            pictures.append(figure_html(drawn, f"Figure {n}. {caption}", links, more))
        lines = "".join(f"<li>{escape(line)}</li>" for line in self.lines)
        drawings = f"<div class=figures>{''.join(pictures)}</div>" * bool(pictures)
        note = f"<p class=note>{escape(self.note)}</p>" * bool(self.note)
        code = f"<pre>{escape(self.code)}</pre>" * bool(self.code)
        tables = map(table_html, self.tables)
        body = "\n".join([drawings, f"<ul>{lines}</ul>" * bool(lines), *tables, note, code])
        if self.folded:
            return f"<details><summary>{escape(self.title)}</summary>{body}</details>"
        title = f"<h2>{escape(self.title)}</h2>" * bool(self.title)
        return f"<section>{title}{body}</section>"

    def markdown(self, counter: Iterator[int]) -> list[str]:
        """Returns the lines of the section as Markdown."""
        title = [f"## {self.title}", ""] if self.title else []
        lines = [*title, *(f"- {line}" for line in self.lines), ""]
        for (name, (caption, _)), n in zip(self.figures.items(), counter, strict=False):
            lines += [f"![Figure {n}](figures/{name}.png)", "", f"Figure {n}. {caption}", ""]
            lines += [*_rows(self.numbers[name]), ""] if name in self.numbers else []
        lines += [line for table in self.tables for line in (*_rows(table), "")]
        return [*lines, self.note, "", *(["```", self.code, "```", ""] if self.code else [])]


def _rows(table: Table) -> list[str]:
    head, *rows = table
    cell = lambda text: text.replace("|", "\\|")
    rule = ["---", *["---:"] * (len(head) - 1)]
    return [f"| {' | '.join(map(cell, row))} |" for row in (head, rule, *rows)]


def document(title: str, style: str, parts: Sequence[str], script: str = "") -> str:
    """Returns a self-contained HTML page."""
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>\n{style}</style>\n"
        + "\n".join([*parts, f"<script>\n{SCRIPT}{script}</script>", "</html>\n"])
    )


def figure_html(drawn: Figure, caption: str, links: str = "", more: str = "") -> str:
    """Returns a figure that a click enlarges, with a text at each point that has one."""
    file, ratio = io.BytesIO(), drawn.get_figwidth() / drawn.get_figheight()
    drawn.savefig(file, format="svg", metadata={"Date": None})
    data, alt = base64.b64encode(file.getvalue()).decode(), html.escape(caption)
    return (
        f"<figure><div class=plot style='--ratio:{ratio:.3f}'><div class=frame>"
        f'<img alt="{alt}" src="data:image/svg+xml;base64,{data}">{"".join(_texts(drawn))}'
        f"</div></div><figcaption>{html.escape(caption)} {links}</figcaption>{more}</figure>"
    )


def _texts(drawn: Figure) -> list[str]:
    """Returns an element for each point of a line whose gid is a text with {x} and {y}."""
    spots, (width, height) = [], drawn.get_size_inches() * drawn.dpi
    for axes in drawn.axes:
        for line in axes.lines:
            for x, y in line.get_xydata() if line.get_gid() else ():
                across, up = axes.transData.transform((x, y)) / (width, height)
                text = html.escape(line.get_gid().format(x=x, y=y))
                spot = f"left:{across:.2%};bottom:{up:.2%}"
                if 0 < across < 1 and 0 < up < 1:
                    spots.append(f'<i style="{spot}" title="{text}"></i>')
    return spots


def table_html(table: Table) -> str:
    """Returns a table as HTML. Columns with long texts are left-aligned."""
    (head, *rows), escape = table, html.escape
    is_text = [any(len(row[n]) > 36 for row in rows) for n in range(len(head))]
    cells = lambda row, tag: "".join(
        f"<{tag}{' class=text' * is_text[n]}>{escape(x)}</{tag}>" for n, x in enumerate(row)
    )
    return table_of_cells(cells(head, "th"), [cells(row, "td") for row in rows])


def table_of_cells(head: str, rows: Sequence[str]) -> str:
    """Returns a table as HTML, from the HTML of the cells of its head and of each row."""
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    parts = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f"<div class=wide><table>{parts}</table></div>"
