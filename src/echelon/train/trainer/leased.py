"""The samples that a Trainer's steps use: batches of leases, in the order in which the steps use them.

A batch is taken, then a step uses it, then all servers have applied the step, and when all batches of a lease are
applied, the lease is reported as trained. `take` returns batches to a loop or to a loader that reads ahead. The steps
that follow use them in the same order. A step that accumulates several batches uses all of them.

A worker that was removed from the job loses its leases, but a loop or a loader may have batches of them that no step
has used. They are marked as lost when the worker joins again. A step that uses a lost batch becomes an empty one,
because other workers train its samples.

In lock-step, each round needs a push of every worker. A worker without samples for a round makes an empty step, which
carries no gradient: in the last round of an epoch, and after it has joined, until the rounds of its first lease begin.
These steps are made here, so a loop sees no empty batch.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from echelon.cluster.messages import CutReady, Lease, Work
from echelon.errors import UsageError, WorkerRemoved
from echelon.kvstore.leases import Leases

MAX_WORK = 256  # intervals that the pushes of one step name
UNUSED_S = 0.5  # how long a worker waits for a lease before batches that no step has used count as trained
NO_LEASE = 0


class LeasedBatch(NamedTuple):
    """The positions [start, stop) of the order of an epoch."""

    epoch: int
    start: int
    stop: int

    @property
    def num_samples(self) -> int:
        return self.stop - self.start


@dataclass(slots=True, eq=False)
class _Part:
    """A batch with its lease, of which it is batch number `count`, counted from 1."""

    batch: LeasedBatch
    lease: int
    count: int
    is_last: bool
    is_lost: bool = False  # others train it, because this worker was removed after it was taken

    def lose(self) -> None:
        self.lease, self.is_last, self.is_lost = NO_LEASE, False, True

    @property
    def is_empty(self) -> bool:
        return self.batch.start == self.batch.stop


class Steps(Protocol):
    """What leased batches need from a Trainer."""

    def make_empty_round(self) -> None:
        """Take part in a round without a gradient, with all Trainers of this worker that have the round, too."""

    def sync(self) -> None:
        """Wait until every step is applied."""

    @property
    def wait_s(self) -> float: ...

    @property
    def next_clock(self) -> int:
        """The clock of the next step in the store."""

    def set_work(self, work: list[Work]) -> None:
        """Say which samples the next step uses."""

    def join_again(self, error: WorkerRemoved) -> None:
        """Join the job again, after the scheduler removed this worker, and call `forget`."""


class LeasedBatches:
    """The batches of one ledger for one worker. The Trainer calls `stepped` after each step."""

    def __init__(self, leases: Leases, steps: Steps, *, reads_ahead: bool) -> None:
        """`reads_ahead`: several batches may be taken before a step uses the first. Each step then uses one.

        Otherwise a step uses all batches that were taken since the last step, so a loop may leave a batch out.
        """
        self.leases = leases
        self.on_cut: Callable[[CutReady], None] = lambda cut: None  # called by `take`, while no worker has a lease
        self._steps = steps
        self.reads_ahead = reads_ahead
        self._ahead: deque[_Part] = deque()  # of leases that have arrived
        self._taken: deque[_Part] = deque()  # that no step has used yet
        self._in_flight: deque[list[_Part]] = deque()  # of steps that may not be applied yet
        self._num_accumulated = 0  # of the taken ones, those whose gradients were only accumulated
        self._adds_batch = True  # whether the next step uses a batch besides the accumulated ones
        self._trained: dict[int, int] = {}  # by lease: how many of its batches are applied and not reported yet
        self._makes_empty_steps = False
        self._own_time = _OwnTime(steps)

    @property
    def epoch(self) -> int:
        """The present epoch: the first one that is not complete."""
        return self.leases.epoch

    @property
    def ended(self) -> bool:
        """Whether all samples of all epochs are trained."""
        return self.leases.ended and not self._ahead

    def take(self, *, wait: bool = True) -> LeasedBatch | None:
        """Return the next batch. None: all epochs are trained (`ended`), or without `wait`: there is none yet.

        With `wait`, no batch may be on its way to a step. If batches are read ahead, those that were taken and not used
        are returned again then.
        """
        if wait and self.reads_ahead:
            self._take_back()
        while self.wait_for_batch() if wait else self._has_batch():
            if len(self._ahead) == 1:
                self.leases.ask(self._clock_after_taken() + 1)
            if not self._ahead:
                continue  # this worker was removed, and has joined the rounds again to know its clock
            part = self._ahead.popleft()
            self._taken.append(part)
            if not part.is_empty:
                self._announce()
                return part.batch
            self._make_empty_steps()
        return None

    def wait_for_batch(self) -> bool:
        """Wait until there is a batch for this worker. Return False if all epochs are trained, or if interrupted."""
        while not self._has_batch() and not self.leases.ended and not self.leases.is_interrupted():
            try:
                self._wait_for_lease()
            except WorkerRemoved as error:
                self._steps.join_again(error)
        if self.ended:
            self._report_steps()
            self._count_unused()
        return bool(self._ahead)

    def _has_batch(self) -> bool:
        """Return whether there is a batch or an empty step, after the lease that may have arrived was added."""
        while not self._ahead and (lease := self.leases.take(wait=False)) is not None:
            self._add(lease)
        return bool(self._ahead)

    def next_epoch(self) -> int | None:
        """Return the epoch of the next batch, or None if there is no batch now, without waiting.

        Epochs overlap, so it can be the one before that of the last batch: others lost these samples.
        """
        return self._ahead[0].batch.epoch if self._has_batch() else None

    def report(self) -> None:
        """Wait until all steps are applied, and report them. The present epoch may be complete then."""
        try:
            self._report_steps()
        except WorkerRemoved as error:
            self._steps.join_again(error)

    def _take_back(self) -> None:
        """Let batches come again that were taken and not used. Gradients have those that were accumulated already."""
        accumulated = list(islice(self._used_by_steps(), self._num_accumulated))
        unused = [part for part in self._taken if part not in accumulated and not part.is_lost]
        self._ahead.extendleft(reversed(unused))
        self._taken = deque(accumulated)

    def _wait_for_lease(self) -> None:
        """Wait for the next lease. All workers may wait for this one's report of its last steps.

        Batches that were taken and not used stay with the next step, because their gradients may be accumulated. If no
        lease comes, the epoch may not be able to end without them, and they count as trained.
        """
        self._report_steps()
        self.leases.ask(self._clock_after_taken())
        has_unused = any(part.lease != NO_LEASE for part in self._taken)
        with self._own_time.excluded():
            lease = self._take_lease(UNUSED_S if has_unused else None)
        if lease is not None:
            self._add(lease)
        elif (cut := self.leases.cut) is not None:
            self._count_unused()
            self.on_cut(cut)
            self.leases.end_cut()
        elif has_unused and not self.leases.is_interrupted():
            self._count_unused()

    def _take_lease(self, seconds: float | None) -> Lease | None:
        """Wait for a lease, for some seconds if they are given."""
        if seconds is None:
            return self.leases.take(wait=True)
        is_interrupted, deadline = self.leases.is_interrupted, time.monotonic() + seconds
        self.leases.is_interrupted = lambda: is_interrupted() or time.monotonic() >= deadline
        try:
            return self.leases.take(wait=True)
        finally:
            self.leases.is_interrupted = is_interrupted

    def _add(self, lease: Lease) -> None:
        """Append the batches of a lease, after the empty steps until its first round."""
        empty = LeasedBatch(lease.epoch, 0, 0)
        for _ in range(lease.first_clock - self._clock_after_taken()):
            self._ahead.append(_Part(empty, NO_LEASE, 0, is_last=False))
        for count, (start, stop) in enumerate(lease.batches, 1):
            is_last = count == len(lease.batches)
            self._ahead.append(_Part(LeasedBatch(lease.epoch, start, stop), lease.number, count, is_last))

    def _clock_after_taken(self) -> int:
        return self._steps.next_clock + len(self._taken)

    # --- steps

    @property
    def has_accumulated(self) -> bool:
        """Whether gradients of batches were accumulated, which the next step uses, too."""
        return self._num_accumulated > 0

    def accumulated(self, batches: int | None = None, samples: int | None = None) -> None:
        """Note that gradients of `batches` batches were only accumulated: the next step uses them, too.

        If batches are read ahead, None means one batch. `samples`, those that forward passes have seen, must agree.
        """
        self._num_accumulated += self._num_batches(batches, samples) if self.reads_ahead else 1
        self._announce()

    def _num_batches(self, batches: int | None, samples: int | None) -> int:
        following = list(self._used_by_steps())[self._num_accumulated :]
        if batches is None and following and following[0].is_lost:
            return 1  # this worker was removed, and the count of samples may have begun again inside
        if batches is None:
            size = following[0].batch.num_samples if following else 0
            if samples != size:
                raise UsageError(
                    f"accumulate(): forward passes saw {samples or 0} samples, but the next batch of the LeaseSampler "
                    f"has {size}, so it is not known which batches they are; pass their number: accumulate(batches=n), "
                    "or batches=0 for a part of a batch that is not its last one"
                )
            return 1
        if not 0 <= batches <= len(following):
            raise UsageError(
                f"accumulate(batches={batches}), but the LeaseSampler has yielded {len(following)} batches that no "
                "step has used"
            )
        return batches

    def begin_step(self, *, adds_batch: bool) -> None:
        """Note that a step is being made. `adds_batch`: it uses a batch besides those that were accumulated."""
        if self._adds_batch != adds_batch and not self._makes_empty_steps:
            self._adds_batch = adds_batch
            self._announce()

    def stepped(self, *, is_applied: bool) -> None:
        """Note that a step was made. `is_applied`: all servers have applied it; else, those before it are applied."""
        parts = self._take_of_step()
        if any(part.is_lost for part in parts):
            self._return_leases(parts)
            parts = []
        self._in_flight.append(parts)
        self._note_applied(0 if is_applied else 1)
        self._announce()
        self._make_empty_steps()

    @property
    def loses_step(self) -> bool:
        """Whether the next step must not have a gradient, because other workers train samples that it would use."""
        return any(part.is_lost for part in self._of_step())

    def drop_step(self) -> None:
        """Note that a step was not made: this worker was removed. Its batches do not come again."""
        self._take_of_step()

    def _return_leases(self, parts: Iterable[_Part]) -> None:
        """Return the leases of batches that were accumulated with lost ones, and have no step now."""
        leases = {part.lease for part in parts} - {NO_LEASE}
        if not leases:
            return
        self._report_steps()
        for lease in sorted(leases):
            if lease in self._trained:
                self._report(lease)
            self.leases.give_back(lease)
        self._ahead = deque(part for part in self._ahead if part.lease not in leases)
        for part in self._taken:
            if part.lease in leases:
                part.lose()

    def _used_by_steps(self) -> Iterable[_Part]:
        """Return the taken batches that have samples, in the order in which steps use them."""
        return (part for part in self._taken if not part.is_empty)

    def _of_step(self) -> list[_Part]:
        """Return those of the taken batches that the next step uses. Empty steps between them follow it."""
        if self._makes_empty_steps:
            return list(islice(self._taken, 1))
        limit = self._num_accumulated + (self._adds_batch or not self._num_accumulated)
        return list(islice(self._used_by_steps(), limit if self.reads_ahead else None))

    def _take_of_step(self) -> list[_Part]:
        parts = self._of_step()
        self._taken = deque(part for part in self._taken if part not in parts)
        if not self._makes_empty_steps:
            self._num_accumulated, self._adds_batch = 0, True
        return parts

    def _announce(self) -> None:
        """Let the pushes of the next step say which samples they use."""
        work: list[Work] = []
        ledger = self.leases.opened.ledger
        for part in self._of_step():
            if part.is_lost:
                work = []
                break
            epoch, start, stop = part.batch
            if work and (work[-1].epoch, work[-1].stop) == (epoch, start):
                work[-1] = Work(epoch, work[-1].start, stop, ledger)
            elif start < stop:
                work.append(Work(epoch, start, stop, ledger))
        if len(work) > MAX_WORK and self._num_accumulated:
            raise UsageError(
                f"a step uses {len(work)} separate intervals of samples, and can name at most {MAX_WORK}; accumulate "
                "the gradients of fewer batches per step"
            )
        self._steps.set_work(work[:MAX_WORK])

    def _make_empty_steps(self) -> None:
        """Make the empty steps that are next."""
        while not self._makes_empty_steps and self._taken and self._taken[0].is_empty:
            self._makes_empty_steps = True
            self._announce()
            try:
                self._steps.make_empty_round()  # which calls `stepped`
            finally:
                self._makes_empty_steps = False
                self._announce()

    def _note_applied(self, num_left: int) -> None:
        """Report the leases that the steps have trained, except for the last `num_left` steps."""
        while len(self._in_flight) > num_left:
            for part in self._in_flight.popleft():
                if part.lease != NO_LEASE:
                    self._trained[part.lease] = part.count
                if part.is_last:
                    self._report(part.lease)

    def _report(self, lease: int) -> None:
        self.leases.trained(lease, self._trained.pop(lease), self._own_time.since_last())

    def _report_steps(self) -> None:
        """Wait until all steps are applied, and report them."""
        self._steps.sync()
        self._note_applied(0)

    def _count_unused(self) -> None:
        """Count batches that no step has used as trained: the loop has seen them, and would get them again otherwise.

        Lost ones stay, because the next step may have their gradients.
        """
        self._in_flight.append([part for part in self._taken if not part.is_lost])
        self._taken = deque(part for part in self._taken if part.is_lost)
        self._num_accumulated = min(self._num_accumulated, len(self._taken))
        self._note_applied(0)
        self._announce()

    def close(self) -> None:
        """Return what no step has used. Later calls do nothing."""
        self._report_all()
        self._clear()
        self.leases.close()

    def stop(self) -> CutReady | None:
        """Return what no step has used, and wait until all workers have done so. None: all epochs are trained.

        All workers call it together. Nobody gets a lease until they have called `leases.end_cut` or left.
        """
        self._report_all()
        unused = {part.lease for part in (*self._taken, *self._ahead)} - {NO_LEASE}
        self._clear()
        for lease in sorted(unused):
            self.leases.give_back(lease)
        self.leases.is_interrupted = lambda: False
        self.leases.request_cut()
        while self.leases.cut is None and not self.leases.ended:
            if (late := self.leases.take(wait=True)) is not None:
                self.leases.give_back(late.number)
        return self.leases.cut

    def _report_all(self) -> None:
        """Wait until all steps are applied, and report them, also those of leases that have untrained batches."""
        self._report_steps()
        for lease in list(self._trained):
            self._report(lease)

    def forget(self) -> None:
        """Forget all leases, because this worker was removed from the job and they were given to others.

        Batches that were taken and not used are lost, but they still come to the next steps.
        """
        self._ahead.clear()
        self._in_flight.clear()
        self._trained.clear()
        self._taken = deque(self._used_by_steps())
        for part in self._taken:
            part.lose()
        self._announce()

    def drop_lost(self, limit: int) -> int:
        """Drop lost batches that will not come to a step, at most the last `limit` that were taken. Return how many."""
        dropped = 0
        while dropped < limit and self._taken and self._taken[-1].is_lost:
            self._taken.pop()
            dropped += 1
        return dropped

    def _clear(self) -> None:
        self._taken.clear()
        self._num_accumulated, self._adds_batch = 0, True
        self.forget()


class _OwnTime:
    """The time of a worker without its waits for other workers and for leases."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._excluded = 0.0
        self._last = self._now()

    def _now(self) -> float:
        return time.monotonic() - self._steps.wait_s - self._excluded

    def since_last(self) -> float:
        """Return the seconds since the last call."""
        last, self._last = self._last, self._now()
        return max(0.0, self._last - last)

    def excluded(self) -> _Excluded:
        """Return a context whose time does not count."""
        return _Excluded(self)


class _Excluded:
    def __init__(self, own_time: _OwnTime) -> None:
        self._own_time = own_time

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._own_time._excluded += time.monotonic() - self._began
