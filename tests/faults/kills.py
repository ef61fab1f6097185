"""Runs killed at random times: the same command must continue and end with the same result.

A training (of one or two processes), a sweep or an evaluation is killed with SIGKILL or stopped
with SIGTERM, and started again until it finishes. Its results must equal those of an uninterrupted
run bit for bit: the logged losses, the metrics in test.json, and the fingerprints of all arrays in
the last checkpoint.
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

from xla_flags import one_device_flags

ROOT = Path(__file__).parents[2]

EXPERIMENT = """
from transformer import Sweep, vary

def get_config():
    return dict(
        model=dict(
            family="decoder", vocab_size=400, d_model=16, d_ff=32, num_heads=2,
            num_decoder_layers=2, max_length=32, dropout=0.1,
        ),
        data=dict(corpus="pydoc", length=32, batch_size=4, held_out=8, tokenizer=dict(kind="bpe")),
        optimizer=dict(warmup_steps=5),
        train=dict(
            steps=200, log_every=20, eval_every=100, checkpoint_every=20, ema_decay=0.9,
            tensorboard=False,
        ),
    )

def sweep():
    return Sweep(
        vary("model.norm_placement", "pre", "peri"),
        question="Does it continue?",
        seeds=1,
    )
"""

KINDS = ("train", "train", "evaluate", "sweep", "processes")


@dataclasses.dataclass(frozen=True)
class Case:
    """A kind of command and the signals that end it, as (seconds, index of the process, signal).

    The run is restarted after each signal. The first time counts from the first line of metrics,
    the others from the restart, so that later signals also arrive during imports, compilation and
    the restore.
    """

    seed: int
    number: int
    kind: str
    ends: tuple[tuple[float, int, int], ...]

    def __str__(self) -> str:
        ends = ", ".join(f"{signal.Signals(s).name} to {p} at {t:.2f} s" for t, p, s in self.ends)
        return f"kill {self.number} of seed {self.seed}: {self.kind}, {ends}"


def cases(seed: int) -> Iterator[Case]:
    """Yields random cases without end."""
    rng = random.Random(seed)
    for number in itertools.count():
        kind = rng.choice(KINDS)
        signals = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)
        ends = tuple(
            (rng.uniform(0, 12 if index else 4), rng.randrange(2), rng.choice(signals))
            for index in range(rng.choice((1, 2, 3)))
        )
        yield Case(seed, number, kind, ends)


def check(case: Case) -> str:
    """Raises AssertionError, with the case, unless the result is that of an uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        work, killed = Path(folder) / "work", 0
        for seconds, process, signal_number in case.ends:
            children = _start(case.kind, work)
            was_running, output = _end(children, work, seconds, process, signal_number)
            killed += was_running
            assert "Traceback" not in output, f"{case}: {output[-3000:]}"
        for _ in range(3):  # one of two processes may have to restart after the other is lost
            children = _start(case.kind, work)
            outputs = [child.communicate(timeout=400)[0] for child in children]
            codes = [child.returncode for child in children]
            if not any(codes):
                break
        assert not any(codes), f"{case}: exit codes {codes}: {outputs[0][-2000:]}"
        assert "Traceback" not in "".join(outputs), f"{case}: {outputs}"
        results, expected = _results(work), reference(case.kind)
        for name in expected:
            assert results.get(name) == expected[name], (
                f"{case}: {name} differs: {_difference(results.get(name), expected[name])}"
            )
    return f"{case.kind}: killed {killed} times, equal"


def _difference(results, expected) -> str:
    if isinstance(expected, list) and isinstance(results, list):
        pairs = [(a, b) for a, b in itertools.zip_longest(results, expected) if a != b]
        return f"{len(results)} lines for {len(expected)}; first {pairs[:1]}"
    return f"{str(results)[:200]} for {str(expected)[:200]}"


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
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    env |= {"XLA_FLAGS": one_device_flags()}
    env |= {"TRANSFORMER_WAIT": "20"}  # seconds to wait for a process that was killed
    variables: list[dict[str, str]] = [{}]
    if kind == "processes":
        sys.path.insert(0, str(ROOT / "launch"))
        import local

        port = local.free_port()
        variables = [local.variables(i, 2, 1, port) for i in range(2)]
        command += ["--config.mesh.data=2"]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return [
        subprocess.Popen(command, env=env | process_variables, cwd=ROOT, **pipe)
        for process_variables in variables
    ]


def _end(
    children: list[subprocess.Popen], work: Path, seconds: float, process: int, signal_number: int
) -> tuple[bool, str]:
    """Sends a signal to a process, `seconds` after the first metrics were written.

    Returns whether the process was still running, and the output of all processes.
    """
    victim = children[process % len(children)]
    deadline = time.monotonic() + 120
    while victim.poll() is None and not list(work.rglob("metrics.jsonl")):
        assert time.monotonic() < deadline, "no metrics were written"
        time.sleep(0.02)
    time.sleep(seconds)
    was_running = victim.poll() is None
    if was_running:
        victim.send_signal(signal_number)
    return was_running, "".join(child.communicate(timeout=200)[0] for child in children)


@functools.cache
def reference(kind: str) -> dict:
    """Returns the results of an uninterrupted run."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        children = _start(kind, work)
        outputs = [child.communicate(timeout=400)[0] for child in children]
        assert not any(child.returncode for child in children), outputs
        return _results(work)


@functools.cache
def _trained() -> Path:
    """Returns a finished run for evaluations."""
    work = Path(tempfile.mkdtemp(prefix="faults-")) / "work"
    (child,) = _start("train", work)
    output = child.communicate(timeout=400)[0]
    assert not child.returncode, output
    return work


def _results(work: Path) -> dict:
    """Returns the logged metrics, test metrics and array fingerprints of each run."""
    results = {}
    for file in sorted(work.rglob("test.json")):
        results[str(file.relative_to(work))] = _timeless(json.loads(file.read_text()))
    for file in sorted(work.rglob("metrics.jsonl")):
        run = file.parent
        name = str(run.relative_to(work))
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        results[f"{name}/metrics"] = [_timeless(line) for line in lines]
        last = max((run / "checkpoints").glob("[0-9]*"), key=lambda path: int(path.name))
        record = json.loads(next((last / "host").rglob("metadata")).read_text())
        results[f"{name}/arrays"] = record["arrays"]
    return results


def _timeless(line: dict) -> dict:
    return {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))}
