"""The data of an experiment: tokenizer, training batches, evaluation batches, held-out texts."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from transformer.data.batching import Batches, JoinedBatches, MixedBatches, Stream, check_fields
from transformer.data.config import DataConfig, Task
from transformer.data.mixture import Turns, of_temperature, read_sources, weights_at
from transformer.data.objectives.base import Sequences
from transformer.data.records import Prepared, Records, open_prepared
from transformer.data.sources import Example
from transformer.data.store import Store, joined, open_stores
from transformer.data.tokenizer import Tokenizer, find_tokenizer
from transformer.errors import UserError
from transformer.model.config import ModelConfig
from transformer.model.special_tokens import as_tuple
from transformer.output import event


@dataclasses.dataclass(frozen=True)
class Data:
    """The data of a run."""

    config: Task
    stores: Mapping[str, Store]  # by source; "" without a mixture

    @functools.cached_property
    def meta(self) -> dict:
        """The `meta` of the store, or of all sources together."""
        metas = {name: store.meta for name, store in self.stores.items()}
        return joined(metas) if self.config.data.mixture else metas[""]

    @property
    def tokenizer(self):
        return next(iter(self.stores.values())).tokenizer

    def batches(self, part: str, share: Callable[[int], np.ndarray] = np.arange) -> Stream:
        """The batches of a split. `share`: see `Batches`. Those of train are shuffled and do not
        end. Others contain each sequence once, in order."""
        data, seed = self.config.data, self.config.seed if part == "train" else None
        options = {"length": data.length, "decoder_length": data.decoder_length, "share": share}
        options |= {"batch_size": data.batch_size, "buckets": data.buckets, "seed": seed}
        sources = {name: Batches(self._sequences(name, part), **options) for name in data.sources}
        for name, batches in sources.items():
            if not batches.num_sequences:
                reasons = "; ".join(event(number, text) for text, number in batches.report.items())
                problem = f"the {part} split has no sequence of {data.length} tokens"
                problem += f" in source {name!r}" if name else ""
                problem += f" ({reasons})" if reasons else ""
                raise UserError(f"data.length: {problem}; add text, or change it or data.held_out")
        if data.mixture:
            check_fields(sources)
        is_prepared = any(isinstance(store, Prepared) for store in self.stores.values())
        if part == "train" and (data.mixture or is_prepared):
            threads = 16 if is_prepared else 2  # each waits for the records of its batch
            return MixedBatches(sources, self._turns(), data.batch_size, seed, threads)
        return JoinedBatches(sources) if data.mixture else sources[""]

    def _sequences(self, name: str, part: str) -> Sequences:
        store, config = self.stores[name], self.config
        task = SimpleNamespace(model=config.model, data=config.data.sources[name], seed=config.seed)
        if part == "train" and isinstance(store, Prepared):
            return Records(store, task)
        return task.data.chosen.sequences(store, part, task)

    def _turns(self) -> Turns:
        data = self.config.data
        if not data.mixture:
            return Turns([(0, [Fraction(1)])])
        if temperature := data.mixture_temperature:
            tokens = [store.meta["train"]["tokens"] for store in self.stores.values()]
            return Turns([(0, of_temperature(tokens, temperature))])
        sources = read_sources(data.mixture, 0.0)
        steps = sorted({int(step) for source in sources for step, _ in source.phases})
        return Turns([(step * data.batch_size, weights_at(sources, step)) for step in steps])

    def examples(self, part: str) -> list[Example]:
        """The raw text of valid or test, of the sources with the columns of `objective`."""
        sources, columns = self.config.data.sources, self.config.data.chosen.columns
        names = [name for name in self.stores if sources[name].chosen.columns == columns]
        return [example for name in names for example in self.stores[name].examples(part)]


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
        if (configured := as_tuple(getattr(model, field))[:1]) not in ((), (token,)):
            name = {"pad_id": "padding"}.get(field, field)
            problem = f"{configured[0]}, but the tokenizer's {name} is {token}"
            raise UserError(f"model.{field}: {problem}; set it to that, or to None")
        if token >= model.vocab_size:
            problem = f"{model.vocab_size} has no room for the tokenizer's {field}, {token}"
            raise UserError(f"model.vocab_size: {problem}; increase it")


def _open_stores(config: DataConfig, vocab_size: int) -> dict[str, Store]:
    """The store of each source. All sources have the tokenizer of those that are prepared."""
    others = {k: v for k, v in config.sources.items() if v.format != "prepared"}
    names = [name for name in config.sources if name not in others]
    prepared = {name: open_prepared(config.sources[name], vocab_size) for name in names}
    if len({store.tokenizer.sha256 for store in prepared.values()}) > 1:
        way_out = "prepare them with one: data.tokenizer.path"
        raise UserError(f"data.mixture: {', '.join(prepared)} have different tokenizers; {way_out}")
    if prepared and others:
        file = find_tokenizer(next(iter(prepared.values())).folder)
        others = {name: source.with_tokenizer(file) for name, source in others.items()}
    stores = prepared | open_stores(others, vocab_size)
    return {name: stores[name] for name in config.sources}


def open_data(config: Task, tokenizer: Path | None = None) -> Data:
    """Opens the data of an experiment. Data that is not cached is fetched, split and tokenized.
    `tokenizer` is the tokenizer file of an existing run. If given, it tokenizes the text, even if
    training again, such as with another version of SentencePiece, would yield a different one."""
    settings = config.data.tokenizer
    # The config names an existing tokenizer: read the copy in the run.
    if tokenizer is not None and (settings.path or settings.eos_id >= 0):
        config = dataclasses.replace(config, data=config.data.with_tokenizer(tokenizer))
    data = Data(config, _open_stores(config.data, config.model.vocab_size))
    if tokenizer is not None and data.tokenizer.content != tokenizer.read_bytes():
        with_its = config.data.with_tokenizer(tokenizer)
        data = Data(config, _open_stores(with_its, config.model.vocab_size))
    check_special_tokens(config.model, data.tokenizer)
    if (classes := data.meta.get("classes")) and len(classes) != config.model.num_labels:
        found = f"{len(classes)}: {', '.join(classes[:8])}"
        raise UserError(f"model.num_labels: {config.model.num_labels}, but the text has {found}")
    return data
