"""Claims: locks that keep two processes from working on the same run.

A claim is a file that names its holder, which updates its modification time every few seconds. A
claim is dead if its process has ended (detected at once on the same machine), or if it was not
renewed for `STALE` seconds. Files are created exclusively, even on shared disks (from NFS 3 on). In
a bucket, a claim is an object that is written and deleted with generation preconditions."""

import contextlib
import dataclasses
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from transformer import buckets
from transformer.errors import TemporaryError, UserError
from transformer.files import write_atomic

STALE = 90.0  # seconds without renewal after which a claim is dead


@dataclasses.dataclass(frozen=True)
class Process:
    """A process on some machine. `began` is its PID namespace and start time ("" if unknown), which
    distinguish it from later processes, and those in other containers, with the same PID."""

    host: str
    pid: str
    began: str

    @classmethod
    def here(cls, pid: int) -> "Process":
        """Returns the process of this machine with that PID."""
        return cls(socket.gethostname(), str(pid), _began(pid))

    @classmethod
    def parse(cls, text: str) -> "Process":
        """Parses the output of `str`, which may be incomplete while it is being written."""
        return cls(*(text.split() + [""] * 3)[:3])

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.began}"

    def is_visible(self) -> bool:
        """Returns whether a living process would be visible here: same host, same container."""
        same_container = self.began.partition(":")[0] == _container()
        return self.host == socket.gethostname() and self.pid.isdecimal() and same_container

    def runs(self) -> bool:
        """Returns whether a visible process is alive. True if /proc hides its start time."""
        try:
            with contextlib.suppress(PermissionError):  # of a process of another user
                os.kill(int(self.pid), 0)
        except (ProcessLookupError, OverflowError, ValueError):  # no process has that PID
            return False
        now = _began(int(self.pid))
        return now == self.began or now.endswith(":")


def _container() -> str:
    """Returns the PID namespace of this process; "" on systems without namespaces."""
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return ""


def _began(pid: int) -> str:
    """Returns the PID namespace and the start time of the process in clock ticks since boot."""
    start_time = ""
    with contextlib.suppress(OSError):
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
        start_time = after_name.split()[19]
    return f"{_container()}:{start_time}"


class _OnDisk:
    """A file that holds the name of a process."""

    def __init__(self, file: Path):
        self.file = file

    def create(self, holder: Process) -> bool:
        """Creates the file. Returns False if it exists: another process was faster."""
        with contextlib.suppress(FileExistsError), self.file.open("x") as file:
            file.write(str(holder))
            return True
        return False

    def read(self) -> Process | None:
        with contextlib.suppress(FileNotFoundError):
            return Process.parse(self.file.read_text(errors="replace"))
        return None

    def replace(self, holder: Process) -> None:
        write_atomic(self.file, str(holder))

    def renew(self, holder: Process) -> None:
        os.utime(self.file)

    def renewed(self) -> float:
        """Returns the time of the last renewal, or -inf if the file does not exist."""
        with contextlib.suppress(FileNotFoundError):
            return self.file.stat().st_mtime
        return -math.inf

    def remove(self, holder: Process) -> bool:
        """Removes the file of that holder. Of several processes, only one succeeds."""
        aside = self.file.with_name(f"{self.file.name}.{socket.gethostname()}.{os.getpid()}.dead")
        try:
            self.file.rename(aside)
        except FileNotFoundError:
            return False
        if Process.parse(aside.read_text(errors="replace")) != holder:  # taken by another meanwhile
            aside.rename(self.file)
            return False
        aside.unlink()
        return True


class _InBucket(_OnDisk):
    """An object that holds the name of a process."""

    def create(self, holder: Process) -> bool:
        return buckets.write_if(self.file, str(holder), 0)

    def read(self) -> Process | None:
        content, _, _ = buckets.read(self.file)
        return None if content is None else Process.parse(content.decode(errors="replace"))

    def replace(self, holder: Process) -> None:
        buckets.write_if(self.file, str(holder), None)

    def renew(self, holder: Process) -> None:
        content, generation, _ = buckets.read(self.file)
        if content == str(holder).encode():
            buckets.write_if(self.file, str(holder), generation)

    def renewed(self) -> float:
        return buckets.read(self.file)[2]

    def remove(self, holder: Process) -> bool:
        content, generation, _ = buckets.read(self.file)
        return content == str(holder).encode() and buckets.write_if(self.file, None, generation)


_alone: dict[Path, float] = {}
"""Claim file -> when this process last verified that no other process had held the claim. If this
one was then suspended for long (Ctrl-Z), another may have taken and released it."""


