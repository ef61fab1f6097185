"""Renders a View as one HTML page: token losses, logit lens, attention maps, profiles by depth."""

import base64
import html
import io
import json
from collections.abc import Sequence

import numpy as np

from transformer.evaluation.inside import SELF_ATTENTION_ONLY
from transformer.lab.figures import new_figure, styles
from transformer.lab.inspection import Map, View
from transformer.lab.report import STYLE
from transformer.output import count

INSIDE = """
.tokens { line-height: 2.1; overflow-wrap: anywhere; }
.tokens span { padding: .15rem .1rem; border-radius: .2rem; white-space: pre-wrap; }
td.cell { text-align: center; padding: .2rem .45rem; border-bottom: none; }
td.cell, .tokens span, canvas { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
.heads { display: grid; gap: 3px; width: fit-content; max-width: 100%; align-items: center; }
.heads button { padding: 0; border: 2px solid transparent; background: none; }
.heads button { cursor: pointer; line-height: 0; }
.heads button[aria-pressed=true] { border-color: #d55e00; }
.heads canvas { width: 100%; image-rendering: pixelated; }
.heads .side { font-size: .75rem; color: #555; padding-right: .4rem; white-space: nowrap; }
.numbers { display: flex; flex-wrap: wrap; gap: 0 2.5rem; }
.numbers > div { break-inside: avoid; } .numbers .about { margin: .8rem 0 .2rem; }
.large { overflow: auto; max-width: 100%; } .large canvas { display: block; }
"""

SCRIPT = """
const shade = w => {  // from white to #0072b2
  const t = Math.sqrt(w);
  return [255 - 255 * t, 255 - 141 * t, 255 - 77 * t];
};
const piece = s => s.replace(/\\n/g, '\\u21b5').replace(/^ *$/, '\\u2581');
document.querySelectorAll('section.map').forEach(section => {
  const map = JSON.parse(section.querySelector('script').textContent);
  const [L, N, T, S] = map.shape, bytes = Uint8Array.from(atob(map.weights), c => c.charCodeAt(0));
  const at = (l, n, t, s) => bytes[((l * N + n) * T + t) * S + s] / 255;
  const grid = section.querySelector('.heads'), large = section.querySelector('.large canvas');
  const caption = section.querySelector('.caption');
  grid.style.gridTemplateColumns = `auto repeat(${N}, minmax(0, 5rem))`;
  const paint = (canvas, l, n) => {
    canvas.width = S; canvas.height = T;
    const context = canvas.getContext('2d'), image = context.createImageData(S, T);
    for (let t = 0; t < T; t++) for (let s = 0; s < S; s++)
      image.data.set([...shade(at(l, n, t, s)), 255], 4 * (t * S + s));
    context.putImageData(image, 0, 0);
  };
  let now = [0, 0];
  const enlarge = (l, n) => {
    now = [l, n];
    const press = b => b.setAttribute('aria-pressed', b.dataset.at == `${l},${n}`);
    grid.querySelectorAll('button').forEach(press);
    const cell = Math.max(9, Math.min(26, Math.floor(640 / Math.max(S, T))));
    const ratio = devicePixelRatio || 1;
    const longest = pieces => Math.min(12, Math.max(...pieces.map(p => p.length))) * 7 + 12;
    const left = longest(map.queries), top = longest(map.keys) * .87;
    large.width = (left + S * cell + 60) * ratio; large.height = (top + T * cell + 4) * ratio;
    large.style.width = large.width / ratio + 'px';
    large.style.height = large.height / ratio + 'px';
    const c = large.getContext('2d');
    c.scale(ratio, ratio); c.font = `${Math.min(12, cell + 2)}px system-ui, sans-serif`;
    c.fillStyle = '#1a1a1a'; c.textBaseline = 'middle';
    for (let t = 0; t < T; t++) {
      c.textAlign = 'right';
      c.fillText(piece(map.queries[t]), left - 6, top + (t + .5) * cell, left - 8);
    }
    for (let s = 0; s < S; s++) {
      c.save(); c.translate(left + (s + .5) * cell, top - 6); c.rotate(-Math.PI / 3);
      c.textAlign = 'left'; c.fillText(piece(map.keys[s]), 0, 0, top); c.restore();
    }
    for (let t = 0; t < T; t++) for (let s = 0; s < S; s++) {
      c.fillStyle = `rgb(${shade(at(l, n, t, s)).join()})`;
      c.fillRect(left + s * cell, top + t * cell, cell, cell);
    }
    c.strokeStyle = '#ccc'; c.strokeRect(left, top, S * cell, T * cell);
    const head = `layer ${map.layers[l]}, head ${n}`;
    caption.textContent =
      `${head}. Rows: queries; columns: keys. Hover over a cell for its weight.`;
    large.onmousemove = e => {
      const s = Math.floor((e.offsetX - left) / cell), t = Math.floor((e.offsetY - top) / cell);
      if (s >= 0 && s < S && t >= 0 && t < T) {
        const query = piece(map.queries[t]), key = piece(map.keys[s]);
        const weight = at(l, n, t, s).toFixed(2);
        caption.textContent = `${head}: ${query} attends to ${key} with weight ${weight}`;
      }
    };
  };
  for (let l = 0; l < L; l++) {
    const side = document.createElement('div');
    side.className = 'side'; side.textContent = `layer ${map.layers[l]}`; grid.append(side);
    for (let n = 0; n < N; n++) {
      const button = document.createElement('button'), canvas = document.createElement('canvas');
      button.dataset.at = `${l},${n}`; button.onclick = () => enlarge(l, n);
      button.title = button.ariaLabel = `layer ${map.layers[l]}, head ${n}`;
      paint(canvas, l, n); button.append(canvas); grid.append(button);
    }
  }
  enlarge(...now);
});
"""

