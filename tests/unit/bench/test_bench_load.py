"""`echelon bench load`: what counts as a deadlock, how memory is compared, and the outcome of a job."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from echelon.bench.load.run import command, judge
from echelon.bench.load.watch import DEADLOCK_S, START_S, Memory, Watch

GB = 10**9


def watched(*updates: tuple[float, int], memory: tuple[tuple[float, int], ...] = ()) -> Watch:
    watch = Watch(began=0.0, training_s=600.0)
    for at, number in updates:
        watch.add_updates(at, number)
    for at, num_bytes in memory:
        watch.add_memory(Memory(at, num_bytes, 73))
    return watch


def test_a_job_without_an_update_is_deadlocked_after_a_while() -> None:
    assert watched().deadlock(START_S) is None
    assert watched().deadlock(START_S + 1) == f"no update within {START_S + 1:.0f} s of the start"
    watch = watched((10.0, 5), (12.0, 8), (20.0, 8))
    assert watch.deadlock(12.0 + DEADLOCK_S) is None
    assert watch.deadlock(13.0 + DEADLOCK_S) == f"no update was applied for {DEADLOCK_S + 1:.0f} s, after 8"


def test_rates_and_pauses_count_from_the_first_update() -> None:
    watch = watched((10.0, 100), (11.0, 150), (15.0, 200), (20.0, 600))
    assert watch.updates_per_s() == 50.0
    assert watch.longest_pause_s == 5.0
    assert watched((10.0, 1)).updates_per_s() == watched().updates_per_s() == 0.0


def test_memory_is_compared_between_the_first_minute_and_the_end_while_all_processes_run() -> None:
    samples = ((5.0, 9 * GB), (20.0, 1 * GB), (75.0, 2 * GB), (300.0, 3 * GB), (601.0, 9 * GB))
    watch = watched((10.0, 1), (600.0, 1000), memory=(*samples, (590.0, 9 * GB)))  # a worker has ended at 585
    watch.add_memory(Memory(400.0, 1, num_processes=10))  # some have ended
    assert watch.settled_and_last_bytes() == (2 * GB, 3 * GB)
    assert watch.growth() == 0.5
    assert watched().settled_and_last_bytes() == (0, 0)
    assert watched((1.0, 1)).growth() == 0.0


@pytest.mark.parametrize(
    ("failure", "grown", "finished", "expected"),
    [
        ("", 1.0, 2, ""),
        ("", 1.2, 2, "memory grew by 20%"),
        ("", 1.0, 1, "only 1 of 2 workers finished"),
        ("exit status 1", 1.2, 1, "exit status 1"),
    ],
)
def test_the_outcome_of_a_job(failure: str, grown: float, finished: int, expected: str) -> None:
    watch = watched((0.0, 1), (100.0, 1001), memory=((20.0, GB), (99.0, int(grown * GB))))
    lines = [json.dumps({"rank": rank, "steps": 100 + rank, "seconds": 10.0}) for rank in range(finished)]
    text = "".join(f"[worker {rank}] {line}\n" for rank, line in enumerate(lines))
    outcome = judge("dist_sync", watch, failure, text, num_workers=2)
    assert outcome.failure.startswith(expected)
    assert bool(outcome.failure) == bool(expected)
    assert (outcome.fewest_steps, outcome.most_steps) == (100, 99 + finished)
    assert outcome.steps_per_s == pytest.approx(sum((100 + rank) / 10 for rank in range(finished)))
    assert outcome.updates_per_s == 10.0


@pytest.mark.parametrize(
    ("store", "flags"),
    [
        ("dist_sync", []),
        ("dist_ssync", ["--staleness", "4"]),
        ("dist_gsync", ["--groups", "0,8/1,9/2/3/4/5/6/7"]),
    ],
)
def test_a_scheme_gets_what_it_needs(store: str, flags: list[str]) -> None:
    args = argparse.Namespace(num_workers=10, num_servers=2, minutes=0.5, width=8, transport="tcp")
    words = command(args, store, Path("/run"))
    assert words[words.index("tcp") + 1 : words.index("--")] == flags
    assert words[-3:] == [store, "30.0", "8"]
