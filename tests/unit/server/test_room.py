"""The memory of gradients that wait: who is read when it is used up, and that nobody is delayed for ever."""

from __future__ import annotations

from echelon.server.shard.room import LONGEST_S, Need, Room


def never() -> Need:
    return Need.NONE


def test_pushes_are_read_while_there_is_room() -> None:
    room = Room(100)
    assert room.admits(b"a", 60, 40, never, now=0.0)
    assert not room.admits(b"a", 61, 40, never, now=0.0)
    assert room.num_deferred == 1


def test_a_push_that_something_waits_for_is_read_without_room() -> None:
    room = Room(100)
    assert not room.admits(b"a", 60, 90, never, now=0.0)
    assert room.admits(b"a", 60, 900, lambda: Need.THIS, now=0.1)
    assert room.admits(b"a", 60, 140, lambda: Need.LATER, now=0.1)
    assert not room.admits(b"a", 60, 141, lambda: Need.LATER, now=0.1)


def test_a_push_that_alone_exceeds_the_limit_is_read() -> None:
    assert Room(100).admits(b"a", 1000, 0, never, now=0.0)


def test_every_push_is_read_in_the_end_and_each_has_its_own_time() -> None:
    room = Room(100)
    assert not room.admits(b"a", 60, 90, never, now=0.0)
    assert not room.admits(b"a", 60, 90, never, now=LONGEST_S - 0.1)
    assert not room.admits(b"b", 60, 90, never, now=LONGEST_S)
    assert room.admits(b"a", 60, 90, never, now=LONGEST_S)
    assert not room.admits(b"a", 60, 150, never, now=LONGEST_S), "the next push has its own time"
