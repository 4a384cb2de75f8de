"""The event log: one JSON line a fact, appended to `events.jsonl` by every process of a run.

`write` only appends to a queue; a thread writes whole lines with O_APPEND several times a second, so lines of
different processes never mix and a slow disk never holds a step. If the disk stands still, the oldest facts are
dropped and counted, and the count is itself an event.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

FLUSH_S = 0.2
MAX_QUEUED = 100_000
FILE_NAME = "events.jsonl"


class EventLog:
    """A process's pen. Without a directory it writes nothing and costs nothing."""

    def __init__(self, directory: Path | None, role: str, rank: int) -> None:
        self._where = f"{role} {rank}"
        self._queue: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=MAX_QUEUED)
        self._dropped = 0
        self._stop = threading.Event()
        self._file = -1
        self._thread: threading.Thread | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(directory / FILE_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._thread = threading.Thread(target=self._drain, name="echelon-events", daemon=True)
            self._thread.start()

    @classmethod
    def open(cls, directory: str | None, role: str, rank: int) -> EventLog:
        """The log of the run in `directory`, or a silent one."""
        return cls(Path(directory) if directory else None, role, rank)

    def write(self, kind: str, **facts: Any) -> None:
        """Note a fact. Returns at once."""
        if self._thread is not None:
            if len(self._queue) == MAX_QUEUED:
                self._dropped += 1
            self._queue.append((time.time(), kind, facts))

    def close(self) -> None:
        """Write what is left and stop."""
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
        encoder = msgspec.json.Encoder(enc_hook=str)
        while True:
            stopping = self._stop.wait(FLUSH_S)
            lines = []
            while self._queue:
                at, kind, facts = self._queue.popleft()
                lines.append(encoder.encode({"at": round(at, 6), "who": self._where, "event": kind} | facts))
            if self._dropped:
                dropped, self._dropped = self._dropped, 0
                lines.append(
                    encoder.encode({"at": time.time(), "who": self._where, "event": "dropped", "count": dropped})
                )
            if lines:
                self._append(lines)
            if stopping:
                return

    def _append(self, lines: list[bytes]) -> None:
        """One write, so that lines of different processes do not mix; a full disk costs facts, not the run."""
        data = b"\n".join(lines) + b"\n"
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            self._dropped += len(lines)


class EventReader:
    """Reads a run's events from the beginning and then as they come; a half-written last line waits."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._at = 0
        self.torn = 0  # lines that a full disk or a crash cut

    def poll(self) -> list[dict[str, Any]]:
        """The events since the last call."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._at += end
        events = []
        for line in data[:end].splitlines():
            try:
                events.append(msgspec.json.decode(line, type=dict[str, Any]))
            except msgspec.DecodeError:
                self.torn += 1
        return events
