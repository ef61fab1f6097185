"""TensorBoard's event file, written by the calling thread.

`tensorboardX.SummaryWriter` writes in a thread of its own. If that thread fails, on a full disk for
example, the training loop waits for it forever."""

import time
from pathlib import Path

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog

FLUSH_SECONDS = 30  # time after which events are written to disk, so that TensorBoard shows them


class EventFile:
    """The event file of one start of a run. Events of earlier starts from `step` on are hidden."""

    def __init__(self, folder: Path, step: int):
        folder.mkdir(parents=True, exist_ok=True)
        self._events, self._flushed = EventsWriter(str(folder / "events")), 0.0
        self._write(step, file_version="brain.Event:2")
        self._write(step, session_log=SessionLog(status=SessionLog.START))

    def scalar(self, name: str, value: float, step: int) -> None:
        self._write(step, summary=summary.scalar(name, value))

    def text(self, name: str, markdown: str, step: int) -> None:
        self._write(step, summary=summary.text(name, markdown))

    def close(self) -> None:
        self._events.close()

    def _write(self, step: int, **content) -> None:
        self._events.write_event(Event(step=step, wall_time=time.time(), **content))
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._events.flush()
            self._flushed = time.monotonic()
