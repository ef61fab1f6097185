"""Hangs: a step that never ends is named, with all stacks, and ends the process."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from transformer.runs import watchdog
from transformer.runs.watchdog import Watchdog

ROOT = Path(__file__).parent.parent

SCRIPT = """
import time, transformer
from transformer.runs import run

def sleep_long():
    time.sleep(8)

def slow(*args):
    if {condition}:
        sleep_long()
    return before(*args)

before = {function}
{function} = slow
transformer.train("{experiment}", "{workdir}", {overrides})
print("the end")
"""


def train(tmp_path, function: str, condition: str) -> subprocess.CompletedProcess:
    """Trains eight steps, with a deadline of 3 s and a sleep of 8 s in a function."""
    overrides = {"train.steps": 8, "train.step_deadline": 3.0, "train.checkpoint_every": 5}
    overrides |= {"model.d_model": 16, "train.eval_every": 0}
    names = {"experiment": ROOT / "experiments/smoke.py", "workdir": tmp_path / "run"}
    names |= {"function": function, "condition": condition}
    command = [sys.executable, "-c", SCRIPT.format(overrides=overrides, **names)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)


def test_a_step_that_hangs_ends_the_process(tmp_path):
    result = train(tmp_path, "run.Run.evaluation_due", "args[0].step == 5")
    assert result.returncode == 1, result.stderr
    assert re.search(r"error: step 5 has taken 0:0\d in process 0 on ", result.stderr)
    assert "in sleep_long" in result.stderr and "the end" not in result.stdout


def test_a_checkpoint_may_take_longer(tmp_path):
    """The same sleep while a checkpoint is saved ends nothing."""
    result = train(tmp_path, "run.layout", "True")
    assert result.returncode == 0, result.stderr
    assert "the end" in result.stdout


def test_the_default_deadline_is_ten_median_steps(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    dog = Watchdog()
    for step, seconds in enumerate([100.0, 40.0, 60.0, 50.0, 50.0]):
        now[0] += seconds
        dog.step_done(step)
    assert dog._current == (5, 300.0, 500.0)
    dog.pause()
    assert dog._current is None
    now[0] += 1000.0
    dog.step_done(4)
    assert dog._current == (5, 1300.0, 500.0)
    dog.close()
    fast = Watchdog()
    fast.step_done(1)
    assert fast._current[2] == watchdog.LEAST
    fast.close()


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_deadline_is_not_negative(seconds):
    from transformer.config import TrainConfig
    from transformer.errors import UserError

    with pytest.raises(UserError, match="train.step_deadline"):
        TrainConfig(step_deadline=seconds)
