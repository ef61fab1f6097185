"""What several verbs do."""

import argparse
import dataclasses
import sys
from pathlib import Path

from transformer.errors import UserError


def folder(text: str) -> Path:
    """An argument that names a folder."""
    if not text.strip():
        raise argparse.ArgumentTypeError("empty; name a folder")
    return Path(text)


def open_run(args, overrides):
    """The config of a run, with overrides, and its mesh: one device, unless --config.mesh.* says more; of several processes, the run's."""
    from transformer.config import Experiment, MeshConfig
    from transformer.config_io import apply_overrides
    from transformer.training.rundir import converted, load_config

    free = {"decoding", "mesh", "platform", "seed"} | (
        {"data"} if converted(args.workdir) else set()
    )
    for key in overrides:
        if key.split(".")[0] not in free and key != "data.eval_overlap":
            raise UserError(
                f"--config.{key}: a trained run keeps its config; only decoding, mesh, platform, seed and "
                f"data.eval_overlap can be set here"
            )
    config: Experiment = apply_overrides(load_config(args.workdir), overrides)
    start_jax()
    from transformer.parallel.mesh import start
    from transformer.parallel.processes import start_processes

    together = start_processes()
    if together and (args.verb in ("convert", "inspect") or getattr(args, "input", "") == "-"):
        raise UserError(
            f"{args.verb}: several processes cannot do it; start one, or generate from a file (--input=FILE)"
        )
    chosen = (
        config.mesh
        if together or any(key.startswith("mesh") for key in overrides)
        else MeshConfig(data=1)
    )
    platform = config.platform if "platform" in overrides else "auto"
    return dataclasses.replace(config, mesh=chosen), start(platform, chosen)


def read_lines(name: str) -> list[str]:
    if name != "-" and not Path(name).is_file():
        raise UserError(f"--input: no file {name!r}")
    data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    try:
        text = data.decode("utf-8").removesuffix("\n")
        return [line.removesuffix("\r") for line in text.split("\n")] if data else []
    except UnicodeDecodeError as e:
        what = "standard input" if name == "-" else name
        raise UserError(
            f"--input: {what} is not UTF-8 (line {data[: e.start].count(10) + 1})"
        ) from None


def start_jax() -> None:
    """Settings that must stand before the first computation: the persistent compilation cache."""
    import jax

    from transformer.data.corpora import data_home

    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(data_home() / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
