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
def other():
    """Another living process."""
    child = subprocess.Popen(["sleep", "60"])
    yield child
    child.kill()
    child.wait()


def test_a_directory_in_use_is_refused_and_names_the_holder(tmp_path, other):
    claim = rundir.lock(tmp_path / "run")
    with rundir.locked([tmp_path / "run"]):
        assert claim.is_held_by(os.getpid())
        claim.hand_over(other.pid)
        with (
            pytest.raises(UserError, match=f"run is in use by process {other.pid} on .*; wait"),
            rundir.locked([tmp_path / "run"]),
        ):
            raise AssertionError("two processes hold the claim")
        with pytest.raises(UserError, match=f"process {other.pid} on .* took over this run; this"):
            claim.check()
    assert claim.is_held_by(other.pid), "a holder does not release a claim that was taken over"
    other.kill()
    other.wait()
    with rundir.locked([tmp_path / "run"]):
        claim.check()
    assert not (tmp_path / "run").exists(), "a released claim leaves no directory behind"


def test_of_two_starts_a_moment_apart_one_is_refused(tmp_path):
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


def test_a_holder_on_another_machine_lives_as_long_as_it_renews(tmp_path, monkeypatch, capsys):
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


def test_a_process_of_the_same_number_in_another_container_is_another(tmp_path):
    process = Process.here(os.getpid())
    assert process.is_visible() and process.runs() and Process.parse(str(process)) == process
    assert not dataclasses.replace(process, began="1:2").is_visible()
    assert not dataclasses.replace(process, host="elsewhere").is_visible()
    assert not Process.here(999_999_999).runs()
    assert not Process.parse("").is_visible()


def test_a_process_that_the_system_hides_lives(other, monkeypatch):
    """/proc mounted with hidepid does not show the processes of other users."""
    hidden = Process.here(other.pid)

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
def test_a_number_that_no_process_has_is_of_none(tmp_path, digits):
    file, process = tmp_path / "lock", Process.here(os.getpid())
    file.write_text(str(dataclasses.replace(process, pid="9" * digits)))
    assert not Claim(file).alive() and Claim(file).take()


def test_a_claim_is_renewed_while_it_is_held(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "STALE", 0.6)
    with holding([Claim(tmp_path / "lock")]):
        time.sleep(1.5)
        assert Claim(tmp_path / "lock").age() < 0.6


def test_a_claim_is_renewed_after_a_fault_of_the_file_system(tmp_path, monkeypatch):
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


def test_a_claim_whose_file_is_gone_is_taken_again(tmp_path):
    with holding([Claim(tmp_path / "lock")]):
        (tmp_path / "lock").unlink()
        Claim(tmp_path / "lock").check()
        assert Claim(tmp_path / "lock").is_held_by(os.getpid())
    assert not (tmp_path / "lock").exists()


def test_a_claim_that_was_not_renewed_in_time_is_lost(tmp_path, other, monkeypatch):
    """Also if its file is gone: another process may have taken over the run and finished it."""
    monkeypatch.setattr(claims, "start_renewing", lambda taken: lambda: None)  # never renews
    monkeypatch.setattr(claims, "STALE", 0.2)
    late = f"took over this run after process {os.getpid()} had not responded for 0 s; this process"
    claim = Claim(tmp_path / "lock")
    with holding([claim]):
        time.sleep(0.3)
        claim.hand_over(other.pid)
        with pytest.raises(UserError, match=f"lock: process {other.pid} on .* {late}"):
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
def test_a_closed_output_ends_no_work(tmp_path, lasting):
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


def test_streams_are_as_they_were(capsys):
    before = sys.stdout, sys.stderr
    with survive_closed_readers():
        assert sys.stdout.encoding == before[0].encoding
        print("to both", file=sys.stderr)
        print("to both")
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("to both\n", "to both\n")


def test_a_stream_may_be_none(monkeypatch):
    """Python sets a stream that is closed at startup to None; a script may then call main()."""
    monkeypatch.setattr(sys, "stdout", None)
    with survive_closed_readers():
        print("to nobody")
    flush()
    assert sys.stdout is None


CLOSED = {
    "data >&-": (0, ""),
    "data <&- >&- 2>&-": (0, ""),
    "train --config=none.py --workdir=none >&-": (2, "error: --config: no file 'none.py'"),
    "train --config=none.py --workdir=none 2>&-": (2, ""),
}


@pytest.mark.parametrize("command", CLOSED)
def test_a_command_may_begin_with_closed_streams(command):
    result = transformer(command)
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
def test_nobody_need_read_what_a_command_prints(command, stream, code):
    """The output is short, so it is written only when the process ends."""
    reader, writer = os.pipe()
    os.close(reader)
    result = transformer(command, **{stream: writer})
    os.close(writer)
    assert result.returncode == code and not result.stdout and not result.stderr


def transformer(command: str, **streams) -> subprocess.CompletedProcess:
    """Runs `python -m transformer` in a shell with these arguments and redirections."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    command = f"exec {sys.executable} -m transformer {command}"
    return subprocess.run(
        ["bash", "-c", command], text=True, cwd=Path(__file__).parent.parent, env=env, **pipes
    )


def test_a_file_never_takes_the_number_of_a_closed_stream(tmp_path):
    """Otherwise the output of C++ code would be written into the file."""
    code = (
        "from transformer.output import open_closed_streams; open_closed_streams(); "
        "import sys; sys.exit(10 + open(sys.argv[1], 'w').fileno())"
    )
    command = f'{sys.executable} -c "{code}" {tmp_path}/file <&- >&- 2>&-'
    root = Path(__file__).parent.parent
    assert subprocess.run(["bash", "-c", command], cwd=root).returncode > 12
