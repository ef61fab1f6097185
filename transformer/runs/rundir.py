"""The run directory: it tells the whole story of a run, and refuses to mix two.

config.json  manifest.json  tokenizer.model  metrics.jsonl  tensorboard/  checkpoints/  samples.txt  loss.png
"""

import contextlib
import datetime
import importlib.metadata
import json
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh

from transformer.claims import Claim, holding
from transformer.config import Experiment
from transformer.data.tokenizer import FILES, Tokenizer
from transformer.errors import UserError
from transformer.files import read_json, write_whole
from transformer.mapping import from_mapping, to_mapping
from transformer.model.special_tokens import SPECIAL_TOKENS
from transformer.parallel.processes import is_first, worst
from transformer.version import __version__

WRITTEN_BESIDE = (
    "platform",
    "train.log_every",
    "train.eval_every",
    "train.tensorboard",
    "train.wandb",
    "train.profile",
    "train.keep_checkpoints",
    "train.strict_checkpoints",
)
"""Where a run is trained, what it writes beside its parameters, and how often."""

FREE = (
    *WRITTEN_BESIDE,
    "mesh",
    "decoding",
    "model.scan_layers",
    "model.pipeline_rounds",
    "model.pipeline_microbatches",
    "model.remat",
    *(
        f"model.{field}" for field in SPECIAL_TOKENS
    ),  # the tokenizer's are decisive; the config's must agree
    "data.eval_overlap",
    "train.eval_batches",
    "train.evaluators",
)
"""What may differ when a run goes on: nothing of this changes a number that training computes, but for rounding, and which numbers
dropout draws where layers are looped or not."""


def check(workdir: Path, config: Experiment) -> None:
    """Raises UserError, listing what differs, if the directory holds another experiment; writes nothing."""
    check_folder(workdir)
    if (workdir / "checkpoints").exists() and not (workdir / "checkpoints").is_dir():
        raise UserError(
            f"--workdir: {workdir / 'checkpoints'} is a file, but must be a folder; remove it"
        )
    if (workdir / "config.json").exists():
        if not trained(workdir):
            return  # a mended config may take the place
        old, new = (flat(to_mapping(c)) for c in (load_config(workdir), config))
        differ = [
            key
            for key in sorted(old.keys() | new.keys())
            if old.get(key) != new.get(key) and not key.startswith(FREE)
        ]
        if differ == ["train.steps"] and config.optimizer.schedule in ("inverse_sqrt", "constant"):
            differ = []  # these schedules do not know where they end: a run may be extended
        if differ:
            what = "; ".join(
                f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in differ[:6]
            )
            more = f"; and {len(differ) - 6} more" if len(differ) > 6 else ""
            raise UserError(
                f"--workdir: {workdir} holds a different experiment: {what}{more}; choose another directory, or the old values"
            )
    elif workdir.exists() and any(
        file.suffix != ".tmp" and file.name != "lock" for file in workdir.iterdir()
    ):
        raise UserError(
            f"--workdir: {workdir} is not empty and no run of ours (no config.json); choose another directory"
        )


def lock(workdir: Path) -> Claim:
    """The claim of the process that trains here."""
    return Claim(workdir / "lock")


@contextlib.contextmanager
def alone(workdirs: Sequence[Path]) -> Iterator[None]:
    """No other process trains in these directories meanwhile. Raises UserError, with the process that does; all processes of a run
    must enter together. A directory that is still empty at the end is removed."""
    for workdir in workdirs:
        check_folder(workdir)
    with contextlib.ExitStack() as held:
        problem = None
        if is_first():
            try:
                held.enter_context(holding([lock(workdir) for workdir in workdirs]))
            except UserError as e:
                problem = e
        if worst(int(problem is not None)):
            raise problem or UserError("--workdir: process 0 could not lock it; see its log")
        try:
            yield
        finally:
            held.close()
            for workdir in workdirs if is_first() else ():
                with contextlib.suppress(OSError):
                    workdir.rmdir()


def check_folder(workdir: Path) -> None:
    """Raises UserError if a run cannot be there."""
    if "://" in str(workdir) or str(workdir).startswith("gs:/"):
        raise UserError(
            f"--workdir: {workdir} is no local folder; a run directory must be one (text may stand on gs://)"
        )
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"--workdir: {workdir} is a file; name a folder")


