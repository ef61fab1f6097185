"""The record of a checkpoint: its step, the loop's state and a fingerprint of every array."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from transformer.errors import UserError
from transformer.output import listed
from transformer.parallel.sharding import path_name

FORMAT = 2
"""The version of the format. Version 0.1.0 of this package wrote checkpoints without records."""

Arrays = Mapping[str, tuple[str, tuple[int, ...], str]]
"""Path of each array in an item -> (dtype, shape, fingerprint)."""


class Damaged(UserError):
    """A checkpoint does not hold what was saved. `what` says how, `way_out` how to continue."""

    def __init__(self, what: str, way_out: str = ""):
        super().__init__(f"{what}; {way_out}" if way_out else what)
        self.what = what


def describe(items: Mapping[str, Any]) -> dict[str, Arrays]:
    """Returns the record's entries for the arrays of each item. All processes must call this."""
    join = lambda kinds, hashes: {path: (*kinds[path], hashes[path]) for path in kinds}
    return {name: join(_kinds(tree), fingerprints(tree)) for name, tree in items.items()}


@dataclasses.dataclass(frozen=True)
class Record:
    """The record. It is saved as JSON beside the arrays, together with its SHA-256."""

    step: int
    arrays: Mapping[str, Arrays]  # by item
    loop: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    layout: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def to_json(self) -> dict:
        content = {"format": FORMAT, **dataclasses.asdict(self)}
        return content | {"sha256": json_sha256(content)}

    @classmethod
    def from_json(cls, parsed: Any, step: int) -> "Record":
        """Parses a record. Raises Damaged if it changed, UserError if another version wrote it."""
        wrote = f"of this package wrote the checkpoint of step {step:,}"
        if isinstance(parsed, dict) and "data_step" in parsed:
            raise UserError(f"version 0.1 {wrote}; train again, or read it with that version")
        if not isinstance(parsed, dict) or "sha256" not in parsed:
            raise Damaged("its record is incomplete")
        content = {key: value for key, value in parsed.items() if key != "sha256"}
        if parsed["sha256"] != json_sha256(content):
            raise Damaged("its record has changed since it was saved")
        if content.pop("format") != FORMAT:
            raise UserError(f"a later version {wrote}")
        if content["step"] != step:
            raise Damaged(f"it is the checkpoint of step {content['step']:,}")
        return cls(**content)

    def check_same_model(self, where: str, abstract: Mapping[str, Any]) -> None:
        """Raises UserError unless these items match the checkpoint in names, dtypes and shapes. The
        error lists the first arrays that differ. Placeholders (`...`) are skipped."""
        mismatches = []
        for item, tree in abstract.items():
            expected, arrays = _kinds(tree), self.arrays.get(item, {}).items()
            saved = {path: (kind, tuple(shape)) for path, (kind, shape, _) in arrays}
            is_complete = len(jax.tree.leaves(tree)) == len(expected)
            for path in sorted(expected.keys() | saved.keys() if is_complete else expected):
                if expected.get(path) != saved.get(path):
                    old, new = (_format_kind(kinds.get(path)) for kinds in (saved, expected))
                    mismatches.append(f"{path} is {old} in the checkpoint, {new} in the model")
        if mismatches:
            listing = listed(mismatches, 3, separator="; ", last="; ")
            raise UserError(f"{where} is a checkpoint of another architecture: {listing}")

    def check_values(self, items: Mapping[str, Any]) -> None:
        """Raises Damaged, with the first, if arrays that were read differ from those saved."""
        changed = []
        for item, tree in items.items():
            found, saved = fingerprints(tree), self.arrays[item]
            changed += [f"{item}/{path}" for path in found if saved[path][2] != found[path]]
        if changed:
            raise Damaged(f"{len(changed)} of its arrays have changed, first {changed[0]}")


def _kinds(tree: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns path -> (dtype, shape) of each array."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): (str(x.dtype), tuple(x.shape)) for path, x in leaves if x is not ...}


def _format_kind(kind: tuple[str, tuple[int, ...]] | None) -> str:
    if kind is None:
        return "absent"
    dtype, shape = kind
    return "x".join(map(str, shape)) + f" {dtype}" * (dtype != "float32") if shape else dtype


def json_sha256(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def fingerprints(tree: Any) -> dict[str, str]:
    """Returns the fingerprint of each array of `tree`: path -> 16 hexadecimal digits.

    A fingerprint depends on values and positions, but not on the mesh. With i the flat index of an
    element and b_i its bits as an unsigned integer,

        w_i = mix(b_i xor mix(i))
        fingerprint = (sum_i w_i mod 2^32, sum_i mix(w_i) mod 2^32)

    Addition modulo 2^32 is exact and commutative, so each device sums its own elements. `mix` is a
    bijection, so a change of one element always changes the fingerprint. Others collide with
    probability 2^-64. All processes must call this. Placeholders (`...`) are skipped."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    # Waits for each: with gloo, collectives of several programs at a time may block each other.
    words = lambda x: "".join(f"{word:08x}" for word in jax.device_get(_sums(jnp.asarray(x))))
    return {path_name(path): words(x) for path, x in leaves if x is not ...}


@jax.jit
def _sums(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns both sums over an array, as uint32, in one pass."""
    word = _mix(_bits(x) ^ _mix(_flat_index(x.shape)))
    zero, add = jnp.uint32(0), lambda a, b: (a[0] + b[0], a[1] + b[1])
    return jax.lax.reduce((word, _mix(word)), (zero, zero), add, tuple(range(x.ndim)))


def _bits(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    if x.dtype.itemsize > 4:
        raise TypeError(f"fingerprints need numbers of at most 32 bits, not {x.dtype}")
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)


def _flat_index(shape) -> jax.Array:
    """Returns uint32 of this shape: row-major indices modulo 2^32."""
    index = jnp.zeros(shape, jnp.uint32)
    for axis, size in enumerate(shape):
        index = index * jnp.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    return index


def _mix(x: jax.Array) -> jax.Array:
    """Applies MurmurHash3's `fmix32` (Appleby 2011), a bijection that mixes the bits of a word."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
