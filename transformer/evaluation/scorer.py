"""Log-probabilities and embeddings of given texts, batched by length.
Shape suffixes: B batch, T length, D d_model, V vocabulary."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from transformer.data.batching import assemble, by_width
from transformer.data.config import Task
from transformer.data.objectives.base import Segment, given
from transformer.data.tokenizer import Tokenizer
from transformer.errors import UserError, look_up
from transformer.evaluation.subject import Subject
from transformer.model.embedding import POOLINGS

Pair = tuple[Sequence[int], Sequence[int]]  # the ids of a context and of its continuation


class Scores(NamedTuple):
    """The tokens of a continuation: log-probabilities in nats, and whether each is the argmax."""

    logp: np.ndarray
    is_greedy: np.ndarray
    pieces: list[str] | tuple = ()  # the tokens, for display


@dataclasses.dataclass
class Scorer:
    """Computes log p(continuation | context) for a decoder or an encoder-decoder. A decoder reads
    context and continuation in one sequence; a context that is too long loses its first tokens. In
    an encoder-decoder, the encoder reads the context and eos."""

    config: Task
    params: Any
    tokenizer: Tokenizer
    mesh: Mesh
    batch_size: int = 32

    def __post_init__(self):
        if self.config.model.family == "encoder" or not self.config.objective.predicts_tokens:
            problem = f"{self.config.objective.name!r} does not model the probability of texts"
            raise UserError(f"data.objective: {problem}; causal_lm, prefix_lm and seq2seq do")
        self._subject = Subject(self.config, None, "", self.mesh)

    def __call__(self, pairs: Sequence[Pair]) -> list[Scores]:
        """Returns the scores of each continuation. Raises UserError if one is too long."""
        results = [Scores(np.zeros(0, np.float32), np.zeros(0, bool))] * len(pairs)
        numbers = [i for i, (_, continuation) in enumerate(pairs) if len(continuation)]
        segments = [self._segment(*pairs[i]) for i in numbers]
        run = self._subject.program("scores", self._scores)
        for members, batch in _batches(self._subject, segments, self.batch_size):
            arrays = map(np.asarray, run(self.params, batch))
            for i, logp, is_greedy, positions, weights in zip(members, *arrays, strict=False):
                scored = np.flatnonzero(weights)
                scored = scored[np.argsort(positions[scored])]  # the mesh may have reordered them
                results[numbers[i]] = Scores(logp[scored], is_greedy[scored])
        return results

    def _segment(self, context: Sequence[int], continuation: Sequence[int]) -> Segment:
        model, room = self.config.model, self.config.model.max_length
        if len(continuation) > room:
            problem = f"a text of {len(continuation):,} tokens exceeds model.max_length = {room:,}"
            raise UserError(f"texts: {problem}; split it")
        targets = np.array(continuation, np.int32)
        if model.is_encoder_decoder:
            source = np.array([*context[: room - 1], self.tokenizer.eos], np.int32)
            return given(model, self.tokenizer.bos, source, targets)
        first, *rest = context[-(room + 1 - len(targets)) :] or [self.tokenizer.bos]
        return given(model, first, np.array(rest, np.int32), targets)

    def _scores(self, params, batch):
        hidden, _, batch = self._subject.watch(params, batch)
        losses_BxT, greedy_BxT = self._subject.predict(*hidden, batch["targets"])
        return -losses_BxT, greedy_BxT == batch["targets"], batch["positions"], batch["weights"]


def _batches(
    subject: Subject, segments: Sequence[Segment], batch_size: int
) -> Iterator[tuple[list[int], dict[str, jax.Array]]]:
    """Yields (indices of segments, sharded batch that begins with them), by length."""
    share = subject.share
    batch_size = -(-batch_size // share.parts) * share.parts
    lengths = [max(len(x.inputs), 0 if x.source is None else len(x.source)) for x in segments]
    for width, batches in by_width(lengths, subject.config.model.max_length, batch_size):
        for members in batches:
            last = len(members) - 1  # repeated to fill the batch
            rows = [[segments[members[min(row, last)]]] for row in share.sequences(batch_size)]
            yield members, share.place(assemble(rows, width))


def embed_texts(
    config: Task, params: Any, tokenizer: Tokenizer, mesh: Mesh, texts: Sequence[str],
    pooling: str, batch_size: int,
) -> np.ndarray:  # fmt: skip
    """Returns the pooled last hidden states of the encoder, or of the only stack: [texts, D]. A
    text is read as in training: between bos and eos (encoder), before eos (encoder-decoder) or
    after bos (decoder). A longer text than the model's length is cut."""
    pool, subject = look_up(POOLINGS, pooling, "pooling"), Subject(config, None, "", mesh)
    family, room = config.model.family, config.model.max_length
    first = tokenizer.source_prefix_ids if family == "encoder_decoder" else [tokenizer.bos]
    last = [] if family == "decoder" else [tokenizer.eos]
    inside = [ids[: room - len(first) - len(last)] for ids in tokenizer.encode(texts)]
    segments = [Segment(np.array([*first, *ids, *last], np.int32)) for ids in inside]

    def pooled(params, batch):
        tokens_BxT, real_BxT = batch["inputs"], batch["segments"] > 0
        method = "encode" if family == "encoder_decoder" else "hidden"
        options = {"padding_mask": real_BxT, "deterministic": True, "method": method}
        h_BxTxD, _ = subject.model.apply(params, tokens_BxT, **options)
        return pool(h_BxTxD.astype(jnp.float32), real_BxT[..., None])

    results = np.zeros((len(texts), config.model.stack(config.model.sides[0]).d_model), np.float32)
    for members, batch in _batches(subject, segments, batch_size):
        h_BxD = subject.program("pooled", pooled)(params, batch)
        results[members] = np.asarray(h_BxD)[: len(members)]
    return results


