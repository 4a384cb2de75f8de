"""Rounds of values that workers exchange on a server: when they are complete, and what a lost answer does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from echelon.cluster.messages import Gathered
from echelon.errors import UsageError
from echelon.server.shard.gathering import Gathering, Gatherings


class Rounds:
    """A Gathering of some workers, and the answers that it sent."""

    def __init__(self, *workers: int) -> None:
        self.workers = set(workers)
        self.sent: list[tuple[int, int, dict[int, bytes]]] = []  # worker, request, parts by rank
        self.gathering = Gathering(lambda: self.workers, self._answer)

    def _answer(self, worker: int, response: Gathered, frames: Sequence[memoryview]) -> None:
        parts = {rank: bytes(frame) for rank, frame in zip(response.ranks, frames, strict=True)}
        self.sent.append((worker, response.id, parts))

    def add(self, worker: int, request: int) -> None:
        self.gathering.add(worker, request, memoryview(f"{worker}.{request}".encode()))

    def leave(self, worker: int) -> None:
        self.gathering.remove(worker)
        self.workers.discard(worker)
        self.gathering.complete()


def test_a_round_is_answered_when_everybody_has_sent_a_part() -> None:
    rounds = Rounds(0, 1)
    rounds.add(1, 7)
    assert rounds.sent == []
    assert rounds.gathering.missing() == [0]
    assert rounds.gathering.holds(1, 7)
    rounds.add(0, 3)
    assert sorted(rounds.sent) == [(0, 3, {0: b"0.3", 1: b"1.7"}), (1, 7, {0: b"0.3", 1: b"1.7"})]
    assert not rounds.gathering.holds(1, 7)


def test_a_lost_answer_is_sent_again_and_a_repeated_part_counts_once() -> None:
    rounds = Rounds(0, 1)
    rounds.add(0, 1)
    rounds.add(0, 1)
    rounds.add(1, 1)
    rounds.add(0, 2)
    rounds.sent.clear()
    rounds.add(1, 1)
    assert rounds.sent == [(1, 1, {0: b"0.1", 1: b"1.1"})]
    rounds.add(1, 2)
    assert sorted(rounds.sent[1:]) == [(0, 2, {0: b"0.2", 1: b"1.2"}), (1, 2, {0: b"0.2", 1: b"1.2"})]


def test_a_late_copy_of_an_earlier_request_is_not_a_part_of_the_present_round() -> None:
    rounds = Rounds(0, 1)
    for request in (1, 2):
        rounds.add(0, request)
        rounds.add(1, request)
    rounds.sent.clear()
    rounds.add(1, 3)
    rounds.add(0, 1)
    assert rounds.sent == []
    rounds.add(0, 3)
    assert sorted(rounds.sent) == [(0, 3, {0: b"0.3", 1: b"1.3"}), (1, 3, {0: b"0.3", 1: b"1.3"})]


def test_a_worker_that_leaves_is_not_waited_for_and_what_it_sent_counts() -> None:
    rounds = Rounds(0, 1, 2)
    rounds.add(2, 1)
    rounds.add(0, 1)
    rounds.leave(2)
    assert rounds.sent == []
    rounds.leave(1)
    assert rounds.sent == [(0, 1, {0: b"0.1", 2: b"2.1"})]
    with pytest.raises(UsageError, match="this worker has retired"):
        rounds.add(2, 2)


def test_a_worker_that_missed_rounds_takes_part_in_the_present_one() -> None:
    rounds = Rounds(0)
    rounds.add(0, 1)
    rounds.add(0, 2)
    rounds.workers.add(1)
    rounds.add(0, 3)
    rounds.add(1, 1)
    assert sorted(rounds.sent[2:]) == [(0, 3, {0: b"0.3", 1: b"1.1"}), (1, 1, {0: b"0.3", 1: b"1.1"})]


# --- workers that join later


class Store:
    """The Gatherings of workers 0 and 1 and of worker 2, which has joined later."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, list[int]]] = []  # worker, ranks
        self.gatherings = Gatherings(
            lambda: {0, 1, 2}, lambda worker, found, _: self.sent.append((worker, found.ranks))
        )
        self.gatherings.admit(2)

    def add(self, worker: int, about: str, request: int = 1) -> None:
        self.gatherings.add(worker, request, memoryview(b"part"), about)


def test_no_round_waits_for_a_new_worker_until_it_has_trained_with_the_others() -> None:
    store = Store()
    store.add(0, "loss")
    store.add(1, "loss")
    assert store.sent == [(0, [0, 1]), (1, [0, 1])]
    store.gatherings.settle(2)
    store.add(0, "loss", 2)
    store.add(1, "loss", 2)
    assert store.gatherings.missing(0, 2) == [2]
    assert len(store.sent) == 2


def test_values_about_different_things_are_not_mixed() -> None:
    store = Store()
    store.add(2, "buffers")
    store.add(0, "loss")
    store.add(1, "loss")
    assert store.sent == [(0, [0, 1]), (1, [0, 1])]
    assert store.gatherings.missing(2, 1) == [0, 1]


def test_another_process_with_the_rank_of_a_dead_one_gets_no_old_answer() -> None:
    store = Store()
    for worker in range(3):
        store.add(worker, "loss")
    store.gatherings.remove(1)
    store.sent.clear()
    store.add(1, "loss")  # its first request, with the number that the first one of the dead process had
    assert store.sent == []
