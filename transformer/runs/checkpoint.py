"""Checkpoints with Orbax: asynchronous, whole or absent, verified when they are read, restored into declared shapes and shardings.

Each checkpoint carries a record (checkpoint_record.py) with a fingerprint of every array. Whatever is read is compared with it.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from transformer.config import TrainConfig
from transformer.errors import UserError
from transformer.files import check_room, disk_faults
from transformer.model.config import ModelConfig
from transformer.parallel.processes import barrier, is_first, worst
from transformer.runs.checkpoint_record import Damaged, Record, describe
from transformer.training.state import TrainState

T = TypeVar("T")

ITEMS = ("params", "ema", "rest")
"""What is saved by itself, so that it can be read by itself. `rest` is the step and the optimizer's state."""

STRICT = "restore it from a copy, or set train.strict_checkpoints=False to do without it"

READ_AT_ONCE = 2**30
"""Bytes of arrays, over all devices, that verification holds at a time."""


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(
        self,
        workdir: str | Path,
        config: TrainConfig,
        tell: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ):
        """`tell` is given a line for each checkpoint that is damaged and set aside."""
        self._config, self._tell = config, tell
        self._workdir = Path(workdir)
        self.folder = epath.Path(workdir) / "checkpoints"
        options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=True)
        handlers = {name: ocp.PyTreeCheckpointHandler() for name in ITEMS}
        handlers["host"] = ocp.JsonCheckpointHandler()
        for handler in handlers.values():
            handler.restore = _returning_failures(handler.restore)
        self._manager = ocp.CheckpointManager(
            self.folder.resolve(), options=options, item_handlers=handlers
        )
        self._abstract: dict[
            str, Any
        ] = {}  # items as this process saves them: shapes and shardings
        self._intact: set[int] = set()  # steps that this process has read and verified

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    # ---- writing

    def save(self, state: TrainState, step: int, loop: dict, layout: dict) -> None:
        """Starts saving; training goes on. A failure of an earlier save is raised here.

        `loop` is what the training loop itself needs to continue (the position in the data, the open logging interval), `layout`
        how the model stacks its layers; both as JSON.
        """
        items = _items(state)
        self._abstract = jax.tree.map(_abstract, items)
        with disk_faults(self.folder):
            self._finish()
            self._prune()
            check_room(Path(self.folder), size(state), "a checkpoint")
            self._write(step, items, Record(step, describe(items), loop, layout))

    def save_params(self, params, step: int = 0) -> None:
        """Parameters alone, which can be used and started from, but not trained on."""
        with disk_faults(self.folder):
            self._write(step, {"params": params}, Record(step, describe({"params": params})))

    def _write(self, step: int, items: dict, record: Record) -> None:
        arrays = {name: ocp.args.PyTreeSave(tree) for name, tree in items.items()}
        args = ocp.args.Composite(**arrays, host=ocp.args.JsonSave(record.to_json()))
        self._manager.save(step, args=args, force=True)

    def close(self, *, prune: bool = True) -> None:
        """Waits for the last save; raises if it failed.

        A run that ends with an error does not `prune`: another process may have taken it over.
        """
        with disk_faults(self.folder):
            self._finish()
            if prune:
                self._prune(at_end=True)
            self._manager.close()

    def _finish(self) -> None:
        """Waits for the save that is under way, and raises what went wrong with it."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    # ---- reading

    def newest_intact(self, read: Callable[[int], T]) -> T:
        """`read(step)` for the newest checkpoint that is not damaged.

        Newer ones that are damaged are moved to `damaged/` beside this folder. Raises Damaged if none is left, or at once
        with `train.strict_checkpoints`.
        """
        damaged: dict[int, Damaged] = {}
        for step in reversed(self.steps):
            try:
                result = read(step)
            except Damaged as e:
                damaged[step] = e
                if self._config.strict_checkpoints:
                    raise Damaged(e.what, STRICT) from e
                continue
            for bad, why in damaged.items():
                self._set_aside(bad, f"{why.what}; continuing from step {step:,}")
            return result
        newest = damaged[max(damaged)]
        raise Damaged(newest.what, "no other checkpoint is intact; restore the folder from a copy")

    def restore(
        self, step: int, abstract_of: Callable[[dict], TrainState]
    ) -> tuple[TrainState, Record]:
        """The state of a step and its record. `abstract_of(layout)` gives the shapes and shardings to restore into.

        Raises Damaged if anything is missing or differs from the record, UserError if the checkpoint is of another model.
        """
        record = self._record(step)
        if record.arrays.keys() == {"params"}:
            raise UserError(
                f"{self.folder}: these are parameters alone, converted from elsewhere; start from them in another --workdir, "
                f"with --config.train.init_from={self.folder.parent}"
            )
        found = self._read(step, record, _items(abstract_of(record.layout)))
        self._intact.add(step)
        return TrainState(params=found["params"], ema=found.get("ema"), **found["rest"]), record

    def restore_params(self, abstract_params, *, item: str = "params", mean_of: int = 1):
        """Parameters alone: the latest, their moving average (`item="ema"`), or the mean over the last `mean_of` checkpoints."""
        total, steps = None, self.steps[-max(mean_of, 1) :]
        for step in steps:
            with _another_to_read():
                one = self._read(step, self._record(step), {item: abstract_params})[item]
            total = one if total is None else jax.tree.map(jnp.add, total, one)
        return total if len(steps) == 1 else jax.tree.map(lambda x: x / len(steps), total)

    def layout(self, model: ModelConfig) -> ModelConfig:
        """`model` as the latest checkpoint holds it: its layers scanned or not, in so many rounds."""
        with _another_to_read():
            return dataclasses.replace(model, **self._record(self.steps[-1]).layout)

    def _record(self, step: int) -> Record:
        with self._reading(step):
            given = _restored(self._manager, step, {"host": ocp.args.JsonRestore()})["host"]
            return Record.from_json(given, step)

    def _read(self, step: int, record: Record, abstract: Mapping[str, Any]) -> dict[str, Any]:
        """Items of a checkpoint, equal to its record in names, shapes, types and values."""
        record.check_same_model(f"{self.folder}/{step}", abstract)
        with self._reading(step):
            restore = lambda tree: ocp.args.PyTreeRestore(
                tree, ocp.checkpoint_utils.construct_restore_args(tree)
            )
            args = {name: restore(tree) for name, tree in abstract.items()}
            found = _restored(self._manager, step, args)
        with self._reading(step):
            record.check_values(found)
        return found

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Makes a failure of any kind, in any process, one in all of them, so that none waits for another."""
        own: Exception | None = None
        try:
            yield
        except Exception as e:
            own = e
        kind = 0 if own is None else 2 if _is_no_damage(own) else 1
        if (most := worst(kind)) == 0:
            return
        if kind == 2:
            raise own
        if most == 2:
            raise UserError(f"{self.folder}/{step}: another process cannot read it; see its log")
        reason = "another process could not read it"
        if own is not None:
            said = (str(own).splitlines() or [""])[0][:160]
            reason = said if isinstance(own, Damaged) else f"{type(own).__name__}: {said}"
        raise Damaged(f"{self.folder}/{step} is damaged ({reason})") from own

    # ---- keeping

    def _prune(self, *, at_end: bool = False) -> None:
        """Keeps the last `keep_checkpoints` that are intact, and deletes older ones.

        A checkpoint between two regular ones, saved because the run was stopped there, does not count and goes as soon as there
        is a newer one: what is kept, and averaged, is what it would be without the stop. Before anything is deleted, all that
        stays is read back and verified. Raises Damaged for a damaged one with `train.strict_checkpoints`, and `at_end` for the
        last one, which is the run's result.
        """
        every, last = self._config.checkpoint_every, self._config.steps
        while True:
            steps = self.steps
            regular = [s for s in steps if s == last or (every and s % every == 0)]
            over = set(steps[:-1]) - set(regular[-self._config.keep_checkpoints :])
            if not over:
                return
            try:
                found = {step: self._damage(step) for step in steps if step not in over}
            except UserError:  # another layout: nothing is deleted until enough are in this one
                return
            damaged = {step: why for step, why in found.items() if why}
            if not damaged:
                break
            if self._config.strict_checkpoints:
                raise Damaged(next(iter(damaged.values())).what, STRICT)
            if at_end and steps[-1] in damaged:
                way_out = "the same train command continues from the checkpoint before it"
                raise Damaged(damaged[steps[-1]].what, way_out)
            for step, why in damaged.items():
                self._set_aside(step, why.what)
        for step in over:
            self._manager.delete(step)

    def _damage(self, step: int) -> Damaged | None:
        """How a checkpoint, read back, differs from its record. It is read in parts, so this needs little memory."""
        if step in self._intact:
            return None
        try:
            record = self._record(step)
            for part in _parts(self._abstract, READ_AT_ONCE):
                self._read(step, record, part)
        except Damaged as e:
            return e
        self._intact.add(step)
        return None

    def _set_aside(self, step: int, why: str) -> None:
        """Moves a damaged checkpoint out of this folder, and says so."""
        to = self._workdir / "damaged" / str(step)
        barrier(f"the damaged checkpoint of step {step} is still there")
        if is_first():
            while to.exists():
                to = to.with_name(to.name + "+")
            to.parent.mkdir(exist_ok=True)
            Path(self.folder / str(step)).rename(to)
        barrier(f"the damaged checkpoint of step {step} is set aside")
        self._manager.reload()
        self._tell(f"{why}; it is now in {to.parent}")


