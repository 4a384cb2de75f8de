"""The event log: whole lines from all processes, a writer that never blocks, a reader that waits for complete lines."""

from __future__ import annotations

import json
import os
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from echelon.observe.events import FILE_NAME, MAX_QUEUED, EventLog, EventReader


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / FILE_NAME).read_text().splitlines()]


def test_an_event_is_one_line(tmp_path: Path) -> None:
    before = time.time()
    with EventLog(tmp_path / "new" / "run", "worker", 3) as log:
        log.write("progress", clock=4, samples=128, staleness={"0": 3}, note="line one\nline two")
    (line,) = lines(tmp_path / "new" / "run")
    assert before - 1e-3 <= line.pop("at") <= time.time() + 1e-3
    assert line == {
        "who": "worker 3",
        "event": "progress",
        "clock": 4,
        "samples": 128,
        "staleness": {"0": 3},
        "note": "line one\nline two",
    }


def test_without_a_directory_nothing_is_written_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = threading.active_count()
    with EventLog.open(None, "worker", 0) as log:
        log.write("progress", clock=1)
        assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_close_writes_the_queue_in_order_and_ends_the_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    log = EventLog.open(str(tmp_path), "server", 0)
    for number in range(1000):
        log.write("event", number=number)
    log.close()
    assert [line["number"] for line in lines(tmp_path)] == list(range(1000))
    assert set(threading.enumerate()) == before
    log.close()  # a second call does nothing
    log.write("event", number=1000)  # neither does writing after closing
    assert len(lines(tmp_path)) == 1000


def test_processes_append_to_one_file(tmp_path: Path) -> None:
    logs = [EventLog(tmp_path, "worker", rank) for rank in range(4)]

    def talk(rank: int) -> None:
        for number in range(500):
            logs[rank].write("event", number=number, filler="x" * 200)

    threads = [threading.Thread(target=talk, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for log in logs:
        log.close()
    written = lines(tmp_path)  # json.loads fails for a line that is not whole
    for rank in range(4):
        assert [line["number"] for line in written if line["who"] == f"worker {rank}"] == list(range(500))


@contextmanager
def stuck_disk(directory: Path) -> Iterator[tuple[int, threading.Event]]:
    """An events file that accepts 64 kB and then blocks until the event is set: a pipe, and its reading end."""
    path = directory / FILE_NAME
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reading, True)
    go = threading.Event()

    def copy() -> None:
        go.wait()
        with os.fdopen(reading, "rb") as source, (directory / "copy.jsonl").open("wb") as target:
            while data := source.read(1 << 16):
                target.write(data)

    reader = threading.Thread(target=copy)
    reader.start()
    try:
        yield reading, go
    finally:
        go.set()
        reader.join()


def test_a_stuck_disk_blocks_nobody_and_the_oldest_events_are_dropped_and_counted(tmp_path: Path) -> None:
    with stuck_disk(tmp_path) as (disk, go):
        log = EventLog(tmp_path, "worker", 0)
        log.write("first", filler="x" * 100_000)  # more than the pipe holds
        assert select.select([disk], [], [], 30)[0]  # its beginning is written: the thread waits for the disk
        total = MAX_QUEUED + 50
        for number in range(total):
            log.write("event", number=number)
        go.set()  # all were queued while the disk was stuck
        log.close()
    events = [json.loads(line) for line in (tmp_path / "copy.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "first"
    assert [event["number"] for event in events if event["event"] == "event"] == list(range(50, total))
    assert [event["count"] for event in events if event["event"] == "dropped"] == [50]


# --- reading


def test_without_a_file_there_are_no_events(tmp_path: Path) -> None:
    reader = EventReader(tmp_path / "not there")
    assert reader.poll() == []


def test_events_are_read_once_as_they_arrive(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    for number in range(3):
        with EventLog(tmp_path, "worker", 0) as log:
            log.write("event", number=number)
        assert [event["number"] for event in reader.poll()] == [number]
        assert reader.poll() == []
    assert [event["number"] for event in EventReader(tmp_path).poll()] == [0, 1, 2]


def test_a_half_written_line_is_read_when_it_is_complete(tmp_path: Path) -> None:
    """Wherever a line is cut, even inside a multi-byte character, every event is read once."""
    events = [{"event": "a", "text": "é漢\n\r\u2028"}, {"event": "b"}, {"event": "c", "n": 1.5}]
    data = b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)
    for cut in range(len(data) + 1):
        path = tmp_path / str(cut)
        path.mkdir()
        reader = EventReader(path)
        (path / FILE_NAME).write_bytes(data[:cut])
        first = reader.poll()
        assert len(first) == data[:cut].count(b"\n")
        with (path / FILE_NAME).open("ab") as file:
            file.write(data[cut:])
        assert first + reader.poll() == events


@pytest.mark.parametrize("most_bytes", [1, 7, 20, 1000])
def test_pieces_of_a_log_have_whole_lines(tmp_path: Path, most_bytes: int) -> None:
    """A reader with a limit returns every event once, in order, even if a line is longer than the limit."""
    events = [{"event": "a", "text": "é" * 30}, {"event": "b"}, {"event": "c", "n": 1.5}]
    data = b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)
    (tmp_path / FILE_NAME).write_bytes(data + b'{"event": "half')
    reader = EventReader(tmp_path)
    read, pieces = [], 0
    while reader.offset < len(data):
        piece = reader.poll(most_bytes)
        assert piece
        read += piece
        pieces += 1
    assert read == events
    assert (pieces == 1) == (most_bytes == 1000)
    assert reader.poll(most_bytes) == []
    assert reader.size == len(data) + len('{"event": "half')


def test_what_is_written_is_read(tmp_path: Path) -> None:
    fields = {"text": 'quotes " and \\ and \u2028', "none": None, "list": [1, 2.5, True], "nested": {"a": {"1": 2}}}
    with EventLog(tmp_path, "scheduler", 0) as log:
        log.write("event", **fields)
    (event,) = EventReader(tmp_path).poll()
    assert {name: event[name] for name in fields} == fields


def test_counted_events_are_written_at_once_then_seldom_and_at_the_end(tmp_path: Path) -> None:
    with EventLog(tmp_path, "scheduler", 0) as log:
        log.count("malformed", reason="first")
        end = time.monotonic() + 10
        while not (tmp_path / FILE_NAME).read_text() and time.monotonic() < end:
            time.sleep(0.01)
        for number in range(5000):
            log.count("malformed", reason=str(number))
    assert [(line["reason"], line["count"]) for line in lines(tmp_path)] == [("first", 1), ("4999", 5001)]
