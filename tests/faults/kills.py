"""Runs killed at random moments: whatever was going on, the same command goes on, and the result is that of a run that was never killed.

Training is killed with SIGKILL (any of several processes), or stopped with SIGTERM, and started again until it is over. Sweeps and
evaluations likewise. The results must agree bit for bit: the logged losses, the test's numbers, and the fingerprints of all arrays in the
last checkpoint.
"""

import dataclasses
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

EXPERIMENT = """
from transformer import Sweep, vary

def get_config():
    return dict(
        model=dict(family="decoder", vocab_size=400, d_model=16, d_ff=32, num_heads=2, num_decoder_layers=2, max_length=32, dropout=0.1),
        data=dict(corpus="pydoc", length=32, batch_size=4, held_out=8, tokenizer=dict(kind="bpe")),
        optimizer=dict(warmup_steps=5),
        train=dict(steps=200, log_every=20, eval_every=100, checkpoint_every=20, ema_decay=0.9, tensorboard=False),
    )

def sweep():
    return Sweep(vary("model.norm_placement", "pre", "peri"), question="Does it go on?", seeds=1, declared=dict(parameters="norms", flops="norms"))
"""

KINDS = ("train", "train", "evaluate", "sweep", "processes")


@dataclasses.dataclass(frozen=True)
class Case:
    """What is started, and how it is ended: (seconds, which process, signal) one after another. The first time counts from when
    the run begins to write, the others from the start, so that they also fall into imports, compilation and the restore."""

    seed: int
    number: int
    kind: str
    ends: tuple[tuple[float, int, int], ...]

    def __str__(self) -> str:
        ends = ", ".join(f"{signal.Signals(s).name} to {p} at {t:.2f} s" for t, p, s in self.ends)
        return f"kill {self.number} of seed {self.seed}: {self.kind}, {ends}"


def cases(seed: int) -> Iterator[Case]:
    """Without end."""
    draw = random.Random(seed)
    for number in itertools.count():
        kind = draw.choice(KINDS)
        signals = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
        ends = tuple(
            (draw.uniform(0, 12 if again else 4), draw.randrange(2), draw.choice(signals))
            for again in range(draw.choice((1, 2, 3)))
        )
        yield Case(seed, number, kind, ends)


def check(case: Case) -> str:
    """AssertionError, with the case, unless the result is that of a run that was never killed."""
    with tempfile.TemporaryDirectory() as folder:
        work, killed = Path(folder) / "work", 0
        for seconds, process, number in case.ends:
            started = _start(case.kind, work)
            ended, said = _end(started, work, seconds, process, number)
            killed += ended
            assert "Traceback" not in said, f"{case}: {said[-3000:]}"
        for _ in range(3):  # a process of two may have to be started again after the other was lost
            started = _start(case.kind, work)
            said = [child.communicate(timeout=400)[0] for child in started]
            codes = [child.returncode for child in started]
            if not any(codes):
                break
        assert not any(codes), f"{case}: exit codes {codes}: {said[0][-2000:]}"
        assert "Traceback" not in "".join(said), f"{case}: {said}"
        found, expected = _results(work), reference(case.kind)
        for name in expected:
            assert found.get(name) == expected[name], (
                f"{case}: {name} differs: {_difference(found.get(name), expected[name])}"
            )
    return f"{case.kind}: killed {killed} times, equal"


def _difference(found, expected) -> str:
    if isinstance(expected, list) and isinstance(found, list):
        pairs = [(a, b) for a, b in itertools.zip_longest(found, expected) if a != b]
        return f"{len(found)} lines for {len(expected)}; first {pairs[:1]}"
    return f"{str(found)[:200]} for {str(expected)[:200]}"


def _start(kind: str, work: Path) -> list[subprocess.Popen]:
    file = work.with_name("experiment.py")
    file.write_text(EXPERIMENT)
    verb = kind if kind in ("sweep", "evaluate") else "train"
    command = [sys.executable, "-m", "transformer", verb, f"--workdir={work}"]
    if kind == "evaluate":
        if not work.exists():
            shutil.copytree(_trained(), work)
    else:
        command.append(f"--config={file}")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    env |= {"TRANSFORMER_WAIT": "20"}  # for one that was killed before it arrived
    places: list[dict[str, str]] = [{}]
    if kind == "processes":
        sys.path.insert(0, str(ROOT / "launch"))
        import local

        port = local.free_port()
        places = [local.variables(i, 2, 1, port) for i in range(2)]
        command += ["--config.mesh.data=2"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [subprocess.Popen(command, env=env | place, cwd=ROOT, **pipe) for place in places]


def _end(
    started: list[subprocess.Popen], work: Path, seconds: float, process: int, number: int
) -> tuple[bool, str]:
    """Ends one of the processes so many seconds after something was written; whether it was still there, and what all printed."""
    victim = started[process % len(started)]
    deadline = time.monotonic() + 120
    while victim.poll() is None and not list(work.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline, "nothing was written"
        time.sleep(0.02)
    time.sleep(seconds)
    there = victim.poll() is None
    if there:
        victim.send_signal(number)
    return there, "".join(child.communicate(timeout=200)[0] for child in started)


@functools.cache
def reference(kind: str) -> dict:
    """What a run gives that nobody kills."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        started = _start(kind, work)
        said = [child.communicate(timeout=400)[0] for child in started]
        assert not any(child.returncode for child in started), said
        return _results(work)


@functools.cache
def _trained() -> Path:
    """A finished run, which evaluations start from."""
    work = Path(tempfile.mkdtemp(prefix="faults-")) / "work"
    (child,) = _start("train", work)
    said = child.communicate(timeout=400)[0]
    assert not child.returncode, said
    return work


def _results(work: Path) -> dict:
    """Losses, tests and fingerprints of each run."""
    found = {}
    for file in sorted(work.rglob("test.json")):
        found[str(file.relative_to(work))] = _timeless(json.loads(file.read_text()))
    for file in sorted(work.rglob("metrics.jsonl")):
        run = file.parent
        name = str(run.relative_to(work))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        found[f"{name}/metrics"] = [_timeless(line) for line in lines]
        last = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
        record = json.loads(next((last / "host").rglob("metadata")).read_text())
        found[f"{name}/arrays"] = record["arrays"]
    return found


def _timeless(line: dict) -> dict:
    return {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
