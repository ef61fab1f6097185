"""Observes a trained model on one text: an HTML page of token losses, logit lens, maps and sizes.
Shape suffixes: B batch (1), T length, S key length, N heads, L layers, V vocabulary."""

import base64
import dataclasses
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer.checks import plain
from transformer.data.batching import assemble
from transformer.data.objectives.base import Segment, given
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.generate import Generator, check_tokenizer
from transformer.errors import UserError
from transformer.evaluation.subject import SELF_ATTENTION_ONLY, Subject, streams, token_losses
from transformer.lab import interventions
from transformer.lab.figures import new_figure, styles
from transformer.lab.page import STYLE, document, figure_html, table_of_cells
from transformer.model.layout import by_layer, sublayer_of
from transformer.output import count
from transformer.runs.evaluate import LoadedRun

TOP = 5  # most likely tokens that are recorded at each position
INSIDE = Path(__file__).with_name("inspect.css").read_text()
SCRIPT = Path(__file__).with_name("inspect.js").read_text()

CAPTIONS = {
    "entropy": "entropy of the weights (nats)", "sink": "weight on the first token",
    "distance": "mean distance (tokens)", "previous": "weight on the previous token",
    "logit": "largest logit", "ablation": "loss without the head, less that with it (nats)",
}  # fmt: skip

SIZES = {"stream": "RMS of the residual stream", "branch": "branch RMS / residual stream RMS"}


class Map(NamedTuple):
    """Attention weights and statistics of the heads of one kind of attention."""

    name: str  # "decoder self_attention", for example
    layers: list[int]  # numbers of the layers that have this attention
    weights_LxNxTxS: np.ndarray
    queries: list[str]
    keys: list[str]
    numbers: dict[str, np.ndarray]  # statistics (model/attention_statistics.py), each [L, N]


class View(NamedTuple):
    """Everything that the page of one text shows."""

    text: str
    answer: str  # what the model generates; "" if it generates nothing or a target is given
    read: list[str]  # input tokens of the last stack
    targets: list[str]  # target token at each position
    losses_T: np.ndarray  # nats; NaN at positions without a target
    top_tokens_LxT: list[list[list[tuple[str, float]]]]  # most likely tokens and probabilities
    lens_L: np.ndarray  # logit-lens loss by layer, in nats per token
    maps: list[Map]
    sizes: dict[str, dict[str, list[float]]]  # layer, stream, branch by "decoder self_attention"
    cut: int = 0  # tokens cut off because they exceed max_length
    patch: tuple | None = None  # the other text, the tokens of the first stack, and `_patch`


def observe_text(
    trained: LoadedRun, mesh: Mesh, text: str, target="", ablate: bool = False, other: str = ""
) -> View:
    """Runs the model on `text`. An encoder-decoder's decoder reads `target`, or else its own
    output. Also measures the loss without each head, if `ablate` is set, and with the activations
    of the `other` text, if any. Raises UserError without attention weights, language-model head,
    tokenizer or text, and unless both texts have the same length."""
    config, tokenizer = trained.config, trained.tokenizer
    model = config.model
    if not model.observes("maps"):
        raise UserError(f"inspect: model.mixer = {plain(model.mixer)!r} has no attention weights")
    if not model.lm_head:
        raise UserError("inspect: the model has no language-model head, which the logit lens needs")
    check_tokenizer(tokenizer)
    if not text.strip():
        raise UserError("--text: empty; enter the text that the model reads")
    answer = target
    if not answer and config.objective.generates_text and model.family != "encoder":
        decoding = dataclasses.replace(config.decoding, batch_size=1)
        one_sample = dataclasses.replace(config, decoding=decoding)
        (answer,) = Generator(one_sample, trained.params, tokenizer)([text])
    read_answer, (segment, cut) = answer, _segment(config, tokenizer, text, answer)
    read = segment.inputs if segment.source is None else segment.source
    batch = assemble([[segment]], len(read), len(segment.inputs))
    subject = Subject(config, None, "test", mesh)

    def observe(params, batch):
        names = ("maps", "heads", "sizes", "streams")
        (h_BxTxE, head), watched, batch = subject.watch(params, batch, *names)
        lens = []
        for h, layer_head in streams(subject, params, watched["streams"]):
            logits_BxTxV = layer_head(h)
            top = jax.lax.top_k(jax.nn.softmax(logits_BxTxV, axis=-1), TOP)
            lens.append((*top, token_losses(logits_BxTxV, batch["targets"])))
        return watched, lens, token_losses(head(h_BxTxE), batch["targets"])

    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    look = subject.program("look", observe)
    watched, lens, losses_BxT = jax.device_get(look(trained.params, batch))
    pieces = lambda ids: [tokenizer.piece(int(i)) for i in ids]
    tokens_of = {model.sides[-1]: pieces(segment.inputs)}
    if segment.source is not None:
        tokens_of["encoder"] = pieces(segment.source)
    weights_T = segment.weights if segment.weights is not None else np.ones(len(segment.inputs))
    answer, inputs = "" if target else answer, tokens_of[model.sides[-1]]
    targets, losses_T = pieces(segment.targets), np.where(weights_T > 0, losses_BxT[0], np.nan)
    most_likely = lambda ps, ids: list(zip(pieces(ids), map(float, ps), strict=True))
    top_LxT = [list(map(most_likely, ps[0], ids[0])) for ps, ids, _ in lens]
    mean = lambda x_T: float(np.sum(x_T * weights_T) / max(weights_T.sum(), 1))
    lens_L = np.array([mean(x_BxT[0]) for *_, x_BxT in lens])
    maps, sizes = _maps(subject, watched, tokens_of), _sizes(subject, watched["sizes"])
    for x in maps if ablate else ():
        losses_LxN = interventions.ablated(subject, trained.params, batch, x.name, x.layers)
        x.numbers["ablation"] = losses_LxN - np.nanmean(losses_T)
    segments = segment, other and _segment(config, tokenizer, other, read_answer)[0]
    tokens = tokens_of[model.sides[0]]
    patch = (other, tokens, *_patch(subject, trained.params, segments)) if other else None
    return View(text, answer, inputs, targets, losses_T, top_LxT, lens_L, maps, sizes, cut, patch)


