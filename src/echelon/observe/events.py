"""The event log: one JSON line per event, appended to `events.jsonl` by every process of a run.

`write` only appends to a queue. A thread writes whole lines with O_APPEND several times per second, so lines of
different processes never mix and a slow disk never delays a step. If the disk stops responding, the oldest events are
dropped, and an event with their number is written.

Events that any peer can cause as often as it likes, such as malformed messages, are counted: `count` writes the first
one at once, and then at most one with the number so far every SUMMARY_S.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from echelon.fault_points import fault_point

FLUSH_S = 0.2
SUMMARY_S = 10.0
MAX_QUEUED = 100_000
FILE_NAME = "events.jsonl"
_ENCODER = msgspec.json.Encoder(enc_hook=str)
_DECODER = msgspec.json.Decoder(dict[str, Any])


class _Counter:
    """The events of one kind that are counted: the fields of the latest, and how many were written."""

    def __init__(self) -> None:
        self.total = 0
        self.written = 0
        self.next_at = 0.0
        self.fields: dict[str, Any] = {}

    def is_due(self, now: float) -> bool:
        return self.total > self.written and now >= self.next_at


class EventLog:
    """Writes the events of one process. Without a directory it does nothing and starts no thread."""

    def __init__(self, directory: Path | None, role: str, rank: int) -> None:
        self._who = f"{role} {rank}"
        self._queue: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=MAX_QUEUED)
        self._counters: dict[str, _Counter] = {}  # by the kind of event
        self._dropped = 0
        self._stop = threading.Event()
        self._file = -1
        self._path = Path()
        self._thread: threading.Thread | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._path = directory / FILE_NAME
            self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._thread = threading.Thread(target=self._drain, name="echelon-events", daemon=True)
            self._thread.start()

    @classmethod
    def open(cls, directory: str | None, role: str, rank: int) -> EventLog:
        """Open the log of the run in `directory`; None returns a log that does nothing."""
        return cls(Path(directory) if directory else None, role, rank)

    @property
    def is_open(self) -> bool:
        """Whether events are written; without a directory, and after `close`, they are not."""
        return self._thread is not None

    def write(self, kind: str, **fields: Any) -> None:
        """Queue an event; returns immediately."""
        if self._thread is not None:
            if len(self._queue) == MAX_QUEUED:
                self._dropped += 1
            self._queue.append((time.time(), kind, fields))

    def write_now(self, kind: str, **fields: Any) -> None:
        """Write an event before this returns, so that it is not lost if the process is killed."""
        if self._thread is not None:
            self._append([_ENCODER.encode({"at": round(time.time(), 6), "who": self._who, "event": kind} | fields)])

    def count(self, kind: str, **fields: Any) -> None:
        """Count an event, whose `count` is the number of events of this kind so far; returns immediately."""
        if self._thread is not None:
            counter = self._counters.setdefault(kind, _Counter())
            counter.fields = fields
            counter.total += 1

    def close(self) -> None:
        """Write the queued events and stop the thread."""
        if self._thread is not None:
            self._stop.set()
            self._thread.join()
            self._thread = None
            os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drain(self) -> None:
        while True:
            stopping = self._stop.wait(FLUSH_S)
            self._queue_counted(math.inf if stopping else time.monotonic())
            lines = []
            while self._queue:
                at, kind, fields = self._queue.popleft()
                lines.append(_ENCODER.encode({"at": round(at, 6), "who": self._who, "event": kind} | fields))
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                lines.append(
                    _ENCODER.encode({"at": time.time(), "who": self._who, "event": "dropped", "count": dropped})
                )
            if lines:
                self._append(lines)
            if stopping:
                return

    def _queue_counted(self, now: float) -> None:
        """Queue the events that were counted and are due. At the end all of them are."""
        for kind, counter in list(self._counters.items()):
            if counter.is_due(now):
                counter.written, counter.next_at = counter.total, now + SUMMARY_S
                self.write(kind, **counter.fields, count=counter.written)

    def _append(self, lines: list[bytes]) -> None:
        """Append lines in one write, so that those of different processes do not mix; a full disk only loses events."""
        data = b"\n".join(lines) + b"\n"
        try:
            fault_point("events.write", path=self._path)
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            self._dropped += len(lines)


def append_event(directory: str | None, role: str, rank: int | None, kind: str, **fields: Any) -> None:
    """Write one event immediately, for a process that has no log yet; without a directory or a rank, nothing."""
    if directory is not None and rank is not None:
        with EventLog.open(directory, role, rank) as log:
            log.write(kind, rank=rank, **fields)


class EventReader:
    """Reads the events of a run from the beginning; a half-written last line is read once it is complete."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self.offset = 0  # bytes of the file that have been read
        self.torn = 0  # lines that a full disk or a crash cut off
        self._inode: int | None = None  # of the file that has been read

    @property
    def size(self) -> int:
        """The bytes of the file now; 0 if it does not exist."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    @property
    def was_replaced(self) -> bool:
        """Whether the file is another one than before, or was shortened: what has been read is then not in it."""
        try:
            now = self._path.stat()
        except OSError:
            return False
        return self._inode is not None and (now.st_ino != self._inode or now.st_size < self.offset)

    def poll(self, most_bytes: int | None = None) -> list[dict[str, Any]]:
        """Return the events since the last call; with `most_bytes`, those of about so many bytes of the file."""
        try:
            with self._path.open("rb") as file:
                self._inode = os.fstat(file.fileno()).st_ino
                file.seek(self.offset)
                data = file.read(-1 if most_bytes is None else most_bytes)
                if most_bytes is not None and len(data) == most_bytes:
                    data += file.readline()  # completes the last line
        except OSError:  # it does not exist yet, was deleted, or its disk does not respond now
            return []
        end = data.rfind(b"\n") + 1
        self.offset += end
        events = []
        for line in data[:end].splitlines():
            try:
                events.append(_DECODER.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.torn += 1
        return events
