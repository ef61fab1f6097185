"""What goes on inside, seen from where heads look and from what the head would say of each layer's stream.

Shape suffixes: B batch, T length, D d_model, V vocabulary, N heads.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from transformer.errors import UserError
from transformer.evaluation.kinds import Attention, LogitLens, Order
from transformer.evaluation.subject import At, Found, Subject, token_losses
from transformer.model.config import ModelConfig
from transformer.model.layout import flatten, in_layer, part, where

OF_ONE_SIDE = ("distance", "previous")
"""What means nothing between the tokens of two sides."""


def attention(kind: Attention, subject: Subject, at: At) -> Found:
    """attention/WHAT/SIDE/LAYER/SUBLAYER/HEAD, on one batch; WHAT as in model/attention_statistics.py, `induction` being `repeated` on random
    tokens said twice."""
    look = subject.program(
        "attention",
        lambda params, batch: flatten(subject.watch(params, batch, "heads")[1]["heads"]),
    )
    of_text = dict(_by_head(subject.config.model, look(at.params, subject.batch)))
    for (what, here), values in of_text.items():
        if what != "repeated" and not (what in OF_ONE_SIDE and here.endswith("cross_attention")):
            yield from (
                (f"attention/{what}/{here}/{head:02d}", float(value))
                for head, value in enumerate(values)
            )
    if subject.config.model.family == "decoder":
        for (what, here), values in _by_head(
            subject.config.model, look(at.params, _said_twice(subject))
        ):
            if what == "repeated":
                yield from (
                    (f"attention/induction/{here}/{head:02d}", float(value))
                    for head, value in enumerate(values)
                )


def _by_head(config: ModelConfig, told: dict) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """((WHAT, SIDE/LAYER/SUBLAYER), a number a head)."""
    for name, (path, place) in where(config, told).items():
        side, layer, rest = in_layer(name)
        for what, values in told[path][0].items():
            yield (
                (what, f"{side}/{layer:02d}/{rest.removesuffix('/heads')}"),
                np.asarray(part(values, place)),
            )


def _said_twice(subject: Subject) -> dict[str, jax.Array]:
    """The batch with random pieces of text, the second half of each row being the first once more."""
    whole = {name: np.array(x) for name, x in subject.data.batches(subject.part)[0].items()}
    rows, length = whole["inputs"].shape
    half = np.random.default_rng(0).choice(subject.data.tokenizer.text_ids, (rows, length // 2))
    whole["inputs"][:, : 2 * (length // 2)] = np.tile(half, 2)
    whole["segments"][:] = 1
    whole["positions"][:] = np.arange(length)
    here = subject.share.rows(rows)
    return subject.share.place({name: x[here] for name, x in whole.items() if name != "prefix"})


def logit_lens(kind: LogitLens, subject: Subject, at: At) -> Found:
    """lens/loss/LAYER, nats per token of one batch read from the stream behind that layer by the model's own last norm and head;
    lens/agrees/LAYER, the share of tokens of which it says what the model says."""

    def look(params, batch):
        (h_BxTxE, head), told, batch = subject.watch(params, batch, "streams")
        asked = batch["weights"]

        def says(h_BxTxE, head):
            """(loss of each token, what is said of it)."""

            def one(h, targets):
                logits_BxTxV = head(h)
                return token_losses(logits_BxTxV, targets), jnp.argmax(logits_BxTxV, axis=-1)

            return subject.in_chunks(one, h_BxTxE, batch["targets"])

        last, out = says(h_BxTxE, head)[1], {}
        for layer, read in enumerate(streams(subject, params, told["streams"])):
            losses, said = says(*read)
            total = jnp.maximum(jnp.sum(asked), 1.0)
            out[layer] = jnp.sum(losses * asked) / total, jnp.sum((said == last) * asked) / total
        return out

    for layer, (loss, agrees) in subject.program(kind, look)(at.params, subject.batch).items():
        yield f"lens/loss/{layer:02d}", float(loss)
        yield f"lens/agrees/{layer:02d}", float(agrees)


def order(kind: Order, subject: Subject, at: At) -> Found:
    """order/kl: sum of p log(p / q) at the last place of a row, mean over rows, in nats; p as the tokens stand, q with all tokens before the last
    in another order. Rows are read as one document each."""

    def last(params, batch):
        (h_BxTxE, head), _, batch = subject.watch(params, batch)
        at_last = batch["positions"] == jnp.max(batch["positions"], axis=1, keepdims=True)
        return jax.nn.log_softmax(
            head(jnp.sum(jnp.where(at_last[..., None], h_BxTxE, 0), axis=1, keepdims=True))[:, 0]
        )

    whole = {
        name: np.array(x)
        for name, x in subject.data.batches(subject.part)[0].items()
        if name not in ("prefix", "labels", "label_weights")
    }
    rows, length = whole["inputs"].shape
    full = np.flatnonzero((whole["segments"] > 0).all(axis=1))
    if not len(full):
        raise UserError(
            "train.evaluators: order needs a row that is full of tokens; set data.packing=True"
        )
    chosen = np.resize(
        full, rows
    )  # those again where they are fewer, for a batch of the same shape
    inputs, there = whole["inputs"][chosen], np.random.default_rng(0).permutation(length - 1)
    logs = []
    for tokens in (inputs, np.concatenate([inputs[:, there], inputs[:, -1:]], axis=1)):
        batch = {name: x[chosen] for name, x in whole.items()} | {
            "inputs": tokens,
            "segments": np.ones_like(inputs),
        }
        batch["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), inputs.shape)
        here = subject.share.rows(rows)
        logs.append(
            np.asarray(
                subject.program(kind, last)(
                    at.params, subject.share.place({name: x[here] for name, x in batch.items()})
                )
            )
        )
    yield (
        "order/kl",
        float(np.mean(np.sum(np.exp(logs[0]) * (logs[0] - logs[1]), axis=-1)[: len(full)])),
    )


def streams(subject: Subject, params, told: dict) -> Iterator[tuple[jax.Array, Callable]]:
    """(what the head is applied to, the head) of the stream behind each layer of the last stack, as if the stack ended there."""
    config, flat = subject.config.model, flatten(told)
    side = config.sides[-1]
    norm = config.norm_module(parent=None)
    places = where(config, flat)
    for layer in range(config.num_layers(side)):
        path, place = places[f"{side}/layers_{layer}/after"]
        h_BxTxD = part(flat[path][0], place)
        if config.has_final_norm(side):
            h_BxTxD = norm.apply({"params": params[side].get("final_norm", {})}, h_BxTxD)
        yield subject.model.apply({"params": params}, h_BxTxD, method="read")
