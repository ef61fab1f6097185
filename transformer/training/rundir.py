"""The run directory: it tells the whole story of a run, and refuses to mix two.

config.json  manifest.json  tokenizer.model  metrics.jsonl  tensorboard/  checkpoints/  samples.txt  loss.png
"""

import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from pathlib import Path

import jax
from jax.sharding import Mesh

from transformer.config import Experiment
from transformer.config_io import from_mapping, to_mapping
from transformer.data.pipeline import Data
from transformer.errors import UserError
from transformer.version import __version__

FREE = (
    "mesh",
    "platform",
    "decoding",
    "train.log_every",
    "train.tensorboard",
    "train.wandb",
    "train.profile",
    "train.keep_checkpoints",
)
"""What may differ when a run goes on: nothing of this changes a number that training computes."""


def claim(workdir: Path, config: Experiment) -> None:
    """Makes the directory this experiment's own. Raises UserError, listing what differs, if it holds another one."""
    file = workdir / "config.json"
    if file.exists():
        old, new = (_flat(to_mapping(c)) for c in (load_config(workdir), config))
        differ = [
            key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and not key.startswith(FREE)
        ]
        if differ == ["train.steps"] and config.optimizer.schedule in ("inverse_sqrt", "constant"):
            differ = []  # these schedules do not know where they end: a run may be extended
        if differ:
            what = "; ".join(f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in differ[:6])
            more = f"; and {len(differ) - 6} more" if len(differ) > 6 else ""
            raise UserError(
                f"--workdir: {workdir} holds a different experiment: {what}{more}; choose another directory, or the old values"
            )
    elif workdir.exists() and any(workdir.iterdir()):
        raise UserError(
            f"--workdir: {workdir} is not empty and no run of ours (no config.json); choose another directory"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    _write(file, to_mapping(config))


def load_config(workdir: Path) -> Experiment:
    """The experiment of a run directory."""
    file = Path(workdir) / "config.json"
    if not file.exists():
        raise UserError(
            f"--workdir: no run in {workdir} (no config.json); train one with: python -m transformer train --workdir={workdir} --config=..."
        )
    return from_mapping(Experiment, json.loads(file.read_text()))


def write_manifest(workdir: Path, config: Experiment, mesh: Mesh, data: Data, parameters: int) -> None:
    """What the numbers came from: versions, commit, devices, mesh, hashes of data and tokenizer, attention backend."""
    packages = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "sentencepiece", "numpy", "sacrebleu")
    manifest = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "transformer": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "devices": [str(d.device_kind) for d in mesh.devices.flat],
        "platform": mesh.devices.flat[0].platform,
        "processes": jax.process_count(),
        "mesh": dict(mesh.shape),
        "attention_backend": config.model.attention_backend
        if config.model.attention_backend != "auto"
        else "reference",
        "parameters": parameters,
        "data": data.describe(),
    }
    (workdir / "tokenizer.model").write_bytes(data.tokenizer.model)
    _write(workdir / "manifest.json", manifest)


def _commit() -> str:
    """The commit of the code, with `+` where it was changed since; "" outside a checkout."""
    here = Path(__file__).parent
    git = lambda *args: subprocess.run(["git", "-C", str(here), *args], capture_output=True, text=True)
    head = git("rev-parse", "HEAD")
    if head.returncode:
        return ""
    return head.stdout.strip() + ("+" if git("status", "--porcelain", "--untracked-files=no").stdout.strip() else "")


def _flat(tree: dict, prefix: str = "") -> dict:
    out = {}
    for key, value in tree.items():
        out |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def _write(file: Path, content: dict) -> None:
    scratch = file.with_suffix(".tmp")
    scratch.write_text(json.dumps(content, indent=2) + "\n")
    scratch.replace(file)
