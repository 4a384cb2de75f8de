"""What a scheduler that was started again learns from the processes of the job that return to it. Pure.

The newest view that a process reports says who is in the job. Processes that it does not list were removed before; the
processes that it lists and that do not return in time are lost.
"""

from __future__ import annotations

from collections.abc import Mapping

from echelon.cluster.membership.slices import with_sync
from echelon.cluster.messages import Member, Return, Slice


class Rebuilding:
    """The reports of the processes that have returned, by connection."""

    def __init__(self) -> None:
        self._reports: dict[int, Return] = {}

    def add(self, connection: int, report: Return) -> None:
        """Take the report of a process. A later connection of the same process replaces the earlier one."""
        for earlier, known in list(self._reports.items()):
            if known.member.token == report.member.token:
                del self._reports[earlier]
        self._reports[connection] = report

    def lose(self, connection: int) -> None:
        """Forget a process whose connection has closed again."""
        self._reports.pop(connection, None)

    def __contains__(self, connection: int) -> bool:
        return connection in self._reports

    @property
    def is_empty(self) -> bool:
        """Whether no process has returned."""
        return not self._reports

    @property
    def newest(self) -> Return:
        """The report with the newest view."""
        return max(self._reports.values(), key=lambda report: report.view)

    @property
    def returned(self) -> Mapping[int, Return]:
        """The reports of the processes that are members of the newest view, by connection."""
        tokens = {member.token for member in self.newest.members}
        return {connection: report for connection, report in self._reports.items() if report.member.token in tokens}

    @property
    def removed(self) -> list[int]:
        """The connections of processes that are not members of the newest view."""
        return [connection for connection in self._reports if connection not in self.returned]

    @property
    def missing(self) -> list[Member]:
        """The members of the newest view that have not returned."""
        if self.is_empty:
            return []
        here = {report.member.token for report in self._reports.values()}
        return [member for member in self.newest.members if member.token not in here]

    @property
    def is_complete(self) -> bool:
        """Whether all members of the newest view have returned."""
        return not self.is_empty and not self.missing

    def slices(self) -> list[Slice]:
        """Return the slices of the newest view, with what their primaries know about their backups."""
        slices = list(self.newest.slices)
        for report in self.returned.values():
            for held in report.held:
                one = slices[held.slice] if held.slice < len(slices) else None
                if one is None or one.primary != report.member.rank or one.backup is None:
                    continue
                if held.is_primary and held.in_sync and report.view == self.newest.view:  # of the same backup
                    slices = with_sync(slices, held.slice, one.backup)
        return slices
