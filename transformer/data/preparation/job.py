"""The job of a preparation, its intermediate results, and their distribution with Apache Beam."""

import contextlib
import dataclasses
import functools
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from etils import epath

from transformer.data import sources
from transformer.data.config import DataConfig
from transformer.errors import UserError, from_extra
from transformer.model.config import ModelConfig

UNFINISHED = "unfinished"


@dataclasses.dataclass(frozen=True)
class Job:
    """A preparation. It is also the `Task` whose sequences are written."""

    model: ModelConfig
    data: DataConfig
    seed: int
    files: tuple[str, ...]  # raw files ("source,target" for pairs of files)
    output: str
    license: str = ""
    min_chars: int = 1  # shorter examples are dropped
    max_chars: int = 0  # longer examples are dropped; 0: none
    filter: str = ""  # module:function, which returns whether an example (a tuple) is kept
    keep_duplicates: bool = False
    shard_mb: int = 256  # raw text in a shard
    beam: str = ""  # options of Beam; "": all cores of this machine

    @property
    def folder(self) -> epath.Path:
        return epath.Path(self.output)

    @property
    def columns(self) -> tuple[str, ...]:
        return self.data.chosen.columns

    def result(self, stage: str, number) -> epath.Path:
        return self.folder / UNFINISHED / f"{stage}-{number:05d}"

    def examples(self, file: int) -> Iterator[sources.Example]:
        """The examples of a raw file."""
        data = self.data
        examples = sources.examples(data.format, self.files[file], data.fields, self.columns)
        return (example[::-1] for example in examples) if data.reverse else examples

    def scanned(self, file: int) -> dict[str, np.ndarray]:
        with self.result("scan", file).open("rb") as stream:
            return dict(np.load(stream))

    def training(self, file: int) -> np.ndarray:
        """bool: which examples of a raw file pass the filters and repeat no earlier one."""
        kept = self.scanned(file)["kept"]
        for result in (self.folder / UNFINISHED).iterdir():
            if result.name.startswith("duplicates-") and result.suffix != ".tmp":
                with result.open("rb") as stream:
                    kept[np.load(stream).get(str(file), np.zeros(0, int))] = False
        return kept


def distribute(
    job: Job, stage: str, task: Callable[..., Path], numbers: Sequence[int], **options
) -> None:
    """Runs `task(job, number, folder, **options)`, which writes a result into the local folder and
    returns its file, for each number without a result."""
    with from_extra("prepare", "data prepare needs Apache Beam,"), _without_stderr():
        import apache_beam as beam
        from apache_beam.options.pipeline_options import PipelineOptions
    missing = [number for number in numbers if not job.result(stage, number).exists()]
    workers = min(len(missing), os.cpu_count() or 1)
    local = "--runner=BundleBasedDirectRunner"
    if workers > 1:  # worker processes take seconds to start
        local = "--runner=FnApiRunner --direct_running_mode=multi_processing"
        local += f" --direct_num_workers={workers}"
    run = functools.partial(_run, functools.partial(task, **options), job, stage)
    try:
        pipeline = beam.Pipeline(options=PipelineOptions(shlex.split(job.beam or local)))
    except ValueError as e:
        raise UserError(f"--beam: {job.beam!r}: {' '.join(str(e).split())[:200]}") from None
    print(f"{stage:<11} {len(missing):,} of {len(numbers):,} task(s) to do", flush=True)
    error = job.folder / UNFINISHED / "error"
    error.unlink(missing_ok=True)
    try:
        with contextlib.nullcontext() if job.beam else _without_stderr(), pipeline:
            pipeline | beam.Create(missing) | beam.Reshuffle() | beam.Map(run)
    except Exception:
        if error.exists():  # Beam reports the exceptions of workers as text
            raise UserError(error.read_text()) from None
        raise


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Hides what processes log, for Beam's local workers have no option for it."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _run(task: Callable, job: Job, stage: str, number: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            file = task(job, number, Path(folder))
        except UserError as e:
            (job.folder / UNFINISHED / "error").write_text(str(e))
            raise
        publish(file, job.result(stage, number))


def publish(file: Path, target: epath.Path) -> None:
    """Copies a local file to `target`, which exists only when it is complete."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    with file.open("rb") as source, unfinished.open("wb") as out:
        shutil.copyfileobj(source, out)
    unfinished.replace(target)
