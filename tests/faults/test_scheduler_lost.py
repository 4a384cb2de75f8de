"""A scheduler that is killed and started again, or stopped: steps go on, and deaths are noticed again."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path

from echelon.errors import NOT_WHOLE
from jobs import TESTS, ByHand, Fault, Gate, Plan, Row, rows, until

SCHEDULER = [sys.executable, "-m", "echelon.scheduler"]
SILENT_S = 2.0
PAUSE_S = 3 * SILENT_S


class Training(ByHand):
    """A job of two workers and a server by hand, with a plan."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.run = folder
        variables = {"ECHELON_RUN_DIR": str(folder), "PS_HEARTBEAT_TIMEOUT": str(SILENT_S)}
        super().__init__(folder, plan.num_workers, 1, variables)
        self.start("scheduler", SCHEDULER)
        self.start("server", [sys.executable, "-m", "echelon.server"], ECHELON_RANK="0")
        worker = [sys.executable, str(TESTS / "faults" / "worker.py"), json.dumps(asdict(plan))]
        for rank in range(plan.num_workers):
            self.start(f"worker {rank}", worker, ECHELON_RANK=str(rank))

    def events(self, kind: str) -> list[Row]:
        return [row for row in rows(self.run / "events.jsonl") if row["event"] == kind]

    def wait_for_clock(self, rank: int, clock: int) -> None:
        until((self.run / f"at-{rank}-{clock}").exists, f"worker {rank} at clock {clock}", 60.0)

    def open(self, gate: str) -> None:
        (self.run / gate).touch()

    def table(self, rank: int) -> object:
        return json.loads((self.run / f"result-{rank}.json").read_text())["table"]


def test_steps_go_on_without_a_scheduler_and_a_new_one_knows_the_job(tmp_path: Path) -> None:
    dies = Fault("worker", 1, 6)
    gates = [Gate(rank, clock, opened=f"clock-{clock}") for rank in range(2) for clock in (2, 4)]
    plan = Plan("dist_sync", 2, faults=[dies], gates=gates)
    with Training(tmp_path, plan) as job:
        job.wait_for_clock(0, 2)
        job.wait_for_clock(1, 2)
        first = job.processes["scheduler"]
        first.kill()
        first.wait()
        job.open("clock-2")
        job.wait_for_clock(0, 4)  # they make steps together without a scheduler
        job.wait_for_clock(1, 4)
        job.start("scheduler again", SCHEDULER)
        (restarted,) = until(lambda: job.events("scheduler_restarted"), "a scheduler that knows the job")
        job.open("clock-4")
        statuses = job.statuses()
    assert [str(member).split(" (")[0] for member in restarted["members"]] == ["server 0", "worker 0", "worker 1"]
    views = [(view["departure"], view["workers"]) for view in job.events("view")]
    assert views == [("returned", [0, 1]), ("died", [0]), ("left", [])]
    assert job.events("view")[0]["number"] == 2
    assert "worker 1" in job.events("view")[1]["reason"]
    assert statuses["worker 0"] == statuses["server"] == 0
    assert statuses["scheduler again"] == NOT_WHOLE, "nobody has trained what worker 1 had to"
    assert job.table(0) == plan.table(), "every push was applied once"


def test_nobody_is_dead_for_a_scheduler_that_was_stopped(tmp_path: Path) -> None:
    plan = Plan("dist_sync", 2, gates=[Gate(rank, 4, opened="open") for rank in range(2)])
    with Training(tmp_path, plan) as job:
        job.wait_for_clock(0, 4)
        job.wait_for_clock(1, 4)
        scheduler = job.processes["scheduler"].pid
        os.kill(scheduler, signal.SIGSTOP)
        time.sleep(PAUSE_S)  # the pause itself
        os.kill(scheduler, signal.SIGCONT)
        job.open("open")  # the workers meet in a barrier after the last clock, which needs the scheduler
        statuses = job.statuses()
    assert set(statuses.values()) == {0}, statuses
    assert [view["departure"] for view in job.events("view")] == ["left", "left"]
    assert job.table(0) == job.table(1) == plan.table()
