"""The notes of a server in a worker's memory: the latest are kept, in order, whatever their lengths."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.cluster.messages import Contents
from echelon.errors import UsageError
from echelon.server.storage.write_log import LOG_BYTES, Note, WriteLog, Written, attached_log


def written(number: int, num_keys: int = 0) -> list[Written]:
    return [Written(number, [Contents(number, {0: number, 7: 2}, list(range(num_keys)))])]


def test_a_note_is_incomplete_until_the_weights_are_written() -> None:
    log = WriteLog(memoryview(bytearray(LOG_BYTES)))
    assert log.notes() == []
    log.begin(written(1))
    assert log.notes() == [Note(written(1), False)]
    log.end()
    log.begin(written(2, 3))
    assert log.notes() == [Note(written(1), True), Note(written(2, 3), False)]
    log.clear()
    assert log.notes() == []


@given(st.lists(st.tuples(st.integers(0, 9000), st.booleans()), max_size=60), st.integers(0, 60))
def test_the_latest_notes_are_kept(lengths: list[tuple[int, bool]], replaced_at: int) -> None:
    """The server may be replaced by another one, which continues."""
    memory = memoryview(bytearray(LOG_BYTES))
    log, expected = WriteLog(memory), []
    for number, (num_keys, ends) in enumerate(lengths):
        if number == replaced_at:
            log = WriteLog(memory)
        log.begin(written(number, num_keys))
        if ends:
            log.end()
        expected.append(Note(written(number, num_keys), ends))
        found = log.notes()
        assert found == expected[len(expected) - len(found) :]
        assert found
    if sum(3 * num_keys + 32 for num_keys, _ in lengths) < LOG_BYTES // 2 - 100:
        assert len(log.notes()) == len(expected)


def test_a_note_that_does_not_fit_is_left_out_and_does_not_damage_the_others() -> None:
    log = WriteLog(memoryview(bytearray(LOG_BYTES)))
    log.begin(written(1))
    log.end()
    log.begin(written(2, LOG_BYTES))
    log.end()
    assert log.notes() == [Note(written(1), True)]
    log.begin(written(3))
    assert log.notes() == [Note(written(1), True), Note(written(3), False)]


def test_memory_that_is_too_small_is_refused() -> None:
    with pytest.raises(UsageError, match=f"has 10 bytes; {LOG_BYTES} are needed"):
        attached_log(memoryview(bytearray(10)))


@pytest.mark.parametrize("head", [(2, 0, 0), (0, LOG_BYTES, 0), (1, 0, 1 << 60)])
def test_a_server_does_not_trust_what_is_in_the_memory_of_a_worker(head: tuple[int, int, int]) -> None:
    memory = memoryview(bytearray(LOG_BYTES))
    struct.pack_into("=QQQ", memory, 0, *head)
    log = WriteLog(memory)
    log.begin(written(1))
    struct.pack_into("=QQQ", memory, 0, *head)  # while the server uses it
    log.end()
    log.begin(written(2))
    assert WriteLog(memory).notes() == [Note(written(1), True), Note(written(2), False)]
