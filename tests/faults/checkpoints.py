"""Damaged checkpoints: any of their files with a flipped bit, truncated, zeroed or deleted.

A reader must either return what was saved, or report that the checkpoint is damaged and fall back
to the previous one. Both are correct, because a flipped bit in a file that is never read is
harmless. Returning other values is always an error.
"""

import dataclasses
import functools
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer.config import Experiment
from transformer.mapping import from_mapping
from transformer.model.network import build_model
from transformer.parallel.mesh import make_mesh, use
from transformer.runs.checkpoint import Checkpoints
from transformer.runs.checkpoint_record import Damaged
from transformer.runs.loop import train
from transformer.training.optimizer import build_optimizer
from transformer.training.state import abstract_state


@dataclasses.dataclass(frozen=True)
class Harm:
    """Damage to one file or folder of a checkpoint."""

    kind: str  # flip | cut | zero | delete
    file: str  # relative to the checkpoint
    bit: int = 0  # flip: index of the bit; cut and zero: offset in bytes of their start

    def apply(self, checkpoint: Path) -> None:
        path = checkpoint / self.file
        if self.kind == "delete":
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            return
        data = bytearray(path.read_bytes())
        if self.kind == "flip":
            data[self.bit // 8] ^= 1 << self.bit % 8
        elif self.kind == "cut":
            del data[self.bit :]
        else:
            data[self.bit : self.bit + 64] = bytes(len(data[self.bit : self.bit + 64]))
        path.unlink()  # the file may be a hard link to the original
        path.write_bytes(data)


def harms(checkpoint: Path, seed: int) -> Iterator[Harm]:
    """Yields random harms without end.

    Flips bits of files, truncates and zeroes files, and deletes files and folders. Large files are
    drawn more often.
    """
    rng = random.Random(seed)
    paths = sorted(checkpoint.rglob("*"))
    files = [path for path in paths if path.is_file() and path.stat().st_size]
    sizes = {path: path.stat().st_size for path in files}
    name = lambda path: str(path.relative_to(checkpoint))
    while True:
        kind = rng.choice(("flip", "flip", "flip", "flip", "delete", "cut", "zero"))
        # Half of the draws favor large files, half draw every file with the same probability.
        weights = [sizes[path] ** 0.5 for path in files] if rng.random() < 0.5 else None
        path = rng.choice(paths) if kind == "delete" else rng.choices(files, weights)[0]
        stop = {"flip": 8 * sizes.get(path, 0), "delete": 1}.get(kind, sizes.get(path, 0))
        yield Harm(kind, name(path), rng.randrange(stop))


@functools.cache
def _subject() -> "CheckpointSubject":
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    config = from_mapping(
        Experiment,
        {
            "model": {
                "family": "decoder",
                "vocab_size": 400,
                "d_model": 16,
                "d_ff": 16,
                "num_heads": 4,
                "num_decoder_layers": 2,
                "max_length": 16,
            },
            "data": {
                "corpus": "pydoc",
                "length": 16,
                "batch_size": 4,
                "held_out": 4,
                "tokenizer": {"kind": "bpe"},
            },
            "optimizer": {"warmup_steps": 5},
            "mesh": {"data": 1},
            "train": {
                "steps": 6,
                "eval_batches": 1,
                "checkpoint_every": 2,
                "keep_checkpoints": 3,
                "tensorboard": False,
                "ema_decay": 0.9,
            },
        },
    )
    train(config, folder / "run")
    return CheckpointSubject(folder / "run", config)


def cases(seed: int) -> Iterator[Harm]:
    """Yields harms to the newest checkpoint without end."""
    return harms(_subject().newest, seed)


def check(harm: Harm) -> str:
    """See `CheckpointSubject.check`."""
    with tempfile.TemporaryDirectory() as scratch:
        return f"{harm.kind}: {_subject().check(harm, Path(scratch))}"


class CheckpointSubject:
    """A run with several checkpoints of known content."""

    def __init__(self, run: Path, config: Experiment):
        self.run, self.config = run, config
        with use(make_mesh(config.mesh)) as mesh:
            self.abstract, _ = abstract_state(
                config,
                build_model(config.model),
                build_optimizer(config.optimizer, config.train.steps, config.model),
                mesh,
            )
            self.steps = Checkpoints(run, config.train).steps
            self.states = {step: self.read(run, step) for step in self.steps}

    @property
    def newest(self) -> Path:
        return self.run / "checkpoints" / str(self.steps[-1])

    def read(self, run: Path, step: int) -> Any:
        """Returns the state of a step as NumPy arrays."""
        checkpoints = Checkpoints(run, self.config.train)
        return jax.device_get(checkpoints.restore(step, lambda layout: self.abstract)[0])

    def check(self, harm: Harm, scratch: Path) -> str:
        """Harms the newest checkpoint of a copy of the run and resumes from it.

        Returns "intact" or "damaged". Raises AssertionError if no checkpoint is intact, if the
        state differs from the saved one, or if damage is not reported on one line.
        """
        copy = scratch / "run"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.run, copy, copy_function=_link)
        harm.apply(copy / "checkpoints" / str(self.steps[-1]))
        lines: list[str] = []
        with use(make_mesh(self.config.mesh)):
            checkpoints = Checkpoints(copy, self.config.train, lines.append)
            read = lambda step: (step, checkpoints.restore(step, lambda layout: self.abstract)[0])
            try:
                step, state = checkpoints.newest_intact(read)
            except Damaged as e:
                raise AssertionError(f"{harm}: no checkpoint is intact: {e}") from e
        saved = self.states[step]
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(saved),
            jax.tree.leaves(jax.device_get(state)),
            strict=True,
        ):
            same = np.asarray(a).tobytes() == np.asarray(b).tobytes()
            assert same, f"{harm}: {jax.tree_util.keystr(path)} of step {step} differs silently"
        fell_back = step != self.steps[-1]
        assert len(lines) == fell_back, f"{harm}: progress lines {lines}"
        assert all("\n" not in line and len(line) < 600 for line in lines), f"{harm}: {lines}"
        return "damaged" if fell_back else "intact"


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)
