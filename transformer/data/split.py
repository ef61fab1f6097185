"""A held-out side that shares no sentence with training, on either side.

Translation pairs are many to many: after a random split of Tatoeba a nearest-neighbour memory scores 27 BLEU. So what
is held out is whole connected components: pairs joined by the same source or the same target, ignoring case and
punctuation. For single texts a component is a set of equal texts.
"""

import hashlib
import re
from collections.abc import Iterable

from transformer.data.sources import Example

SPLITS = ("train", "valid", "test")


def assign(examples: Iterable[Example], held_out: int) -> tuple[list[str], int]:
    """The split of each example, and the number of components.

    Components are taken in the order of a hash of their content, first for test, then for valid, until each has
    `held_out` distinct sources; one too large for what is still wanted, and all others, are for training. So the split
    depends on the text and on nothing else: not on a seed, nor on the order of the lines.
    """
    parent: list[int] = []
    nodes: dict[tuple[int, str], int] = {}

    def node(side: int, text: str) -> int:
        key = side, normalise(text)
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
        own = [node(side, text) for side, text in enumerate(example)]
        first_nodes.append(own[0])
        for other in own[1:]:
            parent[root(other)] = root(own[0])
    names: dict[int, tuple[int, str]] = {}  # each component by its smallest key
    sources: dict[int, int] = {}
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


def normalise(text: str) -> str:
    """Letters and digits only, case ignored: what makes two sentences the same for the split."""
    key = re.sub(r"[\W_]+", " ", text.casefold()).strip()
    return key or text
