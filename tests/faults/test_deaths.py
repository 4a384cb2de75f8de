"""kill -9 of every role, addressed by role, rank and clock: the others continue or stop, and nothing is left over."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from echelon.errors import NOT_WHOLE
from echelon.schemes.engine import RELEASED_NOTHING
from jobs import AFTER_PUSH, BEFORE_PUSH, IN_PULL, TESTS, ByHand, Fault, Gate, Job, Plan, Row, rows, until
from leaks import segments_of

VIEW_WITHIN_S = 5.0
STOP_WITHIN_S = 10.0
GIVE_UP_S = 15  # that processes try to reach a scheduler that was killed

DEATHS = [
    Fault("worker", 3, 2, BEFORE_PUSH),
    Fault("worker", 2, 4, AFTER_PUSH),
    Fault("worker", 1, 6, IN_PULL),
]
# They die one after the other. Worker 0 waits, so that the second dies before its push is answered and the third
# while its pull is held.
HOLD_BACK = [Gate(2, 4, gone=3), Gate(1, 6, gone=2), Gate(0, 4, gone=2), Gate(0, 6, gone=1)]


@pytest.mark.parametrize(
    ("plan", "options", "num_servers"),
    [
        pytest.param(Plan("dist_sync", 4), (), 2, id="sync-shm"),
        pytest.param(Plan("dist_async", 4), ("--transport", "tcp"), 1, id="async-tcp"),
        pytest.param(Plan("dist_ssync", 4, staleness=1), (), 1, id="ssync-shm"),
        pytest.param(Plan("dist_gsync", 4, groups=[[0, 2], [1, 3]]), ("--transport", "tcp"), 1, id="gsync-tcp"),
    ],
)
def test_killed_workers_leave_the_view_and_the_last_one_finishes(
    tmp_path: Path, plan: Plan, options: tuple[str, ...], num_servers: int
) -> None:
    plan.faults.extend(DEATHS)
    plan.gates.extend(HOLD_BACK)
    with Job(tmp_path, plan, num_servers=num_servers, options=options) as job:
        assert job.wait() == NOT_WHOLE, job.out
    deaths = job.fired()
    assert [(row["rank"], row["clock"], row["point"]) for row in deaths] == [(f.rank, f.clock, f.point) for f in DEATHS]
    assert job.err.startswith(f"echelon: the result is not whole: worker {deaths[0]['rank']} (pid {deaths[0]['pid']} ")
    for row in deaths:
        assert f"worker {row['rank']} (pid {row['pid']}) was killed by signal 9" in job.err
    views = job.events("view")
    assert [view["workers"] for view in views] == [[0, 1, 2], [0, 1], [0], []]
    for death, view in zip(deaths, views, strict=False):
        reason = f"worker {death['rank']} (pid {death['pid']} on 127.0.0.1) died: "
        assert view["reason"].startswith(reason)
        assert 0 <= view["at"] - death["at"] < VIEW_WITHIN_S
        left = len(view["workers"])
        left_text = "1 worker continues" if left == 1 else f"{left} workers continue"
        line = f"[scheduler 0] view {view['number']}: {view['reason']}; {left_text}\n"
        assert line in job.out
    assert {row["released"] for row in job.events("left")} > {RELEASED_NOTHING} or "async" in plan.store
    (result,) = job.results().values()
    assert (result["rank"], result["workers"], result["shared"]) == (0, [0], not options)
    assert set(result["segments"]["server"]) <= set(result["segments"]["worker"]), "a dead worker's memory is kept"
    assert bool(result["segments"]["server"]) == (not options)
    check_applied_once(plan, result)


def check_applied_once(plan: Plan, result: Row) -> None:
    if plan.groups is None:
        assert result["table"] == plan.table()
        return
    # An update of a group is divided by gamma, one more than the other group's updates since its last one.
    gammas: list[list[int]] = []
    for group in plan.groups:
        gammas.append([])
        for clock, row in enumerate(result["table"]):
            there = [rank for rank in group if plan.applied(rank, clock)]
            assert all(row[rank] == 0 for rank in group if rank not in there)
            if there:
                gamma = round(-1 / row[there[0]])
                assert [row[rank] for rank in there] == pytest.approx([-1 / gamma] * len(there))
                gammas[-1].append(gamma)
    assert [len(of_group) for of_group in gammas] == [8, 7]
    assert result["version"] == 15
    assert sum(gammas[0]) - 8 == 7, "every update of the other group is counted once"


@pytest.mark.parametrize(
    ("fault", "num_servers"),
    [
        pytest.param(Fault("server", 1, 2), 2, id="server"),
        pytest.param(Fault("scheduler", 0, 2), 1, id="scheduler"),
    ],
)
def test_without_restarts_the_job_stops_when_a_server_or_the_scheduler_is_killed(
    tmp_path: Path, fault: Fault, num_servers: int
) -> None:
    busy = Gate(1, 2, opened="never")  # one worker does not notice: the launcher ends it
    plan, options = Plan("dist_sync", 2, faults=[fault], gates=[busy]), ("--max-restarts", "0")
    with Job(tmp_path, plan, num_servers=num_servers, options=options) as job:
        status = job.wait()
        ended = (tmp_path / "err").stat().st_mtime
    (death,) = job.fired()
    assert status == 137
    assert f"echelon: {fault.role} {fault.rank} (pid {death['pid']}) was killed by signal 9\n" == job.err
    assert 0 <= ended - death["at"] < STOP_WITHIN_S
    assert job.results() == {}


@pytest.mark.parametrize("victim", ["server", pytest.param("scheduler", marks=pytest.mark.long)])
def test_without_a_launcher_the_others_stop_too(tmp_path: Path, victim: str) -> None:
    """Nobody starts the scheduler again, so the others give up."""
    plan = json.dumps(asdict(Plan("dist_sync", 1, faults=[Fault(victim, 0, 2)])))
    servers = ["server", "server 1"] if victim == "server" else ["server"]
    variables = {"ECHELON_RANK": "0", "ECHELON_RUN_DIR": str(tmp_path), "ECHELON_TIMEOUT": str(GIVE_UP_S)}
    with ByHand(tmp_path, 1, len(servers), variables) as job:
        job.start("scheduler", [sys.executable, "-m", "echelon.scheduler"])
        for rank, name in enumerate(servers):
            job.start(name, [sys.executable, "-m", "echelon.server"], ECHELON_RANK=str(rank))
        job.start("worker", [sys.executable, str(TESTS / "faults" / "worker.py"), plan])
        statuses = job.statuses()
        dead = job.processes[victim].pid
    (death,) = rows(tmp_path / "faults.jsonl")
    assert death["pid"] == dead
    assert statuses.pop(victim) == -9
    assert set(statuses.values()) == {1}
    # The time of the last output: a process with torch needs another second of CPU time to exit.
    ended = [(tmp_path / name).stat().st_mtime - death["at"] for name in statuses]
    assert max(ended) < STOP_WITHIN_S + (0 if victim == "server" else GIVE_UP_S)
    if victim == "server":
        why = rf"server 0 \(pid {dead} on 127\.0\.0\.1\) died: its connection closed"
        assert re.fullmatch(f"job stopped: {why}\\n", job.out("scheduler"))
        assert re.fullmatch(f"server 1 stops: {why}\\n", job.out("server 1"))
    else:
        lost = r"the connection was lost: (it closed|\[Errno \d+\] .*)"  # the kernel's error varies
        why = rf"no connection to the scheduler at 127\.0\.0\.1:\d+ \({lost}; .*\) for {GIVE_UP_S} s"
        assert re.fullmatch(f"server 0 stops: {why}\\n", job.out("server"))
    place = r"\(\S+worker.py, line \d+\)\n"
    job_is_broken = rf"^error: worker 0: (the job is broken: {why}|not all .* within {GIVE_UP_S} s.*) {place}\Z"
    assert re.search(job_is_broken, job.out("worker"), re.MULTILINE)


def test_nothing_is_left_of_a_job_whose_launcher_is_killed(tmp_path: Path) -> None:
    with Job(tmp_path, Plan("dist_sync", 1, gates=[Gate(0, 2, opened="never")])) as job:
        until(lambda: job.at_clock(0, 2), "the worker at clock 2")
        processes = job.processes()
        assert len(processes) == 5, "launcher, scheduler, server, worker, and the process that forks restarted ones"
        assert segments_of(job.pid("server", 0)) & segments_of(job.pid("worker", 0))
        job.launcher.kill()
        job.launcher.wait()
        until(lambda: not job.processes(), "the end of its children", 5.0)
