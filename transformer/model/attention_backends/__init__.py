"""The inner attention: from queries, keys, values, a mask and a position scheme to outputs.

A backend is a function `attend(q, k, v, given)` and a line in BACKENDS that says what it cannot do. `reference` can do
everything and is always there.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

from transformer.model.attention_backends import blockwise, cudnn, ring, splash
from transformer.model.attention_backends.base import Attend, Inputs
from transformer.model.attention_backends.reference import reference
from transformer.model.sharding import axis_of, platform

__all__ = ["BACKENDS", "Backend", "Inputs", "choose", "reference"]


@dataclasses.dataclass(frozen=True)
class Backend:
    """One way to compute it, and what it cannot do: `why_not(q, k, v, given)` is a few words, or None."""

    attend: Attend
    why_not: Callable[..., str | None] = lambda q, k, v, given: None


BACKENDS: dict[str, Backend] = {
    "reference": Backend(reference),
    "blockwise": Backend(blockwise.blockwise, blockwise.why_not),
    "ring": Backend(ring.ring, ring.why_not),
    "splash": Backend(splash.splash, splash.why_not),
    "cudnn": Backend(cudnn.cudnn, cudnn.why_not),
}

LONG = 1024
"""From so many queries and keys on, logits are not held all at once. (On two CPU cores blocks are faster from 512 on; see
experiments/benchmarks/attention.py.)"""


def choose(name: str, q, k, v, given: Inputs) -> Attend:
    """The backend of a config, for these arrays; "auto" is the first that serves them and does not waste memory.

    One that cannot serve them is replaced by the next, in the end by the plain path, and says so.
    """
    spread, size = axis_of("length")[1] > 1, min(q.shape[1], k.shape[1])
    wanted = [name] if name != "auto" else ["ring"] if spread and q.shape[1] > 1 else []
    if name == "auto" and platform() == "tpu" and size >= splash.LANES:
        wanted.append("splash")
    if size >= LONG and name not in ("reference", "blockwise"):
        wanted.append("blockwise")
    problems = {}
    for chosen in (*wanted, "reference"):
        why_not = BACKENDS[chosen].why_not(q, k, v, given)
        if not why_not:
            break
        problems[chosen] = why_not
    _note(chosen, "; ".join(f"{other}: {why_not}" for other, why_not in problems.items()))
    return BACKENDS[chosen].attend


_LISTENERS: list[dict[str, str]] = []


def _note(chosen: str, fallen_back: str) -> None:
    for listener in _LISTENERS:
        listener.setdefault(chosen, fallen_back)


@contextlib.contextmanager
def record() -> Iterator[dict[str, str]]:
    """What was chosen by the programs that are traced inside: backend -> why another that was wanted is not used (or "")."""
    found: dict[str, str] = {}
    _LISTENERS.append(found)
    try:
        yield found
    finally:
        _LISTENERS[:] = [listener for listener in _LISTENERS if listener is not found]