def converted(workdir: Path) -> bool:
    """Whether the parameters here come from elsewhere, so that there is no text of their own."""
    return (workdir / "manifest.json").exists() and "converted_from" in read_manifest(workdir)


_MANIFEST_KINDS = {
    "data": dict, "versions": dict, "attention_backends": dict, "mesh": dict, "devices": list, "earlier_starts": list,
    "parameters": int, "trained_together": int,
}  # fmt: skip


def read_manifest(workdir: Path) -> dict:
    """The manifest of a run. Raises UserError if the file is damaged or an entry is not of its type."""
    file = workdir / "manifest.json"
    found = read_json(file)
    entries = [(name, found[name], kind) for name, kind in _MANIFEST_KINDS.items() if name in found]
    entries += [
        (f"data.{part}", found["data"][part], dict)
        for part in ("train", "valid", "test")
        if isinstance(found.get("data"), dict) and part in found["data"]
    ]
    for name, value, kind in entries:
        if not isinstance(value, kind):
            raise UserError(f"{file}: damaged ({name}: expected {kind.__name__}, got {value!r})")
    return found


def trained(workdir: Path) -> bool:
    """Whether anything was trained here yet, that is kept."""
    return any((workdir / "checkpoints").glob("[0-9]*"))


def load_config(workdir: Path) -> Experiment:
    """The experiment of a run directory."""
    file = Path(workdir) / "config.json"
    if not file.exists():
        raise UserError(
            f"--workdir: no run in {workdir} (no config.json); train one with: python -m transformer train --workdir={workdir} --config=..."
        )
    _check_version(Path(workdir))
    return from_mapping(Experiment, read_json(file))


def _check_version(workdir: Path) -> None:
    """Raises UserError for a run of another minor version, whose fields may mean something else."""
    written = read_manifest(workdir).get("transformer") if (workdir / "manifest.json").exists() else None
    minor = lambda version: version.split(".")[:2]
    if isinstance(written, str) and minor(written) != minor(__version__):
        raise UserError(
            f"--workdir: version {written} of this package wrote {workdir}, and this is version {__version__}; "
            f"read it with that version, or train again in another directory"
        )


def claim(
    workdir: Path,
    config: Experiment,
    mesh: Mesh,
    parameters: int,
    tokenizer: Tokenizer | None,
    origin: dict,
) -> None:
    """Makes the directory this experiment's own: config.json, the tokenizer and, in manifest.json, what the numbers come from
    (versions, commit, devices, mesh and, in `origin`, hashes of data, attention backends), one entry for every start."""
    workdir.mkdir(parents=True, exist_ok=True)
    _write(workdir / "config.json", to_mapping(config))
    packages = (
        "jax",
        "jaxlib",
        "flax",
        "optax",
        "orbax-checkpoint",
        "grain",
        "sentencepiece",
        "numpy",
        "sacrebleu",
    )
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
        "parameters": parameters,
        **origin,
    }
    if tokenizer is not None:
        for name in FILES.values():  # of a start before, whose config was mended since
            (workdir / name).unlink(missing_ok=True)
        write_whole(workdir / tokenizer.name, tokenizer.content)
    file = workdir / "manifest.json"
    before = read_manifest(workdir) if file.exists() else {}
    earlier = (
        [*before.get("earlier_starts", []), {k: before.get(k) for k in _OF_A_START}]
        if before
        else []
    )
    _write(file, manifest | {"earlier_starts": earlier})


_OF_A_START = (
    "started",
    "command",
    "commit",
    "versions",
    "devices",
    "platform",
    "processes",
    "mesh",
)


def _commit() -> str:
    """The commit of the code, with `+` where it was changed since; "" outside a checkout."""
    here = Path(__file__).parent
    git = lambda *args: subprocess.run(
        ["git", "-C", str(here), *args], capture_output=True, text=True
    )
    try:
        head = git("rev-parse", "HEAD")
    except OSError:  # no git on this machine
        return ""
    if head.returncode:
        return ""
    return head.stdout.strip() + (
        "+" if git("status", "--porcelain", "--untracked-files=no").stdout.strip() else ""
    )


def flat(tree: dict, prefix: str = "") -> dict:
    """Dotted names of fields -> values."""
    out = {}
    for key, value in tree.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


def _write(file: Path, content: dict) -> None:
    write_whole(file, json.dumps(content, indent=2) + "\n")