@contextlib.contextmanager
def _another_to_read() -> Iterator[None]:
    """Tells those who read a damaged checkpoint, and do not train, what they can do."""
    try:
        yield
    except Damaged as e:
        raise Damaged(e.what, "restore it from a copy, or move that folder away") from e


def size(state: TrainState) -> int:
    """Bytes of a checkpoint."""
    return sum(_bytes(x) for x in jax.tree.leaves(state))


def _bytes(x) -> int:
    return math.prod(x.shape) * x.dtype.itemsize


def _items(state: TrainState) -> dict:
    """What is saved as an item of its own, so that it can be restored alone."""
    items = {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state}}
    return items if state.ema is None else items | {"ema": state.ema}


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _parts(items: Mapping[str, Any], limit: int) -> Iterator[dict[str, Any]]:
    """The items' arrays, so many bytes at a time, with placeholders where the others are."""
    leaves, structure = jax.tree.flatten(dict(items))
    part: list = [...] * len(leaves)
    held = 0
    for i, x in enumerate(leaves):
        if held and held + _bytes(x) > limit:
            yield _without_empty(structure.unflatten(part))
            part, held = [...] * len(leaves), 0
        part[i] = x
        held += _bytes(x)
    yield _without_empty(structure.unflatten(part))


def _without_empty(items: dict[str, Any]) -> dict[str, Any]:
    return {
        name: tree
        for name, tree in items.items()
        if any(x is not ... for x in jax.tree.leaves(tree))
    }


