"""Claims: one process at a time trains in a run directory. Output: its streams may be closed."""

import dataclasses
import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from transformer import claims
from transformer.claims import Claim, Process, holding
from transformer.errors import UserError
from transformer.output import flush, survive_closed_readers
from transformer.runs import rundir


@pytest.fixture
def other_process():
    """Another living process."""
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def test_run_directory_in_use_raises_and_names_the_holder(tmp_path, other_process):
    claim = Claim(tmp_path / "run" / rundir.LOCK)
    with rundir.locked([tmp_path / "run"]):
        assert claim.is_held_by(os.getpid())
        claim.hand_over(other_process.pid)
        with (
            pytest.raises(
                UserError, match=f"run is in use by process {other_process.pid} on .*; wait"
            ),
            rundir.locked([tmp_path / "run"]),
        ):
            raise AssertionError("two processes hold the claim")
        with pytest.raises(
            UserError, match=f"process {other_process.pid} on .* took over this run; this"
        ):
            claim.check()
    assert claim.is_held_by(other_process.pid), (
        "a holder does not release a claim that was taken over"
    )
    other_process.kill()
    other_process.wait()
    with rundir.locked([tmp_path / "run"]):
        claim.check()
    assert not (tmp_path / "run").exists(), "a released claim leaves no directory behind"


def test_only_one_of_concurrent_starts_gets_the_claim(tmp_path):
    refused, barrier = [], threading.Barrier(8)

    def start():
        barrier.wait()
        try:
            with holding([Claim(tmp_path / "lock")]):
                deadline = time.monotonic() + 60
                while len(refused) < 7 and time.monotonic() < deadline:
                    time.sleep(0.05)
        except UserError as e:
            refused.append(str(e))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7 and not (tmp_path / "lock").exists()


def test_claim_of_another_machine_holds_until_it_is_stale(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(claims, "STALE", 3.0)
    file = tmp_path / "lock"
    file.write_text(str(Process("elsewhere", "17", "1:2")))

    def renew():
        time.sleep(1.5)
        os.utime(file)

    thread = threading.Thread(target=renew)
    thread.start()
    with (
        pytest.raises(UserError, match="in use by process 17 on elsewhere"),
        holding([Claim(file)]),
    ):
        pass
    thread.join()
    message = (
        f"{tmp_path} was in use by process 17 on elsewhere, "
        "which is not visible from this machine; waiting up to 3 s"
    )
    assert (error := capsys.readouterr().err).startswith(message) and error.count("\n") == 1
    with holding([Claim(file)]):  # the holder no longer renews it
        assert Claim(file).is_held_by(os.getpid())


def test_process_in_another_container_is_not_visible(tmp_path):
    process = Process.here(os.getpid())
    assert process.is_visible() and process.runs() and Process.parse(str(process)) == process
    assert not dataclasses.replace(process, began="1:2").is_visible()
    assert not dataclasses.replace(process, host="elsewhere").is_visible()
    assert not Process.here(999_999_999).runs()
    assert not Process.parse("").is_visible()


def test_process_hidden_by_the_system_counts_as_running(other_process, monkeypatch):
    """/proc mounted with hidepid does not show the processes of other users."""
    hidden = Process.here(other_process.pid)

    def kill(pid, number):
        raise PermissionError

    def read_text(path, **options):
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", kill)
        assert hidden.runs() and not dataclasses.replace(hidden, began=hidden.began + "0").runs()
        patch.setattr(Path, "read_text", read_text)
        assert hidden.runs()


@pytest.mark.parametrize("digits", [21, 9000])
def test_claim_with_impossible_pid_is_dead(tmp_path, digits):
    file, process = tmp_path / "lock", Process.here(os.getpid())
    file.write_text(str(dataclasses.replace(process, pid="9" * digits)))
    assert not Claim(file).alive() and Claim(file).take()


def test_claim_is_renewed_while_held(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "STALE", 0.6)
    with holding([Claim(tmp_path / "lock")]):
        time.sleep(1.5)
        assert Claim(tmp_path / "lock").age() < 0.6


def test_claim_renewal_survives_file_system_errors(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "STALE", 0.6)
    renew, faults = os.utime, [OSError(errno.ESTALE, "stale"), OSError(errno.EIO, "broken")]

    def utime(path):
        if faults:
            raise faults.pop()
        renew(path)

    monkeypatch.setattr(os, "utime", utime)
    with holding([Claim(tmp_path / "lock")]):
        time.sleep(1.5)
        assert not faults and Claim(tmp_path / "lock").age() < 0.6


def test_deleted_claim_is_taken_again(tmp_path):
    with holding([Claim(tmp_path / "lock")]):
        (tmp_path / "lock").unlink()
        Claim(tmp_path / "lock").check()
        assert Claim(tmp_path / "lock").is_held_by(os.getpid())
    assert not (tmp_path / "lock").exists()


def test_claim_not_renewed_in_time_is_lost(tmp_path, other_process, monkeypatch):
    """Also if its file is gone: another process may have taken over the run and finished it."""
    monkeypatch.setattr(claims, "start_renewing", lambda taken: lambda: None)  # never renews
    monkeypatch.setattr(claims, "STALE", 0.2)
    late = f"took over this run after process {os.getpid()} had not responded for 0 s; this process"
    claim = Claim(tmp_path / "lock")
    with holding([claim]):
        time.sleep(0.3)
        claim.hand_over(other_process.pid)
        with pytest.raises(UserError, match=f"lock: process {other_process.pid} on .* {late}"):
            claim.check()
        claim.file.unlink()
        claim.renew()
        with pytest.raises(UserError, match=f"lock: another process {late}"):
            claim.check()
        assert not claim.file.exists()


TALKATIVE = """
import sys
from transformer.output import survive_closed_readers
{context}
    for i in range(20_000):
        print("step", i)
        print("step", i, file=sys.stderr)
    open({file!r}, "w").write("done")
"""


@pytest.mark.parametrize("lasting", [True, False])
def test_survive_closed_readers_keeps_work_running(tmp_path, lasting):
    context = "with survive_closed_readers():" if lasting else "if True:"
    program = TALKATIVE.format(context=context, file=str(tmp_path / "done"))
    command = f"{sys.executable} -c '{program}' 2>&1 | head -3; exit ${{PIPESTATUS[0]}}"
    command = command.replace("'done'", '"done"').replace(
        repr(str(tmp_path / "done")), f'"{tmp_path / "done"}"'
    )
    root = Path(__file__).parent.parent
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=root)
    assert result.stdout.splitlines()[0] == "step 0"
    assert (result.returncode == 0) == lasting and (tmp_path / "done").exists() == lasting
    assert not result.stderr