CAPTIONS = {
    "entropy": "entropy of the weights (nats)",
    "sink": "weight on the first token",
    "distance": "mean distance (tokens)",
    "previous": "weight on the previous token",
    "logit": "largest logit",
}


def page(view: View, title: str, about: Sequence[str]) -> str:
    """Returns the page as one self-contained HTML file."""
    escape = html.escape
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=about>{escape(' '.join(about))}</p>",
        f"<p><b>text</b> {escape(view.text)}</p>",
    ]
    if view.answer:
        parts.append(f"<p><b>model output</b> {escape(view.answer)}</p>")
    if view.cut:
        parts.append(
            f"<p class=note>Cut off: {count(view.cut, 'token')} beyond the maximum length.</p>"
        )
    losses = view.losses_T[~np.isnan(view.losses_T)]
    parts += [
        "<h2>Loss of each token</h2>",
        f"<div class=tokens>{_tokens(view)}</div>",
        "<p class=note>Darker tokens are less likely, given the tokens that the model attends to. "
        f"The mean loss is {losses.mean():.3f} nats per token. Hover over a token for its loss and "
        "for the most likely tokens at its position.</p>",
        "<h2>Logit lens: the prediction after each layer</h2>",
        _lens(view),
        "<p class=note>The model's final norm and head, applied to the residual stream after each "
        "layer. Darker cells have a higher probability. Bold predictions equal the target.</p>",
    ]
    for attention in view.maps:
        parts += [
            f"<h2>Attention weights: {escape(attention.name.replace('_', '-'))}</h2>",
            _map(attention),
            "<div class=numbers>",
            *_numbers(attention),
            "</div>",
        ]
    parts += ["<h2>By depth</h2><div class=figures>", *_profiles(view), "</div>"]
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{INSIDE}</style>\n"
        + "\n".join(parts)
        + f"\n<script>{SCRIPT}</script>\n</html>\n"
    )


def _blue(share: float) -> str:
    """Returns CSS for a background from white to dark blue, with a readable text color."""
    share = min(max(share, 0.0), 1.0)
    red, green, blue = 255 - 255 * share, 255 - 141 * share, 255 - 77 * share
    return (
        f"background:rgb({red:.0f},{green:.0f},{blue:.0f});"
        f"color:{'#fff' if share > 0.55 else '#1a1a1a'}"
    )


