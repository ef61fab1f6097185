"""The tensors of a Hugging Face directory: one safetensors file, or shards with an index."""

import functools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

import numpy as np

from transformer import output
from transformer.convert.family import Family
from transformer.convert.fields import printable, shown
from transformer.convert.weights import Shape, Weight
from transformer.errors import UserError, from_extra
from transformer.files import read_json
from transformer.model.config import ModelConfig

FLOATS = ("F16", "BF16", "F32", "F64")
"""The data types of parameters, as named by safetensors. Other types are indices or quantized."""


class Tensors:
    """The tensors of a directory, by name. Each is read on demand. Raises UserError for missing or
    damaged files, and for tensors with non-finite numbers."""

    def __init__(self, directory: Path, family: Family):
        where = {}
        for file, names in _files(directory).items():
            opened = _open(directory / file)
            present = set(opened.keys())
            if names is not None and names != present:
                index, differing = "model.safetensors.index.json", listed(sorted(names ^ present))
                problem = f"weight_map and {printable(file)} disagree about {differing}"
                raise UserError(f"{directory / index}: {problem}")
            where |= dict.fromkeys(present, opened)
        prefix, heads = family.prefix, (f"{family.head}.", "score.", *family.heads)
        lacks_prefix = prefix and not any(key.startswith(prefix) for key in where)
        name = lambda key: prefix + key if lacks_prefix and not key.startswith(heads) else key
        self._stored = {family.rename(name(key), where): (file, key) for key, file in where.items()}
        self.names = frozenset(self._stored)
        # A fused tensor is read three times in a row.
        self.read = functools.lru_cache(maxsize=1)(self._read)

    def _read(self, name: str) -> np.ndarray:
        file, key = self._stored[name]
        x = file.get_tensor(key)
        # Models compute in float32, so a float64 beyond its range counts as infinite.
        with np.errstate(over="ignore"):
            finite = np.isfinite(x if x.itemsize <= 4 else x.astype(np.float32))
        if not finite.all():
            problem = "holds a NaN or an infinite number; the file is damaged"
            raise UserError(f"{printable(name)}: {problem}")
        return x

    def header(self, name: str):
        """Returns safetensors' object for a tensor: `get_shape`, `get_dtype` (F32, I64, BOOL)."""
        file, key = self._stored[name]
        return file.get_slice(key)


def _files(directory: Path) -> dict[str, set[str] | None]:
    """Returns file -> the names of its tensors, or None for all tensors in the file."""
    index, single = directory / "model.safetensors.index.json", "model.safetensors"
    if not index.is_file():
        if not (directory / single).is_file():
            raise UserError(f"{directory}: no {single}; save the model with save_pretrained()")
        return {single: None}
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(file, str) for file in table.values()):
        raise UserError(f"{index}: damaged (no table weight_map)")
    files: dict[str, set[str] | None] = {}
    for name, file in table.items():
        if not _is_inside(file):
            problem = "which is not a file of this directory"
            raise UserError(f"{index}: weight_map names {shown(file)}, {problem}")
        files.setdefault(file, set()).add(name)
    if not files:
        raise UserError(f"{index}: damaged (weight_map names no tensor)")
    for file in files:
        if not (directory / file).is_file():
            missing = f"no {printable(file)}, which {index.name} names"
            raise UserError(f"{directory}: {missing}; copy it, or save the model again")
    if single not in files and (directory / single).is_file():
        raise UserError(f"{directory}: has both {single} and {index.name}; delete the outdated one")
    return files


def _is_inside(file: str) -> bool:
    """Returns whether a path is inside the directory on any system; a hub's link may lead out."""
    paths = PurePosixPath(file), PureWindowsPath(file)
    leaves = any(path.anchor or ".." in path.parts or not path.name for path in paths)
    return not leaves and "\0" not in file


def require_safetensors() -> None:
    """Raises UserError unless safetensors is installed."""
    with from_extra("hf", "Hugging Face directories need"):
        import safetensors  # noqa: F401


def _open(file: Path):
    require_safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="np")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file}: damaged ({printable(str(e))})") from None


def check(
    family: Family, config: ModelConfig, tensors: Tensors, holder: Mapping[str, tuple[Weight, int]],
    shapes: Mapping[str, Shape],
) -> None:  # fmt: skip
    """Raises UserError unless tensors and parameters correspond, with the right shapes and types.
    `holder` maps each parameter to its Weight and its index there; `shapes` are those of all
    parameters. Tensors without a parameter must be copies, constants or unused."""
    kind = family.model_type
    if unnamed := sorted(shapes.keys() - holder.keys()):
        raise UserError(f"{kind} has no tensor for {listed(unnamed)}")
    weights = {weight.theirs: weight for weight, _ in holder.values()}
    if missing := sorted(weights.keys() - tensors.names):
        raise UserError(f"missing tensors of a {kind} model: {listed(missing)}")
    copies = [copy for copy in family.all_copies(config) if copy.theirs in tensors.names]
    extra = tensors.names - weights.keys() - {copy.theirs for copy in copies}
    matching = lambda name, patterns: [p for p in patterns if re.fullmatch(p, name)]
    constants = {n: family.constants[p] for n in extra for p in matching(n, family.constants)}
    unused = [n for n in extra if matching(n, family.unused)]
    if extra := sorted(extra - constants.keys() - set(unused)):
        why = f"which a {kind} model with this config.json does not have"
        raise UserError(f"unexpected tensors, {why}: {listed(extra)}")
    for name in sorted(tensors.names - set(unused)):
        if (dtype := tensors.header(name).get_dtype()) not in FLOATS:
            problem = f"holds numbers of type {dtype}, and not one of {', '.join(FLOATS)}"
            raise UserError(f"{printable(name)}: {problem}")
    for weight in weights.values():
        shape = tensors.header(weight.theirs).get_shape()
        expected_shape = weight.shape([shapes[name] for name in weight.ours])
        if tuple(shape) != tuple(expected_shape):
            expected = f"config.json implies {spell(expected_shape)}"
            raise UserError(f"{weight.theirs}: its shape is {spell(shape)}, but {expected}")
    for copy in copies:
        if copy.compared and not np.array_equal(tensors.read(copy.theirs), tensors.read(copy.of)):
            problem = "hold different numbers; separate tensors are not supported"
            raise UserError(f"{copy.theirs} and {copy.of} {problem} for {kind}")
    for name, formula in constants.items():
        # float16 has a precision of 2^-10, bfloat16 of 2^-7.
        tolerance = {"F16": 1e-3, "BF16": 1e-2}.get(tensors.header(name).get_dtype(), 1e-5)
        values = tensors.read(name).astype(np.float64)
        expected = formula(values.shape)
        has_shape = expected is not None and values.shape == expected.shape
        if not has_shape or np.abs(values - expected).max(initial=0) > tolerance:
            raise UserError(f"{printable(name)}: differs from the values its formula gives")


def spell(shape: Iterable[int]) -> str:
    """Returns a shape as text: 16 x 64."""
    return " x ".join(map(str, shape)) or "that of a single number"


def listed(names: list[str]) -> str:
    """Returns the first eight names, and the number of the others, as one line."""
    return output.listed(list(map(printable, names)), 8)
