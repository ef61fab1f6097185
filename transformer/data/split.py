"""Splits whose held-out examples share no sentence with training, on either side.

Translation pairs are many-to-many: on a random split of Tatoeba, a nearest-neighbor memory scores
27 BLEU. Therefore whole connected components are held out. A component contains all pairs joined by
the same source or the same target, ignoring case and punctuation. For single texts, a component is
a set of equal texts.
"""

import hashlib
import re
from collections.abc import Iterable

from transformer.data.sources import Example

SPLITS = ("train", "valid", "test")


def assign(examples: Iterable[Example], held_out: int) -> tuple[list[str], int]:
    """Returns the split of each example, and the number of components.

    Components are taken in the order of a hash of their content, first for test, then for valid,
    until each split has `held_out` distinct sources. A component with more sources than a split
    still needs is skipped. All components not taken are for training. Therefore the split depends
    on the text alone, and not on a seed or the order of the lines.
    """
    parent: list[int] = []
    nodes: dict[tuple[int, str], int] = {}

    def node(side: int, text: str) -> int:
        key = side, normalize(text)
        if key not in nodes:
            nodes[key] = len(parent)
            parent.append(len(parent))
        return nodes[key]

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first_nodes = []
    for example in examples:
        example_nodes = [node(side, text) for side, text in enumerate(example)]
        first_nodes.append(example_nodes[0])
        for other in example_nodes[1:]:
            parent[root(other)] = root(example_nodes[0])
    names: dict[int, tuple[int, str]] = {}  # root -> smallest key of the component
    sources: dict[int, int] = {}  # root -> number of distinct sources
    for (side, text), i in nodes.items():
        r = root(i)
        names[r] = min(names.get(r, (side, text)), (side, text))
        sources[r] = sources.get(r, 0) + (side == 0)
    order = sorted(names, key=lambda r: hashlib.sha256(repr(names[r]).encode()).digest())
    split_of, taken = {}, dict.fromkeys(("test", "valid"), 0)
    for split in taken:
        for r in order:
            if taken[split] >= held_out:
                break
            if r not in split_of and sources[r] <= held_out - taken[split]:
                split_of[r] = split
                taken[split] += sources[r]
    return [split_of.get(root(i), "train") for i in first_nodes], len(names)


def normalize(text: str) -> str:
    """The letters and digits of a text, ignoring case. Texts that agree here count as equal."""
    key = re.sub(r"[\W_]+", " ", text.casefold()).strip()
    return key or text