def _shown(piece: str) -> str:
    return html.escape(
        piece.replace("\n", "\u21b5").replace("\u2581", " ").strip()
        or piece.replace("\n", "\u21b5")
    )


def _likely(view: View, position: int) -> str:
    return ", ".join(f"{_shown(piece)} {p:.2f}" for piece, p in view.top_tokens_LxT[-1][position])


def _tokens(view: View) -> str:
    spans = []
    for position, (piece, loss) in enumerate(zip(view.targets, view.losses_T, strict=True)):
        text = html.escape(piece.replace("\u2581", " ").replace("\n", "\u21b5\n"))
        if np.isnan(loss):
            spans.append(f"<span title='no target'>{text}</span>")
        else:
            spans.append(
                f"<span style='{_blue(loss / 10)}' title='{loss:.2f} nats; "
                f"most likely: {_likely(view, position)}'>{text}</span>"
            )
    return "".join(spans)


def _lens(view: View) -> str:
    head = "".join(f"<th>{_shown(piece)}</th>" for piece in view.read)
    rows = []
    for layer in reversed(range(len(view.top_tokens_LxT))):
        cells = []
        for position, top in enumerate(view.top_tokens_LxT[layer]):
            piece, p = top[0]
            likely = ", ".join(f"{_shown(piece)} {p:.2f}" for piece, p in top)
            correct = piece == view.targets[position]
            cells.append(
                f"<td class=cell style='{_blue(p)}' title='{likely}'>"
                f"{'<b>' if correct else ''}{_shown(piece)}{'</b>' if correct else ''}</td>"
            )
        rows.append(
            f"<tr><td>layer {layer} <span class=note>{view.lens_L[layer]:.2f} nats</span></td>"
            f"{''.join(cells)}</tr>"
        )
    targets = "".join(f"<td class=cell>{_shown(piece)}</td>" for piece in view.targets)
    return (
        f"<div class=wide><table><thead><tr><th>input</th>{head}</tr></thead><tbody>{''.join(rows)}"
        f"<tr><td>target</td>{targets}</tr></tbody></table></div>"
    )


def _map(attention: Map) -> str:
    bytes_ = np.round(np.clip(attention.weights_LxNxTxS, 0, 1) * 255).astype(np.uint8).tobytes()
    data = json.dumps(
        {
            "shape": attention.weights_LxNxTxS.shape,
            "layers": attention.layers,
            "weights": base64.b64encode(bytes_).decode(),
            "queries": [piece.replace("\u2581", " ") for piece in attention.queries],
            "keys": [piece.replace("\u2581", " ") for piece in attention.keys],
        }
    ).replace("<", "\\u003c")
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
        rows = "".join(
            f"<tr><td>layer {layer}</td>"
            + "".join(
                f"<td class=cell style='{_blue((x - low) / max(high - low, 1e-9) * 0.9)}'>"
                f"{x:.2f}</td>"
                for x in row
            )
            + "</tr>"
            for layer, row in zip(attention.layers, values_LxN, strict=True)
        )
        parts.append(
            f"<div><p class=about>{label.capitalize()}</p><div class=wide><table>"
            f"<thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>"
        )
    return parts


def _profiles(view: View) -> list[str]:
    parts = []
    for size, label in {
        "stream": "RMS of the residual stream",
        "branch": "branch RMS / residual stream RMS",
    }.items():
        figure, axes = new_figure(3.2)
        for (name, sizes), style in zip(
            view.sizes.items(), styles(list(view.sizes)).values(), strict=True
        ):
            axes.plot(
                sizes["layer"],
                sizes[size],
                label=name.replace("_", "-"),
                linewidth=1.5,
                markersize=4.5,
                **style,
            )
        axes.set_xlabel("layer")
        axes.set_ylabel(label)
        axes.set_xticks(
            sorted({layer for sizes in view.sizes.values() for layer in sizes["layer"]})
        )
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
        image = io.BytesIO()
        figure.savefig(image, format="png")
        parts.append(
            f'<figure><img alt="{label} by layer" src="data:image/png;base64,'
            f'{base64.b64encode(image.getvalue()).decode()}"></figure>'
        )
    return parts
