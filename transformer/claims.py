"""Claims: which process works on a run, so that no two do.

A claim is a file that names its holder. The holder renews the file's time every few seconds. A claim is dead when its process has
ended, which is seen at once on the same machine, or when nobody has renewed it for `STALE` seconds. The file is created
exclusively, so claims work on local file systems and on shared ones (NFS 3 and later).
"""

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

from transformer.errors import UserError
from transformer.files import write_whole

STALE = 90.0
"""A claim that was not renewed for so many seconds is dead."""


@dataclasses.dataclass(frozen=True)
class Process:
    """A process on some machine. `began` tells it from a later one with the same number, and from one that has this number in another
    container; it is empty where the system does not say."""

    host: str
    pid: str
    began: str

    @classmethod
    def here(cls, pid: int) -> "Process":
        """One of this machine's."""
        return cls(socket.gethostname(), str(pid), _began(pid))

    @classmethod
    def parse(cls, text: str) -> "Process":
        """What `str` wrote, or as much of it as there is yet."""
        return cls(*(text.split() + [""] * 3)[:3])

    def __str__(self) -> str:
        return f"{self.host} {self.pid} {self.began}"

    def is_visible(self) -> bool:
        """Whether this process could see it if it lived: same machine, same container."""
        same_container = self.began.partition(":")[0] == _container()
        return self.host == socket.gethostname() and self.pid.isdecimal() and same_container

    def runs(self) -> bool:
        """Whether it lives; to be asked only of one that is visible. One whose start the system
        hides does (/proc may show no processes of other users)."""
        try:
            os.kill(int(self.pid), 0)
        except (ProcessLookupError, OverflowError, ValueError):  # no process has such a number
            return False
        except PermissionError:
            pass
        now = _began(int(self.pid))
        return now == self.began or now.endswith(":")


def _container() -> str:
    """The namespace of this process's numbers; "" where there are none."""
    try:
        return str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return ""


def _began(pid: int) -> str:
    """The namespace, and when the process started, in ticks since the machine did."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return f"{_container()}:"
    return f"{_container()}:{after_name.split()[19]}"


_alone: dict[Path, float] = {}
"""When this process last saw that no other has had each of its claims. Where it then stood still
for long (Ctrl-Z), another may have taken the claim over and given it back."""


class Claim:
    """A claim whose file is `file`, which need not exist."""

    def __init__(self, file: Path):
        self.file = file

    def take(self) -> bool:
        """Takes it for this process, unless a living one holds it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        holder = self.holder()
        if holder is not None and (self._lives(holder) or not self._clear(holder)):
            return False
        return self._make()

    def _make(self) -> bool:
        try:
            with self.file.open("x") as file:
                file.write(str(Process.here(os.getpid())))
        except FileExistsError:  # another was faster
            return False
        _alone[self.file] = time.time()
        return True

    def hand_over(self, pid: int) -> None:
        """Gives it to a process on this machine, which renews it from now on."""
        write_whole(self.file, str(Process.here(pid)))

    def held_by(self, *pids: int) -> bool:
        """Whether one of these processes of this machine holds it."""
        return self.holder() in [Process.here(pid) for pid in pids]

    def renew(self) -> None:
        """To be called every few seconds by its holder. It does nothing once another has taken the claim over."""
        with contextlib.suppress(OSError):  # a network file system may answer the next time
            if held := self.held_by(os.getpid()):
                os.utime(self.file)
            if held or (self.holder() is None and not self._lapsed()):
                _alone[self.file] = time.time()

    def _lapsed(self) -> bool:
        """Whether another process may have had it since this one took it."""
        return time.time() - _alone.get(self.file, -math.inf) >= STALE

    def release(self) -> None:
        """Gives it back, if this process holds it or its holder is dead."""
        holder = self.holder()
        if holder is not None and (self.held_by(os.getpid()) or not self._lives(holder)):
            self.file.unlink(missing_ok=True)
            _alone.pop(self.file, None)

    def alive(self) -> bool:
        """Whether a living process holds it."""
        holder = self.holder()
        return holder is not None and self._lives(holder)

    def check(self) -> None:
        """Takes it again if its file is merely gone. Raises UserError if another process has it, or
        may have had it."""
        if self.held_by(os.getpid()):
            return
        lapsed = self._lapsed()
        if self.holder() is None and not lapsed and self._make():
            return
        late = f" after process {os.getpid()} had not responded for {STALE:.0f} s" if lapsed else ""
        raise UserError(
            f"{self.file}: {self.who()} took over this run{late}; this one ends without saving"
        )

    def holder(self) -> Process | None:
        """The process that has, or had, it; None if nobody has."""
        try:
            return Process.parse(self.file.read_text(errors="replace"))
        except FileNotFoundError:
            return None

    def who(self) -> str:
        """The holder, for a message."""
        holder = self.holder()
        return f"process {holder.pid} on {holder.host}" if holder else "another process"

    def age(self) -> float:
        """Seconds since it was taken or renewed, by this machine's clock."""
        try:
            return time.time() - self.file.stat().st_mtime
        except FileNotFoundError:
            return float("inf")

    def _lives(self, holder: Process) -> bool:
        return self.age() < STALE and not (holder.is_visible() and not holder.runs())

    def _clear(self, dead: Process) -> bool:
        """Removes a dead claim. Of several processes that find it dead, one succeeds."""
        aside = self.file.with_name(f"{self.file.name}.{socket.gethostname()}.{os.getpid()}.dead")
        try:
            self.file.rename(aside)
        except FileNotFoundError:
            return False
        if Process.parse(aside.read_text(errors="replace")) != dead:  # another's, made since
            aside.rename(self.file)
            return False
        aside.unlink()
        return True


def keep_renewing(claims: Sequence[Claim]) -> Callable[[], None]:
    """Renews claims of this process in a thread; returns what stops it."""
    over = threading.Event()

    def renew() -> None:
        while not over.wait(STALE / 6):
            for claim in claims:
                claim.renew()

    threading.Thread(target=renew, daemon=True).start()
    return over.set


@contextlib.contextmanager
def holding(claims: Sequence[Claim]) -> Iterator[None]:
    """Takes all of these, and gives them back at the end. Raises UserError, with the holder, if a living process has one.

    A holder on another machine cannot be seen. This says so, and waits until it renews its claim,
    which shows that it lives, or until it is certain that it does not.
    """
    taken = []
    try:
        for claim in claims:
            before, patience, told = claim.age(), time.monotonic() + 2 * STALE, False
            while not claim.take():
                holder = claim.holder()
                if holder is None:
                    continue
                if holder.is_visible() or claim.age() < before or time.monotonic() > patience:
                    raise UserError(
                        f"--workdir: {claim.file.parent} is in use by {claim.who()}; "
                        "wait for its end, stop it, or choose another directory"
                    )
                if not told:
                    told = True
                    print(
                        f"{claim.file.parent} was in use by {claim.who()}, "
                        f"which cannot be seen from here; waiting up to {STALE:.0f} s for a sign of it",
                        file=sys.stderr,
                    )
                before = claim.age()
                time.sleep(1)
            taken.append(claim)
        stop = keep_renewing(taken)
        try:
            yield
        finally:
            stop()
    finally:
        for claim in taken:
            claim.release()
