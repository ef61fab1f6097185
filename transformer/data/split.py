"""Splits whose held-out examples share no sentence with training, on either side.

Translation pairs are many-to-many: on a random split of Tatoeba, a nearest-neighbor memory scores
27 BLEU. Therefore whole connected components are held out. A component contains all pairs joined by
the same source or the same target, ignoring case and punctuation. For single texts, a component is
a set of equal texts."""

import hashlib
import re
from collections.abc import Iterable

import numpy as np
from scipy import sparse

from transformer.data.sources import Example

SPLITS = ("train", "valid", "test")
_WORDS = bytes(i if chr(i).isalnum() and i < 128 else ord(" ") for i in range(256))


def assign(examples: Iterable[Example], held_out: int) -> tuple[list[str], int]:
    """Returns the split of each example, and the number of components.

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
    names: dict[int, tuple[int, str]] = {}  # component -> its smallest key
    sources = [0] * count  # component -> number of distinct sources
    for key, c in zip(nodes, component.tolist(), strict=True):
        names[c] = min(names.get(c, key), key)
        sources[c] += key[0] == 0
    order = sorted(names, key=lambda c: hashlib.sha256(repr(names[c]).encode()).digest())
    split_of, taken = ["train"] * count, dict.fromkeys(("test", "valid"), 0)
    for split in taken:
        for c in order:
            if taken[split] >= held_out:
                break
            if split_of[c] == "train" and sources[c] <= held_out - taken[split]:
                split_of[c] = split
                taken[split] += sources[c]
    return [split_of[component[row[0]]] for row in rows], count


def normalize(text: str) -> str:
    """The letters and digits of a text, ignoring case. Texts that agree here count as equal."""
    if text.isascii():  # the same, faster
        return b" ".join(text.lower().encode().translate(_WORDS).split()).decode() or text
    return re.sub(r"[\W_]+", " ", text.casefold()).strip() or text
