"""A worker's leases from the ledger of the scheduler.

The next lease is requested before it is needed, and arrives on the control connection. A worker that has to wait for
one lets the others make rounds without it (`pause`), and joins them again when the lease has come (`join`). In
lock-step it waits some time before, because all workers usually end an epoch together.

All messages of this module can be repeated. After a lost connection the latest ones are sent again. Of cuts, only what
this worker needs now is sent: an earlier request would stop all workers for a checkpoint that nobody makes.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from echelon.cluster.ledger.axis import Axis
from echelon.cluster.messages import (
    CloseLedger,
    Cut,
    CutReady,
    GiveBack,
    HeldLease,
    HeldLedger,
    Lease,
    LedgerEnded,
    LedgerRefused,
    LedgerState,
    OpenLedger,
    TakeLease,
    Trained,
)
from echelon.errors import JobError, UsageError
from echelon.kvstore.leases import Leases
from echelon.kvstore.servers.store_session import LedgerMessage, StoreSession

PAUSE_AFTER_S = 0.05  # of waiting for a lease
LOCK_STEP_PAUSE_AFTER_S = 2.0
KEPT_MESSAGES = 32  # that are sent again after a lost connection; a worker cannot go on for longer without an answer
KEPT_LEASES = 8
_Kept = OpenLedger | TakeLease | Trained | GiveBack | CloseLedger


class ServerLeases(Leases):
    """The leases of a store with servers. The session's lock protects what its messages change."""

    def __init__(
        self,
        opened: OpenLedger,
        session: StoreSession,
        *,
        pause: Callable[[], None],
        join: Callable[[], None],
        survive: Callable[[Callable[[], None]], None],
        stall_seconds: float,
    ) -> None:
        """`survive` calls what waits, again if this worker was removed from the job and has joined it again."""
        super().__init__(opened)
        self._session = session
        self._changed = session.changed
        self._pause, self._join, self._survive = pause, join, survive
        self._stall_seconds = stall_seconds
        self._sent: deque[_Kept] = deque(maxlen=KEPT_MESSAGES)
        self._request = 0  # the number of the latest request for a lease
        self._asked = False  # whether it is not answered yet
        self._clock = 0  # of the first push after all leases so far
        self._arrived: Lease | None = None
        self._held: dict[int, HeldLease] = {}  # the latest leases by number, finished ones included
        self._axis = Axis(opened.num_samples)
        self._done = list(opened.done)  # from the start of the present epoch on
        self._refused: str | None = None
        self._cut: CutReady | None = None
        self._cut_requested = False
        self._cut_at_end: int | None = None  # the epoch at whose end this worker has asked for a cut
        self._cut_number = 0  # counts the changes of what this worker needs
        self._closed = False
        session.ledger = self
        self._send(opened)

    # --- leases

    def ask(self, clock: int) -> None:
        with self._changed:
            self._clock = clock
            if not self._asked and self._arrived is None and not self.ended:
                self._request += 1
                self._asked = True
                self._send(TakeLease(self.opened.store, self.opened.ledger, self._request, clock))

    def take(self, *, wait: bool) -> Lease | None:
        if wait:
            self._survive(self._wait_for_answer)
        else:
            self._ask_if_needed()
        with self._changed:
            self._check()
            lease, self._arrived = self._arrived, None
            return lease

    def _ask_if_needed(self) -> None:
        with self._changed:
            if self._arrived is None and not self.ended:
                self.ask(self._clock)

    def _wait_for_answer(self) -> None:
        self._ask_if_needed()
        if not self._has_answer():
            self._wait()

    def _has_answer(self) -> bool:
        answered = self._arrived is not None or self.ended or self._refused is not None or self._cut is not None
        return answered or self.is_interrupted()

    def _check(self) -> None:
        if self._refused is not None:
            raise UsageError(f"worker {self._session.rank}: {self._refused}; all workers must train the same samples")

    def _wait(self) -> None:
        """Wait for the answer. Other workers do not wait for this one meanwhile, unless the wait is short."""
        began = time.monotonic()
        first = LOCK_STEP_PAUSE_AFTER_S if self.opened.lock_step else PAUSE_AFTER_S
        if self._session.wait_until(self._has_answer, first):
            return
        self._pause()
        while not self._session.wait_until(self._has_answer, self._stall_seconds):
            waited = time.monotonic() - began
            print(
                f"worker {self._session.rank} has waited {waited:.0f} s for its next samples: other workers have the "
                f"rest of epoch {self.epoch}",
                file=sys.stderr,
                flush=True,
            )
            if waited > self._session.timeout_s:
                raise JobError(f"worker {self._session.rank}: no samples in {waited:.0f} s of epoch {self.epoch}")
        self._join()

    def trained(self, lease: int, count: int, seconds: float) -> None:
        with self._changed:
            if (held := self._held.get(lease)) is not None and count > held.trained:
                self._held[lease] = HeldLease(held.number, held.epoch, held.batches, count)
                self._send(Trained(self.opened.store, self.opened.ledger, lease, count, seconds))

    def give_back(self, lease: int) -> None:
        with self._changed:
            if self._held.pop(lease, None) is not None:
                self._send(GiveBack(self.opened.store, self.opened.ledger, lease))

    def away(self) -> AbstractContextManager[None]:
        return nullcontext() if self.opened.lock_step else self._paused()

    @contextmanager
    def _paused(self) -> Iterator[None]:
        is_paused = True

        def join() -> None:
            nonlocal is_paused
            if is_paused:
                is_paused = False  # a worker that was removed meanwhile has joined again
                self._join()

        self._survive(self._pause)
        yield
        self._survive(join)

    def close(self) -> None:
        with self._changed:
            if not self._closed:
                self._closed = True
                self._held.clear()
                self._arrived = None
                self._send(CloseLedger(self.opened.store, self.opened.ledger))
                self._session.num_closed_ledgers = self.opened.ledger + 1
                if self._session.ledger is self:
                    self._session.ledger = None

    # --- cuts

    def request_cut(self, *, at_end: bool = False) -> None:
        with self._changed:
            if at_end and self._cut_at_end != self.epoch:
                self._cut_at_end = self.epoch
                self._send_cut()
            elif not at_end and not self._cut_requested:
                self._cut_requested, self._cut = True, None
                self._send_cut()

    @property
    def cut(self) -> CutReady | None:
        return self._cut

    def end_cut(self) -> None:
        with self._changed:
            if self._cut_requested or self._cut is not None:
                self._cut_requested, self._cut = False, None
                self._send_cut()

    def _send_cut(self) -> None:
        """Tell the scheduler which cut this worker needs from now on."""
        if not self._closed:
            self._cut_number += 1
            self._session.send(self._needed_cut())

    def _needed_cut(self) -> Cut:
        now = self._cut_requested or self._cut is not None
        return Cut(self.opened.store, self.opened.ledger, self._cut_number, now, self._cut_at_end)

    # --- the scheduler

    def receive(self, message: LedgerMessage) -> None:
        """Take a message of the scheduler. The caller holds the session's lock, and wakes the waiting threads."""
        if isinstance(message, Lease | LedgerEnded):
            self._session.num_over_ledgers = max(self._session.num_over_ledgers, message.num_over)
        if message.ledger != self.opened.ledger or self._closed:
            return
        match message:
            case Lease():
                self._receive_lease(message)
            case LedgerEnded():
                self._asked, self.ended = False, True
            case LedgerState(epoch=epoch, partial=partial):
                self._done = self._axis.after(epoch - self.epoch, self._done)
                self.epoch, self.partial = epoch, partial
            case LedgerRefused(reason=reason):
                self._refused = reason
            case CutReady(epoch=epoch, number=number) if number == self._cut_number:
                at_end = self._cut_at_end is not None and self._cut_at_end < epoch
                if self._cut_requested or self._cut is not None or at_end:
                    self._cut = message
                if at_end:
                    self._cut_at_end = None

    def _receive_lease(self, lease: Lease) -> None:
        if not self._asked or lease.request != self._request:
            return  # the second answer to a request that was sent twice
        self._asked, self._arrived = False, lease
        self.epoch, self.partial, self._done = lease.present, lease.partial, lease.done
        self._clock = max(self._clock, lease.first_clock) + len(lease.batches)
        self._held[lease.number] = HeldLease(lease.number, lease.epoch, lease.batches, 0)
        finished = [number for number, held in self._held.items() if held.trained == len(held.batches)]
        for number in finished[:-KEPT_LEASES]:
            del self._held[number]

    def held(self) -> HeldLedger:
        """Return what a scheduler that was started again needs to know. The caller holds the session's lock."""
        answered = self._request - self._asked
        leases = list(self._held.values())
        known = self.opened, self.epoch, self._done, self.partial
        return HeldLedger(*known, leases, answered, self._clock, self._needed_cut())

    def send_again(self) -> None:
        """Send the latest messages again, because the connection on which they were sent was lost."""
        with self._changed:
            for message in list(self._sent):
                self._session.send(message)
            if self._cut_number and not self._closed:
                self._session.send(self._needed_cut())

    def begin_again(self) -> None:
        """Forget all leases and take part as a new worker, because this worker was removed from the job.

        The scheduler has given its leases to others.
        """
        with self._changed:
            self._sent.clear()
            self._held.clear()
            self._arrived, self._asked, self._cut, self._cut_requested = None, False, None, False
            self._cut_at_end = None
            if not self._closed:
                self._send(self.opened)

    def _send(self, message: _Kept) -> None:
        self._sent.append(message)
        self._session.send(message)