def score_texts(scorer: Scorer, texts: Sequence[str], contexts: Sequence[str]) -> list[Scores]:
    """Scores each text after its context; both are tokenized together, except in a translator. A
    text that exceeds the model's length after no context is scored in several windows."""
    tokenizer, is_pair = scorer.tokenizer, scorer.config.model.is_encoder_decoder
    before = tokenizer.encode(contexts)
    if is_pair:
        before = [[*tokenizer.source_prefix_ids, *ids] for ids in before]
        after = tokenizer.encode_targets(texts)
    else:
        both = tokenizer.encode(["".join(pair) for pair in zip(contexts, texts, strict=True)])
        after = [ids[len(x) :] for ids, x in zip(both, before, strict=True)]
        before = [[tokenizer.bos, *ids] for ids in before]
    room = scorer.config.model.max_length
    is_long = lambda context, text: not is_pair and len(context) == 1 and len(text) > room
    split = lambda x, text: windows(*x, text, room) if is_long(x, text) else [(x, text)]
    parts = [split(x, text) for x, text in zip(before, after, strict=True)]
    scored, results = iter(scorer([pair for of_text in parts for pair in of_text])), []
    for of_text, ids in zip(parts, after, strict=True):
        of_parts = [next(scored) for _ in of_text]
        logp, is_greedy = (np.concatenate([x[i] for x in of_parts]) for i in (0, 1))
        results.append(Scores(logp, is_greedy, [tokenizer.piece(i) for i in ids]))
    return results


def windows(first: int, ids: Sequence[int], length: int) -> list[Pair]:
    """Splits a text into continuations of at most `length` tokens, each with its context. Every
    token is scored once. `first` is the context of the first token. The context of a later window
    is the token before it; the last window has as much context as its sequence has room for."""
    pairs: list[Pair] = [([first], ids[:length])] if ids else []
    for start in range(length, len(ids), length):
        stop = min(start + length, len(ids))
        pairs.append((ids[max(stop - length - 1, 0) : start], ids[start:stop]))
    return pairs
