"""Who is slow, and why."""

from __future__ import annotations

from typing import Any

import pytest

from echelon.report.state.run import Event, RunState
from echelon.report.state.slowness import own_times, slow_workers


def event(kind: str, who: str, **fields: Any) -> Event:
    return {"event": kind, "at": 1000.0, "who": who, **fields}


def began(num_workers: int) -> RunState:
    state = RunState()
    state.take(event("begin", f"worker {rank}", rank=rank) for rank in range(num_workers))
    return state


def progress(rank: int, compute: float, wait: float = 0.0) -> Event:
    usual = {"clock": 8, "samples": 64, "wait_s": 8 * wait, "staleness": {}}
    return event("progress", f"worker {rank}", rank=rank, steps=[[1000.0, compute, 0.0, wait, 0.0]] * 8, **usual)


def server(rank: int, own: dict[int, float | None]) -> Event:
    workers = {str(worker): {"clock": 8, "own_s": own_s, "late_s": 0.0} for worker, own_s in own.items()}
    usual = dict.fromkeys(("store", "pushes", "updates", "held", "sent", "received", "memory_bytes", "cpu_s"), 0)
    return event("server", f"server {rank}", rank=rank, workers=workers, decision="", **usual)


def test_a_slow_backward_pass_is_blamed_on_its_rank_although_all_have_the_same_rate() -> None:
    state = began(4)
    state.take(
        progress(rank, compute=0.06 if rank == 2 else 0.02, wait=0.0 if rank == 2 else 0.04) for rank in range(4)
    )
    state.take([server(0, {0: 0.02, 1: 0.021, 2: 0.061, 3: 0.02})])
    (slow,) = slow_workers(state)
    assert (slow.rank, round(slow.factor, 2)) == (2, 3.05)
    assert slow.why == "61 ms per step, where the median of the others is 20 ms: it computes for 60 ms (others 20 ms)"


def test_a_slow_link_is_told_from_slow_computing() -> None:
    state = began(3)
    state.take(progress(rank, compute=0.02) for rank in range(3))
    state.take([server(0, {0: 0.02, 1: 0.02, 2: 0.02}), server(1, {0: 0.02, 1: 0.09, 2: 0.02})])
    (slow,) = slow_workers(state)
    assert slow.rank == 1
    assert slow.why.endswith(
        "it computes as long as others, and its pushes arrive late (its network, or a busy machine)"
    )


def test_without_servers_the_workers_own_measurements_decide() -> None:
    state = began(3)
    state.take(progress(rank, compute=0.5 if rank == 1 else 0.1, wait=0.0 if rank == 1 else 0.4) for rank in range(3))
    assert [slow.rank for slow in slow_workers(state)] == [1]


@pytest.mark.parametrize(
    "own",
    [
        {0: 0.02},  # alone
        {0: 0.02, 1: 0.025, 2: 0.021},  # about equal
        {0: 0.0002, 1: 0.0006},  # too short to judge
        {0: None, 1: None},  # no second step yet
    ],
)
def test_nobody_is_slow_without_a_clear_difference(own: dict[int, float | None]) -> None:
    state = began(len(own))
    state.take([server(0, own)])
    assert slow_workers(state) == []


def test_workers_that_finished_or_left_are_not_judged() -> None:
    state = began(3)
    state.take([server(0, {0: 0.02, 1: 0.02, 2: 0.9})])
    state.take([event("view", "scheduler 0", workers=[0, 1], reason="worker 2 was killed", departure="died")])
    assert own_times(state) == {0: 0.02, 1: 0.02}
    assert slow_workers(state) == []
    assert [(fault.kind, fault.who, fault.text) for fault in state.faults] == [
        ("died", "worker 2", "worker 2 was killed")
    ]


def test_the_stores_of_a_server_do_not_hide_each_other() -> None:
    state = began(2)
    first = server(0, {0: 0.02, 1: 0.08}) | {"updates": 10, "pushes": 20, "decision": "of the first"}
    second = server(0, {0: 0.5, 1: 0.5}) | {"store": 1, "updates": 5, "pushes": 7, "decision": "of the second"}
    state.take([first, second])
    state.take([first | {"at": 1001.0, "updates": 30}, second | {"at": 1001.001, "updates": 6}])
    (only,) = state.servers.values()
    assert (only.pushes, only.updates) == (27, 36)
    assert only.updates_per_s == pytest.approx(20 + 1 / 1.001)
    assert state.newest_decision(0) == "server 0: of the first"
    assert state.newest_decision(1) == "server 0: of the second"
    assert [slow.rank for slow in slow_workers(state)] == [1]
