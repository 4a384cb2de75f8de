"""Worker processes that have not registered: those that ended before, and those whose store has no servers. Pure."""

from __future__ import annotations

from echelon.cluster.messages import Forbidden, ServersUnused


class Unregistered:
    """What the scheduler knows of workers that are not members of the job, of which there are `num_workers`."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._exited: dict[int, str] = {}  # rank -> how a worker exited that never registered
        self._num_unused = 0  # workers whose store has no servers
        self.unused: set[int] = set()  # their connections that are open
        self.announcement: ServersUnused | None = None  # the first message of such a worker

    @property
    def first_exit(self) -> str | None:
        """How the first worker ended that never registered."""
        return next(iter(self._exited.values()), None)

    def announce(self, connection: int) -> None:
        """Record that a worker has a store without servers."""
        if connection not in self.unused and len(self.unused) >= self._num_workers:
            raise Forbidden(f"it announces a store without servers, as all {len(self.unused)} workers have")
        self._num_unused += connection not in self.unused
        self.unused.add(connection)

    def exit(self, rank: int, how: str) -> str:
        """Record that a worker has ended, and return how."""
        when = "" if self.announcement else " before it joined the job"
        self._exited[rank] = f"worker {rank} {how}{when}"
        return self._exited[rank]

    @property
    def all_have_ended(self) -> bool:
        """Whether no worker is left that could register."""
        return max(len(self._exited), self._num_unused - len(self.unused)) >= self._num_workers