def _segment(config, tokenizer: Tokenizer, text: str, answer: str) -> tuple[Segment, int]:
    """Returns the segment of a text and the number of tokens that were cut off."""
    limit, (ids,) = config.model.max_length, tokenizer.encode([text])
    if config.model.is_encoder_decoder:
        source, (target,) = [*tokenizer.source_prefix_ids, *ids], tokenizer.encode_targets([answer])
        cut = max(len(source) + 1 - limit, 0) + max(len(target) + 1 - limit, 0)
        source, target = ([*ids[: limit - 1], tokenizer.eos] for ids in (source, target))
        source, target = np.array(source, np.int32), np.array(target, np.int32)
        return given(config.model, tokenizer.bos, source, target), cut
    if config.model.family == "encoder":
        whole = np.array([tokenizer.bos, *ids[: limit - 2], tokenizer.eos], np.int32)
        return Segment(whole, whole), max(len(ids) - (limit - 2), 0)
    prompt, targets = [], ids
    if config.objective.has_pairs:
        prompt = [*tokenizer.source_prefix_ids, *ids, tokenizer.eos]
        targets = [*tokenizer.encode_targets([answer])[0], tokenizer.eos]
    elif config.model.prefix_lm:  # training splits at random positions
        prompt, targets = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    prompt, targets = np.array(prompt, np.int32), np.array(targets, np.int32)
    segment = given(config.model, tokenizer.bos, prompt, targets)
    prefix = min(segment.prefix, limit) if config.model.prefix_lm else None
    inputs, targets, weights = segment.inputs, segment.targets, segment.weights[:limit]
    kept = Segment(inputs[:limit], targets[:limit], weights=weights, prefix=prefix)
    return kept, max(len(targets) - limit, 0)


