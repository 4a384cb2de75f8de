"""The inputs of a slice on their way from its primary to its backup, and the answers that wait for them.

A shard is a deterministic state machine: the same inputs in the same order give the same weights, bit for bit. The
primary numbers the inputs of its slice and sends each one to the backup before it carries it out. An answer leaves the
primary when the backup has acknowledged the input that caused it, so whatever a worker was told, the backup has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from echelon.cluster.messages import Replicate, encode
from echelon.transport.interface import Buffer

RESEND_S = 1.0  # without an acknowledgement, until the inputs are sent again: their connection may have been cut
Send = Callable[[Sequence[Buffer]], None]


@dataclass(slots=True)
class _Input:
    """An input that the backup has not acknowledged."""

    number: int
    frames: list[Buffer]
    answers: list[Callable[[], None]] = field(default_factory=list)  # which its acknowledgement releases
    on_result: Callable[[bool], None] | None = None  # gets whether the backup has refused it
    refused: bool = False  # by the primary itself


class Stream:
    """The inputs that one backup has to carry out.

    `holds_answers`: whether answers wait for acknowledgements. While a new backup is brought up to date they do not.
    """

    def __init__(self, slice_number: int, send: Send, now: float, *, holds_answers: bool) -> None:
        self.holds_answers = holds_answers
        self.diverged: str | None = None  # why the backup does not have the state of the primary
        self._slice = slice_number
        self._send = send
        self._num_sent = 0
        self._unacknowledged: deque[_Input] = deque()
        self._progress_at = now  # when an input was acknowledged, or the first one began to wait

    @property
    def is_empty(self) -> bool:
        """Whether the backup has acknowledged everything."""
        return not self._unacknowledged

    @property
    def is_in_sync(self) -> bool:
        """Whether the backup has everything that was answered."""
        return self.holds_answers and self.diverged is None

    def forward(
        self,
        store: int,
        worker: int,
        body: bytes,
        frames: Sequence[Buffer],
        now: float,
        on_result: Callable[[bool], None] | None = None,
    ) -> None:
        """Send an input. Its frames must not change until it is acknowledged.

        `on_result`: the backup may refuse this one although the primary does not, and this gets whether it has.
        """
        self._num_sent += 1
        message = Replicate(self._num_sent, self._slice, store, worker, body)
        if not self._unacknowledged:
            self._progress_at = now
        self._unacknowledged.append(_Input(self._num_sent, [encode(message), *frames], on_result=on_result))
        self._send(self._unacknowledged[-1].frames)

    def note_refusal(self) -> None:
        """Record that the primary has refused the last input, which the backup must then refuse, too."""
        if self._unacknowledged:
            self._unacknowledged[-1].refused = True

    def hold(self, answer: Callable[[], None]) -> None:
        """Send an answer to the last input when the backup has acknowledged it."""
        if self.holds_answers and self._unacknowledged:
            self._unacknowledged[-1].answers.append(answer)
        else:
            answer()

    def acknowledge(self, number: int, refused: bool, now: float) -> None:
        """Release the answers to all inputs up to a number, unless the backup has done something else with the last."""
        self._progress_at = now
        while self.diverged is None and self._unacknowledged and self._unacknowledged[0].number <= number:
            first = self._unacknowledged[0]
            was_refused = refused and first.number == number
            if first.on_result is not None:
                first.on_result(was_refused)
            elif was_refused != first.refused and first.number == number:
                self.diverged = f"its backup {'refused' if refused else 'accepted'} input {number}"
                return
            self._unacknowledged.popleft()
            for answer in first.answers:
                answer()

    def resend_if_due(self, now: float) -> bool:
        """Send all inputs again that were not acknowledged for a while. Return whether it did."""
        if not self._unacknowledged or now - self._progress_at < RESEND_S:
            return False
        self._progress_at = now
        for waiting in self._unacknowledged:
            self._send(waiting.frames)
        return True

    def close(self) -> None:
        """Release all answers: there is no backup any more."""
        self.holds_answers = False
        while self._unacknowledged:
            for answer in self._unacknowledged.popleft().answers:
                answer()


class Received:
    """The inputs that a backup has received: it carries them out in order, each one once."""

    def __init__(self) -> None:
        self.last = 0  # the number of the last input that was carried out

    def is_next(self, number: int) -> bool:
        """Return whether an input is the next one. An earlier one was sent twice; a later one will be sent again."""
        if number != self.last + 1:
            return False
        self.last = number
        return True
