"""From a config to its data: the tokenizer, training batches, evaluation batches, held-out texts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from transformer.data.batching import Batches
from transformer.data.config import Task
from transformer.data.objectives.base import Objective
from transformer.data.store import Store, open_store
from transformer.data.tokenizer_base import Tokenizer
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.special_tokens import as_tuple


@dataclasses.dataclass(frozen=True)
class Data:
    """All that a run reads."""

    config: Task
    objective: Objective
    store: Store

    @property
    def tokenizer(self):
        return self.store.tokenizer

    def batches(self, part: str, share: Callable[[int], np.ndarray] = np.arange) -> Batches:
        """Training: shuffled by the seed, for all steps. valid, test: every row once, in order. `share`: see `Batches`."""
        data, train = self.config.data, part == "train"
        rows = self.objective.rows(self.store, part, self.config)
        batches = Batches(
            rows, length=data.length, decoder_length=data.decoder_length, batch_size=data.batch_size, buckets=data.buckets,
            seed=self.config.seed if train else None, share=share,
        )  # fmt: skip
        if not batches.per_epoch:
            why = "; ".join(f"{count:,} {what}" for what, count in batches.report.items())
            raise UserError(
                f"data.length: the {part} text gives no row of {data.length} tokens{f' ({why})' if why else ''}; give it more text, or change data.length"
            )
        return batches

    def describe(self) -> dict:
        """Counts and hashes for the manifest."""
        return {"objective": type(self.objective).__name__, **self.store.meta}


def special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, int]:
    """The tokenizer's special tokens, by the fields of a ModelConfig. In a run the tokenizer's are the ones that count."""
    found = {"pad_id": tokenizer.pad, "eos_id": tokenizer.eos}
    if not model.two_sides:
        return found | {"bos_id": tokenizer.bos}
    source_bos = dict(zip(("bos_id",), tokenizer.before_source, strict=False))
    return found | {"decoder_start_id": tokenizer.bos} | source_bos


def check_special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError where the model's config says other special tokens, or has no room for the tokenizer's."""
    for field, token in special_tokens(model, tokenizer).items():
        ours = as_tuple(getattr(model, field))[:1]  # of several ends, a tokenizer writes the first
        if ours not in ((), (token,)):
            its = {"pad_id": "padding"}.get(field, field)
            raise UserError(
                f"model.{field}: {ours[0]}, but the tokenizer's {its} is {token}; set it to that, or to None"
            )
        if token >= model.vocab_size:
            raise UserError(
                f"model.vocab_size: {model.vocab_size} has no room for the tokenizer's {field}, {token}; raise it"
            )


def open_data(config: Task, tokenizer: Path | None = None) -> Data:
    """Fetches, splits, tokenises what is not there yet. With `tokenizer`, that of an existing run: the text is tokenised
    by that one, even if training anew (by another version of SentencePiece, say) would give another."""
    its = config.data.tokenizer
    if tokenizer is not None and (
        its.path or its.eos_id >= 0
    ):  # a given one, of which the run has its copy
        its = its.at(tokenizer)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=its))
    store = open_store(config.data, config.model.vocab_size)
    if tokenizer is not None and store.tokenizer.content != tokenizer.read_bytes():
        own = config.data.tokenizer.at(tokenizer)
        store = open_store(dataclasses.replace(config.data, tokenizer=own), config.model.vocab_size)
    check_special_tokens(config.model, store.tokenizer)
    if store.classes and len(store.classes) != config.model.num_labels:
        raise UserError(
            f"model.num_labels: {config.model.num_labels}, but the text has {len(store.classes)}: {', '.join(store.classes[:8])}"
        )
    return Data(config, config.data.chosen, store)
