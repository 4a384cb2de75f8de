"""`echelon launch`, and the roles started by hand, as a user runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from jobs import TESTS, ByHand, Job, rows, until

SCRIPT = str(TESTS / "integration" / "script.py")


def launch(folder: Path, mode: str, *options: str, num_workers: int = 2) -> Job:
    return Job(folder, num_workers=num_workers, command=[sys.executable, SCRIPT, mode], options=options)


def lines(text: str, name: str) -> list[str]:
    """Return the lines of one process in the output of a job."""
    return [line.removeprefix(f"[{name}] ") for line in text.splitlines() if line.startswith(f"[{name}] ")]


def has_registered(folder: Path, count: int) -> bool:
    return len([row for row in rows(folder / "events.jsonl") if row["event"] == "registered"]) >= count


def test_a_failing_worker_gives_its_status_and_last_line_and_the_other_continues(tmp_path: Path) -> None:
    with launch(tmp_path, "exit") as job:
        assert job.wait() == 3
    assert lines(job.out, "worker 0") == ["imported", "rank 0 of 2", "result [1.0, 1.0]"]
    assert lines(job.out, "worker 1") == ["imported", "rank 1 of 2", "no newline at the end"]
    assert all(re.match(r"\[(worker|server|scheduler) \d\] ", line) for line in job.out.splitlines())
    expected = r"echelon: worker 1 \(pid \d+\) exited with status 3; its last line: no newline at the end\n"
    assert re.fullmatch(expected, job.err)


def test_ctrl_c_is_forwarded_and_ends_everything(tmp_path: Path) -> None:
    with launch(tmp_path, "wait") as job:
        until(lambda: job.out.count("at work") == 2, "both workers at work")
        job.launcher.send_signal(signal.SIGINT)
        assert job.wait(10.0) == 130
    assert job.err == "echelon: stopped by SIGINT\n"
    assert lines(job.out, "worker 1")[-1] == "KeyboardInterrupt", "it was interrupted, not killed"
    assert lines(job.out, "server 0") == [], "servers are not interrupted: they end with the workers"


def test_a_second_ctrl_c_kills_the_remaining_workers_and_names_them(tmp_path: Path) -> None:
    with launch(tmp_path, "deaf") as job:
        until(lambda: job.out.count("at work") == 2, "both workers at work")
        job.launcher.send_signal(signal.SIGINT)
        until(lambda: job.out.count("noted") == 2, "both workers got the signal")
        job.launcher.send_signal(signal.SIGINT)
        assert job.wait(10.0) == 130
    killed = "".join(rf"; worker {rank} \(pid \d+\) had not ended and was killed" for rank in (0, 1))
    assert re.fullmatch(rf"echelon: stopped by SIGINT, and again by SIGINT{killed}\n", job.err)


def test_a_wrong_shape_is_the_error_of_the_worker_that_gave_it(tmp_path: Path) -> None:
    with launch(tmp_path, "shapes", "--transport", "tcp") as job:
        assert job.wait() == 1
    expected = "worker 1: server 0: key 'w' is 2 float32 on the servers but 3 float32 on this worker"
    assert lines(job.out, "worker 1")[-1] == f"echelon.errors.UsageError: {expected}"
    assert lines(job.out, "worker 0")[-1] == "result [1.0, 1.0]"
    assert lines(job.out, "server 0") == []
    assert job.err.startswith("echelon: worker 1 (pid ")


def test_an_unknown_store_ends_the_job_and_lists_the_known_names(tmp_path: Path) -> None:
    with launch(tmp_path, "unknown store") as job:
        assert job.wait() == 1
    expected = "unknown store 'dist_snyc'; did you mean 'dist_sync'? Choose one of local, device, nccl_allreduce, "
    assert expected in lines(job.out, "worker 1")[-1]
    assert lines(job.out, "scheduler 0") == ["job stopped: worker 1 exited with status 1 before it joined the job"]
    assert re.match(r"echelon: worker 1 \(pid \d+\) exited with status 1; its last line: .*unknown store", job.err)
    assert job.err.count("\n") == 1


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    """A job of two workers and a server."""
    with ByHand(tmp_path, 2, 1, {"PS_VERBOSE": "2", "DMLC_INTERFACE": "lo"}) as job:
        yield job


def script_lines(output: str) -> list[str]:
    """Return the lines of the script itself, without those of PS_VERBOSE."""
    return [line for line in output.splitlines() if " received " not in line and " joined the job of " not in line]


@pytest.mark.long
def test_one_script_in_every_role_started_by_hand_in_any_order(by_hand: ByHand) -> None:
    command = [sys.executable, SCRIPT, "well"]
    for name in ("worker late", "worker early", "server", "scheduler"):
        by_hand.start(name, command)
    assert by_hand.statuses() == {"worker late": 0, "worker early": 0, "server": 0, "scheduler": 0}
    assert by_hand.out("scheduler") == "imported\n", "it serves from create() and ends there"
    assert script_lines(by_hand.out("server")) == ["imported"], "it serves from create() and ends there"
    assert "received Finish()" in by_hand.out("server")
    expected = [script_lines(by_hand.out(name)) for name in ("worker late", "worker early")]
    assert sorted(text[1] for text in expected) == ["rank 0 of 2", "rank 1 of 2"]
    assert [text[2] for text in expected] == ["result [3.0, 3.0]"] * 2


def test_ranks_come_from_the_order_of_arrival(tmp_path: Path) -> None:
    arrive = """
