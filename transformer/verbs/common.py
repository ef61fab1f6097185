"""Functions that several verbs share."""

import argparse
import sys
from pathlib import Path

from transformer.errors import UserError


def folder(text: str) -> Path:
    """Parses an argument that names a folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("empty; name a folder")
    return Path(text)


def open_run(args, overrides):
    """Returns the config of a run, with overrides, and its mesh.

    The mesh has one device unless --config.mesh.* sets another. With several processes, it is the
    run's.
    """
    from transformer.config import Experiment, MeshConfig
    from transformer.mapping import apply_overrides
    from transformer.runs.rundir import converted, load_config

    settable = {"decoding", "mesh", "platform", "seed"} | (
        {"data"} if converted(args.workdir) else set()
    )
    for key in overrides:
        if key.split(".")[0] not in settable and key != "data.eval_overlap":
            raise UserError(
                f"--config.{key}: a trained run keeps its config; "
                "set only decoding, mesh, platform, seed and data.eval_overlap"
            )
    config: Experiment = apply_overrides(load_config(args.workdir), overrides)
    start_jax()
    from transformer.parallel.mesh import start
    from transformer.parallel.processes import start_processes

    distributed = start_processes()
    if distributed and (args.verb in ("convert", "inspect") or getattr(args, "input", "") == "-"):
        raise UserError(
            f"{args.verb}: cannot run on several processes; "
            "start one process, or generate from a file (--input=FILE)"
        )
    mesh_config = (
        config.mesh
        if distributed or any(key.startswith("mesh") for key in overrides)
        else MeshConfig(data=1)
    )
    platform = config.platform if "platform" in overrides else "auto"
    return config.on(mesh_config), start(platform, mesh_config)


def read_lines(name: str) -> list[str]:
    """Returns the lines of a file or a pipe, or of standard input ("-")."""
    source = "standard input" if name == "-" else name
    if name == "-":
        data = sys.stdin.buffer.read()
    elif Path(name).is_dir() or not Path(name).exists():
        raise UserError(f"--input: no file {name!r}")
    else:
        data = Path(name).read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise UserError(
            f"--input: {source} is not UTF-8 (line {data[: e.start].count(10) + 1}); convert it"
        ) from None
    if "\0" in text:
        line = data[: data.index(0)].count(10) + 1
        raise UserError(
            f"--input: {source} holds a NUL byte (line {line}); convert UTF-16 to UTF-8"
        )
    lines = text.removesuffix("\n").split("\n") if text else []
    return [line.removesuffix("\r") for line in lines]


def ask(prompt: str) -> str:
    """Returns a line typed at the terminal. Raises EOFError at the end of input."""
    try:
        return check_text(input(prompt), "standard input")
    except UnicodeDecodeError:
        raise UserError("standard input is not UTF-8") from None


def check_text(text: str, what: str) -> str:
    """Returns `text`. Raises UserError if it holds bytes that are not UTF-8.

    Python keeps bytes that it could not decode as surrogates.
    """
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise UserError(f"{what} is not UTF-8: {text[:60]!r}")
    return text


def start_jax() -> None:
    """Configures JAX before its first computation: enables the persistent compilation cache."""
    import jax

    from transformer.data.corpora import data_home

    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(data_home() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
