"""A bucket of parameters on the servers: its place in the store's memory, and its pushes in flight.

A bucket is pushed as one message per server, and the answers bring its new weights. The trainer decides when a bucket
is pushed and who waits for its weights.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor, nn

from echelon.cluster.messages import PushHeader
from echelon.cluster.placement import Slot
from echelon.kvstore.optimizer_spec import StepSettings
from echelon.kvstore.servers.client import Ticket
from echelon.kvstore.servers.store import ServerStore


class Bucket:
    """Parameters that are pushed together, and what is known of them in the current step."""

    def __init__(
        self,
        index: int,
        parameters: Mapping[str, nn.Parameter],
        store: ServerStore,
        settings: StepSettings,
        *,
        gated: bool,
    ) -> None:
        """`store` has keys of the parameters' names. `gated`: servers hold updates until `ServerStore.clip`."""
        self.index = index
        self.parameters = parameters
        self.names = list(parameters)
        self._store = store
        self._settings = settings
        self._gated = gated
        self._slots = dict(zip(self.names, store.slots(self.names), strict=True))
        self._all = list(self._slots.values())
        self._used, self._unused = self._all, list[Slot]()  # with and without gradients in captured steps
        views = {name: store.views(name) for name in self.names}
        self.weights: dict[str, Tensor] = {name: weights for name, (weights, _) in views.items()}
        self.gradients: dict[str, Tensor] = {name: gradients for name, (_, gradients) in views.items()}
        self.arrived: set[str] = set()  # whose gradients of the current step are in the store's memory
        self.cleared_late: set[str] = set()  # those of them that `zero_grad` was called for after they were pushed
        self.edits = 0  # identifies the edits of weights that the loop made before this step; 0: none
        self._pushed: list[Ticket] | None = None  # in the current step
        self._in_flight: list[Ticket] | None = None  # of the last step, not waited for yet

    # --- pushes

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of the current step have arrived."""
        return len(self.arrived) == len(self.names)

    @property
    def is_pushed(self) -> bool:
        """Whether the bucket was pushed in the current step."""
        return self._pushed is not None

    def push(self, samples: int, *, factor_rank: int = 0) -> None:
        """Push all gradients. `factor_rank` above 0: of the one parameter, its factors are pushed instead."""
        self._pushed = self._push(self._all, samples, factor_rank=factor_rank)

    def push_incomplete(self, given: Collection[str], samples: int) -> None:
        """Push the gradients of some parameters, and tell the servers that the others have none."""
        self._pushed = self._push([self._slots[name] for name in given], samples) if given else []
        if absent := [slot for name, slot in self._slots.items() if name not in given]:
            self._pushed += self._push(absent, 0, absent=samples)

    def push_captured(self, samples: int, *, more: bool) -> None:
        """Push the bucket of a captured step. `more`: another bucket of the step follows soon."""
        tickets = []
        if self._unused:
            tickets += self._push(self._unused, 0, more=more or bool(self._used), absent=samples)
        if self._used:
            tickets += self._push(self._used, samples, more=more)
        self._in_flight = tickets

    def mark_unused(self, names: Collection[str]) -> None:
        """Declare that captured steps give some parameters no gradient."""
        self._unused = [self._slots[name] for name in names]
        self._used = [slot for name, slot in self._slots.items() if name not in names]

    def _push(
        self, slots: Sequence[Slot], samples: int, *, factor_rank: int = 0, more: bool = False, absent: int = 0
    ) -> list[Ticket]:
        header = PushHeader(
            float(samples),
            self._settings.rates(),
            self._settings.changes(),
            float(absent),
            factor_rank,
            more,
            gated=self._gated,
            edits=self.edits,
        )
        return self._store.push_bucket(slots, header, priority=self.index)  # the next forward pass begins with the last

    def discard(self) -> None:
        """Discard the gradients of the current step, unless they were pushed."""
        self.cleared_late = set(self.arrived)
        if not self.is_pushed:
            self.arrived.clear()

    def end_step(self) -> None:
        """Keep the pushes as those in flight, and begin a new step."""
        assert self._pushed is not None
        self._in_flight, self._pushed = self._pushed, None
        self.edits = 0
        self.arrived.clear()
        self.cleared_late.clear()

    def forget(self) -> None:
        """Forget the pushes and gradients of a worker that was removed from the job."""
        self._pushed = self._in_flight = None
        self.edits = 0
        self.arrived.clear()
        self.cleared_late.clear()

    # --- new weights

    @property
    def is_in_flight(self) -> bool:
        """Whether nobody has waited for the new weights of the last step yet."""
        return self._in_flight is not None

    @property
    def is_answered(self) -> bool:
        """Whether the new weights are in the store's memory by now."""
        return self._in_flight is None or self._store.is_answered(self._in_flight)

    def wait(self) -> list[Ticket]:
        """Wait until the new weights are in the store's memory. Return the answers."""
        assert self._in_flight is not None
        tickets, self._in_flight = self._in_flight, None
        self._store.wait(tickets)
        return tickets