def _patch(subject: Subject, params, segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the loss on both segments, [2], and that on the first with activations of the second,
    [L, T], of the targets of the first: all tokens of an answer, or the last token of a text."""
    side = subject.config.model.sides[0]
    if subject.config.model.family == "encoder":
        raise UserError("--patch: an encoder reads the tokens that it predicts; inspect a decoder")
    lengths = [len(x.inputs if x.source is None else x.source) for x in segments]
    if lengths[0] != lengths[1]:
        problem = f"this text has {lengths[1]} tokens, but --text has {lengths[0]}"
        raise UserError(f"--patch: {problem}; patching needs two texts of the same length")
    batch = assemble([[x] for x in segments], lengths[0], len(segments[0].inputs))
    batch["targets"][1] = batch["targets"][0]
    if side == "decoder" and not subject.config.objective.has_pairs:
        batch["weights"][:, :-1] = 0.0
    return interventions.patched(subject, params, batch, side)


def _maps(subject: Subject, watched: dict, tokens_of: dict[str, list[str]]) -> list[Map]:
    """Returns the maps of each kind of attention: encoder, decoder, then cross-attention."""
    recorded = [by_layer(subject.config.model, watched[kind]) for kind in ("maps", "heads")]
    by_sublayer = {}
    for (side, layer, sublayer, weights), (*_, numbers) in zip(*recorded, strict=True):
        name = sublayer.removesuffix("/weights")
        without = ("repeated", *SELF_ATTENTION_ONLY * (name == "cross_attention"))
        numbers = {key: x for key, x in numbers.items() if key not in without}
        by_sublayer.setdefault((side, name), {})[layer] = weights[0], numbers
    maps, rank = [], lambda key: (key[0] != "encoder", key[1] == "cross_attention")
    for side, sublayer in sorted(by_sublayer, key=rank):
        layers = by_sublayer[side, sublayer]
        weights_L, statistics_L = zip(*layers.values(), strict=True)
        stacked = {name: np.stack([x[name] for x in statistics_L]) for name in statistics_L[0]}
        tokens = tokens_of[side], tokens_of["encoder" if sublayer == "cross_attention" else side]
        maps.append(Map(f"{side} {sublayer}", list(layers), np.stack(weights_L), *tokens, stacked))
    return maps


def _sizes(subject: Subject, sizes: dict) -> dict[str, dict[str, list[float]]]:
    by_sublayer = {}
    for side, layer, rest, of_layer in by_layer(subject.config.model, sizes):
        values = {key: float(x) for key, x in of_layer.items()}
        share = values["branch"] / values["kept"] if values["kept"] else 1.0
        sublayer = by_sublayer.setdefault(f"{side} {sublayer_of(rest)}", {})
        for key, x in {"layer": layer, "stream": values["stream"], "branch": share}.items():
            sublayer.setdefault(key, []).append(x)
    return by_sublayer


def page(view: View, title: str, about: Sequence[str]) -> str:
    """Returns the page as one self-contained HTML file."""
    escape = html.escape
    cut = f"Cut off: {count(view.cut, 'token')} beyond the maximum length."
    parts = [
        f"<h1>{escape(title)}</h1>",
        f"<p class=about>{escape(' '.join(about))}</p>",
        f"<p><b>text</b> {escape(view.text)}</p>",
        *([f"<p><b>model output</b> {escape(view.answer)}</p>"] if view.answer else ()),
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
    parts += _patched(*view.patch) if view.patch else []
    parts += ["<h2>By depth</h2><div class=figures>", *_profiles(view), "</div>"]
    return document(title, f"{STYLE}\n{INSIDE}", parts, SCRIPT)


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
        look = f"style='--share:{loss / 10:.3f}' title='{loss:.2f} nats; most likely: {likely}'"
        look = "title='no target'" if np.isnan(loss) else look
        spans.append(f"<span {look}>{text}</span>")
    return "".join(spans)


def _lens(view: View) -> str:
    head, rows = "".join(f"<th>{_shown(piece)}</th>" for piece in view.read), []
    for layer in reversed(range(len(view.top_tokens_LxT))):
        cells = []
        for position, top in enumerate(view.top_tokens_LxT[layer]):
            piece, p = top[0]
            text = f"<b>{_shown(piece)}</b>" if piece == view.targets[position] else _shown(piece)
            cells.append(
                f"<td class=cell style='--share:{p:.3f}' title='{_likely(top)}'>{text}</td>"
            )
        loss = f"<span class=note>{view.lens_L[layer]:.2f} nats</span>"
        rows.append(f"<td>layer {layer} {loss}</td>{''.join(cells)}")
    targets = "".join(f"<td class=cell>{_shown(piece)}</td>" for piece in view.targets)
    return table_of_cells(f"<th>input</th>{head}", [*rows, f"<td>target</td>{targets}"])


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
    numbers, parts = attention.numbers, []
    for label, x_LxN in ((CAPTIONS[name], numbers[name]) for name in CAPTIONS if name in numbers):
        heads = [f"head {n}" for n in range(x_LxN.shape[1])]
        table = _shaded(heads, attention.layers, x_LxN)
        parts.append(f"<div><p class=about>{label.capitalize()}</p>{table}</div>")
    return parts


def _shaded(columns: Sequence[str], layers: Sequence[int], values_LxC: np.ndarray) -> str:
    """Returns a table with a row per layer. Higher values have a darker background."""
    low, span = values_LxC.min(), max(np.ptp(values_LxC), 1e-9)
    cell = lambda x: f"<td class=cell style='--share:{0.9 * (x - low) / span:.3f}'>{x:.2f}</td>"
    cells_L = ["".join(map(cell, row)) for row in values_LxC]
    rows = [f"<td>layer {n}</td>{cells}" for n, cells in zip(layers, cells_L, strict=True)]
    return table_of_cells("".join(f"<th>{x}</th>" for x in ("", *columns)), rows)


def _patched(other: str, tokens: Sequence[str], losses_2, losses_LxT: np.ndarray) -> list[str]:
    losses = "Without a patch, the loss is {:.2f} on this text, {:.2f} on the other, for the same"
    return [
        f"<h2>Activation patching</h2><p><b>other text</b> {html.escape(other)}</p>",
        _shaded([_shown(x) for x in tokens], range(len(losses_LxT)), losses_LxT),
        "<p class=note>A cell is the loss on this text, in nats, if the residual stream after this "
        f"layer is that of the other text at this token. {losses.format(*losses_2)} targets: the "
        "last token of the text, or all tokens of an answer.</p>",
    ]


def _profiles(view: View) -> list[str]:
    parts, styles_of = [], styles(list(view.sizes))
    layers = sorted({layer for sizes in view.sizes.values() for layer in sizes["layer"]})
    for size, label in SIZES.items():
        figure, axes = new_figure(3.2, xlabel="layer", ylabel=label, xticks=layers)
        for name, sizes in view.sizes.items():
            look = {"linewidth": 1.5, "markersize": 4.5} | styles_of[name]
            axes.plot(sizes["layer"], sizes[size], label=name.replace("_", "-"), **look)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False, fontsize=8)
        parts.append(figure_html(figure, f"{label} by layer"))
    return parts
