"""The run directory: config.json, manifest.json, the tokenizer, and what may change on resuming."""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh

from transformer import buckets
from transformer.claims import Claim, holding
from transformer.config import Experiment
from transformer.data.tokenizer import FILES, Tokenizer, find_tokenizer
from transformer.errors import UserError
from transformer.files import read_bytes, read_json, write_atomic, write_json
from transformer.mapping import from_mapping, to_mapping
from transformer.model.special_tokens import SPECIAL_TOKENS
from transformer.output import listed
from transformer.parallel.processes import is_first, max_over_processes
from transformer.registry import load_plugins, save_plugins
from transformer.version import __version__

flatten_fields = functools.partial(flatten_dict, sep=".")  # nested dicts -> {dotted field: value}

LOCK = "lock"  # the claim of the process that trains in a run directory

OUTPUT_FIELDS = (
    "platform", "train.log_every", "train.eval_every", "train.tensorboard", "train.wandb",
    "train.profile", "train.checkpoint_every", "train.keep_checkpoints", "train.strict_checkpoints",
)  # fmt: skip
"""Fields that set where a run trains, what it writes beside its parameters, and how often."""

RESUME_FIELDS = (
    *OUTPUT_FIELDS, "mesh", "decoding", "model.scan_layers", "model.pipeline_rounds",
    "model.pipeline_microbatches", "model.remat", "train.accumulate",
    *(f"model.{field}" for field in SPECIAL_TOKENS),  # as the tokenizer determines
    "data.eval_overlap", "train.eval_batches", "train.evaluators",
)  # fmt: skip
"""Fields that may change when a run resumes. They do not affect the results of training, except for
rounding, for dropout masks (`scan_layers`, `accumulate`), and for the capacity of experts if the
batch is split into other parts (`accumulate`, `pipeline_microbatches`)."""


def check(workdir: Path, config: Experiment) -> None:
    """Raises UserError, with the differences, if the directory holds another experiment."""
    check_folder(workdir)
    is_foreign = lambda file: file.suffix != ".tmp" and file.name != LOCK
    if (workdir / "checkpoints").exists() and not (workdir / "checkpoints").is_dir():
        raise UserError(f"workdir: {workdir / 'checkpoints'} is a file, not a folder; remove it")
    if not (workdir / "config.json").exists():
        if workdir.exists() and any(map(is_foreign, workdir.iterdir())):
            raise UserError(f"workdir: {workdir} is not empty and not a run; choose another one")
        return
    if not has_checkpoint(workdir):
        return  # nothing has been trained yet, so another config may replace it
    old, schedule = load_config(workdir), config.optimizer.schedule
    different = different_fields(old, config)
    changed = sorted(key for key in different if not key.startswith(RESUME_FIELDS))
    if changed == ["train.steps"] and schedule not in ("inverse_sqrt", "constant"):
        problem = f"train.steps was {old.train.steps} in {workdir}, and schedule {schedule!r}"
        way_out = f"restore the old value, or start a new run with train.init_from={workdir}"
        raise UserError(f"workdir: {problem} depends on it; {way_out}")
    if changed and changed != ["train.steps"]:  # with other schedules, a run may be extended
        changes = listed([different[key] for key in changed], 6, separator="; ", last="; ")
        way_out = "choose another directory or restore the old values"
        raise UserError(f"workdir: {workdir} contains a different experiment: {changes}; {way_out}")


@contextlib.contextmanager
def locked(workdirs: Sequence[Path]) -> Iterator[None]:
    """Ensures that no other process, which UserError names, trains in these directories. All
    processes of a run must enter together. A directory that stays empty is removed."""
    for workdir in workdirs:
        check_folder(workdir)
    with contextlib.ExitStack() as claims:
        error = None
        if is_first():
            try:
                claims.enter_context(holding([Claim(workdir / LOCK) for workdir in workdirs]))
            except UserError as e:
                error = e
        if max_over_processes(int(error is not None)):
            raise error or UserError("workdir: process 0 could not lock it; see its log")
        for workdir in workdirs:
            buckets.sync(workdir)  # what another machine wrote before it released the claim
        try:
            yield
        finally:
            with contextlib.suppress(UserError):  # the last synchronization raises it
                for workdir in workdirs:
                    buckets.sync(workdir)  # before another machine continues
            claims.close()
            for workdir in workdirs if is_first() else ():
                with contextlib.suppress(OSError):
                    workdir.rmdir()


