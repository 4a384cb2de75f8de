"""What the launcher knows of its job from the notes of the processes, in a file of their machine.

A program may end before it has created a store, which the other workers wait for, and a program without any store
trains one model per worker. Both look like success. And a process can be restarted only in a job that runs. The notes,
one line each (`observe.notes`):

    RANK STORE           a worker creates a store, for example "0 dist_sync"
    job started          all processes have registered
    RANK joined          a worker has joined a job with servers, which therefore runs
    RANK ledger          the samples of a lost worker are given to others
    RANK refused         a worker ends with an error that would repeat (UsageError, DataError)
    ROLE RANK lost PID   the scheduler has declared a process dead, which may still exist
    ROLE RANK back PID   it has returned, or another one has taken its place
    job over STATUS WHY  the scheduler ends the job, with this exit status if it is not killed before it exits
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from echelon.cluster.messages import WORKER
from echelon.launch.supervision.verdict import Verdict
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
        self.has_started = False  # all processes have registered
        self.has_ledger = False
        self.verdict: Verdict | None = None  # of the scheduler, when the job is over
        self.refused: set[str] = set()  # the workers that ended with an error that would repeat
        self._lost: dict[str, int | None] = {}  # by the name of a process: its pid if it was declared dead

    def add_lines(self, lines: Iterable[str]) -> None:
        """Take new notes."""
        for line in lines:
            match line.split():
                case ["job", "over", status, *why]:
                    self.verdict = Verdict(int(status), " ".join(why))
                case [role, rank, "lost" | "back" as what, pid]:
                    self._lost[f"{role} {rank}"] = int(pid) if what == "lost" else None
                case ["job", "started"]:
                    self.has_started = True
                case [rank, "joined"]:
                    self.has_started = True
                    self._lost[f"{WORKER} {rank}"] = None
                case [rank, "refused"]:
                    self.refused.add(f"{WORKER} {rank}")
                case [_, "ledger"]:
                    self.has_ledger = True
                case [rank, store]:
                    self._stores.append((int(rank), store))

    @property
    def is_over(self) -> bool:
        """Whether the scheduler has ended the job."""
        return self.verdict is not None

    def take_lost(self) -> dict[str, int | None]:
        """Return who was declared dead (the pid), and who has joined or is back (None), since the last call."""
        changes, self._lost = self._lost, {}
        return changes

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
        return (
            RAN_ALONE.format(self._num_workers)
            if self._num_workers > 1 and not (self._stores or self.has_started)
            else None
        )