class Claim:
    """A claim on `file`, which need not exist."""

    def __init__(self, file: Path):
        self.file = file
        self._stored = _OnDisk(file) if buckets.url_of(file) is None else _InBucket(file)

    def take(self) -> bool:
        """Takes the claim unless a living process holds it. Returns whether it was taken."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        holder = self.holder()
        if holder is not None and (self._lives(holder) or not self._stored.remove(holder)):
            return False
        return self._make()

    def _make(self) -> bool:
        if made := self._stored.create(Process.here(os.getpid())):
            _alone[self.file] = time.time()
        return made

    def hand_over(self, pid: int) -> None:
        """Transfers the claim to a process on this machine, which must renew it from now on."""
        self._stored.replace(Process.here(pid))

    def is_held_by(self, *pids: int) -> bool:
        """Returns whether one of these processes of this machine holds the claim."""
        return self.holder() in [Process.here(pid) for pid in pids]

    def renew(self) -> None:
        """Renews the claim, if this process still holds it. It must do so every few seconds."""
        with contextlib.suppress(OSError, UserError):  # the network may work next time
            if held := self.is_held_by(os.getpid()):
                self._stored.renew(Process.here(os.getpid()))
            if held or (self.holder() is None and not self._lapsed()):
                _alone[self.file] = time.time()

    def _lapsed(self) -> bool:
        """Returns whether another process may have held the claim since this one took it."""
        return time.time() - _alone.get(self.file, -math.inf) >= STALE

    def release(self) -> None:
        """Removes the claim if this process holds it or its holder is dead."""
        holder = self.holder()
        if holder is not None and (self.is_held_by(os.getpid()) or not self._lives(holder)):
            self._stored.remove(holder)
            _alone.pop(self.file, None)

    def alive(self) -> bool:
        """Returns whether a living process holds the claim. True if it cannot be read now."""
        with contextlib.suppress(TemporaryError):
            return self._lives(self.holder())
        return True

    def check(self) -> None:
        """Retakes a claim whose file is missing. Raises UserError if another may have held it."""
        if self.is_held_by(os.getpid()):
            return
        lapsed = self._lapsed()
        if self.holder() is None and not lapsed and self._make():
            return
        late = f" after process {os.getpid()} had not responded for {STALE:.0f} s" if lapsed else ""
        how = f"{self.who()} took over this run{late}"
        raise UserError(f"{self.file}: {how}; this process stops without saving")

    def holder(self) -> Process | None:
        """Returns the process that holds or held the claim; None if the file does not exist."""
        return self._stored.read()

    def who(self) -> str:
        """Describes the holder for an error message."""
        holder = self.holder()
        return f"process {holder.pid} on {holder.host}" if holder else "another process"

    def age(self) -> float:
        """Returns the seconds since the claim was taken or renewed, by this machine's clock."""
        return time.time() - self._stored.renewed()

    def _lives(self, holder: Process | None) -> bool:
        return bool(holder and self.age() < STALE and (not holder.is_visible() or holder.runs()))


def start_renewing(claims: Sequence[Claim]) -> Callable[[], None]:
    """Renews this process's claims in a thread. Returns a function that stops the thread."""
    stopped = threading.Event()

    def renew() -> None:
        while not stopped.wait(STALE / 6):
            for claim in claims:
                claim.renew()

    threading.Thread(target=renew, daemon=True).start()
    return stopped.set


@contextlib.contextmanager
def holding(claims: Sequence[Claim]) -> Iterator[None]:
    """Holds these claims. Raises UserError, with the holder, if a living process holds one. For a
    holder on another machine, prints a line and waits until the claim is renewed or stale."""
    with contextlib.ExitStack() as taken:
        for claim in claims:
            last_age, deadline, announced = claim.age(), time.monotonic() + 2 * STALE, False
            while not claim.take():
                holder, folder = claim.holder(), buckets.shown(claim.file.parent)
                if holder is None:
                    continue
                if holder.is_visible() or claim.age() < last_age or time.monotonic() > deadline:
                    way_out = "wait until it ends, stop it, or choose another directory"
                    raise UserError(f"--workdir: {folder} is in use by {claim.who()}; {way_out}")
                if not announced:
                    announced = True
                    used = f"{folder} was in use by {claim.who()}, which is not visible"
                    wait = f"waiting up to {STALE:.0f} s for it to renew its claim"
                    print(f"{used} from this machine; {wait}", file=sys.stderr)
                last_age = claim.age()
                time.sleep(1)
            taken.callback(claim.release)
        taken.callback(start_renewing(claims))
        yield
