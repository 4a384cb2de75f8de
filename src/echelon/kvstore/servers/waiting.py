"""How a worker of a store with servers waits for the others, some of which may still be in rounds, and joins them.

While a worker waits, the rounds of others do not wait for it (`Pause`), neither in this store nor in the other stores
that it has open. Workers that have waited together continue together (`Resume`): none of them makes a round before all
take part again. When a worker continues, its Trainer learns whether the others have made rounds meanwhile.

A worker that comes while others are in rounds joins them (`Join`): a worker that joins a running job, and one that
continues alone. It takes part from the next round on that is free on all servers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from echelon.cluster.messages import Join, Joined, Part, Pause, Resume, Resumed, Retire
from echelon.kvstore.servers.client import Client
from echelon.kvstore.servers.store_session import StoreSession
from echelon.kvstore.servers.wire import Wire

T = TypeVar("T")

MAX_LAG = 4  # rounds between keys that workers push in the same step; others are pushed less often


def pushed_seldom(answers: Sequence[Mapping[int, int]], own: Mapping[int, int], lock_step: bool) -> set[int]:
    """Return the keys that workers push less often than the others. All other keys have the same clock in a step.

    A worker that has pushed knows them from its `own` clocks. A new one compares the clocks in each server's answer.
    The answers of several servers can be compared only in `lock_step`: otherwise a server that has not received yet
    that a slow worker waits, or joins, answers with another clock than one that has.
    """
    newest_own = max(own.values(), default=0)
    known = own if newest_own else {}
    often = {key for key, clock in known.items() if clock >= newest_own - MAX_LAG}
    newest = max((clock for answer in answers for clock in answer.values()), default=0)
    for answer in answers:
        limit = (newest if lock_step else max(answer.values())) - MAX_LAG
        often |= {key for key, clock in answer.items() if clock >= limit and key not in known}
    return {key for answer in answers for key in answer} - often


def _newest(answers: Sequence[Mapping[int, int]]) -> dict[int, int]:
    clocks: dict[int, int] = {}
    for answer in answers:
        clocks |= {key: max(clock, clocks.get(key, 0)) for key, clock in answer.items()}
    return clocks


class Waiting:
    """The part of one worker in the rounds of one store: it takes part, waits for others, or has retired."""

    def __init__(self, session: StoreSession, client: Client, wire: Wire, *, lock_step: bool) -> None:
        self._session = session
        self._lock_step = lock_step
        self._client = client
        self._wire = wire
        self.on_missed_rounds: Callable[[], None] | None = None  # set by Trainers, whose rounds a wait interrupts
        self.on_joined: Callable[[], None] = lambda: None  # set by Trainers, which fetch the weights of the round
        self.check_join: Callable[[], None] = lambda: None  # set by Trainers; raises if others must not wait for it
        self.on_removed: Callable[[], None] | None = None  # set by Trainers, which join the job again
        self.takes_part = True  # False: this worker has come late, and no round waits for it before `join`
        self.has_retired = False
        self._is_waiting = False  # on all servers, or on its way to them
        self._is_paused = False  # while this worker waits in another store
        wire.part = lambda: self.part
        session.pause, session.resume = self._pause, self._end_pause

    def restart(self) -> None:
        """Forget what this worker did before the scheduler removed it."""
        self.has_retired = self._is_paused = self._is_waiting = False

    @property
    def part(self) -> Part:
        """What a server that was lost has to know of this worker.

        It changes before the first request that stops this worker, and after the last one that lets it go on. Requests
        without an answer are repeated. If one was answered that lets it continue, it joins the rounds again.
        """
        if self.has_retired:
            return Part.RETIRED
        if not self.takes_part:
            return Part.LATE
        return Part.PAUSED if self._is_waiting else Part.ACTIVE

    def retire(self) -> None:
        """Make no more pushes: others stop waiting for this worker."""
        self._wire.wait_for_pushes()
        self.has_retired = True
        self._wire.send_to_all(Retire)

    def wait_for_end(self) -> bool:
        """Stop pushing, and wait until no worker pushes any more.

        Return False without waiting if this worker has retired before: its caller waits for the others, if at all.
        """
        if self.has_retired:
            return False
        self.retire()
        siblings = self._pause_siblings()
        self._session.wait_for_end(self._client.stall_seconds)
        for sibling in siblings:
            sibling.resume([])
        return True

    def meet(self, wait: Callable[[], tuple[T, Sequence[int]]]) -> T:
        """Wait for all workers, of which some may still be in rounds. Those do not wait for this worker.

        `wait` returns its result and the workers that have waited together. They resume at the same clock.
        """
        is_in_rounds = self._may_pause
        if is_in_rounds:
            self.pause()
        siblings = self._pause_siblings()
        result, workers = wait()
        missed = is_in_rounds and self._resume(workers)
        for sibling in siblings:
            sibling.resume(workers)
        if missed and self.on_missed_rounds is not None:
            self.on_missed_rounds()
        return result

    @property
    def _may_pause(self) -> bool:
        """Whether this worker is in rounds, and not in the middle of a step.

        Its gated pushes are of a round that all others are in, too: they come to the same wait before they need it.
        """
        return self.takes_part and not self.has_retired and not self._wire.gated

    def pause(self) -> None:
        """Let the others make rounds without this worker, until it resumes or joins."""
        self._wire.wait_for_pushes()
        self._is_waiting = True
        self._wire.send_to_all(Pause)

    def join(self) -> None:
        """Take part from the next round on, and fetch its weights. This worker is late or paused."""
        self._join_rounds()
        self.on_joined()

    def _join_rounds(self) -> None:
        """Take part from the next clock on that is free on all servers. This worker has no push in flight."""
        answers = self._send_to_all(None, {})
        clocks = _newest(answers)
        seldom = pushed_seldom(answers, self._wire.clocks, self._lock_step)
        if not self.takes_part and any(clocks.values()):
            self.check_join()
        for attempt in itertools.count(1):  # others may make rounds between the answers and the next request
            latest = max((clock for key, clock in clocks.items() if key not in seldom), default=0)
            first = latest + attempt if latest else 0
            firsts = {key: clock for key, clock in clocks.items() if key in seldom}
            recovered = self._wire.num_recovered
            refused = _newest(self._send_to_all(first, firsts))
            if not refused and recovered == self._wire.num_recovered:  # a server that lost its state has forgotten it
                break
            clocks = {key: max(clock, refused.get(key, 0)) for key, clock in clocks.items()}
        self._wire.join_at({key: firsts.get(key, first) for key in clocks})
        self.takes_part, self._is_waiting = True, False

    def _send_to_all(self, first: int | None, firsts: dict[int, int]) -> list[dict[int, int]]:
        """Send a request to join. Return of each server that did not accept the latest clocks, by key."""
        servers = range(self._wire.layout.num_servers)
        tickets = [self._client.send(server, Join(self._client.next_id(), first, firsts)) for server in servers]
        self._client.wait(tickets)
        answers = [ticket.response for ticket in tickets]
        return [answer.clocks for answer in answers if isinstance(answer, Joined) and answer.clocks]

    def _pause_siblings(self) -> list[StoreSession]:
        """Let others make rounds of this worker's other Trainers while it waits in this one."""
        siblings = self._session.siblings
        for sibling in siblings:
            sibling.pause()
        return siblings

    def _pause(self) -> None:
        if self.on_missed_rounds is not None and self._may_pause:
            self.pause()
            self._is_paused = True

    def _end_pause(self, workers: Sequence[int]) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._resume(workers) and self.on_missed_rounds is not None:
                self.on_missed_rounds()

    def _resume(self, workers: Sequence[int]) -> bool:
        """Take part in rounds again, together with `workers`. Return whether others have made rounds meanwhile."""
        listed, recovered = list(workers), self._wire.num_recovered
        servers = range(self._wire.layout.num_servers)
        tickets = [self._client.send(server, Resume(self._client.next_id(), listed)) for server in servers]
        self._client.wait(tickets)
        clocks: dict[int, int] = {}  # by key
        for answer in (ticket.response for ticket in tickets):
            assert isinstance(answer, Resumed)
            for key, clock in zip(answer.keys, answer.clocks, strict=True):
                if clocks.setdefault(key, clock) != clock:  # others are in a round that not all servers have applied
                    self._join_rounds()
                    return True
        if recovered != self._wire.num_recovered:  # a server that lost its state takes this worker for a paused one
            self._join_rounds()
            return True
        self._is_waiting = False
        return self._wire.adopt_clocks(clocks)