def test_streams_are_restored(capsys):
    before = sys.stdout, sys.stderr
    with survive_closed_readers():
        assert sys.stdout.encoding == before[0].encoding
        print("to both", file=sys.stderr)
        print("to both")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("to both\n", "to both\n")


def test_stdout_may_be_none(monkeypatch):
    """Python sets a stream that is closed at startup to None; a script may then call main()."""
    monkeypatch.setattr(sys, "stdout", None)
    with survive_closed_readers():
        print("to nobody")
    flush()
    assert sys.stdout is None


CLOSED = {
    "data >&-": (0, ""),
    "data <&- >&- 2>&-": (0, ""),
    "train --config=none.py --workdir=none >&-": (2, "error: no file 'none.py'"),
    "train --config=none.py --workdir=none 2>&-": (2, ""),
}


@pytest.mark.parametrize("command", CLOSED)
def test_commands_start_with_closed_streams(command):
    result = run_transformer(command)
    code, error = CLOSED[command]
    assert (result.returncode, result.stderr.count("\n")) == (code, bool(error)), result.stderr
    assert result.stderr.startswith(error)


@pytest.mark.parametrize(
    ("command", "stream", "code"),
    [
        ("--help", "stdout", 0),
        ("data", "stdout", 0),
        ("train --config=none.py --workdir=none", "stderr", 2),
    ],
)
def test_commands_ignore_closed_output_readers(command, stream, code):
    """The output is short, so it is written only when the process ends."""
    reader, writer = os.pipe()
    os.close(reader)
    result = run_transformer(command, **{stream: writer})
    os.close(writer)
    assert result.returncode == code and not result.stdout and not result.stderr


def run_transformer(command: str, **streams) -> subprocess.CompletedProcess:
    """Runs `python -m transformer` in a shell with these arguments and redirections."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    command = f"exec {sys.executable} -m transformer {command}"
    return subprocess.run(
        ["bash", "-c", command], text=True, cwd=Path(__file__).parent.parent, env=env, **pipes
    )


def test_opened_file_never_gets_a_standard_descriptor(tmp_path):
    """Otherwise the output of C++ code would be written into the file."""
    code = (
        "from transformer.output import open_closed_streams; open_closed_streams(); "
        "import sys; sys.exit(10 + open(sys.argv[1], 'w').fileno())"
    )
    command = f'{sys.executable} -c "{code}" {tmp_path}/file <&- >&- 2>&-'
    root = Path(__file__).parent.parent
    assert subprocess.run(["bash", "-c", command], cwd=root).returncode > 12
