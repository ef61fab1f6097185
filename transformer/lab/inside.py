"""One text seen from inside of a trained model: what each token was worth, where each head looked, what each layer would have said.

Shape suffixes: B batch (1), T length, S key length, N heads, L layers, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer.checks import plain
from transformer.data.batching import assemble
from transformer.data.objectives.base import Segment, continued, shifted
from transformer.data.tokenizer_base import Tokenizer
from transformer.decoding.generate import Generator
from transformer.errors import UserError
from transformer.evaluation.inside import residual_of, streams
from transformer.evaluation.subject import Subject, token_losses
from transformer.model.layout import flatten, in_layer, part, where
from transformer.runs.evaluate import Trained

TOP = 5
"""Likely tokens that are told of each place."""


@dataclasses.dataclass(frozen=True)
class Map:
    """Where the heads of one kind of attention look."""

    name: str  # decoder self_attention
    layers: list[int]  # the layers that have it, by number
    weights_LxNxTxS: np.ndarray
    queries: list[str]
    keys: list[str]
    numbers: dict[str, np.ndarray]  # entropy, ... (model/attention_statistics.py): [L, N]


@dataclasses.dataclass(frozen=True)
class View:
    """All that a page shows of one text."""

    text: str
    answer: str  # what the model writes; "" where it writes nothing, or is not asked to
    read: list[str]  # tokens of the last stack
    asked: list[str]  # and what should follow, or stand, there
    losses_T: np.ndarray  # nats
    said_LxT: list[
        list[list[tuple[str, float]]]
    ]  # by layer and place: the likeliest tokens and their probability
    lens_L: np.ndarray  # nats per token, by layer
    maps: list[Map]
    sizes: dict[
        str, dict[str, list[float]]
    ]  # "decoder self_attention" -> layer, stream, branch: one value per layer that has it
    cut: int = 0  # tokens that did not fit


def look_inside(trained: Trained, mesh: Mesh, text: str, target: str = "") -> View:
    """Reads `text` (and, with an encoder and a decoder, `target`, or what the model itself answers). Raises UserError where there is nothing to
    look at."""
    config, tokenizer = trained.config, trained.tokenizer
    model = config.model
    if not model.observes("maps"):
        raise UserError(
            f"inspect: model.mixer = {plain(model.mixer)!r} has no attention weights to look at"
        )
    if not model.lm_head:
        raise UserError(
            "inspect: this model has no head over the vocabulary to read its layers by; it says labels only"
        )
    if tokenizer is None:
        raise UserError(
            "this run has no tokenizer (tokenizer.model or tokenizer.json); put one into its directory"
        )
    if not text.strip():
        raise UserError("--text: empty; type what the model is to read")
    answer = target
    if not answer and config.objective.writes and model.family != "encoder":
        one = dataclasses.replace(
            config, decoding=dataclasses.replace(config.decoding, batch_size=1)
        )
        (answer,) = Generator(one, trained.params, tokenizer)([text])
    segment, cut = _segment(config, tokenizer, text, answer)
    has_source = segment.source is not None
    batch = assemble(
        [[segment]], len(segment.source if has_source else segment.inputs), len(segment.inputs)
    )
    subject = Subject(config, None, "test", mesh)

    def look(params, batch):
        (h_BxTxE, head), told, batch = subject.watch(
            params, batch, "maps", "heads", "sizes", "streams"
        )
        said = []
        for h, its_head in streams(subject, params, told["streams"]):
            logits_BxTxV = its_head(h)
            top = jax.lax.top_k(jax.nn.softmax(logits_BxTxV, axis=-1), TOP)
            said.append((*top, token_losses(logits_BxTxV, batch["targets"])))
        return told, said, token_losses(head(h_BxTxE), batch["targets"])

    batch = {name: jnp.asarray(x) for name, x in batch.items()}
    told, said, losses_BxT = jax.device_get(subject.program("look", look)(trained.params, batch))
    pieces = lambda ids: [tokenizer.piece(int(i)) for i in ids]
    sides = {model.sides[-1]: pieces(segment.inputs)} | (
        {"encoder": pieces(segment.source)} if has_source else {}
    )
    asked = segment.weights if segment.weights is not None else np.ones(len(segment.inputs))
    return View(
        text, answer if not target else "", sides[model.sides[-1]], pieces(segment.targets), np.where(asked > 0, losses_BxT[0], np.nan),
        [[[(tokenizer.piece(int(i)), float(p)) for p, i in zip(ps, ids, strict=True)] for ps, ids in zip(p[0], top[0], strict=True)] for p, top, _ in said],
        np.array([float(np.sum(losses[0] * asked) / max(asked.sum(), 1)) for *_, losses in said]),
        _maps(subject, told, sides), _sizes(subject, told["sizes"]), cut,
    )  # fmt: skip


def _segment(config, tokenizer: Tokenizer, text: str, answer: str) -> tuple[Segment, int]:
    """What a batch of this one text holds, and how many tokens were cut off it."""
    most, (ids,) = config.model.max_length, tokenizer.encode([text])
    if config.model.two_sides:
        source, (written,) = [*tokenizer.before_source, *ids], tokenizer.encode_targets([answer])
        cut = max(len(source) + 1 - most, 0) + max(len(written) + 1 - most, 0)
        source, written = ([*one[: most - 1], tokenizer.eos] for one in (source, written))
        return Segment(
            shifted(tokenizer.bos, np.array(written)),
            np.array(written, np.int32),
            np.array(source, np.int32),
        ), cut
    if config.model.family == "encoder":
        whole = [tokenizer.bos, *ids[: most - 2], tokenizer.eos]
        return Segment(np.array(whole, np.int32), np.array(whole, np.int32)), max(
            len(ids) - (most - 2), 0
        )
    given, asked = [], ids
    if config.objective.columns == ("source", "target"):
        given, asked = (
            [*tokenizer.before_source, *ids, tokenizer.eos],
            [*tokenizer.encode_targets([answer])[0], tokenizer.eos],
        )
    elif config.model.prefix_lm:  # training cuts where it likes
        given, asked = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    one = continued(tokenizer.bos, np.array(given, np.int32), np.array(asked, np.int32))
    prefix = min(one.prefix, most) if config.model.prefix_lm else None
    return Segment(
        one.inputs[:most], one.targets[:most], weights=one.weights[:most], prefix=prefix
    ), max(len(one.targets) - most, 0)


def _maps(subject: Subject, told: dict, sides: dict[str, list[str]]) -> list[Map]:
    config, found = subject.config.model, {}
    weights, numbers = flatten(told["maps"]), flatten(told["heads"])
    where_numbers = where(config, numbers)
    for name, (path, place) in where(config, weights).items():
        side, layer, rest = in_layer(name)
        its, at = where_numbers[name.removesuffix("weights") + "heads"]
        one = {
            what: part(values, at) for what, values in numbers[its][0].items() if what != "repeated"
        }
        found.setdefault((side, rest.removesuffix("/weights")), {})[layer] = (
            part(weights[path][0], place)[0],
            one,
        )
    return [
        Map(
            f"{side} {sublayer}", sorted(layers), np.stack([layers[n][0] for n in sorted(layers)]), sides[side], sides["encoder" if sublayer == "cross_attention" else side],
            {what: np.stack([layers[n][1][what] for n in sorted(layers)]) for what in next(iter(layers.values()))[1]},
        )
        for (side, sublayer), layers in sorted(found.items(), key=lambda one: (one[0][0] != "encoder", one[0][1] == "cross_attention"))
    ]  # fmt: skip


def _sizes(subject: Subject, told: dict) -> dict[str, dict[str, list[float]]]:
    flat, found = flatten(told), {}
    for name, (path, place) in sorted(
        where(subject.config.model, flat).items(), key=lambda one: in_layer(one[0])
    ):
        side, layer, rest = in_layer(name)
        of = {key: float(np.asarray(part(x, place))) for key, x in flat[path][0].items()}
        here = found.setdefault(
            f"{side} {residual_of(rest)}", {"layer": [], "stream": [], "branch": []}
        )
        here["layer"].append(layer)
        here["stream"].append(of["stream"])
        here["branch"].append(of["branch"] / of["kept"] if of["kept"] else 1.0)
    return found
