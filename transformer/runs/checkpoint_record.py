"""What a checkpoint says of itself: its step, what the loop needs to continue, and a fingerprint of every array it holds."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax

from transformer.errors import UserError
from transformer.parallel.sharding import path_name
from transformer.runs.fingerprint import fingerprints

FORMAT = 2
"""Version 0.1.0 wrote checkpoints without records."""


class Damaged(UserError):
    """A checkpoint does not hold what was saved. `what` is missing or differs; `way_out` is what to do."""

    def __init__(self, what: str, way_out: str = ""):
        super().__init__(f"{what}; {way_out}" if way_out else what)
        self.what = what


Arrays = Mapping[str, tuple[str, tuple[int, ...], str]]
"""The path of each array in an item -> (type, shape, fingerprint)."""


def describe(items: Mapping[str, Any]) -> dict[str, Arrays]:
    """What a record says of each item's arrays. All processes must call it together (see `fingerprints`)."""
    described = {}
    for name, tree in items.items():
        prints = fingerprints(tree)
        described[name] = {path: (*kind, prints[path]) for path, kind in _kinds(tree).items()}
    return described


@dataclasses.dataclass(frozen=True)
class Record:
    """Saved as JSON beside the arrays, with its own SHA-256."""

    step: int
    arrays: Mapping[str, Arrays]  # by item
    loop: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict:
        """The record as a JSON object."""
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        return content | {"sha256": _sha256(content)}

    @classmethod
    def from_json(cls, given: Any, step: int) -> "Record":
        """The record of the checkpoint of that step. Raises Damaged if it is not the one that was saved."""
        if isinstance(given, dict) and "data_step" in given:
            raise UserError(
                f"version 0.1 of this package wrote the checkpoint of step {step:,}; train again, or read it with that version"
            )
        if not isinstance(given, dict) or "sha256" not in given:
            raise Damaged("its record is incomplete")
        content = {key: value for key, value in given.items() if key != "sha256"}
        if given["sha256"] != _sha256(content):
            raise Damaged("its record has changed since it was saved")
        if content.pop("format") != FORMAT:
            raise UserError(
                f"a later version of this package wrote the checkpoint of step {step:,}"
            )
        if content["step"] != step:
            raise Damaged(f"it is the checkpoint of step {content['step']:,}")
        return cls(**content)

    def check_same_model(self, where: str, abstract: Mapping[str, Any]) -> None:
        """Raises UserError, naming the first arrays that differ, unless these items are the checkpoint's in names, types and
        shapes. Leaves that are a placeholder (`...`) are left out."""
        wrong = []
        for item, tree in abstract.items():
            here = _kinds(tree)
            there = {
                path: (kind, tuple(shape))
                for path, (kind, shape, _) in self.arrays.get(item, {}).items()
            }
            whole = len(jax.tree.leaves(tree)) == len(here)
            for path in sorted(here.keys() | there.keys() if whole else here):
                if here.get(path) != there.get(path):
                    wrong.append(
                        f"{path} is {_spell(there.get(path))} there, {_spell(here.get(path))} here"
                    )
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UserError(
                f"{where} is a checkpoint of another architecture: {'; '.join(wrong[:3])}{more}"
            )

    def check_values(self, items: Mapping[str, Any]) -> None:
        """Raises Damaged, naming the first array, if arrays that were read differ from those that were saved."""
        differ = [
            f"{item}/{path}"
            for item, tree in items.items()
            for path, found in fingerprints(tree).items()
            if self.arrays[item][path][2] != found
        ]
        if differ:
            raise Damaged(
                f"{len(differ)} of its arrays have changed since they were saved, first {differ[0]}"
            )


def _kinds(tree: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Path -> (type, shape) of each array."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): (str(x.dtype), tuple(x.shape)) for path, x in leaves if x is not ...}


def _spell(kind: tuple[str, tuple[int, ...]] | None) -> str:
    if kind is None:
        return "absent"
    dtype, shape = kind
    return (
        "x".join(map(str, shape)) + (f" {dtype}" if dtype != "float32" else "") if shape else dtype
    )


def _sha256(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
