"""The shapes of a batch, without the text: an objective lays out one row of a made-up one.

What fields a batch has, and of which kind, is known to the objective alone; so it is asked.
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
    """A training batch of the longest rows, spread over the mesh."""
    data, where = config.data, NamedSharding(mesh, BATCH)
    rows = config.objective.rows(_MadeUp(config), "train", config)
    one = assemble(
        [rows.segments(0, lambda: np.random.default_rng(0))], data.length, data.decoder_length
    )
    shape = lambda x: jax.ShapeDtypeStruct((data.batch_size, *x.shape[1:]), x.dtype, sharding=where)
    return {name: shape(x) for name, x in one.items()}


class _MadeUp:
    """What objectives read of a store: a few texts of one word over and over, some short, some as long as a row."""

    def __init__(self, config: Experiment):
        size = config.model.vocab_size - config.objective.reserved
        short = max(min(config.data.length, config.data.decoder_length) // 2, 2)
        self._lengths = np.array([short, config.data.length] * 8)
        self._per_text = config.objective.columns[-1] == "label"
        self.tokenizer = types.SimpleNamespace(
            vocab_size=size, bos=1, eos=2, pad=0, mask=None, before_source=[], text_ids=np.array([3]),
            starts_word=np.ones(size, bool), find=lambda piece: None,
        )  # fmt: skip

    def texts(self, part: str, side: int) -> Texts:
        ends = np.cumsum(self._lengths)
        ids = np.full(ends[-1], 3, np.int32)
        ids[ends - 1] = self.tokenizer.eos
        return Texts(ids, ends)

    def labels(self, part: str) -> np.ndarray:
        return np.zeros(len(self._lengths) if self._per_text else self._lengths.sum(), np.int32)
