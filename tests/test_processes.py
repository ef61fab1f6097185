"""Runs on several real processes of this machine.

Results are bitwise equal on any number of processes. Stops and deaths of processes end the run
cleanly.
"""

import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from xla_flags import one_device_flags

from transformer import api
from transformer.cli import main
from transformer.data.batching import Batches
from transformer.parallel import processes

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "launch"))  # as for a script: local.py imports shell.py
spec = importlib.util.spec_from_file_location("local", ROOT / "launch" / "local.py")
local = importlib.util.module_from_spec(spec)
spec.loader.exec_module(local)

TRAIN = [
    "train", "--config=experiments/smoke.py", "--config.train.log_every=1",
    "--config.train.tensorboard=False", "--config.train.eval_batches=2",
    "--config.data.batch_size=4", "--config.data.length=32", "--config.model.max_length=32",
    "--config.mesh.fsdp=2", "--config.mesh.data=2",
]  # fmt: skip


def launch(
    count: int,
    workdir: Path | str,
    *options: str,
    command=TRAIN,
    stderr=subprocess.STDOUT,
    variables=({},) * 4,
) -> list[subprocess.Popen]:
    """Starts one command on `count` processes with four devices in total."""
    port, command = (
        local.free_port(),
        [sys.executable, "-m", "transformer", *command, f"--workdir={workdir}", *options],
    )
    return [
        subprocess.Popen(
            command,
            env=os.environ | local.variables(i, count, 4 // count, port) | variables[i],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        for i in range(count)
    ]


def logged_metrics(workdir: Path) -> list[dict]:
    """Returns the lines of metrics.jsonl, without times and memory."""
    file = workdir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [
        {k: v for k, v in line.items() if not k.startswith(("time/", "memory/"))} for line in lines
    ]


def wait_until(condition, seconds: float = 120) -> None:
    """Waits until the condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.05)


def wait_for_exit(
    started: list[subprocess.Popen], seconds: float = 150
) -> tuple[list[int], list[str]]:
    """Waits for the processes, and returns their exit codes and outputs."""
    outputs = [process.communicate(timeout=seconds)[0] for process in started]
    return [process.returncode for process in started], outputs


@pytest.mark.parametrize("kind", ["text", "prepared"])
def test_resumes_on_fewer_processes_bitwise(tmp_path, monkeypatch, capsys, kind):
    """Trains on four processes until one is preempted, on two likewise, then on one.

    The run equals that of one process from start to end.
    """
    monkeypatch.chdir(ROOT)
    options = ["--config.train.steps=24"]
    if kind == "prepared":
        prepare = ["data", "prepare", *TRAIN[1:], f"--output={tmp_path / 'text'}"]
        assert main([*prepare, "--beam=--runner=BundleBasedDirectRunner"]) == 0
        options += shlex.split(capsys.readouterr().out.partition("read it with ")[2])
    assert wait_for_exit(launch(1, tmp_path / "whole", *options))[0] == [0]
    for count, victim in ((4, 2), (2, 0)):
        before = len(logged_metrics(tmp_path / "parts"))
        started = launch(count, tmp_path / "parts", *options)
        wait_until(lambda before=before: len(logged_metrics(tmp_path / "parts")) > before)
        started[victim].send_signal(signal.SIGTERM)
        exit_codes, outputs = wait_for_exit(started)
        assert exit_codes == [143] * count, outputs
        assert "stopped at step" in outputs[0]
    assert 2 < len(logged_metrics(tmp_path / "parts")) < 24
    exit_codes, (output,) = wait_for_exit(launch(1, tmp_path / "parts", *options))
    assert exit_codes == [0] and "resumed     at step" in output
    whole, parts = logged_metrics(tmp_path / "whole"), logged_metrics(tmp_path / "parts")
    assert len(whole) == 25 and whole == parts
    if kind == "prepared":
        return
    on_one, on_two = (evaluate_and_generate(tmp_path / "parts", count) for count in (1, 2))
    assert on_one["loss"] > 1 and on_one["answer"].strip() and on_one == on_two
    manifest = json.loads((tmp_path / "parts" / "manifest.json").read_text())
    assert [start["processes"] for start in manifest["earlier_starts"]] == [4, 2]


def test_all_processes_fall_back_if_one_cannot_read_a_checkpoint(tmp_path):
    run, options = tmp_path / "run", ["--config.train.steps=4", "--config.train.checkpoint_every=2"]
    assert wait_for_exit(launch(2, run, *options))[0] == [0, 0]
    before = logged_metrics(run)
    damaged_files = list((run / "checkpoints" / "4" / "params" / "ocdbt.process_1").rglob("d/*"))
    for file in damaged_files:
        data = file.read_bytes()
        file.write_bytes(data[: len(data) // 8] + bytes(len(data) - len(data) // 8))
    exit_codes, outputs = wait_for_exit(launch(2, run, *options))
    assert exit_codes == [0, 0] and damaged_files, outputs
    assert "4 is damaged" in outputs[0] and "continuing from step 2" in outputs[0]
    assert "Traceback" not in "".join(outputs)
    assert logged_metrics(run) == before and (run / "damaged" / "4").is_dir()


def evaluate_and_generate(workdir: Path, count: int) -> dict:
    """Returns the results of `evaluate` and the output of `generate` on `count` processes."""
    prompts, answers = workdir / "asked.txt", workdir / f"answer{count}.txt"
    prompts.write_text("The import statement\n")
    (workdir / "test.json").unlink(missing_ok=True)
    generate = [
        "generate",
        f"--input={prompts}",
        f"--output={answers}",
        "--config.decoding.max_extra=4",
    ]
    for verb in (["evaluate"], generate):
        command = [*verb, "--config.mesh.fsdp=2", "--config.mesh.data=2"]
        started = launch(count, workdir, command=command, stderr=subprocess.PIPE)
        outputs = [process.communicate(timeout=150) for process in started]
        assert [process.returncode for process in started] == [0] * count, outputs
        # Only process 0 prints results.
        expected = [verb == ["evaluate"]] + [False] * (count - 1)
        assert ["perplexity" in out for out, _ in outputs] == expected
    return json.loads((workdir / "test.json").read_text()) | {"answer": answers.read_text()}


def test_killed_process_ends_the_others_and_launcher_restarts(tmp_path):
    command = [
        sys.executable,
        "launch/local.py",
        "--processes=2",
        "--devices=2",
        "--restarts=1",
        "--",
        *TRAIN,
        f"--workdir={tmp_path / 'run'}",
    ]
    steps = ["--config.train.steps=50", "--config.train.checkpoint_every=5"]
    environment = {"XLA_FLAGS": one_device_flags(), "TRANSFORMER_HEARTBEAT": "10"}
    launcher = subprocess.Popen(
        command + steps, env=os.environ | environment, cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    checkpoints = tmp_path / "run" / "checkpoints"
    # Wait for a complete checkpoint.
    wait_until(lambda: any(folder.name.isdigit() for folder in checkpoints.glob("*")))
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(
        lambda: (
            not Path(f"/proc/{children[0]}").exists()
            or "Z" in Path(f"/proc/{children[0]}/stat").read_text()
        ),
        60,
    )
    assert time.monotonic() - killed_at < 60
    _, errors = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, errors
    assert "process 1 of 2 was killed by SIGKILL" in errors and "restarting (1 of 1)" in errors
    assert "error: process 1 of this run ended or cannot be reached; see its log" in errors
    assert "Traceback" not in errors and "stack trace" not in errors
    assert "resumed     at step" in errors
    assert [
        line["step"] for line in logged_metrics(tmp_path / "run") if "train/loss" in line
    ] == list(range(1, 51))


def test_missing_processes_are_named(tmp_path):
    port = local.free_port()
    code = (
        "from transformer.parallel.processes import start_processes; "
        "from transformer.cli import main; import sys\n"
    )
    code += (
        "from transformer.errors import UserError\n"
        "try: start_processes()\nexcept UserError as e: sys.exit(str(e))"
    )
    start = lambda i, wait: subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | local.variables(i, 4, 1, port) | {"TRANSFORMER_WAIT": wait},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = [start(0, "10"), start(2, "10")]
    for process in started:
        _, error = process.communicate(timeout=60)
        assert (
            process.returncode == 1
            and "processes 1, 3 of 4 did not connect within 10 s; connected: 0 (" in error
        ), error
    _, error = (alone := start(1, "2")).communicate(timeout=60)
    assert (
        alone.returncode == 1
        and f"process 1: process 0 did not answer at localhost:{port + 1} within 2 s" in error
    )


def test_failing_script_ends_the_other_processes():
    """A process that raises does not wait for the others.

    Processes that all reach the barrier and then exit with 143 print nothing.
    """
    code = (
        "import sys\n"
        "from transformer.parallel.processes import barrier, start_processes\n"
        "start_processes()\n"
    )
    die = "if sys.argv[1] == '1': raise ValueError('of its own')\nbarrier('that none reaches')"
    stop = "barrier('that all reach')\nsys.exit(143)"

    def run_both(code: str, port: int) -> tuple[list[int], list[str]]:
        return wait_for_exit(
            [
                subprocess.Popen(
                    [sys.executable, "-c", code, str(i)],
                    env=os.environ | local.variables(i, 2, 1, port),
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
                for i in range(2)
            ],
            40,
        )

    exit_codes, outputs = run_both(code + die, local.free_port())
    assert exit_codes == [1, 1], outputs
    assert outputs[0] == "error: process 1 of this run ended or cannot be reached; see its log\n"
    assert "ValueError: of its own" in outputs[1]
    assert run_both(code + stop, local.free_port()) == ([143, 143], ["", ""])


def test_processes_build_their_own_share_of_each_batch():
    class FakeSequences:
        lengths, report = np.full(10, 6), {}

        def segments(self, row, draw):
            from transformer.data.objectives.base import Segment

            ids = np.arange(6, dtype=np.int32) + 10 * row
            return [Segment(ids, ids)]

    batches = lambda share: Batches(FakeSequences(), length=6, batch_size=4, seed=None, share=share)
    whole, parts = (
        batches(np.arange),
        [batches(lambda n, p=p: np.arange(p * n // 4, (p + 1) * n // 4)) for p in range(4)],
    )
    # The last batch has two sequences, so two of the four processes have none of it.
    for step in range(3):
        for name, x in whole[step].items():
            np.testing.assert_array_equal(np.concatenate([part[step][name] for part in parts]), x)
    assert whole[2]["weights"].sum() == 12 and parts[3][2]["weights"].sum() == 0


def test_processes_with_different_configs_or_folders_fail(tmp_path):
    """Covers different configs, and a folder that is not shared."""
    port, command = (
        local.free_port(),
        [sys.executable, "-m", "transformer", *TRAIN, "--config.train.steps=2"],
    )
    options = {
        0: [f"--workdir={tmp_path / 'a'}"],
        1: [f"--workdir={tmp_path / 'a'}", "--config.seed=7"],
    }
    start = lambda i: subprocess.Popen(
        command + options[i],
        env=os.environ | local.variables(i, 2, 2, port),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    started = [start(i) for i in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert any(process.returncode == 2 for process in started)
    expected = "the config differs between processes 0 and 1; use the same on all"
    assert any(expected in error for error in errors), errors
    assert not (tmp_path / "a").exists()
    port, options = local.free_port(), {i: [f"--workdir={tmp_path / str(i)}"] for i in range(2)}
    started = [start(i) for i in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in started]
    assert (
        f"process 1 cannot see the files that process 0 wrote to {tmp_path / '1'}; "
        "use a shared folder" in errors[1]
    )


def test_generate_and_convert_refuse_several_processes(tmp_path, monkeypatch, capsys):
    from transformer.cli import main
    from transformer.config import Experiment
    from transformer.config_io import load_experiment
    from transformer.mapping import to_mapping

    config: Experiment = load_experiment(str(ROOT / "experiments" / "smoke.py"), {})
    (tmp_path / "config.json").write_text(json.dumps(to_mapping(config)))
    for module in (processes, api):
        monkeypatch.setattr(module, "start_processes", lambda: True)
    for arguments in (
        ["generate", f"--workdir={tmp_path}"],
        ["convert", f"--workdir={tmp_path}", f"--to={tmp_path / 'out'}"],
        ["convert", f"--workdir={tmp_path / 'new'}", f"--from={tmp_path}"],
    ):
        assert main(arguments) == 2
        assert (
            f"{arguments[0]}: cannot run on several processes; start one" in capsys.readouterr().err
        )
    assert not (tmp_path / "new").exists() and not (tmp_path / "out").exists()


def test_sweep_uses_all_hosts_and_resumes(tmp_path):
    """Every host starts the sweep, whose runs use all hosts, one run after another.

    A signal to one host stops all of them. The same command continues the sweep.
    """
    sweep = (
        "def sweep():\n"
        "    from transformer import Sweep, vary\n"
        '    return Sweep(vary("optimizer.learning_rate", low=1e-3, high=1e-2), seeds=1)\n'
    )
    (tmp_path / "x.py").write_text((ROOT / "experiments" / "smoke.py").read_text() + sweep)
    command, runs = (
        ["sweep", f"--config={tmp_path / 'x.py'}", *TRAIN[2:], "--config.train.steps=12"],
        tmp_path / "runs",
    )
    stopped = launch(2, runs, command=command)
    wait_until(lambda: len(logged_metrics(runs / "low" / "seed-0")) > 2)
    stopped[1].send_signal(signal.SIGTERM)
    exit_codes, outputs = wait_for_exit(stopped)
    assert exit_codes == [143, 143], outputs
    assert (
        re.search(r"low +stopped", outputs[0])
        and "seed 0" not in outputs[1]
        and not (runs / "high").exists()
    )
    exit_codes, outputs = wait_for_exit(launch(2, runs, command=command))
    assert exit_codes == [0, 0], outputs
    assert "2 of 2 runs finished" in outputs[0] and all(
        (runs / arm / "seed-0" / "test.json").exists() for arm in ("low", "high")
    )
    low, high = (logged_metrics(runs / arm / "seed-0") for arm in ("low", "high"))
    assert [line["step"] for line in low if "train/loss" in line] == list(range(1, 13)) and low[
        2
    ] != high[2]


def test_sweep_on_several_processes_rejects_jobs(tmp_path, monkeypatch, capsys):
    for name, value in {"COORDINATOR": "localhost:12345", "PROCESSES": "2", "PROCESS": "1"}.items():
        monkeypatch.setenv(f"TRANSFORMER_{name}", value)
    assert (
        main(["sweep", "--config=experiments/ablation.py", f"--workdir={tmp_path}", "--jobs=2"])
        == 2
    )
    assert "--jobs: 2, but each run uses all 2 processes" in capsys.readouterr().err
