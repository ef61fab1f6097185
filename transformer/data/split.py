"""Splits whose held-out examples share no sentence with training, on either side.

Translation pairs are many-to-many: on a random split of Tatoeba, a nearest-neighbor memory scores
27 BLEU. Therefore whole connected components are held out. A component contains all pairs joined by
the same source or the same target, ignoring case and punctuation. Single texts join equal texts.

A fraction is held out by the hash of the text alone, and does not depend on any other text: sources
of a mixture agree on the split of a text, and text that is added later does not change it."""

import hashlib
import re
from collections.abc import Iterable

import numpy as np
from scipy import sparse

from transformer.data.sources import Example
from transformer.errors import UserError

SPLITS = ("train", "valid", "test")
_WORDS = bytes(i if chr(i).isalnum() and i < 128 else ord(" ") for i in range(256))


def assign(examples: Iterable[Example], held_out: int) -> list[str]:
    """Returns the split of each example. Raises UserError if no text is left for training.

    Components are taken in the order of a hash of their content, first for test, then for valid,
    until each split has `held_out` distinct sources. A component with more sources than a split
    still needs is skipped. All components not taken are for training. Therefore the split depends
    on the text alone, and not on a seed or the order of the lines."""
    nodes: dict[tuple[int, str], int] = {}
    node = lambda side, text: nodes.setdefault((side, normalize(text)), len(nodes))
    rows = [[node(side, text) for side, text in enumerate(example)] for example in examples]
    ends = [row[0] for row in rows], [row[-1] for row in rows]  # an example has one or two texts
    graph = sparse.coo_array((np.ones(len(rows)), ends), shape=(len(nodes), len(nodes)))
    count, component = sparse.csgraph.connected_components(graph, directed=False)
    if count <= 2 * held_out:
        limit = (count - 1) // 2
        problem = f"{held_out:,} sources in each of valid and test leave no text for training"
        lower = f"use at most {limit:,}, or " if limit else ""
        raise UserError(f"data.held_out: {problem}; {lower}set data.valid and data.test")
    names: dict[int, tuple[int, str]] = {}  # component -> its smallest key
    sources = [0] * count  # component -> number of distinct sources
    for key, c in zip(nodes, component.tolist(), strict=True):
        names[c] = min(names.get(c, key), key)
        sources[c] += key[0] == 0
    order = sorted(names, key=lambda c: hashlib.sha256(repr(names[c]).encode()).digest())
    split_of, taken = ["train"] * count, dict.fromkeys(("test", "valid"), 0)
    for split in taken:
        for c in order:
            if split_of[c] == "train" and sources[c] <= held_out - taken[split]:
                split_of[c] = split
                taken[split] += sources[c]
    return [split_of[component[row[0]]] for row in rows]


def by_hash(examples: Iterable[Example], share: float) -> list[str]:
    """The split of each example, or "" for an example of none. Sources with hashes below `share`
    are for test, below 2 * `share` for valid. No training example has a text with such a hash, or
    shares a text with a held-out example."""
    rows = [[hash64(normalize(text)) for text in example] for example in examples]
    hashes = np.array(rows, np.uint64)
    parts = np.where(hashes[:, 0] < held_out_below(share / 2), "test", "valid")
    train = hashes[:, 0] >= held_out_below(share)
    shared = [np.isin(side, side[~train]) | (side < held_out_below(share)) for side in hashes.T]
    parts[train] = np.where(np.any(shared, axis=0), "", "train")[train]
    return parts.tolist()


def held_out_below(held_out: float) -> int:
    """The hash below which texts are held out, if `held_out` is a fraction; 0 if it is a number."""
    return int(held_out * 2**65) if held_out < 1 else 0


def hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def normalize(text: str) -> str:
    """The letters and digits of a text, ignoring case. Texts that agree here count as equal."""
    if text.isascii():  # the same, faster
        return b" ".join(text.lower().encode().translate(_WORDS).split()).decode() or text
    return re.sub(r"[\W_]+", " ", text.casefold()).strip() or text
