"""kill -9 of servers in real jobs: with a backup nothing is lost, without one the workers give the weights back."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from large_key_worker import NUM_PARTS, PART
from samples_outcome import PROGRAM

from echelon.environment import HISTORY
from echelon.errors import NOT_WHOLE
from echelon.testing import faults, history
from jobs import AFTER_PUSH, BEFORE_PUSH, PATHS, TESTS, Fault, Gate, Job, Plan, until

PAUSE_S = 3.0  # that training may stop for
SYNC, GSYNC = Plan("dist_sync", 2, clocks=12), Plan("dist_gsync", 2, groups=[[0, 1]], clocks=12)


@pytest.mark.parametrize(
    ("plan", "transport"),
    [
        pytest.param(SYNC, "shm", id="sync-shm"),
        pytest.param(Plan("dist_async", 2, clocks=12), "tcp", id="async-tcp"),
        pytest.param(SYNC, "tcp", id="sync-tcp", marks=pytest.mark.long),
        pytest.param(Plan("dist_ssync", 2, staleness=1, clocks=12), "tcp", id="ssync-tcp", marks=pytest.mark.long),
        pytest.param(GSYNC, "shm", id="gsync-shm", marks=pytest.mark.long),
    ],
)
def test_a_killed_server_loses_nothing_with_a_backup(tmp_path: Path, plan: Plan, transport: str) -> None:
    """Each server is killed once: the second is killed when the first is back and has a copy of its slices."""
    faults = [Fault("server", 0, 3, BEFORE_PUSH), Fault("server", 1, 8, AFTER_PUSH)]
    plan = Plan(plan.store, 2, plan.staleness, plan.groups, plan.clocks, faults, gates=[Gate(0, 8, opened="go")])
    options = ("--replicas", "1", "--transport", transport)
    with Job(tmp_path, plan, num_servers=2, options=options) as job:
        until(lambda: sum("has a copy of" in view["reason"] for view in job.events("view")) == 2, "both copies")
        (job.run / "go").touch()
        assert job.wait() == 0, job.out + job.err
    assert [(row["role"], row["rank"]) for row in job.fired()] == [("server", 0), ("server", 1)]
    assert [event["slice"] for event in job.events("promoted")] == [0, 0, 1]
    for result in job.results().values():
        assert result["table"] == plan.table(), "each push is applied once"
    assert len(job.results()) == 2
    deaths = [row["at"] for row in job.fired()]
    for death, event in zip(deaths, job.events("promoted"), strict=False):
        assert event["at"] - death < PAUSE_S


@pytest.mark.parametrize(("plan", "transport"), [(SYNC, "shm"), (GSYNC, "tcp")], ids=["sync-shm", "gsync-tcp"])
def test_without_a_backup_the_workers_give_the_weights_back(tmp_path: Path, plan: Plan, transport: str) -> None:
    faults = [Fault("server", 1, 4, BEFORE_PUSH)]
    plan = Plan(plan.store, 2, plan.staleness, plan.groups, plan.clocks, faults, gates=[])
    with Job(tmp_path, plan, num_servers=2, options=("--transport", transport)) as job:
        assert job.wait() == 0, job.out + job.err
    assert len(job.fired()) == 1
    (recovered,) = job.events("recovered")
    assert recovered["slice"] == 1
    assert re.search(r"server 1 has slice 1 from the workers again \(\d+ keys\); the optimizer's state ", job.out)
    for result in job.results().values():
        assert result["table"] == plan.table(), "the weights that workers had pulled are not lost"


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(SYNC, id="sync"),
        pytest.param(Plan("dist_async", 2, clocks=12), id="async"),
        pytest.param(Plan("dist_sync", 1, clocks=12), id="one-worker"),
        pytest.param(GSYNC, id="gsync", marks=pytest.mark.long),
        pytest.param(Plan("dist_ssync", 3, staleness=2, clocks=12), id="ssync", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_weights_that_were_written_and_not_answered_have_the_push_once(
    tmp_path: Path, plan: Plan, transport: str
) -> None:
    """Over shared memory the workers have the new weights when the server dies, and repeat their pushes."""
    plan = replace(plan, together=True)
    crash = faults.Fault(faults.Kind.CRASH, "server", 1, clock=9, point="server.applied")  # it stores the last rows
    options = ("--transport", transport)
    with Job(tmp_path, plan, num_servers=2, options=options, environment=faults.faults_in([crash])) as job:
        assert job.wait() == 0, job.out + job.err
    faults.check_fired(job.run, [crash])
    assert len(job.events("recovered")) == 1
    assert len(job.results()) == plan.num_workers
    for result in job.results().values():
        assert result["table"] == plan.table(), "each push is applied once"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_server_that_dies_while_it_writes_weights_applies_no_push_twice(tmp_path: Path, num_workers: int) -> None:
    """The first two of four parts are new, on all workers. The job says so, and goes on."""
    program = [sys.executable, str(TESTS / "faults" / "large_key_worker.py"), "6"]
    parts_before = NUM_PARTS * 4  # of the initial values, the first pull, and two updates
    crash = faults.Fault(faults.Kind.CRASH, "server", 0, point="server.writing", after=parts_before + 1)
    environment = faults.faults_in([crash]) | {HISTORY: "1"} | PATHS
    with Job(tmp_path, num_servers=1, num_workers=num_workers, command=program, environment=environment) as job:
        assert job.wait() == 0, job.out + job.err
    faults.check_fired(job.run, [crash])
    assert "has slice 0 from the workers again (1 keys); the last update of 1 of them was applied in part" in job.out
    found = [json.loads(text) for text in re.findall(r"worker \d has ({.*})", job.out)]
    assert found == [{"-6.0": 2 * PART, "-5.0": (NUM_PARTS - 2) * PART}] * num_workers
    report = history.check(job.run)
    assert (report.problems, report.updates_in_part, report.acked) == ([], 1, 6 * num_workers)


def test_a_lost_server_gets_its_weights_back_from_a_worker_that_waits_at_a_barrier(tmp_path: Path) -> None:
    """Worker 0 has made its last push, and waits for the scheduler. Without its part the new server cannot go on."""
    plan = Plan("dist_async", 2, clocks=6, gates=[Gate(1, 3, opened="go")])
    with Job(tmp_path, plan, num_servers=2) as job:
        until(lambda: job.at_clock(0, 5) and job.at_clock(1, 3), "the last clock of worker 0")
        os.kill(job.pid("server", 1), signal.SIGKILL)
        until(lambda: any(view["departure"] == "joined" for view in job.events("view")), "server 1 again")
        (job.run / "go").touch()
        assert job.wait() == 0, job.out + job.err
    assert len(job.events("recovered")) == 1
    for result in job.results().values():
        assert result["table"] == plan.table(), "the weights that workers had pulled are not lost"


@pytest.mark.parametrize("store", ["dist_async", pytest.param("dist_ssync", marks=pytest.mark.long)])
def test_pushes_after_a_death_are_not_taken_for_those_of_the_dead_worker(tmp_path: Path, store: str) -> None:
    """The versions that workers have seen count updates of worker 2, which cannot say any more how many it made."""
    faults = [Fault("worker", 2, 3, BEFORE_PUSH), Fault("server", 0, 5, BEFORE_PUSH)]
    gates = [Gate(0, 5, gone=2, opened="kill"), Gate(1, 5, gone=2, opened="go")]
    plan = Plan(store, 3, 8 if store == "dist_ssync" else None, clocks=8, faults=faults, gates=gates)
    with Job(tmp_path, plan, num_servers=1, options=("--transport", "tcp")) as job:
        until(lambda: job.at_clock(0, 5) and job.at_clock(1, 5), "clock 5 of both workers")
        (job.run / "kill").touch()
        until(lambda: bool(job.fired()[1:]), "the death of the server")
        (job.run / "go").touch()
        assert job.wait() == NOT_WHOLE, job.out + job.err
    assert len(job.events("recovered")) == 1
    assert len(job.results()) == 2
    for result in job.results().values():
        assert result["table"] == plan.table(), "each push is applied once"


def test_a_job_ends_when_a_server_and_all_workers_that_had_its_weights_are_lost(tmp_path: Path) -> None:
    """The worker that is started again knows nothing. Its own initial weights are not those of the job."""
    out = tmp_path / "out_files"
    out.mkdir()
    plan = {"store": "dist_sync", "num_samples": 400, "batch_size": 2, "epochs": 1, "compute_s": {"0": 0.02}}
    command = [sys.executable, str(PROGRAM), json.dumps(plan | {"out": str(out)})]
    with Job(tmp_path, num_servers=1, num_workers=1, command=command, options=["--max-restarts", "3"]) as job:
        until(lambda: any("end" in file.read_text() for file in out.iterdir()), "a step")
        worker = job.pid("worker", 0)
        os.kill(worker, signal.SIGSTOP)  # it does not give the weights back
        os.kill(job.pid("server", 0), signal.SIGKILL)
        until(lambda: any(view["departure"] == "joined" for view in job.events("view")), "server 0 again")
        os.kill(worker, signal.SIGKILL)
        status = job.wait(30.0)
    assert status == 1, job.out + job.err
    assert "the weights of slice 0 are lost" in job.out + job.err
    assert "resume from a checkpoint" in job.out + job.err
