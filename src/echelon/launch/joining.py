"""What the launcher can see of its workers' stores: which workers have created one.

A program may end before it has created a store, which the other workers wait for, and a program without any store
trains one model per worker. Both look like success. Each worker therefore adds a line with its rank and the name of its
store to a file of its machine (`kvstore.create`), which the launcher or its agent there reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from echelon.schemes.stores import store_kind

RAN_ALONE = (
    "no worker created a Trainer or a store, so the {} workers ran independently of each other. To train one model, "
    "create echelon.Trainer(model, optimizer, 'dist_sync') in the program; start a program that uses torch.distributed "
    "itself with torchrun"
)


class JoinedFile:
    """The file to which the workers of one machine add lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_read = 0
        path.touch()

    def new_lines(self) -> list[str]:
        """Return the lines that were added since the last call."""
        lines = self.path.read_text().splitlines()
        new, self._num_read = lines[self._num_read :], len(lines)
        return new


class Joining:
    """The workers of a job: which of them have joined it, and which have ended."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._stores: list[tuple[int, str]] = []  # the rank of a worker and the name of its store
        self._ended: set[int] = set()  # with status 0, and without having joined

    def add_lines(self, lines: Iterable[str]) -> None:
        """Record workers that have created a store."""
        self._stores += [(int(rank), store) for rank, store in map(str.split, lines)]

    def worker_ended(self, rank: int) -> None:
        """Record that a worker has ended with status 0."""
        self._ended.add(rank)

    @property
    def has_joined(self) -> bool:
        """Whether a worker has created a store."""
        return bool(self._stores)

    def missing(self) -> tuple[int, str] | None:
        """Return a worker that ended without joining, although others have joined, and what is wrong with that."""
        if not self._ended:
            return None
        joined = {rank for rank, store in self._stores if store_kind(store).spans_workers}
        self._ended -= joined
        if not self._ended or not joined:
            return None
        waiting = ", ".join(f"worker {rank}" for rank in sorted(joined))
        return min(
            self._ended
        ), f"exited with status 0 before it created a Trainer or a store, for which {waiting} waited"

    def warning(self) -> str | None:
        """Return what to tell the user after a successful end, or None."""
        return RAN_ALONE.format(self._num_workers) if self._num_workers > 1 and not self._stores else None
