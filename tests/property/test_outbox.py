"""In which order the messages of a connection leave, for any priorities, keys and moments at which bytes are sent."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from echelon.transport.outbox import Outbox, Precedence

PRECEDENCES = st.none() | st.builds(
    Precedence, st.integers(-2, 2), st.lists(st.integers(0, 4), max_size=3, unique=True)
)
SIZES = st.lists(st.sampled_from([0, 1, 3, 100_000, 300_000]), min_size=1, max_size=3)


@dataclass(frozen=True)
class Put:
    precedence: Precedence | None
    sizes: list[int]


@dataclass(frozen=True)
class Send:
    """Offer some buffers, of which a part of the bytes is accepted."""

    max_buffers: int
    share: float


STEPS = st.lists(st.builds(Put, PRECEDENCES, SIZES) | st.builds(Send, st.integers(1, 5), st.floats(0, 1)), max_size=30)


class Connection:
    """Drives an outbox. Every byte of message number n is n, and the first byte of a message is marked."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.messages: list[bytes] = []
        self.precedences: list[Precedence | None] = []
        self.begun_before: list[set[int]] = []  # of each message: those of which bytes were offered when it was put
        self.offered: set[int] = set()
        self.sent = bytearray()

    def put(self, step: Put) -> None:
        number = len(self.messages)
        buffers = [memoryview(bytes([number]) * size) for size in [*step.sizes, 1]]
        self.begun_before.append(set(self.offered))
        self.messages.append(b"".join(buffers))
        self.precedences.append(step.precedence)
        self.outbox.put(buffers, step.precedence)

    def send(self, step: Send) -> None:
        buffers = self.outbox.first(step.max_buffers)
        assert len(buffers) <= step.max_buffers
        offered = b"".join(buffers)
        self.offered |= set(offered)
        accepted = int(len(offered) * step.share)
        self.sent += offered[:accepted]
        self.outbox.remove(accepted)

    def run(self, steps: list[Put | Send]) -> list[int]:
        """Carry out steps, send the rest, and return the numbers of the messages in the order in which they left."""
        for step in steps:
            self.put(step) if isinstance(step, Put) else self.send(step)
            assert self.outbox.num_bytes == sum(map(len, self.messages)) - len(self.sent)
        while self.outbox:
            self.send(Send(5, 1.0))
        order = list(dict.fromkeys(self.sent))
        assert self.sent == b"".join(self.messages[number] for number in order)  # whole, once, not interleaved
        assert sorted(order) == list(range(len(self.messages)))
        return order


@given(STEPS)
def test_messages_leave_whole_and_once_and_only_a_higher_priority_overtakes(steps: list[Put | Send]) -> None:
    connection = Connection()
    order = connection.run(steps)
    place = {number: index for index, number in enumerate(order)}
    for later, precedence in enumerate(connection.precedences):
        for earlier in range(later):
            if place[later] < place[earlier]:
                other = connection.precedences[earlier]
                assert precedence is not None
                assert other is not None
                assert precedence.priority > other.priority
                assert not set(precedence.keys) & set(other.keys)
                assert earlier not in connection.begun_before[later]


@given(st.lists(st.tuples(st.integers(-5, 5), SIZES), max_size=20))
def test_waiting_messages_about_different_keys_leave_by_priority(messages: list[tuple[int, list[int]]]) -> None:
    connection = Connection()
    steps = [Put(Precedence(priority, [key]), sizes) for key, (priority, sizes) in enumerate(messages)]
    order = connection.run([*steps])
    assert order == sorted(order, key=lambda number: -messages[number][0])  # a stable sort of 0, 1, 2 …


def test_nothing_overtakes_a_message_without_precedence() -> None:
    connection = Connection()
    urgent = Put(Precedence(9, [1]), [10])
    assert connection.run([Put(Precedence(0, [2]), [10]), Put(None, [10]), urgent]) == [0, 1, 2]
    assert Connection().run([Put(Precedence(0, [2]), [10]), urgent]) == [1, 0]
