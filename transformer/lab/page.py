"""Self-contained HTML pages, from Jinja templates (*.html), and the sections of a report."""

import base64
import dataclasses
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
Table = Sequence[Sequence[str]]


def render(template: str, **values: Any) -> str:
    """Returns the page that a template makes of these values. Texts in it are escaped."""
    return _TEMPLATES.get_template(template).render(values)


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


def _svg(drawn: Figure) -> dict[str, Any]:
    """Returns a figure as base64 of an SVG file, its aspect ratio, and (left, bottom, text) of each
    point of a line whose gid is a text with {x} and {y}."""
    file, texts, (width, height) = io.BytesIO(), [], drawn.get_size_inches() * drawn.dpi
    drawn.savefig(file, format="svg", metadata={"Date": None})
    for axes in drawn.axes:
        for line in axes.lines:
            for x, y in line.get_xydata() if line.get_gid() else ():
                across, up = axes.transData.transform((x, y)) / (width, height)
                if 0 < across < 1 and 0 < up < 1:
                    texts.append((f"{across:.2%}", f"{up:.2%}", line.get_gid().format(x=x, y=y)))
    data = base64.b64encode(file.getvalue()).decode()
    return {"data": data, "ratio": width / height, "texts": texts}


_TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER), autoescape=jinja2.select_autoescape(["html"]),
    trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined,
)  # fmt: skip
_TEMPLATES.globals |= {
    "file": lambda name: Markup((FOLDER / name).read_text()),
    "svg": _svg, "next": next,
    "columns_with_text": lambda table: [
        n for n in range(len(table[0])) if any(len(row[n]) > 36 for row in table[1:])
    ],
}  # fmt: skip
_TEMPLATES.filters |= {
    "unbroken": lambda text: text.replace("95 %", "95\u00a0%").replace("p = ", "p\u00a0=\u00a0"),
    "shown": lambda piece: piece.replace("\u2581", " ").replace("\n", "\u21b5").strip() or piece,
    "in_text": lambda piece: piece.replace("\u2581", " ").replace("\n", "\u21b5\n"),
}