from echelon.cluster.messages import Leave
from echelon.environment import Job
from echelon.transport.choose import by_name
from echelon.transport.registration import register
with register(Job.from_environment(), "worker", by_name("tcp")) as post:
    print("rank", post.rank)
    post.control.send(Leave("it finished", False))  # a connection that closes without it means that the worker died
"""
    names = ["worker c", "worker a", "worker b"]
    with ByHand(tmp_path, len(names), 0, {"ECHELON_RUN_DIR": str(tmp_path)}) as job:
        job.start("scheduler", [sys.executable, "-m", "echelon.scheduler"])
        for number, name in enumerate(names, 1):
            job.start(name, [sys.executable, "-c", arrive])
            until(partial(has_registered, tmp_path, number), f"{name} has arrived")
        assert set(job.statuses().values()) == {0}
        assert [job.out(name) for name in names] == ["rank 0\n", "rank 1\n", "rank 2\n"]


def test_importing_starts_nothing() -> None:
    code = """
import os, sys, threading
os.environ.update(DMLC_ROLE="server", DMLC_PS_ROOT_URI="127.0.0.1", DMLC_PS_ROOT_PORT="1", DMLC_NUM_WORKER="1")
import echelon
assert "torch" not in sys.modules
import echelon.kvstore, echelon.train.trainer.base, echelon.scheduler, echelon.server.serve, echelon.cli.launch
paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
print(threading.active_count(), any(os.readlink(path).startswith("socket:") for path in paths if os.path.islink(path)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ)
    assert (done.stdout, done.stderr) == ("1 False\n", "")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-n", "0", "-s", "1", "true"], "a job needs at least one worker (-n), not 0"),
        (["-n", "1", "-s", "1"], "no command to launch"),
        (["-n", "1", "--launcher", "nosuch", "true"], "unknown launcher 'nosuch'; "),
        (["-n", "1", "--transport", "pigeon", "true"], "unknown transport 'pigeon'; choose one of auto, shm, tcp"),
        (["-n", "1", "nosuchprogram"], "there is no program 'nosuchprogram'"),
    ],
)
def test_an_invalid_command_line_gives_one_line(tmp_path: Path, arguments: list[str], expected: str) -> None:
    command = [sys.executable, "-m", "echelon.cli.main", "launch", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("echelon: ")
    assert done.stderr.count("\n") == 1
    assert expected in done.stderr


def test_processes_that_a_command_leaves_running_are_killed(tmp_path: Path) -> None:
    leave = ["sh", "-c", "sleep 1000 & echo started"]
    with Job(tmp_path, num_workers=2, num_servers=0, command=leave) as job:
        assert job.wait() == 0
    assert job.out.split("\n")[:2] in (
        ["[worker 0] started", "[worker 1] started"],
        ["[worker 1] started", "[worker 0] started"],
    )


def test_unused_servers_end_normally(tmp_path: Path) -> None:
    with Job(tmp_path, num_workers=1, num_servers=1, command=["echo", "hello"]) as job:
        assert job.wait() == 0
    assert (job.out, job.err) == ("[worker 0] hello\n", "")


def test_a_store_without_servers_runs_in_a_job_with_servers_and_says_so(tmp_path: Path) -> None:
    with launch(tmp_path, "no servers") as job:
        assert job.wait() == 0
    assert [lines(job.out, f"worker {rank}")[1:] for rank in (0, 1)] == [
        [f"rank {rank} of 2", "result [3.0, 3.0]"] for rank in (0, 1)
    ]
    unused = "dist_device_sync runs without servers: it does not use the 1 server of this job (-s 0 starts none)"
    assert lines(job.out, "scheduler 0") == [unused]
    assert (lines(job.out, "server 0"), job.err) == ([], "")


def test_workers_without_a_store_are_reported(tmp_path: Path) -> None:
    with Job(tmp_path, num_workers=2, num_servers=1, command=["echo", "hello"]) as job:
        assert job.wait() == 0
    assert job.err.startswith("echelon: warning: no worker created a Trainer or a store, so the 2 workers ran")


@pytest.mark.parametrize("num_servers", [0, 1])
def test_a_worker_that_ends_before_it_joins_ends_the_job_at_once(tmp_path: Path, num_servers: int) -> None:
    program = "import os, sys, echelon\nif os.environ['ECHELON_RANK'] == '1': sys.exit()\n"
    command = [sys.executable, "-c", program + "echelon.kvstore.create('dist_sync')"]
    with Job(tmp_path, num_workers=2, num_servers=num_servers, command=command) as job:
        assert job.wait() == 1
    expected = r"echelon: worker 1 \(pid \d+\) exited with status 0 before it created a Trainer or a store, for which "
    assert re.fullmatch(expected + r"worker 0 waited\n", job.err)
    assert "Traceback" not in job.out


def test_a_program_for_torchrun_is_told_what_to_change(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os; rank = int(os.environ['RANK'])"]
    with Job(tmp_path, num_workers=2, num_servers=0, command=command) as job:
        assert job.wait() == 1
    assert re.match(r"echelon: worker \d \(pid \d+\) exited with status 1; its last line: KeyError: 'RANK'\n", job.err)
    assert "start it with torchrun, or\n    replace init_process_group and DistributedDataParallel by" in job.err


def test_valid_flags_start_the_command(tmp_path: Path) -> None:
    flags = "-n 2 -s 0 -i lo --stall-seconds 3 --staleness 0 --run-dir here --groups 0,1"
    command = [sys.executable, "-m", "echelon.cli.main", "launch", *flags.split(), "touch", "started"]
    assert subprocess.run(command, cwd=tmp_path, timeout=60).returncode == 0
    assert (tmp_path / "started").exists()
