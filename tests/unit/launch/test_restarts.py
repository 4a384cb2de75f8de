"""Which processes are restarted, and when; and what the exit status of a job says about its result."""

from __future__ import annotations

import subprocess
import sys

import pytest

from echelon.errors import CRASHED
from echelon.launch.supervision.restarts import LONGEST_WAIT_S, RAN_WELL_S, Restarts, is_replaceable
from echelon.launch.supervision.verdict import MOST_NAMED, Failure, Loss, describe_losses, final_status, stop_reason


def test_each_restart_of_a_process_waits_longer_up_to_a_limit() -> None:
    restarts = Restarts(most=7)
    waits = [restart.at - 100.0 for restart in iter(lambda: restarts.next("server 0", 100.0), None) if restart]
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, LONGEST_WAIT_S, LONGEST_WAIT_S])


def test_a_process_that_ran_for_a_minute_is_restarted_soon_again_and_the_restart_counts() -> None:
    restarts = Restarts(most=4)
    now, seen = 0.0, []
    for ran_s in (0.0, 0.0, RAN_WELL_S - 1.0, RAN_WELL_S):
        restart = restarts.next("server 0", now + ran_s)
        assert restart is not None
        seen.append((restart.number, round(restart.at - now - ran_s, 3)))
        now = restart.at
    assert seen == [(1, 0.2), (2, 0.4), (3, 0.8), (4, 0.2)]
    assert restarts.next("server 0", now + RAN_WELL_S) is None


def test_restarts_of_processes_are_counted_apart() -> None:
    restarts = Restarts(most=1)
    assert restarts.next("worker 0", 0.0) is not None
    assert restarts.next("worker 0", 0.0) is None
    assert restarts.next("worker 1", 0.0) is not None


def test_no_restarts() -> None:
    assert Restarts(most=0).next("server 0", 0.0) is None


@pytest.mark.parametrize("code", [-9, -15, CRASHED, 255])
@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_servers_and_the_scheduler_are_replaced_when_they_are_killed_or_crash(role: str, code: int) -> None:
    assert is_replaceable(role, code, has_started=True, has_ledger=False, is_over=False)
    assert not is_replaceable(role, code, has_started=False, has_ledger=False, is_over=False)
    assert not is_replaceable(role, code, has_started=True, has_ledger=False, is_over=True)


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_a_server_or_scheduler_that_ends_deliberately_is_not_replaced(code: int) -> None:
    assert not is_replaceable("server", code, has_started=True, has_ledger=True, is_over=False)
    assert not is_replaceable("scheduler", code, has_started=True, has_ledger=True, is_over=False)


@pytest.mark.parametrize("code", [-9, 1, 2, 255])
def test_a_worker_is_replaced_only_if_the_job_has_a_ledger(code: int) -> None:
    assert is_replaceable("worker", code, has_started=True, has_ledger=True, is_over=False)
    assert not is_replaceable("worker", code, has_started=True, has_ledger=False, is_over=False)
    assert not is_replaceable("worker", code, has_started=True, has_ledger=True, is_over=True)


def test_a_worker_that_leaves_with_status_0_is_not_replaced() -> None:
    assert not is_replaceable("worker", 0, has_started=True, has_ledger=True, is_over=False)


KILLED, BROKEN, ALONE = Failure(137), Failure(137, decisive=True), Failure(7, uncovered=True)


@pytest.mark.parametrize(
    ("first", "scheduler", "workers", "status"),
    [
        (None, 0, [0, 0], 0),
        (None, None, [0], 0),
        (KILLED, 0, [0, -9], 0),  # the others did its work
        (KILLED, 3, [0, -9], 3),  # nobody did
        (ALONE, 3, [0, -9], 3),
        (ALONE, 0, [0, 7], 7),  # it had left the job before it failed
        (None, 3, [0, 0], 3),  # a value was not finite
        (KILLED, 0, [-9, -9], 137),  # nobody finished
        (KILLED, 1, [1, -9], 137),
        (KILLED, -9, [0, -9], 3),  # nobody says whether the result is whole
        (KILLED, -9, [1, -9], 137),
        (KILLED, None, [0, -9], 137),  # a job without servers
        (BROKEN, 0, [0, 0], 137),
        (BROKEN, 3, [0, 0], 137),
    ],
)
def test_the_exit_status_says_whether_the_result_is_whole(
    first: Failure | None, scheduler: int | None, workers: list[int], status: int
) -> None:
    assert final_status(first, scheduler, workers) == status


def test_losses_are_named_up_to_a_limit() -> None:
    one = Loss("worker 1 (pid 7)", "was killed by signal 9", restarted=True)
    assert describe_losses([one]) == "worker 1 (pid 7) was killed by signal 9 and was restarted"
    text = describe_losses([one] * (MOST_NAMED + 2))
    assert text.count("pid 7") == MOST_NAMED
    assert text.endswith("; 2 more")


@pytest.mark.parametrize(("module", "serve"), [("server", "echelon.server.serve"), ("scheduler", "echelon.scheduler")])
def test_an_uncaught_exception_is_a_crash(module: str, serve: str) -> None:
    """Python's own status would be 1, with which servers and the scheduler say that the job has failed."""
    crash = "def serve(*_): raise MemoryError"
    program = f"import runpy, {serve} as module\n{crash}\nmodule.serve = serve\n"
    program += f"runpy.run_module('echelon.{module}', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (CRASHED, "MemoryError")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (
            "job stopped: 1 worker is left, and the job needs 2 (--min-workers): worker 1 (pid 7 on h) died: x",
            "job stopped: 1 worker is left, and the job needs 2 (--min-workers)",
        ),
        ("job stopped: worker 1 exited with status 1 before it joined the job", ""),
        ("job stopped: worker 10 (pid 7 on h) died: x", "job stopped: worker 10 (pid 7 on h) died: x"),
        ("job stopped: server 0 was lost", "job stopped: server 0 was lost"),
        ("", ""),
    ],
)
def test_the_reason_of_the_scheduler_does_not_repeat_the_worker_that_failed(line: str, reason: str) -> None:
    assert stop_reason(line, "worker 1") == reason
