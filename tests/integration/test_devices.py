"""One process per device: their ranks, what is printed, and what happens to the others when one ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import Job, until

SCRIPT = str(Path(__file__).with_name("device_script.py"))
STARTER = """
import sys
from echelon.launch.devices import run_devices
sys.exit(run_devices([sys.executable, *sys.argv[2:]], int(sys.argv[1])))
"""


def starter(num_devices: int, how: str, what: str) -> list[str]:
    """Return the command of a worker that starts its devices."""
    return [sys.executable, "-c", STARTER, str(num_devices), SCRIPT, how, what]


def run(num_devices: int, how: str, what: str) -> subprocess.CompletedProcess[str]:
    command = starter(num_devices, how, what)
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ)


def test_only_the_output_of_device_0_is_printed() -> None:
    done = run(2, "well", "nccl")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "device 0 of 2\nrank 0 of 2: [3.0, 3.0]\n"


def test_a_killed_device_ends_the_others_and_is_named() -> None:
    done = run(2, "die", "device")
    assert done.returncode == 128 + signal.SIGKILL
    assert re.search(r"^echelon: device 1 \(pid \d+\) was killed by signal 9$", done.stderr, re.MULTILINE)
    assert done.stdout.startswith("device 0 of 2\nrank 0 of 2: [3.0, 3.0]\n")


def test_a_failing_device_shows_its_last_lines_and_ends_the_others(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    done = run(2, "fail", str(tmp_path / "pipe"))
    assert done.returncode == 1
    assert done.stdout == "device 0 of 2\n"
    expected = r"echelon: device 1 \(pid \d+\) exited with status 1; its last lines:\n"
    assert re.search(expected + r"    device 1 of 2\n    a device has its reasons\n", done.stderr)


def test_signals_are_forwarded_to_all_devices(tmp_path: Path) -> None:
    with subprocess.Popen(starter(3, "wait", str(tmp_path)), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as worker:
        until(lambda: len(list(tmp_path.iterdir())) == 3, "all devices at work")
        worker.send_signal(signal.SIGTERM)
        printed = worker.communicate(timeout=20)
    assert worker.returncode == 128 + signal.SIGTERM
    assert printed == (b"device 0 of 3\n", b"echelon: stopped by SIGTERM\n")


@pytest.mark.long
def test_devices_of_several_workers_without_servers(tmp_path: Path) -> None:
    """`echelon launch -n 2 -s 0` with a program that starts two devices gives ranks 0 to 3 in one process group."""
    with Job(tmp_path, num_workers=2, num_servers=0, command=starter(2, "well", "dist_device_sync")) as job:
        assert job.wait() == 0
    assert job.err == ""
    lines = sorted(job.out.splitlines())
    assert lines == [
        "[worker 0] device 0 of 2",
        "[worker 0] rank 0 of 4: [10.0, 10.0]",
        "[worker 1] device 0 of 2",
        "[worker 1] rank 2 of 4: [10.0, 10.0]",
    ]


def test_a_worker_that_exits_ends_a_job_without_servers_and_is_named(tmp_path: Path) -> None:
    """The error does not name the others, whose collectives fail afterwards."""
    command = [sys.executable, SCRIPT, "leave", "dist_sync"]
    with Job(tmp_path, num_workers=2, num_servers=0, command=command) as job:
        assert job.wait() == 1
    expected = r"echelon: worker 1 \(pid \d+\) exited with status 1; its last line: enough of this\n"
    assert re.fullmatch(expected, job.err)
    assert "Traceback" not in job.out


@pytest.mark.long
def test_torchrun_starts_a_group(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", SCRIPT, "well", "nccl"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "device 0 of 2",
        "device 1 of 2",
        "rank 0 of 2: [3.0, 3.0]",
        "rank 1 of 2: [3.0, 3.0]",
    ]
