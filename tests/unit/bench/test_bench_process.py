"""Contenders of real processes: answers, idling, errors, and that no process is left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from echelon.bench.harness.process import ProcessContender, ProcessSpec
from echelon.errors import JobError, UsageError

START = "import os, subprocess, sys; from echelon.bench.harness.protocol import serve\n"
WORK = START + "print('other output'); serve(lambda num_steps: [0.25] * num_steps)"
WITH_CHILD = START + "subprocess.Popen(['cat'], stdin=subprocess.PIPE)\n" + "serve(lambda num_steps: [0.5] * num_steps)"
SERVE = "import sys; print('serving', flush=True); sys.stdin.close(); import signal; signal.pause()"
SILENT = "import sys; print('still starting', file=sys.stderr, flush=True); sys.stdin.read()"
FAIL_AT_START = "print('here is why', end='', flush=True); raise SystemExit(3)"
FAIL_IN_ROUND = START + "def crash(num_steps): raise RuntimeError(f'lost at step {num_steps}')\nserve(crash)"
MISCOUNT = START + "serve(lambda num_steps: [0.25])"
STAY = (
    START
    + "serve(lambda num_steps: [0.25] * num_steps); print('not leaving', flush=True); import signal; signal.pause()"
)

MakeContender = Callable[..., ProcessContender]


@pytest.fixture
def make(tmp_path: Path) -> MakeContender:
    """Return a function that makes a contender of programs; those whose name starts with `worker` are driven."""

    def made(timeouts: dict[str, Any] | None = None, **programs: str) -> ProcessContender:
        specs = [
            ProcessSpec(name.replace("_", " "), [sys.executable, "-c", code], {}, driven=name.startswith("worker"))
            for name, code in programs.items()
        ]
        return ProcessContender("subject", specs, tmp_path, **(timeouts or {}))

    return made


def all_processes(contender: ProcessContender) -> list[psutil.Process]:
    """Return every process of a contender, with all child processes."""
    members = [psutil.Process(pid) for pid in contender.pids]
    return members + [child for member in members for child in member.children(recursive=True)]


def assert_ended(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert alive == []


def test_rounds_are_answered_and_no_process_is_left(make: MakeContender) -> None:
    with make(worker_0=WORK, worker_1=WITH_CHILD) as contender:
        assert contender.run_round(2) == [0.25, 0.25]
        assert contender.run_round(1) == [0.25]
        processes = all_processes(contender)
        assert len(processes) == 3
        assert {os.getpgid(pid) for pid in contender.pids} == set(contender.pids)
    assert contender.pids == []
    assert_ended(processes)


def test_an_idle_contender_uses_no_cpu_time(make: MakeContender) -> None:
    with make(worker_0=WORK) as idle, make(worker_0=WORK) as busy:
        (process,) = all_processes(idle)
        before_s = sum(process.cpu_times()[:2])
        for _ in range(50):
            busy.run_round(1)
        assert sum(process.cpu_times()[:2]) - before_s <= 0.02  # two ticks of the kernel's clock
        assert idle.run_round(1) == [0.25]


def test_an_exception_in_the_block_ends_the_processes(make: MakeContender) -> None:
    contender = make(worker_0=WORK, worker_1=WITH_CHILD)
    processes: list[psutil.Process] = []

    def interrupted() -> None:
        with contender:
            processes.extend(all_processes(contender))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(processes) == 3
    assert_ended(processes)


def test_a_failure_at_the_start_shows_its_last_lines(make: MakeContender) -> None:
    contender = make(worker_0=SILENT, worker_1=FAIL_AT_START)
    with pytest.raises(JobError) as caught:
        contender.start()
    message = str(caught.value)
    assert message.startswith("subject could not get ready; worker 1 ended with status 3")
    assert "last lines of worker 1:\n  here is why" in message
    assert contender.pids == []


def test_a_crash_in_a_round_shows_the_traceback_and_ends_the_others(make: MakeContender) -> None:
    contender = make(worker_0=WORK, worker_1=FAIL_IN_ROUND, server_0=SERVE)
    contender.start()
    processes = all_processes(contender)
    with pytest.raises(JobError, match=r"could not do 4 steps; worker 1 ended with status 1(.|\n)*lost at step 4"):
        contender.run_round(4)
    assert_ended(processes)


def test_a_killed_server_is_noticed(make: MakeContender) -> None:
    with pytest.raises(JobError, match=r"could not get ready; server 0 ended with status 137"):
        make(worker_0=SILENT, server_0="import os; os.kill(os.getpid(), 9)").start()


def test_no_answer_within_the_timeout_is_an_error(make: MakeContender) -> None:
    contender = make({"start_timeout_s": 0.01}, worker_0=SILENT)
    with pytest.raises(JobError, match=r"did not get ready within 0.01 s; no answer from worker 0\nlast lines of"):
        contender.start()
    assert contender.pids == []


def test_a_wrong_number_of_times_is_an_error(make: MakeContender) -> None:
    contender = make(worker_0=MISCOUNT)
    contender.start()
    with pytest.raises(JobError, match="asked for 3 steps, but it returned 1 times"):
        contender.run_round(3)
    assert contender.pids == []


def test_a_process_that_does_not_exit_is_killed_and_reported(make: MakeContender) -> None:
    contender = make({"stop_timeout_s": 0.2}, worker_0=STAY)
    contender.start()
    processes = all_processes(contender)
    with pytest.raises(JobError, match=r"did not end normally after 'quit'"):
        contender.stop()
    assert_ended(processes)


def test_stop_without_start_does_nothing(make: MakeContender) -> None:
    make(worker_0=WORK).stop()


def test_a_missing_program_is_an_error(tmp_path: Path) -> None:
    contender = ProcessContender("subject", [ProcessSpec("worker 0", ["./no-such-program"], driven=True)], tmp_path)
    with pytest.raises(UsageError, match=r"worker 0 cannot run '\./no-such-program': No such file"):
        contender.start()


def test_a_contender_needs_a_driven_process(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no driven process"):
        ProcessContender("subject", [ProcessSpec("server 0", ["true"])], tmp_path)
