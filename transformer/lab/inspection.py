"""Observes a trained model on one text: an HTML page of token losses, logit lens, maps and sizes.
Shape suffixes: B batch (1), T length, S key length, N heads, L layers, V vocabulary."""

import base64
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from matplotlib.figure import Figure

from transformer.checks import plain
from transformer.data.batching import assemble
from transformer.data.objectives.base import Segment, given
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.generate import Generator, check_tokenizer
from transformer.errors import UserError
from transformer.evaluation.subject import SELF_ATTENTION_ONLY, Subject, streams, token_losses
from transformer.lab import interventions
from transformer.lab.figures import new_figure, styles
from transformer.lab.page import render
from transformer.model.layout import by_layer, sublayer_of
from transformer.output import count
from transformer.runs.evaluate import LoadedRun

TOP = 5  # most likely tokens that are recorded at each position

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

    def data(self) -> dict:
        """Returns what the page's script reads. Weights are bytes, from 0 to 255, in base64."""
        weights = np.round(np.clip(self.weights_LxNxTxS, 0, 1) * 255).astype(np.uint8).tobytes()
        fields = {"shape": self.weights_LxNxTxS.shape, "layers": self.layers}
        fields |= {"weights": base64.b64encode(weights).decode()}
        shown = lambda pieces: [piece.replace("\u2581", " ") for piece in pieces]
        return fields | {"queries": shown(self.queries), "keys": shown(self.keys)}

    def statistics(self) -> list[tuple[str, np.ndarray]]:
        """Returns the captions of the statistics and their values, [L, N]."""
        return [(x, self.numbers[name]) for name, x in CAPTIONS.items() if name in self.numbers]

    def heads(self) -> list[str]:
        return [f"head {n}" for n in range(self.weights_LxNxTxS.shape[1])]


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


def observe_text(trained: LoadedRun, text: str, target="", ablate=False, other="") -> View:
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
    subject = Subject(config, None, "test", trained.mesh)

    def observe(params, batch):
        names = ("maps", "heads", "sizes", "streams")
        (h_BxTxE, head), watched, batch = subject.watch(params, batch, *names)
        lens = []
        for h, layer_head in streams(subject, params, watched["streams"]):
            logits_BxTxV = layer_head(h)
            top = jax.lax.top_k(jax.nn.softmax(logits_BxTxV, axis=-1), TOP)
            lens.append((*top, token_losses(logits_BxTxV, batch["targets"])))
        return watched, lens, token_losses(head(h_BxTxE), batch["targets"])

    batch = jax.tree.map(jax.numpy.asarray, batch)
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
        kept = ([*ids[: limit - 1], tokenizer.eos] for ids in (source, target))
        source, target = (np.array(ids, np.int32) for ids in kept)
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
    kept = {x: getattr(segment, x)[:limit] for x in ("inputs", "targets", "weights")}
    return dataclasses.replace(segment, **kept), max(len(segment.inputs) - limit, 0)


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
    """Returns the page as one self-contained HTML file (inspect.html)."""
    drawn = {label: _profile(view, size, label) for size, label in SIZES.items()}
    values = {"about": about, "cut": count(view.cut, "token"), "figures": drawn}
    mean_loss = np.nanmean(view.losses_T)
    return render("inspect.html", title=title, view=view, mean_loss=mean_loss, **values)


def _profile(view: View, size: str, label: str) -> Figure:
    """Returns a figure of the sizes of each sublayer by layer."""
    layers = sorted({layer for sizes in view.sizes.values() for layer in sizes["layer"]})
    figure, axes = new_figure(3.2, xlabel="layer", ylabel=label, xticks=layers)
    for name, style in styles(list(view.sizes)).items():
        xs, ys = view.sizes[name]["layer"], view.sizes[name][size]
        axes.plot(xs, ys, label=name.replace("_", "-"), linewidth=1.5, markersize=4.5, **style)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)
    return figure
