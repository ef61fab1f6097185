"""Text to text: translation by encoder-decoders, continuation by decoders."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.data.batching import by_width
from transformer.data.config import Task
from transformer.data.tokenizer import Tokenizer
from transformer.decoding.batches import Batches
from transformer.decoding.beam import BeamSearch
from transformer.decoding.config import DecodingConfig
from transformer.decoding.prefill import Ending, Search, begin
from transformer.decoding.sampling import Sampling
from transformer.errors import UserError
from transformer.mapping import to_mapping
from transformer.model.network import build_model


def check_texts(texts: Any, name: str = "texts") -> None:
    """Raises UserError unless the argument is a list of strings that UTF-8 can encode."""
    if isinstance(texts, (str, bytes)) or not hasattr(texts, "__len__"):
        raise UserError(f"{name}: expected a list of strings, got {type(texts).__name__}")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise UserError(f"{name}[{i}]: {text!r} is not text; pass strings")
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UserError(f"{name}[{i}]: {text[e.start]!a} is not in UTF-8; remove it") from None


def check_tokenizer(tokenizer: Tokenizer | None) -> Tokenizer:
    """Returns the tokenizer of a run. Raises UserError if there is none."""
    if tokenizer is None:
        missing = "no tokenizer (tokenizer.model or tokenizer.json)"
        raise UserError(f"this run has {missing}; put one into its directory")
    return tokenizer


@dataclasses.dataclass
class Generator:
    """A trained model that generates text. `cut` counts inputs that were too long and cut."""

    config: Task
    params: Any
    tokenizer: Tokenizer | None
    cut: int = 0
    add_bos: bool = True  # whether a prompt begins with bos

    def __post_init__(self):
        if not self.config.objective.generates_text or self.config.model.family == "encoder":
            problem = f"{to_mapping(self.config.data.objective)!r} does not train text generation"
            raise UserError(f"data.objective: {problem}; causal_lm, prefix_lm and seq2seq do")
        check_tokenizer(self.tokenizer)
        self._model = build_model(self.config.model)
        self._translates = self.config.model.is_encoder_decoder
        # A decoder trained on pairs reads eos after the source. Its output is no continuation.
        self._answers = not self._translates and self.config.objective.has_pairs
        self._calls = 0  # number of previous texts; each text has its own random key
        decoding: DecodingConfig = self.config.decoding
        eos_ids, pad = self.config.model.eos_ids or (self.tokenizer.eos,), self.tokenizer.pad
        suppressed = () if pad in eos_ids else (pad,)  # within a text, pad would mean its end
        ending = Ending.of(self.config.model, eos_ids, pad, suppressed)
        numbers = decoding.temperature, decoding.top_k, decoding.top_p
        self._search: Search = Sampling(ending, *numbers)
        if decoding.beam_size > 1:
            self._search = BeamSearch(ending, decoding.beam_size, decoding.length_penalty)
        self._batches = Batches(self._search, self._model, self._begin, self.params)

    def __call__(self, texts: Sequence[str], progress: Callable = lambda done: None) -> list[str]:
        """Returns the translation or continuation of each text. `progress` gets the number done."""
        check_texts(texts)
        ids = self.tokenizer.encode(texts)
        if self._translates or self._answers:
            ids = [[*self.tokenizer.source_prefix_ids, *i] for i in ids]
        if self._answers:
            ids = [[*i, self.tokenizer.eos] for i in ids]
        out: list[str] = [""] * len(texts)
        # The output of a decoder gets at most half of the length.
        done, length = 0, self.config.model.max_length
        answer = min(self.config.decoding.max_extra, length - length // 2)
        room = length if self._translates else max(length - answer, 1)
        lengths = [len(i) + 1 for i in ids]  # with the source's eos, or the prompt's bos
        self.cut += sum(length > room for length in lengths)
        for width, batches in by_width(lengths, room, self.config.decoding.batch_size):
            inputs = lambda batch, width=width: self._inputs(width, [ids[i] for i in batch], batch)
            for i, tokens in self._batches.decode(self.params, batches, inputs):
                out[i] = self._text(ids[i], tokens)
                progress(done := done + 1)
        self._calls += len(texts)
        return out

    def _text(self, prompt: list[int], output: np.ndarray) -> str:
        """Decodes the generated tokens. A continuation keeps the space that it may begin with."""
        if self._translates or self._answers:
            return self.tokenizer.decode(output)
        return self.tokenizer.decode([*prompt, *output])[len(self.tokenizer.decode(prompt)) :]

    def _inputs(self, width: int, ids: list[list[int]], numbers: Sequence[int]) -> tuple:
        """The arguments of `_begin`. The batch is filled with empty sequences."""
        decoding, max_length = self.config.decoding, self.config.model.max_length
        batch_size, bos = decoding.batch_size, self.tokenizer.bos
        inputs = np.full((batch_size, width), self.tokenizer.pad, np.int32)
        limits, real = np.zeros(batch_size, np.int32), np.zeros((batch_size, width), bool)
        for r, tokens in enumerate(ids):
            if self._translates:
                tokens = [*tokens[: width - 1], self.tokenizer.eos]
                inputs[r, : len(tokens)], real[r, : len(tokens)] = tokens, True
                limits[r] = min(len(tokens) + decoding.max_extra, max_length)
            else:
                begins = self.add_bos or not tokens
                tokens = [*[bos] * begins, *tokens[max(len(tokens) + begins - width, 0) :]]
                inputs[r, width - len(tokens) :], real[r, width - len(tokens) :] = tokens, True
                limits[r] = min(decoding.max_extra, max_length - len(tokens))
        numbers = np.resize(np.asarray(numbers, np.uint32), batch_size) + np.uint32(self._calls)
        return inputs, real, limits, numbers

    def _begin(self, params, inputs, real, limits, numbers) -> Any:
        """Returns the state of the search after the prompts."""
        decoding: DecodingConfig = self.config.decoding
        source, prompt, max_length = None, inputs, self.config.model.max_length
        masks, max_new = (real, None), min(decoding.max_extra, max_length - 1)
        if self._translates:  # the start token is real, even if it is the pad token
            source, max_new = inputs, min(inputs.shape[1] + decoding.max_extra, max_length)
            prompt = jnp.full((inputs.shape[0], 1), self.tokenizer.bos, jnp.int32)
            masks = jnp.ones_like(prompt, bool), real
        logits, cache = begin(self._model, params, prompt, limits, max_new, source, *masks)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(self.config.seed), numbers)
        return self._search.start(logits, cache, jnp.minimum(limits, max_new), keys, max_new)
