"""How a worker of a store with servers waits for the others, some of which may still be in rounds.

While a worker waits, the rounds of others do not wait for it (`Pause`, `Resume`), neither in this store nor in the
other stores that it has open. When it continues, its Trainer learns whether the others have made rounds meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from echelon.cluster.messages import Pause, Resume, Resumed, Retire
from echelon.kvstore.servers.client import Client
from echelon.kvstore.servers.store_session import StoreSession
from echelon.kvstore.servers.wire import Wire

T = TypeVar("T")


class Waiting:
    """The part of one worker in the rounds of one store: it takes part, waits for others, or has retired."""

    def __init__(self, session: StoreSession, client: Client, wire: Wire) -> None:
        self._session = session
        self._client = client
        self._wire = wire
        self.on_missed_rounds: Callable[[], None] | None = None  # set by Trainers, whose rounds a wait interrupts
        self.has_retired = False
        self._is_paused = False  # while this worker waits in another store
        session.pause, session.resume = self._pause, self._end_pause

    def retire(self) -> None:
        """Make no more pushes: others stop waiting for this worker."""
        self._wire.wait_for_pushes()
        self._wire.send_to_all(Retire)
        self.has_retired = True

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
            sibling.resume()
        return True

    def meet(self, wait: Callable[[], T], wait_again: Callable[[], object]) -> T:
        """Wait for all workers, of which some may still be in rounds. Those do not wait for this worker.

        Between the two waits no worker is in a round, so all resume at the same clock.
        """
        active = not self.has_retired
        if active:
            self._wire.wait_for_pushes()
            self._wire.send_to_all(Pause)
        siblings = self._pause_siblings()
        result = wait()
        missed = active and self._resume()
        for sibling in siblings:
            sibling.resume()
        wait_again()
        if missed and self.on_missed_rounds is not None:
            self.on_missed_rounds()
        return result

    def _pause_siblings(self) -> list[StoreSession]:
        """Let others make rounds of this worker's other Trainers while it waits in this one."""
        siblings = self._session.siblings
        for sibling in siblings:
            sibling.pause()
        return siblings

    def _pause(self) -> None:
        if self.on_missed_rounds is not None and not self.has_retired:
            self._wire.wait_for_pushes()
            self._wire.send_to_all(Pause)
            self._is_paused = True

    def _end_pause(self) -> None:
        if self._is_paused:
            self._is_paused = False
            if self._resume() and self.on_missed_rounds is not None:
                self.on_missed_rounds()

    def _resume(self) -> bool:
        """Take part in rounds again. Return whether other workers have made rounds meanwhile."""
        clocks: dict[int, int] = {}  # by key; a key that is divided between servers has the same clock on all of them
        for server in range(self._wire.layout.num_servers):
            answer = self._client.call(server, Resume(self._client.next_id()))
            assert isinstance(answer, Resumed)
            clocks |= zip(answer.keys, answer.clocks, strict=True)
        return self._wire.adopt_clocks(clocks)
