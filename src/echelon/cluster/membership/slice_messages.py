"""Servers that are lost, replaced and filled: which of them store which slice. `slices` has the pure functions."""

from __future__ import annotations

from echelon.cluster.membership.members import Send
from echelon.cluster.membership.patience import Patience
from echelon.cluster.membership.rules import RESTART_S, Rules
from echelon.cluster.membership.slices import (
    describe_promotions,
    has_replicas,
    unstored,
    with_backups,
    with_sync,
    without_backup,
    without_server,
)
from echelon.cluster.membership.views import Views
from echelon.cluster.messages import SERVER, Departure, Forbidden, HeldSlice, SliceInSync


class SliceMessages(Views):
    """Members of a job of which some are servers."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()
        self._rules = rules
        self._without_server, self._without_backup = Patience(), Patience()

    @property
    def servers(self) -> list[int]:
        """The ranks of the living servers."""
        return [member.rank for member in self.members if member.role == SERVER]

    def slice_in_sync(self, connection: int, message: SliceInSync) -> list[Send]:
        """Record that a new backup has everything, or that one is of no use. One of an earlier view is ignored."""
        member = self._members.get(connection)
        if member is None:
            return []
        if member.role != SERVER or message.slice >= len(self.slices):
            raise Forbidden(f"it reports about slice {message.slice}, which it does not store")
        one = self.slices[message.slice]
        if (one.primary, one.backup) != (member.rank, message.backup):
            return []
        if not message.in_sync:
            self.slices = without_backup(self.slices, message.slice)
            reason = f"the copy of slice {message.slice} on server {message.backup} is not that of its primary"
            return self._new_view(Departure.MOVED, reason)
        if one.in_sync:
            return []
        self.slices = with_sync(self.slices, message.slice, message.backup)
        return self._new_view(Departure.MOVED, f"server {message.backup} has a copy of slice {message.slice}")

    def _take_held(self, connection: int, held: list[HeldSlice]) -> list[Send]:
        """Adopt what a server that has returned reports: its messages about backups may have been lost."""
        sends = []
        for one in held:
            backup = self.slices[one.slice].backup if one.slice < len(self.slices) else None
            if one.in_sync and backup is not None:
                sends += self.slice_in_sync(connection, SliceInSync(one.slice, backup))
        return sends

    def _continue_without_server(self, rank: int, reason: str) -> list[Send] | None:
        """Let backups take over. Return None if a slice is lost and nobody starts a new process of its server."""
        after = without_server(self.slices, rank)
        if unstored(after) and not (self._rules.can_restart and self.workers):  # a new process gets values from workers
            return None
        if not self._rules.can_restart and has_replicas(len(after), self._rules.replicas):
            after = with_backups(after, self.servers)
        promoted = describe_promotions(self.slices, after)
        self.slices = after
        return self._new_view(Departure.DIED, f"{reason}; {promoted}" if promoted else reason)

    def _lost_servers(self, now: float) -> str | None:
        """Return which servers have not come back in time, or None."""
        empty = unstored(self.slices)
        if self._without_server.lasted_s(now, bool(empty)) <= RESTART_S:
            return None
        gone = ", ".join(f"server {number}" for number in empty)
        return f"no new process of {gone} joined within {RESTART_S:g} s, so its values are lost"

    def _replace_backups(self, now: float) -> list[Send]:
        """Give slices that lost a backup another one, when its server has not come back."""
        if not has_replicas(len(self.slices), self._rules.replicas):
            return []
        changed = with_backups(self.slices, self.servers)
        if self._without_backup.lasted_s(now, changed != self.slices) <= RESTART_S:
            return []
        self.slices = changed
        return self._new_view(Departure.MOVED, "slices without a backup get another one")
