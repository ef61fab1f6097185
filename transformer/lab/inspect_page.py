"""Renders a View as one HTML page: token losses, logit lens, attention maps, profiles by depth."""

import base64
import html
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from transformer.evaluation.inside import SELF_ATTENTION_ONLY
from transformer.lab.figures import new_figure, styles
from transformer.lab.inspection import Map, View
from transformer.lab.page import STYLE, document, figure_html
from transformer.output import count

INSIDE = Path(__file__).with_name("inspect.css").read_text()
SCRIPT = Path(__file__).with_name("inspect.js").read_text()

CAPTIONS = {
    "entropy": "entropy of the weights (nats)",
    "sink": "weight on the first token",
    "distance": "mean distance (tokens)",
    "previous": "weight on the previous token",
    "logit": "largest logit",
}

SIZES = {"stream": "RMS of the residual stream", "branch": "branch RMS / residual stream RMS"}


def page(view: View, title: str, about: Sequence[str]) -> str:
    """Returns the page as one self-contained HTML file."""
    escape = html.escape
    output = f"<p><b>model output</b> {escape(view.answer)}</p>"
    cut = f"Cut off: {count(view.cut, 'token')} beyond the maximum length."
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=about>{escape(' '.join(about))}</p>",
        f"<p><b>text</b> {escape(view.text)}</p>",
        *([output] if view.answer else ()),
        *([f"<p class=note>{cut}</p>"] if view.cut else ()),
        "<h2>Loss of each token</h2>",
        f"<div class=tokens>{_tokens(view)}</div>",
        "<p class=note>Darker tokens are less likely, given the tokens that the model attends to. "
        f"The mean loss is {np.nanmean(view.losses_T):.3f} nats per token. Hover over a token for "
        "its loss and for the most likely tokens at its position.</p>",
        "<h2>Logit lens: the prediction after each layer</h2>",
        _lens(view),
        "<p class=note>The model's final norm and head, applied to the residual stream after each "
        "layer. Darker cells have a higher probability. Bold predictions equal the target.</p>",
    ]
    for attention in view.maps:
        name = escape(attention.name.replace("_", "-"))
        parts += [f"<h2>Attention weights: {name}</h2>", _map(attention)]
        parts += ["<div class=numbers>", *_numbers(attention), "</div>"]
    parts += ["<h2>By depth</h2><div class=figures>", *_profiles(view), "</div>"]
    return document(title, f"{STYLE}\n{INSIDE}", parts, SCRIPT)


def _blue(share: float) -> str:
    """Returns CSS for a background from white to dark blue, with a readable text color."""
    share = min(max(share, 0.0), 1.0)
    red, green, blue = 255 - 255 * share, 255 - 141 * share, 255 - 77 * share
    text = "#fff" if share > 0.55 else "#1a1a1a"
    return f"background:rgb({red:.0f},{green:.0f},{blue:.0f});color:{text}"


def _shown(piece: str) -> str:
    text = piece.replace("\n", "\u21b5")
    return html.escape(text.replace("\u2581", " ").strip() or text)


def _likely(top: list[tuple[str, float]]) -> str:
    return ", ".join(f"{_shown(piece)} {p:.2f}" for piece, p in top)


def _tokens(view: View) -> str:
    spans = []
    for position, (piece, loss) in enumerate(zip(view.targets, view.losses_T, strict=True)):
        text = html.escape(piece.replace("\u2581", " ").replace("\n", "\u21b5\n"))
        likely = _likely(view.top_tokens_LxT[-1][position])
        look = f"style='{_blue(loss / 10)}' title='{loss:.2f} nats; most likely: {likely}'"
        look = "title='no target'" if np.isnan(loss) else look
        spans.append(f"<span {look}>{text}</span>")
    return "".join(spans)


def _lens(view: View) -> str:
    head = "".join(f"<th>{_shown(piece)}</th>" for piece in view.read)
    rows = []
    for layer in reversed(range(len(view.top_tokens_LxT))):
        cells = []
        for position, top in enumerate(view.top_tokens_LxT[layer]):
            piece, p = top[0]
            text = f"<b>{_shown(piece)}</b>" if piece == view.targets[position] else _shown(piece)
            cells.append(f"<td class=cell style='{_blue(p)}' title='{_likely(top)}'>{text}</td>")
        loss = f"<span class=note>{view.lens_L[layer]:.2f} nats</span>"
        rows.append(f"<tr><td>layer {layer} {loss}</td>{''.join(cells)}</tr>")
    targets = "".join(f"<td class=cell>{_shown(piece)}</td>" for piece in view.targets)
    return (
        f"<div class=wide><table><thead><tr><th>input</th>{head}</tr></thead><tbody>{''.join(rows)}"
        f"<tr><td>target</td>{targets}</tr></tbody></table></div>"
    )


def _map(attention: Map) -> str:
    bytes_ = np.round(np.clip(attention.weights_LxNxTxS, 0, 1) * 255).astype(np.uint8).tobytes()
    shown = lambda pieces: [piece.replace("\u2581", " ") for piece in pieces]
    fields = {"shape": attention.weights_LxNxTxS.shape, "layers": attention.layers}
    fields |= {"weights": base64.b64encode(bytes_).decode()}
    fields |= {"queries": shown(attention.queries), "keys": shown(attention.keys)}
    data = json.dumps(fields).replace("<", "\\u003c")
    return (
        f"<section class=map><script type=application/json>{data}</script><div class=heads></div>"
        "<p class='caption note'>This figure needs JavaScript.</p>"
        "<div class=large><canvas></canvas></div></section>"
    )


def _numbers(attention: Map) -> list[str]:
    """Returns a table for each statistic, with one row per layer and one column per head."""
    parts = []
    for statistic, label in CAPTIONS.items():
        if "cross_attention" in attention.name and statistic in SELF_ATTENTION_ONLY:
            continue
        values_LxN = attention.numbers[statistic]
        low, high = float(values_LxN.min()), float(values_LxN.max())
        head = "".join(f"<th>head {n}</th>" for n in range(values_LxN.shape[1]))
        rows, shares_LxN = "", (values_LxN - low) / max(high - low, 1e-9) * 0.9
        for layer, row, shares in zip(attention.layers, values_LxN, shares_LxN, strict=True):
            cells = [(f"{x:.2f}", _blue(share)) for x, share in zip(row, shares, strict=True)]
            cells = "".join(f"<td class=cell style='{look}'>{x}</td>" for x, look in cells)
            rows += f"<tr><td>layer {layer}</td>{cells}</tr>"
        parts.append(
            f"<div><p class=about>{label.capitalize()}</p><div class=wide><table>"
            f"<thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"
        )
    return parts


def _profiles(view: View) -> list[str]:
    parts, styles_of = [], styles(list(view.sizes))
    layers = sorted({layer for sizes in view.sizes.values() for layer in sizes["layer"]})
    line = {"linewidth": 1.5, "markersize": 4.5}
    for size, label in SIZES.items():
        figure, axes = new_figure(3.2, xlabel="layer", ylabel=label, xticks=layers)
        for name, sizes in view.sizes.items():
            look = line | styles_of[name]
            axes.plot(sizes["layer"], sizes[size], label=name.replace("_", "-"), **look)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
        parts.append(figure_html(figure, f"{label} by layer"))
    return parts
