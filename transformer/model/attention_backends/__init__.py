"""Inner attention: from queries, keys, values, a mask and a position scheme to outputs. A backend
is a function `attend(q, k, v, inputs)`. Its entry in BACKENDS also has a function that checks
whether it supports inputs. `reference` supports all inputs."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from transformer.model.attention_backends import blockwise, flash, ring
from transformer.model.attention_backends.base import Attend, Inputs, reference
from transformer.model.sharding import axis_of, platform

__all__ = ["BACKENDS", "Backend", "Inputs", "choose", "reference"]


class Backend(NamedTuple):
    """One implementation of inner attention. `why_not(q, k, v, inputs)` returns why the backend
    does not support these inputs, in a few words, or None if it does."""

    attend: Attend
    why_not: Callable[..., str | None] = lambda q, k, v, inputs: None


BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference),
    "blockwise": Backend(blockwise.blockwise, blockwise.why_not),
    "ring": Backend(ring.ring, ring.why_not),
    "flash": Backend(flash.flash, flash.why_not),
}

_LISTENERS: list[dict[str, str]] = []

LONG = 1024
"""From this number of queries and keys, `blockwise` is preferred to `reference`, which stores all
logits at once. On two CPU cores, it is faster from 512 (experiments/benchmarks/attention.py)."""


def choose(name: str, q, k, v, inputs: Inputs) -> Attend:
    """Returns the backend for these inputs, where `name` is the config's `attention_backend`.
    "auto" prefers `flash` on TPUs and GPUs, except for single queries, and then `ring` where
    sequences are sharded. If the preferred backends do not support the inputs, long inputs fall
    back to `blockwise`, and all inputs finally to `reference`. `record` collects the reasons."""
    sharded, size = axis_of("length")[1] > 1, min(q.shape[1], k.shape[1])
    preferred = [name]
    if name == "auto":
        is_fused = platform() in ("tpu", "gpu") and size > 1
        preferred = ["flash"] * is_fused + ["ring"] * (sharded and q.shape[1] > 1)
    if size >= LONG and name not in ("reference", "blockwise"):
        preferred.append("blockwise")
    problems = {}
    for chosen in (*preferred, "reference"):
        why_not = BACKENDS[chosen].why_not(q, k, v, inputs)
        if chosen != "reference" and (inputs.additive_NxH is not None or inputs.mask_value):
            why_not = "it supports neither additive scores nor attention_mask_value"
        if not why_not:
            break
        problems[chosen] = why_not
    reason = "; ".join(f"{backend}: {why_not}" for backend, why_not in problems.items())
    for listener in _LISTENERS:
        listener.setdefault(chosen, reason)
    return BACKENDS[chosen].attend


@contextlib.contextmanager
def record() -> Iterator[dict[str, str]]:
    """Records the backends of all programs that are traced in this context. Yields a dictionary:
    name of a chosen backend -> why preferred backends were not used, or ""."""
    chosen: dict[str, str] = {}
    _LISTENERS.append(chosen)
    try:
        yield chosen
    finally:
        _LISTENERS[:] = [listener for listener in _LISTENERS if listener is not chosen]
