"""What a server's slices exchange with other servers: inputs for the backups, and acknowledgements of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from echelon.cluster.messages import (
    Between,
    Malformed,
    Member,
    Replicate,
    Replicated,
    Slice,
    SliceInSync,
    encode,
)
from echelon.errors import UsageError
from echelon.observe.events import EventLog
from echelon.server.slices.hosted_slice import HostedSlice
from echelon.server.slices.links import Links
from echelon.transport.interface import Peer


class Backups:
    """The backups of the slices whose primary this server is. It is the backup of others, whose inputs it receives."""

    def __init__(
        self,
        hosted: Mapping[int, HostedSlice],
        links: Links,
        events: EventLog,
        tell_in_sync: Callable[[SliceInSync], None],
    ) -> None:
        """`hosted`: the slices that this server stores now, by number. `tell_in_sync` tells the scheduler."""
        self._hosted = hosted
        self._links = links
        self._events = events
        self._tell_in_sync = tell_in_sync
        self._backups: dict[int, Member] = {}  # by the number of the slice
        self._diverged: set[int] = set()  # slices whose backup does not have their state

    def follow(self, hosted: HostedSlice, stored: Slice, now: float) -> None:
        """Replicate a slice to the backup that a view names, and to no other."""
        number = hosted.number
        backup = None if stored.backup is None else self._links.member(stored.backup)
        if backup == self._backups.get(number):
            return
        hosted.drop_backup()
        self._diverged.discard(number)
        self._backups.pop(number, None)
        if backup is not None:
            self._backups[number] = backup
            try:
                hosted.use_backup(partial(self._links.send, backup.rank), now)
            except UsageError as error:
                self._report_divergence(hosted, backup, str(error))
                return
            if not stored.in_sync and not hosted.shards:
                self._tell_in_sync(SliceInSync(number, backup.rank))

    def carry_out(self, peer: Peer, message: Between, frames: Sequence[memoryview]) -> None:
        """Carry out an input of a primary as its backup, or take the acknowledgement of a backup."""
        sender = self._links.server_of(peer)
        if self._links.was_server(peer):
            return  # it does not know yet that it was removed
        if sender is None:
            raise Malformed(f"{type(message).__name__} of a process that is not a server of the job")
        if isinstance(message, Replicate):
            hosted = self._hosted.get(message.slice)
            if hosted is None or hosted.is_primary:
                return  # from a server that does not know yet that it is not the primary any more
            hosted.receive(message, frames[1:])
            self._free_empty(hosted, message)
            self._links.send(sender, [encode(hosted.acknowledgement())])
        elif isinstance(message, Replicated):
            hosted = self._hosted.get(message.slice)
            backup = self._backups.get(message.slice)
            if hosted is not None and hosted.stream is not None and backup is not None and backup.rank == sender:
                self._acknowledge(hosted, backup, message)

    def _free_empty(self, hosted: HostedSlice, message: Replicate) -> None:
        shard = hosted.shards.get(message.store)
        if shard is not None and not shard.workers:
            hosted.free(message.store)

    def _acknowledge(self, hosted: HostedSlice, backup: Member, message: Replicated) -> None:
        stream = hosted.stream
        assert stream is not None
        stream.acknowledge(message.id, message.refused, time.monotonic())
        if stream.diverged is not None:
            self._report_divergence(hosted, backup, stream.diverged)
        elif not stream.holds_answers and stream.is_empty:
            stream.holds_answers = True
            self._tell_in_sync(SliceInSync(hosted.number, backup.rank))

    def _report_divergence(self, hosted: HostedSlice, backup: Member, reason: str) -> None:
        """Tell the scheduler that a backup is of no use. Answers wait for the view that does not have it."""
        if hosted.number in self._diverged:
            return
        self._diverged.add(hosted.number)
        self._events.write("diverged", slice=hosted.number, backup=backup.rank, reason=reason)
        print(f"slice {hosted.number} goes on without a backup: {reason}", file=sys.stderr, flush=True)
        self._tell_in_sync(SliceInSync(hosted.number, backup.rank, in_sync=False))
