"""The inputs of a slice on their way to its backup: which answers may leave, and what a backup that differs means."""

from __future__ import annotations

from collections.abc import Callable

from echelon.cluster.messages import Ask, Gone, OpenShard, Replicate, encode
from echelon.server.shard.shard import Shard
from echelon.server.slices.hosted_slice import HostedSlice
from echelon.server.slices.replication import RESEND_S, Stream


class Setup:
    """A stream whose messages and answers are recorded."""

    def __init__(self, *, holds_answers: bool = True) -> None:
        self.sent: list[bytes] = []
        self.answered: list[int] = []
        self.stream = Stream(0, lambda frames: self.sent.append(bytes(frames[0])), 0.0, holds_answers=holds_answers)

    def forward(self, number: int, on_result: Callable[[bool], None] | None = None) -> None:
        self.stream.forward(0, 0, b"", (), 0.0, on_result)
        self.stream.hold(lambda: self.answered.append(number))


def test_an_answer_leaves_when_the_backup_has_its_input() -> None:
    setup = Setup()
    for number in (1, 2, 3):
        setup.forward(number)
    setup.stream.acknowledge(2, False, 0.0)
    assert setup.answered == [1, 2]


def test_a_new_backup_delays_no_answer() -> None:
    setup = Setup(holds_answers=False)
    setup.forward(1)
    assert setup.answered == [1]
    assert not setup.stream.is_in_sync


def test_without_a_backup_all_answers_leave() -> None:
    setup = Setup()
    setup.forward(1)
    setup.stream.close()
    assert setup.answered == [1]


def test_inputs_are_sent_again_until_they_are_acknowledged() -> None:
    setup = Setup()
    setup.forward(1)
    assert not setup.stream.resend_if_due(RESEND_S / 2)
    assert setup.stream.resend_if_due(RESEND_S)
    assert setup.sent[0] == setup.sent[1]


def test_no_answer_leaves_after_a_backup_has_done_something_else() -> None:
    setup = Setup()
    setup.forward(1)
    setup.forward(2)
    setup.stream.acknowledge(1, True, 0.0)
    setup.stream.acknowledge(2, False, 0.0)
    assert setup.stream.diverged == "its backup refused input 1"
    assert setup.answered == []
    assert not setup.stream.is_in_sync


def test_an_input_that_both_refuse_is_no_difference() -> None:
    setup = Setup()
    setup.forward(1)
    setup.stream.note_refusal()
    setup.stream.acknowledge(1, True, 0.0)
    assert setup.stream.diverged is None
    assert setup.answered == [1]


def test_a_backup_may_refuse_what_says_what_follows() -> None:
    setup = Setup()
    results: list[bool] = []
    setup.forward(1, results.append)
    setup.stream.acknowledge(1, True, 0.0)
    assert results == [True]
    assert setup.stream.diverged is None


def test_the_acknowledgement_of_a_repeated_input_is_the_first_one() -> None:
    """Its first acknowledgement may have been lost. Otherwise a refused input would look accepted."""

    def make_shard(number: int, workers: object, answer: object) -> Shard:
        return Shard(number, 1, {0: ""}, answer, lambda _: None)  # type: ignore[arg-type]

    backup = HostedSlice(0, make_shard, lambda *_: None, is_primary=False)
    backup.receive(Replicate(1, 0, 0, 0, encode(OpenShard(0, {0: ""}))), ())
    refused = Replicate(2, 0, 0, 0, encode(Ask(5, 4)))  # no store was created yet
    backup.receive(refused, ())
    first = backup.acknowledgement()
    backup.receive(refused, ())
    assert first.refused
    assert backup.acknowledgement() == first
    backup.receive(Replicate(3, 0, 0, 0, encode(Gone(0, False, 2))), ())
    assert (backup.acknowledgement().id, backup.acknowledgement().refused) == (3, False)
