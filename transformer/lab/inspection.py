"""Observes a trained model on one text: token losses, attention maps, logit lens, branch sizes.

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
from transformer.decoding.generate import Generator, check_tokenizer
from transformer.errors import UserError
from transformer.evaluation.inside import streams, sublayer_of
from transformer.evaluation.subject import Subject, token_losses
from transformer.model.layout import flatten, part, split_layer_path, where
from transformer.runs.evaluate import LoadedRun

TOP = 5
"""Number of most likely tokens recorded at each position."""


@dataclasses.dataclass(frozen=True)
class Map:
    """Attention weights and statistics of the heads of one kind of attention."""

    name: str  # "decoder self_attention", for example
    layers: list[int]  # numbers of the layers that have this attention
    weights_LxNxTxS: np.ndarray
    queries: list[str]
    keys: list[str]
    numbers: dict[str, np.ndarray]  # model/attention_statistics.py: entropy, ..., each [L, N]


@dataclasses.dataclass(frozen=True)
class View:
    """Everything that the page of one text shows."""

    text: str
    answer: str  # what the model generates; "" if it generates nothing or a target is given
    read: list[str]  # input tokens of the last stack
    targets: list[str]  # target token at each position
    losses_T: np.ndarray  # nats; NaN at positions without a target
    # most likely tokens and their probabilities, by layer and position
    top_tokens_LxT: list[list[list[tuple[str, float]]]]
    lens_L: np.ndarray  # logit-lens loss by layer, in nats per token
    maps: list[Map]
    # "decoder self_attention" -> layer, stream, branch: one value for each layer that has it
    sizes: dict[str, dict[str, list[float]]]
    cut: int = 0  # tokens cut off because they exceed max_length


def observe_text(trained: LoadedRun, mesh: Mesh, text: str, target: str = "") -> View:
    """Runs the model on `text` and returns what it computes.

    The decoder of an encoder-decoder reads `target`, or by default the model's own output. Raises
    UserError if the model has no attention weights, language-model head or tokenizer, or the text
    is empty.
    """
    config, tokenizer = trained.config, trained.tokenizer
    model = config.model
    _check(model, tokenizer, text)
    answer = target
    if not answer and config.objective.generates_text and model.family != "encoder":
        decoding = dataclasses.replace(config.decoding, batch_size=1)
        one_sample = dataclasses.replace(config, decoding=decoding)
        (answer,) = Generator(one_sample, trained.params, tokenizer)([text])
    segment, cut = _segment(config, tokenizer, text, answer)
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
    return View(text, answer, inputs, targets, losses_T, top_LxT, lens_L, maps, sizes, cut)


def _check(model, tokenizer: Tokenizer | None, text: str) -> None:
    if not model.observes("maps"):
        raise UserError(f"inspect: model.mixer = {plain(model.mixer)!r} has no attention weights")
    if not model.lm_head:
        raise UserError("inspect: this model has no language-model head, as the logit lens needs")
    check_tokenizer(tokenizer)
    if not text.strip():
        raise UserError("--text: empty; enter the text that the model reads")


def _segment(config, tokenizer: Tokenizer, text: str, answer: str) -> tuple[Segment, int]:
    """Returns the only segment of the batch, and the number of tokens that were cut off."""
    limit, (ids,) = config.model.max_length, tokenizer.encode([text])
    if config.model.is_encoder_decoder:
        source, (target,) = [*tokenizer.source_prefix_ids, *ids], tokenizer.encode_targets([answer])
        cut = max(len(source) + 1 - limit, 0) + max(len(target) + 1 - limit, 0)
        source, target = ([*ids[: limit - 1], tokenizer.eos] for ids in (source, target))
        inputs = shifted(tokenizer.bos, np.array(target))
        return Segment(inputs, np.array(target, np.int32), np.array(source, np.int32)), cut
    if config.model.family == "encoder":
        whole = np.array([tokenizer.bos, *ids[: limit - 2], tokenizer.eos], np.int32)
        return Segment(whole, whole), max(len(ids) - (limit - 2), 0)
    prompt, targets = [], ids
    if config.objective.has_pairs:
        prompt = [*tokenizer.source_prefix_ids, *ids, tokenizer.eos]
        targets = [*tokenizer.encode_targets([answer])[0], tokenizer.eos]
    elif config.model.prefix_lm:  # training splits at random positions
        prompt, targets = ids[: len(ids) // 2], ids[len(ids) // 2 :]
    segment = continued(tokenizer.bos, np.array(prompt, np.int32), np.array(targets, np.int32))
    prefix = min(segment.prefix, limit) if config.model.prefix_lm else None
    inputs, targets, weights = segment.inputs, segment.targets, segment.weights[:limit]
    kept = Segment(inputs[:limit], targets[:limit], weights=weights, prefix=prefix)
    return kept, max(len(targets) - limit, 0)


def _maps(subject: Subject, watched: dict, tokens_of: dict[str, list[str]]) -> list[Map]:
    """Returns the maps of each kind of attention: encoder, decoder, then cross-attention."""
    config, by_sublayer = subject.config.model, {}
    weights, statistics = flatten(watched["maps"]), flatten(watched["heads"])
    statistics_at = where(config, statistics)
    for name, (path, index) in where(config, weights).items():
        side, layer, sublayer = split_layer_path(name)
        statistics_path, statistics_index = statistics_at[name.removesuffix("weights") + "heads"]
        numbers = statistics[statistics_path][0].items()
        of_layer = {key: part(x, statistics_index) for key, x in numbers if key != "repeated"}
        layers = by_sublayer.setdefault((side, sublayer.removesuffix("/weights")), {})
        layers[layer] = part(weights[path][0], index)[0], of_layer
    maps, rank = [], lambda key: (key[0] != "encoder", key[1] == "cross_attention")
    for side, sublayer in sorted(by_sublayer, key=rank):
        layers = dict(sorted(by_sublayer[side, sublayer].items()))
        weights_L, statistics_L = zip(*layers.values(), strict=True)
        stacked = {name: np.stack([x[name] for x in statistics_L]) for name in statistics_L[0]}
        tokens = tokens_of[side], tokens_of["encoder" if sublayer == "cross_attention" else side]
        weights_LxNxTxS = np.stack(weights_L)
        maps.append(Map(f"{side} {sublayer}", list(layers), weights_LxNxTxS, *tokens, stacked))
    return maps


def _sizes(subject: Subject, sizes: dict) -> dict[str, dict[str, list[float]]]:
    flat, by_sublayer = flatten(sizes), {}
    places = where(subject.config.model, flat)
    for name in sorted(places, key=split_layer_path):
        path, index = places[name]
        side, layer, rest = split_layer_path(name)
        values = {key: float(np.asarray(part(x, index))) for key, x in flat[path][0].items()}
        empty = {"layer": [], "stream": [], "branch": []}
        sublayer = by_sublayer.setdefault(f"{side} {sublayer_of(rest)}", empty)
        sublayer["layer"].append(layer)
        sublayer["stream"].append(values["stream"])
        sublayer["branch"].append(values["branch"] / values["kept"] if values["kept"] else 1.0)
    return by_sublayer