def check_folder(workdir: Path) -> None:
    """Raises UserError if `workdir` cannot be a run directory."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(workdir)):  # Path turns :// into :/
        way_out = "use a local one, or gs://BUCKET/FOLDER"
        raise UserError(f"workdir: {workdir} is not a folder; {way_out}")
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"workdir: {workdir} is a file; choose a folder")
    in_bucket = buckets.url_of(workdir) and (workdir / "manifest.json").exists()
    if in_bucket and "gs://" not in str(read_manifest(workdir).get("workdir")):
        problem = f"{workdir} was written as a folder, and its checkpoints cannot be read here"
        raise UserError(f"workdir: {problem}; mount the bucket and continue in that folder")


def is_converted(workdir: Path) -> bool:
    """Returns whether the parameters were converted from elsewhere, so that there is no data."""
    return (workdir / "manifest.json").exists() and "converted_from" in read_manifest(workdir)


_MANIFEST_KINDS = {
    **dict.fromkeys(("data", "versions", "attention_backends", "mesh", "goodput"), dict),
    **dict.fromkeys(("data.train", "data.valid", "data.test"), dict),  # after "data"
    **dict.fromkeys(("devices", "earlier_starts"), list),
    **dict.fromkeys(("parameters", "trained_together"), int),
}


def read_manifest(workdir: Path) -> dict:
    """Returns the manifest of a run. Raises UserError if it is damaged."""
    file = workdir / "manifest.json"
    manifest = read_json(file)
    for name, cls in _MANIFEST_KINDS.items():
        section, _, key = name.rpartition(".")
        tree = manifest.get(section, {}) if section else manifest
        if key in tree and not isinstance(tree[key], cls):
            raise UserError(f"{file}: damaged ({name}: expected {cls.__name__}, got {tree[key]!r})")
    return manifest


def tokenizer_file(workdir: Path) -> Path | None:
    """Returns the run's tokenizer, if it has one. Raises UserError if the file has changed."""
    file, manifest = find_tokenizer(workdir), workdir / "manifest.json"
    if file is None or not manifest.exists():
        return file
    recorded = read_manifest(workdir).get("tokenizer_sha256")
    if recorded not in (None, hashlib.sha256(read_bytes(file)).hexdigest()):
        raise UserError(f"{file}: damaged or replaced; it is not the tokenizer of this run")
    return file


def has_checkpoint(workdir: Path) -> bool:
    # Orbax saves into N.orbax-checkpoint-tmp, and renames it.
    return any(folder.name.isdigit() for folder in (workdir / "checkpoints").glob("*"))


def load_config(workdir: Path) -> Experiment:
    """Loads the experiment of a run directory. Raises UserError if another version wrote it."""
    file = workdir / "config.json"
    check_folder(workdir)
    if not file.exists():
        way_out = f"train one: python -m transformer train --workdir={workdir} --config=..."
        raise UserError(f"workdir: no run in {workdir} (no config.json); {way_out}")
    has_manifest = (workdir / "manifest.json").exists()
    written = read_manifest(workdir).get("transformer") if has_manifest else None
    minor = lambda version: version.split(".")[:2]
    if isinstance(written, str) and minor(written) != minor(__version__):  # fields may differ
        problem = f"version {written} of this package wrote {workdir}, but this is {__version__}"
        way_out = "read it with that version, or train again in another directory"
        raise UserError(f"workdir: {problem}; {way_out}")
    load_plugins(workdir)
    return from_mapping(Experiment, read_json(file))


def record_start(
    workdir: Path, config: Experiment, mesh: Mesh, tokenizer: Tokenizer | None, origin: dict
) -> None:
    """Writes config.json, the tokenizer and manifest.json: versions, commit, devices and mesh; in
    `origin`, the number of parameters, data hashes and attention backends; and earlier starts."""
    save_plugins(workdir, to_mapping(config))
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "config.json", to_mapping(config))
    manifest = {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv, "transformer": __version__, "commit": _commit(),
        "python": platform.python_version(), "host": platform.node(), "cores": os.cpu_count(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "devices": [str(d.device_kind) for d in mesh.devices.flat],
        "platform": mesh.devices.flat[0].platform, "processes": jax.process_count(),
        "mesh": dict(mesh.shape), "workdir": buckets.shown(workdir.absolute()), **origin,
    }  # fmt: skip
    if tokenizer is not None:
        for name in FILES.values():  # from an earlier start with another config
            buckets.delete(workdir / name)
        write_atomic(workdir / tokenizer.name, tokenizer.content)
        manifest["tokenizer_sha256"] = tokenizer.sha256
    file, manifest["earlier_starts"] = workdir / "manifest.json", []
    if previous := read_manifest(workdir) if file.exists() else {}:
        last_start = {key: previous.get(key) for key in _OF_A_START}
        manifest["earlier_starts"] = [*previous.get("earlier_starts", []), last_start]
        manifest["goodput"] = previous.get("goodput", {})
    write_json(file, manifest)


def amend(workdir: Path, **values) -> None:
    """Sets values in the manifest."""
    write_json(workdir / "manifest.json", read_manifest(workdir) | values)


_PACKAGES = (
    "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "sentencepiece", "numpy",
    "sacrebleu",
)  # fmt: skip
_OF_A_START = (
    "started", "command", "commit", "versions", "host", "devices", "platform", "processes", "mesh",
)  # fmt: skip


def _commit() -> str:
    """Returns the commit of the code, followed by `+` if it was changed; "" outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe"]
    command += ["--always", "--exclude=*", "--abbrev=40", "--dirty=+"]
    with contextlib.suppress(OSError):  # git is not installed
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return ""


def different_fields(old: Experiment, new: Experiment) -> dict[str, str]:
    """Returns the fields in which two experiments differ, each with both values in words."""
    before, now = (flatten_fields(to_mapping(experiment)) for experiment in (old, new))
    different = [key for key in before | now if before.get(key) != now.get(key)]
    return {key: f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in different}