@dataclasses.dataclass(frozen=True)
class _Failure:
    """What a process that could not restore an item gets in its place."""

    error: Exception


def _returning_failures(restore: Callable) -> Callable:
    """`restore` that returns its error instead of raising it. Orbax's processes wait for each other after they restore; one that
    raised before would never come."""

    @functools.wraps(restore)
    def guarded(*args, **kwargs):
        try:
            return restore(*args, **kwargs)
        except Exception as e:
            e.__cause__ = e.__context__ = None
            return _Failure(e.with_traceback(None))

    return guarded


def _restored(manager: ocp.CheckpointManager, step: int, args: Mapping[str, Any]) -> dict[str, Any]:
    """The items that were asked for. Raises what went wrong in this process."""
    found = manager.restore(step, args=ocp.args.Composite(**args))
    for name in args:
        if isinstance(found.get(name), _Failure):
            raise found[name].error
        if found.get(name) is None:
            raise Damaged(f"{name!r} is missing")
    return {name: found[name] for name in args}


def _is_no_damage(error: Exception) -> bool:
    """Whether a failure says nothing of the checkpoint: no right to read, a network that is down, no memory, another model."""
    if isinstance(error, UserError):
        return not isinstance(error, Damaged)
    elsewhere = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return elsewhere or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
