"""The data of an experiment: tokenizer, training batches, evaluation batches, held-out texts."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np

from transformer.data.batching import Batches
from transformer.data.config import Task
from transformer.data.objectives.base import Objective
from transformer.data.store import Store, open_store
from transformer.data.tokenizer import Tokenizer
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.special_tokens import as_tuple
from transformer.output import event


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run."""

    config: Task
    store: Store

    @property
    def objective(self) -> Objective:
        return self.config.data.chosen

    @property
    def tokenizer(self):
        return self.store.tokenizer

    def batches(self, part: str, share: Callable[[int], np.ndarray] = np.arange) -> Batches:
        """The batches of a split. `share`: see `Batches`.

        Those of train are shuffled and do not end. Others contain each sequence once, in order.
        """
        data, train = self.config.data, part == "train"
        sequences = self.objective.sequences(self.store, part, self.config)
        fields = ("length", "decoder_length", "batch_size", "buckets")
        sizes = {field: getattr(data, field) for field in fields}
        seed = self.config.seed if train else None
        batches = Batches(sequences, **sizes, seed=seed, share=share)
        if not batches.per_epoch:
            reasons = "; ".join(event(number, text) for text, number in batches.report.items())
            problem = f"the {part} split has no sequence of {data.length} tokens"
            problem += f" ({reasons})" if reasons else ""
            raise UserError(f"data.length: {problem}; add text, or change data.length")
        return batches

    def describe(self) -> dict:
        """Counts and hashes for the manifest."""
        return {"objective": type(self.objective).__name__, **self.store.meta}


def special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> dict[str, int]:
    """The tokenizer's special tokens, by field of ModelConfig. They are authoritative in a run."""
    tokens = {"pad_id": tokenizer.pad, "eos_id": tokenizer.eos}
    if not model.is_encoder_decoder:
        return tokens | {"bos_id": tokenizer.bos}
    source_bos = dict(zip(("bos_id",), tokenizer.source_prefix_ids, strict=False))
    return tokens | {"decoder_start_id": tokenizer.bos} | source_bos


def check_special_tokens(model: ModelConfig, tokenizer: Tokenizer) -> None:
    """Raises UserError if a special token is not the tokenizer's, or exceeds the vocabulary."""
    for field, token in special_tokens(model, tokenizer).items():
        # Of several eos tokens, a tokenizer writes the first.
        configured = as_tuple(getattr(model, field))[:1]
        if configured not in ((), (token,)):
            name = {"pad_id": "padding"}.get(field, field)
            problem = f"{configured[0]}, but the tokenizer's {name} is {token}"
            raise UserError(f"model.{field}: {problem}; set it to that, or to None")
        if token >= model.vocab_size:
            problem = f"{model.vocab_size} has no room for the tokenizer's {field}, {token}"
            raise UserError(f"model.vocab_size: {problem}; increase it")


def open_data(config: Task, tokenizer: Path | None = None) -> Data:
    """Opens the data of an experiment. Data that is not cached is fetched, split and tokenized.

    `tokenizer` is the tokenizer file of an existing run. If given, it tokenizes the text, even if
    training again, such as with another version of SentencePiece, would yield a different one.
    """
    settings = config.data.tokenizer
    # The config names an existing tokenizer: read the copy in the run.
    if tokenizer is not None and (settings.path or settings.eos_id >= 0):
        data = dataclasses.replace(config.data, tokenizer=settings.at(tokenizer))
        config = dataclasses.replace(config, data=data)
    store = open_store(config.data, config.model.vocab_size)
    if tokenizer is not None and store.tokenizer.content != tokenizer.read_bytes():
        data = dataclasses.replace(config.data, tokenizer=config.data.tokenizer.at(tokenizer))
        store = open_store(data, config.model.vocab_size)
    check_special_tokens(config.model, store.tokenizer)
    if store.classes and len(store.classes) != config.model.num_labels:
        found = f"{len(store.classes)}: {', '.join(store.classes[:8])}"
        raise UserError(f"model.num_labels: {config.model.num_labels}, but the text has {found}")
    return Data(config, store)
