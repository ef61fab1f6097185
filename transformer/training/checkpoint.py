"""Checkpoints with Orbax: asynchronous, whole or absent, restored only into declared shapes and shardings."""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from transformer.config import TrainConfig
from transformer.errors import UserError
from transformer.files import check_room, disk_faults
from transformer.model.config import ModelConfig
from transformer.parallel.sharding import path_name
from transformer.training.state import TrainState


@contextlib.contextmanager
def damage(folder, step: int) -> Iterator[None]:
    """Whatever goes wrong in reading a checkpoint that is there, as one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as e:
        elsewhere = isinstance(e, OSError) and not isinstance(
            e, FileNotFoundError
        )  # no right to read, a network
        if elsewhere or "RESOURCE_EXHAUSTED" in str(e) or "Out of memory" in str(e):
            raise
        reason = (str(e).splitlines() or [""])[0][:120]
        raise UserError(
            f"{folder}/{step} is damaged ({type(e).__name__}: {reason}); delete that folder to go on from the checkpoint before it"
        ) from e


class Checkpoints:
    """The `checkpoints/` folder of a run."""

    def __init__(self, workdir: str | Path, config: TrainConfig):
        self._config = config
        self.folder = epath.Path(workdir) / "checkpoints"
        options = ocp.CheckpointManagerOptions(create=True, enable_async_checkpointing=True)
        handlers = {name: ocp.StandardCheckpointHandler() for name in ("params", "ema", "rest")} | {
            "host": ocp.JsonCheckpointHandler()
        }
        self._manager = ocp.CheckpointManager(
            self.folder.resolve(), options=options, item_handlers=handlers
        )

    @property
    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, step: int, host: dict) -> None:
        """Starts saving; training goes on. A failure of an earlier save is raised here. `host` is what the loop itself
        must know to go on (the data position, the open logging interval), as JSON."""
        items = {name: ocp.args.StandardSave(tree) for name, tree in _items(state).items()}
        with disk_faults(self.folder):
            self._manager.check_for_errors()
            self._prune()
            check_room(Path(self.folder), size(state), "a checkpoint")
            self._manager.save(
                step, args=ocp.args.Composite(**items, host=ocp.args.JsonSave(host)), force=True
            )

    def layout(self, model: ModelConfig) -> ModelConfig:
        """`model` as the latest checkpoint holds it: its layers looped or not, in so many rounds."""
        step = self.steps[-1]
        with damage(self.folder, step):
            if "host" not in self._items_of(step):
                return model
            host = self._manager.restore(
                step, args=ocp.args.Composite(host=ocp.args.JsonRestore())
            )["host"]
        return dataclasses.replace(model, **host.get("layout", {}))

    def restore(self, abstract: TrainState, step: int | None = None) -> tuple[TrainState, dict]:
        """The state of a step (default: the latest), sharded as `abstract` says, and its `host`."""
        step = self.steps[-1] if step is None else step
        with damage(self.folder, step):
            if "rest" not in self._items_of(step):
                raise UserError(
                    f"{self.folder}: these are parameters alone, converted from elsewhere; start from them in another --workdir, "
                    f"with --config.train.init_from={self.folder.parent}"
                )
            self._check_same("params", abstract.params, step)
            items = {
                name: ocp.args.StandardRestore(tree) for name, tree in _items(abstract).items()
            }
            found = self._manager.restore(
                step, args=ocp.args.Composite(**items, host=ocp.args.JsonRestore())
            )
            state = abstract.replace(params=found["params"], ema=found.get("ema"), **found["rest"])
            return state, {
                key: found["host"][key] for key in ("data_step", "window", "text_sha256")
            }

    def save_params(self, params, step: int = 0) -> None:
        """Parameters alone, which can be used and started from, but not trained on."""
        with disk_faults(self.folder):
            self._manager.save(
                step, args=ocp.args.Composite(params=ocp.args.StandardSave(params)), force=True
            )

    def _items_of(self, step: int) -> set[str]:
        return {item.name for item in (self.folder / str(step)).iterdir()}

    def restore_params(self, abstract_params, *, item: str = "params", mean_of: int = 1):
        """Parameters alone: the latest, their moving average (`item="ema"`), or the mean over the last `mean_of` checkpoints."""
        total, steps = None, self.steps[-max(mean_of, 1) :]
        for step in steps:
            with damage(self.folder, step):
                self._check_same(item, abstract_params, step)
                one = self._manager.restore(
                    step,
                    args=ocp.args.Composite(**{item: ocp.args.StandardRestore(abstract_params)}),
                )[item]
            total = one if total is None else jax.tree.map(jnp.add, total, one)
        return total if len(steps) == 1 else jax.tree.map(lambda x: x / len(steps), total)

    def close(self) -> None:
        """Waits for the last save; raises if it failed."""
        with disk_faults(self.folder):
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
            self._prune()
            self._manager.close()

    def _prune(self) -> None:
        """Of what is whole, keeps the last `keep_checkpoints`. A checkpoint between two regular ones, saved because the run was
        stopped there, does not count and goes as soon as there is a newer one: what is kept, and averaged, is what it would
        be without the stop."""
        every, steps = self._config.checkpoint_every, self.steps
        regular = [s for s in steps if s == self._config.steps or (every and s % every == 0)]
        for step in set(steps[:-1]) - set(regular[-self._config.keep_checkpoints :]):
            self._manager.delete(step)

    def _check_same(self, item: str, abstract_params, step: int) -> None:
        """Raises UserError, with the first names that differ, if the checkpoint is of another architecture."""
        shapes = lambda tree: {
            path_name(p): tuple(x.shape) for p, x in jax.tree_util.tree_leaves_with_path(tree)
        }
        saved = self._manager.item_metadata(step)[item]
        here, there = shapes(abstract_params), shapes(getattr(saved, "tree", saved))
        spell = lambda shape: "absent" if shape is None else "x".join(map(str, shape))
        wrong = [f"{name} is {spell(there.get(name))} there, {spell(here.get(name))} here"
                 for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]  # fmt: skip
        if wrong:
            more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise UserError(
                f"{self.folder}/{step} is a checkpoint of another architecture: {'; '.join(wrong[:3])}{more}"
            )


def size(state: TrainState) -> int:
    """Bytes of a checkpoint."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))


def _items(state: TrainState) -> dict:
    """What is saved as an item of its own, so that it can be restored alone."""
    items = {"params": state.params, "rest": {"step": state.step, "opt_state": state.opt_state}}
    return items if state.ema is None else items | {"ema": state.ema}
