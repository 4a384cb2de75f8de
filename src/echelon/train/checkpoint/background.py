"""Writes checkpoints while training goes on: the caller's thread copies the tensors, another thread writes the file.

At most one copy exists, so the extra memory is that of one checkpoint; it is kept for the next one. If a checkpoint is
still being written, the next one waits for it: every position that the user asked for is saved, in order, and all ranks
save the same positions. A disk that is slower than the interval between checkpoints therefore slows training down, and
the log says so.

The writing thread has the priority of the others. A lower one made steps slower: the thread then waits for a core while
it has Python's lock, which the steps need.

A checkpoint that cannot be written, for example because the disk is full, does not end training. The failure is logged
and kept in `failures`, and the files before it are unchanged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from echelon.errors import EchelonError
from echelon.train.checkpoint.format import Abandoned, Checkpoint, Image

SLOW_S = 1.0  # a wait for the checkpoint before that is worth a line in the log
SIGNALS_S = 0.5  # after which a wait lets Python handle signals

log = logging.getLogger(__name__)


class BackgroundWriter:
    """Writes one checkpoint at a time. As a context manager it waits at the end; Ctrl-C abandons the file instead.

    `on_failure(path, reason)` is called in the writing thread, once per file that could not be written for a reason.
    """

    def __init__(self, on_failure: Callable[[Path, str], None] = lambda path, reason: None) -> None:
        self._on_failure = on_failure
        self._thread: threading.Thread | None = None
        self.failures: dict[Path, str] = {}  # why a file was not written, until it is written later
        self._abandoned = threading.Event()
        self._image: Image | None = None

    def write(self, path: Path, checkpoint: Checkpoint, on_saved: Callable[[], None] = lambda: None) -> None:
        """Copy a checkpoint and begin to write it; `on_saved` is called in the writing thread when it is on the disk.

        Waits first if the checkpoint before is not written yet.
        """
        start = time.monotonic()
        self.wait()
        waited = time.monotonic() - start
        if waited > SLOW_S:
            log.warning(
                "training waited %.1f s for the checkpoint before %s: the disk is slower than the interval between "
                "checkpoints; save less often, or use a faster disk",
                waited,
                path,
            )
        self._image = Image(checkpoint, self._image)
        self._thread = threading.Thread(
            target=self._run, args=(path, self._image, on_saved), name="echelon-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written."""
        while self._thread is not None:
            # A signal that arrives just before `join` begins to wait does not interrupt it. Python handles it after.
            self._thread.join(SIGNALS_S)
            if not self._thread.is_alive():
                self._thread = None

    def __enter__(self) -> BackgroundWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._abandoned.set()
        self.wait()

    def _run(self, path: Path, image: Image, on_saved: Callable[[], None]) -> None:
        try:
            image.save(path, self._abandoned.is_set)
            self.failures.pop(path, None)
            on_saved()
        except Abandoned:
            pass
        except Exception as error:  # any: training must not end because of a file
            reason = str(error) if isinstance(error, EchelonError) else f"cannot write the checkpoint {path}: {error!r}"
            if self.failures.get(path) == reason:
                return  # it was reported when the same file was written before
            self.failures[path] = reason
            log.error("%s. Training goes on, and earlier checkpoints are unchanged", reason)
            self._on_failure(path, reason)
