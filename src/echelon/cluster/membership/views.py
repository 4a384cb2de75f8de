"""The views of a job: numbered states of its membership, with what is known of its result."""

from __future__ import annotations

from echelon.cluster.membership.members import Members, Send
from echelon.cluster.messages import Departure, Member, Outcome, Slice, View, shorten

MAX_DEFECTS = 100
_UNTRAINED = "; nobody has trained the rest of its samples"


class Views(Members):
    """Members whose changes are views. All members receive every view."""

    def __init__(self) -> None:
        super().__init__()
        self.slices: list[Slice] = []
        self.last_view: View | None = None
        self.defects: list[str] = []  # why the result is not whole, the first ones
        self._num_finished = 0  # workers

    @property
    def view(self) -> int:
        """The number of the view, 0 before the job runs."""
        return self.last_view.number if self.last_view is not None else 0

    @property
    def outcome(self) -> Outcome:
        """What is known of the result."""
        return Outcome(self._num_finished, shorten(self.defects[0]) if self.defects else None)

    def add_defect(self, connection: int, reason: str) -> list[Send]:
        """Record why the result of the job is not whole. The job goes on, but its status will say so."""
        if connection in self._members:
            self.note_defect(reason)
        return []

    def note_defect(self, reason: str) -> None:
        """Record a defect that the scheduler has found itself."""
        if len(self.defects) < MAX_DEFECTS:
            self.defects.append(reason)

    def _add_untrained(self, reason: str) -> None:
        """Record that a worker was lost, in a job without a ledger."""
        self.note_defect(f"{reason}{_UNTRAINED}")

    def _trains_itself(self, member: Member) -> None:
        """Correct what was recorded of a worker that has returned: it trains the rest of its samples itself."""
        lost = f"{member} was removed for a while, and the step that it was in is lost"
        is_of_it = [one.startswith(f"{member} died: ") and one.endswith(_UNTRAINED) for one in self.defects]
        self.defects = [lost if found else one for found, one in zip(is_of_it, self.defects, strict=True)]

    def _new_view(self, departure: Departure, reason: str) -> list[Send]:
        number, reason = self.view + 1, shorten(reason)
        self.last_view = View(number, self.workers, reason, departure, self.members, self.slices, self.outcome)
        return self.to_all(self.last_view)
