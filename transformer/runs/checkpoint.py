"""Checkpoints with Orbax.

They are saved asynchronously and atomically, and restored into declared shapes and shardings. All
arrays that are read are compared with their fingerprints in the record (checkpoint_record.py)."""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from transformer import buckets
from transformer.config import TrainConfig
from transformer.errors import UserError
from transformer.files import check_disk_space, disk_errors
from transformer.model.config import ModelConfig
from transformer.parallel.processes import barrier, is_first, max_over_processes
from transformer.runs.checkpoint_record import Damaged, Record, describe
from transformer.training.state import TrainState

T = TypeVar("T")

ITEMS = ("params", "ema", "rest")
"""Items that can be read separately. `rest` contains the step and the optimizer state."""

STRICT = "restore it from a copy, or set train.strict_checkpoints=False to skip it"
VERIFY_CHUNK_BYTES = 2**30  # bytes of arrays, over all devices, that verification reads at a time


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(
        self, workdir: str | os.PathLike, config: TrainConfig,
        report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ):  # fmt: skip
        """`report` receives a line for each damaged checkpoint that is moved away."""
        self._config, self._report = config, report
        self._in_bucket = buckets.url_of(Path(workdir))
        self.folder = epath.Path(self._in_bucket or workdir) / "checkpoints"
        handlers = {name: ocp.PyTreeCheckpointHandler() for name in ITEMS}
        handlers["host"] = ocp.JsonCheckpointHandler()
        for handler in handlers.values():
            handler.restore = _returning_failures(handler.restore)
        folder = self.folder if self._in_bucket else self.folder.resolve()
        self._manager = ocp.CheckpointManager(folder, item_handlers=handlers)
        self._abstract: dict[str, Any] = {}  # shapes and shardings of the items being saved
        self._intact: set[int] = set()  # steps that this process has verified

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, step: int, loop: dict, layout: dict) -> None:
        """Starts an asynchronous save. Raises the error of an earlier save that failed. `loop` is
        the state of the training loop, `layout` that of the model's layers, both as JSON."""
        items = _items(state)
        shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        self._abstract = jax.tree.map(shape, items)
        with disk_errors(self.folder):
            self._finish()
            self._prune()
            if not self._in_bucket:
                check_disk_space(Path(self.folder), size(state), "a checkpoint")
            self._write(step, items, Record(step, describe(items), loop, layout))

    def save_params(self, params) -> None:
        """Saves only parameters. They can be used and trained from, but training cannot resume."""
        with disk_errors(self.folder):
            self._write(0, {"params": params}, Record(0, describe({"params": params})))

    def _write(self, step: int, items: dict, record: Record) -> None:
        arrays = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        args = ocp.args.Composite(**arrays, host=ocp.args.JsonSave(record.to_json()))
        self._manager.save(step, args=args, force=True)

    def close(self, *, prune: bool = True) -> None:
        """Waits for the last save and raises its error if it failed. Set `prune=False` if the run
        ends with an error: another process may have taken it over."""
        with disk_errors(self.folder):
            self._finish()
            if prune:
                self._prune(at_end=True)
            self._manager.close()

    def _finish(self) -> None:
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def newest_intact(self, read: Callable[[int], T]) -> T:
        """Returns `read(step)` for the newest intact checkpoint; newer, damaged ones are moved to
        `damaged/`. Raises Damaged if none is intact, or at once with `train.strict_checkpoints`."""
        damaged: dict[int, Damaged] = {}
        for step in reversed(self.steps):
            try:
                result = read(step)
            except Damaged as e:
                damaged[step] = e
                if self._config.strict_checkpoints:
                    raise Damaged(e.what, STRICT) from e
                continue
            for damaged_step, error in damaged.items():
                self._set_aside(damaged_step, f"{error.what}; continuing from step {step:,}")
            return result
        newest = damaged[max(damaged)]
        raise Damaged(newest.what, "no other checkpoint is intact; restore the folder from a copy")

    def restore(self, step: int, abstract_of: Callable) -> tuple[TrainState, Record]:
        """Returns the state of a step and its record. `abstract_of(layout)` returns the shapes and
        shardings to restore into. Raises Damaged if anything is missing or differs from the record,
        and UserError if the checkpoint is of another model."""
        record = self._record(step)
        if record.arrays.keys() == {"params"}:
            way_out = f"start from them in another --workdir: train.init_from={self.folder.parent}"
            raise UserError(f"{self.folder}: contains only converted parameters; {way_out}")
        items = self._read(step, record, _items(abstract_of(record.layout)))
        self._intact.add(step)
        return TrainState(params=items["params"], ema=items.get("ema"), **items["rest"]), record

    def evaluation_params(self, abstract_params):
        """Returns the parameters to evaluate: the moving average (`train.ema_decay`), or else the
        mean of the last `train.average_checkpoints` checkpoints."""
        ema = self._config.ema_decay > 0
        item, mean_of = ("ema", 1) if ema else ("params", self._config.average_checkpoints)
        total, steps = None, self.steps[-max(mean_of, 1) :]
        for step in steps:
            params = self._read(step, self._record(step), {item: abstract_params})[item]
            total = params if total is None else jax.tree.map(jnp.add, total, params)
        return total if len(steps) == 1 else jax.tree.map(lambda x: x / len(steps), total)

    def layout(self, model: ModelConfig) -> ModelConfig:
        """Returns `model` with the layout of layers that the latest checkpoint has."""
        return dataclasses.replace(model, **self._record(self.steps[-1]).layout)

    def _record(self, step: int) -> Record:
        with self._reading(step):
            content = _restored(self._manager, step, {"host": ocp.args.JsonRestore()})["host"]
            return Record.from_json(content, step)

    def _read(self, step: int, record: Record, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """Reads items and compares their names, shapes, dtypes and values with the record."""
        record.check_same_model(f"{self.folder}/{step}", abstract)
        with self._reading(step):
            how = ocp.checkpoint_utils.construct_restore_args
            args = {k: ocp.args.PyTreeRestore(tree, how(tree)) for k, tree in abstract.items()}
            items = _restored(self._manager, step, args)
        with self._reading(step):
            record.check_values(items)
        return items

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Turns a failure in any process into a failure in all, so that none waits for another."""
        error: Exception | None = None
        try:
            yield
        except Exception as e:
            error = e
        kind = 0 if error is None else 2 if _is_no_damage(error) else 1
        if (worst_kind := max_over_processes(kind)) == 0:
            return
        if kind == 2:
            raise error
        if worst_kind == 2:
            raise UserError(f"{self.folder}/{step}: another process cannot read it; see its log")
        reason = "another process could not read it"
        if error is not None:
            message = (str(error).splitlines() or [""])[0][:160]
            reason = message if isinstance(error, Damaged) else f"{type(error).__name__}: {message}"
        raise Damaged(f"{self.folder}/{step} is damaged ({reason})") from error

    def _prune(self, *, at_end: bool = False) -> None:
        """Keeps the last `keep_checkpoints` intact checkpoints and deletes older ones.

        A checkpoint between two regular ones, saved because the run was stopped, does not count. It
        is deleted as soon as there is a newer one, so that those kept and averaged are those of an
        uninterrupted run. Before anything is deleted, all remaining ones are verified. Raises
        Damaged for a damaged checkpoint with `train.strict_checkpoints`; with `at_end`, also for a
        damaged last checkpoint, which is the run's result."""
        interval, last = self._config.checkpoint_every, self._config.steps
        while True:
            steps = self.steps
            regular = [x for x in steps if x == last or (interval and x % interval == 0)]
            surplus = set(steps[:-1]) - set(regular[-self._config.keep_checkpoints :])
            if not surplus:
                return
            try:
                verified = {step: self._damage(step) for step in steps if step not in surplus}
            except UserError:  # another layout: delete nothing until enough have this one
                return
            damaged = {step: error for step, error in verified.items() if error}
            if not damaged:
                break
            if self._config.strict_checkpoints:
                raise Damaged(next(iter(damaged.values())).what, STRICT)
            if at_end and steps[-1] in damaged:
                way_out = "the same train command continues from the checkpoint before it"
                raise Damaged(damaged[steps[-1]].what, way_out)
            for step, error in damaged.items():
                self._set_aside(step, error.what)
        for step in surplus:
            self._manager.delete(step)

    def _damage(self, step: int) -> Damaged | None:
        """Returns how a checkpoint, read in parts, differs from its record, or None."""
        if step in self._intact:
            return None
        try:
            record = self._record(step)
            for part in _parts(self._abstract, VERIFY_CHUNK_BYTES):
                self._read(step, record, part)
        except Damaged as e:
            return e
        self._intact.add(step)
        return None

    def _set_aside(self, step: int, why: str) -> None:
        target = self.folder.parent / "damaged" / str(step)
        barrier(f"damaged checkpoint of step {step}")
        if is_first():
            while target.exists():
                target = target.with_name(target.name + "+")
            target.parent.mkdir(exist_ok=True)
            (target.parent / "reason.txt").write_text(f"{why}\n")  # a bucket has no empty folders
            (self.folder / str(step)).rename(target)
        barrier(f"moved checkpoint of step {step}")
        self._manager.reload()
        self._report(f"{why}; it is now in {target.parent}")


def size(arrays) -> int:
    """Returns the bytes of arrays, such as those of a checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))


def _items(state: TrainState) -> dict:
    items = {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state}}
    return items if state.ema is None else items | {"ema": state.ema}


def _parts(items: Mapping[str, Any], limit: int) -> Iterator[dict[str, Any]]:
    """Yields the items in parts of at most `limit` bytes, or one array; `...` for the others."""
    leaves, structure = jax.tree.flatten(dict(items))
    parts, part_bytes = [{}], 0  # of each part: index of a leaf -> leaf
    for i, x in enumerate(leaves):
        if part_bytes and part_bytes + size(x) > limit:
            parts, part_bytes = [*parts, {}], 0
        parts[-1][i] = x
        part_bytes += size(x)
    is_empty = lambda tree: all(x is ... for x in jax.tree.leaves(tree))
    for part in parts:
        trees = structure.unflatten([part.get(i, ...) for i in range(len(leaves))])
        yield {name: tree for name, tree in trees.items() if not is_empty(tree)}


def _returning_failures(restore: Callable) -> Callable:
    """Wraps `restore` so that it returns its error instead of raising it. Orbax's processes wait
    for each other afterwards. One that raised would never arrive."""

    @functools.wraps(restore)
    def guarded(*args, **kwargs):
        try:
            return restore(*args, **kwargs)
        except Exception as e:
            e.__cause__ = e.__context__ = None
            return e.with_traceback(None)

    return guarded


def _restored(manager: ocp.CheckpointManager, step: int, args: Mapping[str, Any]) -> dict[str, Any]:
    items = manager.restore(step, args=ocp.args.Composite(**args))
    for name in args:
        if isinstance(items.get(name), Exception):
            raise items[name]
        if items.get(name) is None:
            raise Damaged(f"{name!r} is missing")
    return {name: items[name] for name in args}


def _is_no_damage(error: Exception) -> bool:
    """Returns whether a failure is of permissions, network, memory or model, not the checkpoint."""
    if isinstance(error, UserError):
        return not isinstance(error, Damaged)
    is_system_error = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return is_system_error or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
