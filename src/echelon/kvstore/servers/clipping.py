"""The last stage of gated pushes: the servers measure the norm of a round, and apply the round clipped to a limit.

Every worker of a group adds the parts of the norm in the same order and sends the same scale to all servers. A server
applies the round at the first scale that arrives, so a round does not depend on one worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from echelon.cluster.messages import ApplyScaled, MeasureNorm, SquaredNorm
from echelon.cluster.placement import Slot
from echelon.kvstore.servers.client import Client, Ticket
from echelon.kvstore.servers.wire import Wire
from echelon.schemes import scale_to_clip


class ClippedRounds:
    """A worker's requests to clip the rounds that it has pushed."""

    def __init__(self, client: Client, wire: Wire) -> None:
        self._client = client
        self._wire = wire
        self._stored: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}  # of `_servers_of`
        self._scaled: list[Ticket] = []  # the requests that applied the last round

    def restart(self) -> None:
        """Forget requests that will not be answered."""
        self._scaled = []

    def clip(self, slots: Sequence[Slot], max_norm: float) -> float:
        """Let the servers apply the last pushes of some keys, which were gated, clipped to a norm over all of them.

        Wait until all workers of the group have pushed, and return the norm. Every worker of the group calls this with
        the same keys and gets the same number.
        """
        self._client.wait(self._scaled)  # of the last step; answered long ago
        rounds = [(clock - 1, *part) for clock, keys in self._by_clock(slots) for part in self._servers_of(keys)]
        alone = max_norm if len(rounds) == 1 else None  # one server has all keys: it need not know other parts
        tickets = [
            self._client.send(server, MeasureNorm(self._client.next_id(), clock, keys, alone))
            for clock, server, keys in rounds
        ]
        self._client.wait(tickets)
        square = sum(ticket.response.square for ticket in tickets if isinstance(ticket.response, SquaredNorm))
        if alone is None:
            scale = scale_to_clip(square, max_norm)
            self._scaled = [
                self._client.send(server, ApplyScaled(self._client.next_id(), clock, keys, scale))
                for clock, server, keys in rounds
            ]
        self._wire.gated.difference_update(slot.key for slot in slots)
        return math.sqrt(square)

    def _by_clock(self, slots: Sequence[Slot]) -> list[tuple[int, list[Slot]]]:
        """Return the slots of each clock, in the order of their keys. Keys that were added later have another clock."""
        ordered = sorted(slots, key=lambda slot: slot.key)
        clocks = sorted({self._wire.clock(slot) for slot in ordered})
        return [(clock, [slot for slot in ordered if self._wire.clock(slot) == clock]) for clock in clocks]

    def _servers_of(self, slots: Sequence[Slot]) -> list[tuple[int, list[int]]]:
        """Return the servers that store parts of some keys, each with these keys."""
        keys = tuple(slot.key for slot in slots)
        found = self._stored.get(keys)
        if found is None:
            layout = self._wire.layout
            found = self._stored[keys] = []
            for server in range(layout.num_servers):
                if here := [slot.key for slot in slots if layout.pieces(slot, server)]:
                    found.append((server, here))
        return found
