"""Chaos: what its events mean, when a job hangs, and the table at the end."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path

import pytest

from echelon.observe.events import EventLog
from echelon.testing.chaos import job as job_module
from echelon.testing.chaos.campaign import Outcome, _message_fault
from echelon.testing.chaos.injections import join_worker, kill_worker
from echelon.testing.chaos.job import FINISHED, ChaosJob, Hang, JoinFailed, Place, Progress, Setting
from echelon.testing.chaos.summary import as_row, table, totals
from echelon.testing.history import LOST, Problem, Report

SETTING = Setting("dist_sync", "tcp")


class Sleeping(Setting):
    """A job that does nothing."""

    def command(self, run: Path) -> list[str]:
        return ["sleep", "60"]


def progress(*events: dict[str, object]) -> Progress:
    found = Progress()
    for event in events:
        found.take(event)
    return found


def test_the_newest_process_of_a_place_is_the_victim() -> None:
    found = progress(
        {"event": "registered", "who": "worker 1 (pid 10 on 127.0.0.1)"},
        {"event": "registered", "who": "server 0 (pid 11 on 127.0.0.1)"},
        {"event": "scheduler_started", "pid": 9},
        {"event": "view", "workers": [], "departure": "died", "slices": [[0, None, True], [1, 0, True]]},
        {"event": "registered", "who": "worker 1 (pid 12 on 127.0.0.1)"},
    )
    assert found.pids == {("worker", 1): 12, ("server", 0): 11, ("scheduler", 0): 9}
    assert found.workers == [1]
    assert (found.lacks_backups, found.lacks_primaries) == (True, False)


def test_a_worker_that_was_told_to_end_has_not_finished() -> None:
    update = {"event": "history", "slice": 0, "copy": False, "updates": [["0", 5, 6, [[0, []], [1, []]]]]}
    left = {"event": "view", "workers": [1], "departure": "left", "slices": []}
    assert not progress(update, {**left, "reason": "worker 0 (pid 7 on 127.0.0.1) left: SIGTERM"}).done
    assert progress(update, {**left, "reason": f"worker 0 (pid 7 on 127.0.0.1) left: {FINISHED}"}).done == {0}


def test_updates_of_backups_are_not_counted() -> None:
    update = ["0-3", 5, 6, [[0, []], [2, []]]]
    found = progress(
        {"event": "history", "slice": 1, "copy": False, "updates": [update]},
        {"event": "history", "slice": 1, "copy": True, "updates": [update]},
    )
    assert (found.updates, found.by_worker, found.by_slice) == (1, Counter({0: 1, 2: 1}), Counter({1: 1}))


def test_a_job_without_progress_is_a_hang(tmp_path: Path) -> None:
    with ChaosJob(Sleeping("dist_sync", "tcp"), tmp_path) as job:
        with pytest.raises(Hang, match=r"dist_sync tcp replicas=0: not within 0\.05 s: an update"):
            job.wait_until(lambda: job.progress.updates > 0, "an update", 0.05)
        with pytest.raises(Hang, match="no update and no end"):
            job.status(0.05)
        with EventLog(job.run, "server", 0) as log:
            log.write("history", slice=0, copy=False, updates=[["0", 0, 1, [[0, []]]]])
        assert job.wait_until(lambda: job.progress.updates > 0, "an update", 5.0)


ECHO = "echelon: up to 2 more workers can join this job: echelon join 127.0.0.1:4711 -- python train.py"


def test_a_worker_that_cannot_join_is_reported_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "JOIN", [sys.executable, "-c", "import sys; print('why'); sys.exit('refused')"])
    with ChaosJob(Sleeping("dist_sync", "tcp"), tmp_path) as job:
        job.output.write_text(ECHO)
        with pytest.raises(JoinFailed) as caught:
            join_worker(job, random.Random(1))
    assert str(caught.value) == "dist_sync tcp replicas=0: a worker could not join, status 1: why; refused"


def test_a_worker_that_cannot_join_because_the_others_have_finished_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_module, "JOIN", [sys.executable, "-c", "import sys; sys.exit('the job is over')"])
    with ChaosJob(Sleeping("dist_sync", "tcp"), tmp_path) as job:
        job.output.write_text(ECHO)
        job.progress.done = {0}
        assert not join_worker(job, random.Random(1))


def test_a_killed_worker_may_be_started_again_with_another_rank(tmp_path: Path) -> None:
    """The scheduler assigns the rank of one that has joined with `echelon join`."""

    def update(log: EventLog, rank: int) -> None:
        for one in range(job.setting.num_servers):
            log.write("history", slice=one, copy=False, updates=[["0", 0, 1, [[rank, []]]]])

    class Acting(ChaosJob):
        """A job whose processes are events."""

        turns = 0

        def signal(self, place: Place, number: int) -> bool:
            return place == ("worker", 4)

        def poll(self) -> None:
            self.turns += 1
            if self.turns == 2:
                events.write("registered", who="worker 1 (pid 31 on 127.0.0.1)")
            update(events, 0 if self.turns < 5 else 1)
            super().poll()

    with Acting(Sleeping("dist_sync", "tcp"), tmp_path) as job, EventLog(job.run, "scheduler", 0) as events:
        job.progress.pids = {("worker", 1): 10, ("worker", 4): 30}
        job.progress.workers = [4]
        assert kill_worker(job, random.Random(1))
        assert job.progress.by_worker[1] > 0


def test_a_seed_gives_the_same_faults() -> None:
    first, second = (random.Random(7) for _ in range(2))
    assert [_message_fault(first, 250) for _ in range(9)] == [_message_fault(second, 250) for _ in range(9)]


def test_the_table_has_a_column_per_scheme_and_one_of_all() -> None:
    bad = Report([Problem(LOST, "a push")], acked=10, partial_steps=1, longest_pause_s=1.234)
    outcomes = [
        Outcome(SETTING, Counter({"kill worker": 2}), 0, None, 5.0, Report(acked=5)),
        Outcome(Setting("dist_async", "shm"), Counter({"kill worker": 1}), None, "it hangs", 6.0, bad),
    ]
    assert [outcome.is_good for outcome in outcomes] == [True, False]
    found = totals(outcomes)
    assert (found["jobs"], found["hangs"], found["lost_acknowledged_updates"]) == (2, 1, 1)
    failed = Outcome(SETTING, failure="a worker could not join")
    assert not failed.is_good
    assert (totals([failed])["hangs"], totals([failed])["failed_jobs"]) == (0, 1)
    assert found["largest_pause_s"] == 1.23
    assert json.loads(json.dumps([as_row(outcome) for outcome in outcomes]))[1]["hang"] == "it hangs"
    lines = table(outcomes).splitlines()
    assert lines[0] == "|  | dist_async | dist_sync | all |"
    assert "| kill worker | 1 | 2 | 3 |" in lines
    assert "| acknowledged pushes | 10 | 5 | 15 |" in lines
