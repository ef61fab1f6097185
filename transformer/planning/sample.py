"""The shapes of a batch, without reading a text.

Only the objective defines its fields, so it lays out one sequence of synthetic texts.
"""

import types

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from transformer.config import Experiment
from transformer.data.batching import assemble
from transformer.data.store import Texts
from transformer.parallel.sharding import BATCH


def batch_shapes(config: Experiment, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a training batch of full length, sharded over the mesh."""
    data, sharding = config.data, NamedSharding(mesh, BATCH)
    sequences = config.objective.sequences(_SyntheticStore(config), "train", config)
    segments = sequences.segments(0, lambda: np.random.default_rng(0))
    sample = assemble([segments], data.length, data.decoder_length)
    shape = lambda x: (data.batch_size, *x.shape[1:])
    struct = lambda x: jax.ShapeDtypeStruct(shape(x), x.dtype, sharding=sharding)
    return {name: struct(x) for name, x in sample.items()}


class _SyntheticStore:
    """The part of a store that objectives read: texts of one repeated token, half of them short."""

    def __init__(self, config: Experiment):
        size = config.model.vocab_size - config.objective.reserved
        short = max(min(config.data.length, config.data.decoder_length) // 2, 2)
        self._lengths = np.array([short, config.data.length] * 8)
        self._per_text = config.objective.columns[-1] == "label"
        special = {"pad": 0, "bos": 1, "eos": 2, "mask": None, "source_prefix_ids": []}
        pieces = {"text_ids": np.array([3]), "starts_word": np.ones(size, bool)}
        pieces |= {"vocab_size": size, "find": lambda piece: None}
        self.tokenizer = types.SimpleNamespace(**special, **pieces)

    def texts(self, part: str, side: int) -> Texts:
        ends = np.cumsum(self._lengths)
        ids = np.full(ends[-1], 3, np.int32)
        ids[ends - 1] = self.tokenizer.eos
        return Texts(ids, ends)

    def labels(self, part: str) -> np.ndarray:
        return np.zeros(len(self._lengths) if self._per_text else self._lengths.sum(), np.int32)
