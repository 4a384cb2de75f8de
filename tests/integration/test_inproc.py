"""`--launcher inproc`: a job whose processes are threads of one process, for a debugger."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.plan import Request
from echelon.launch.threads.launcher import InprocLauncher, PythonProgram, python_program
from jobs import until

PROGRAM = """
import os, sys, time, torch, echelon
store = echelon.kvstore.create("dist_sync")
store.init("x", torch.zeros(3))
out = torch.zeros(3)
store.pushpull("x", torch.full((3,), store.rank + 1.0), out)
print(f"rank {store.rank} of process {os.getpid()} has {out[0]:g}, arguments {sys.argv[1:]}", flush=True)
if "stop" in sys.argv and store.rank == 0:
    breakpoint()
    print("after the breakpoint")
if "fail" in sys.argv and store.rank == 1:
    raise ValueError("failed on purpose")
while "wait" in sys.argv:
    time.sleep(0.01)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def launch(program: Path, *arguments: str, entered: str = "") -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, sys.executable, program.name, *arguments]
    return subprocess.run(
        command, cwd=program.parent, input=entered, capture_output=True, text=True, timeout=60, check=False
    )


COMMAND = [sys.executable, "-m", "echelon.cli.main", "launch", "-n", "2", "-s", "1", "--launcher", "inproc"]


def test_workers_are_threads_of_one_process(program: Path) -> None:
    done = launch(program, "a b", "$c")
    assert (done.returncode, done.stderr) == (0, "")
    found = re.findall(r"^\[worker (\d)\] rank (\d) of process (\d+) has 3, arguments (.*)$", done.stdout, re.M)
    assert sorted((label, rank) for label, rank, _, _ in found) == [("0", "0"), ("1", "1")]
    assert len({process for _, _, process, _ in found}) == 1
    assert {arguments for *_, arguments in found} == {"['a b', '$c']"}


def test_a_breakpoint_stops_one_worker(program: Path) -> None:
    done = launch(program, "stop", entered="p store.rank + 40\ncontinue\n")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^(\[worker 0\] \(Pdb\) )?(\[worker 0\] )?40$", done.stdout, re.M), (
        "others may print after the prompt"
    )
    assert "after the breakpoint" in done.stdout


def test_a_failed_worker_does_not_end_the_others(program: Path) -> None:
    done = launch(program, "fail")
    assert done.returncode == 1
    assert "[worker 1] ValueError: failed on purpose" in done.stdout
    assert "inproc.py" not in done.stdout  # only the lines of the program
    assert done.stderr == "echelon: worker 1 exited with status 1\n"


def test_a_store_without_servers_is_refused_in_one_line(program: Path) -> None:
    """The workers end before they have joined the job. The scheduler and the servers must not wait for them."""
    program.write_text("import echelon\nechelon.kvstore.create('dist_device_sync')\n")
    done = launch(program)
    assert done.returncode == 1
    assert "dist_device_sync without servers cannot run in threads" in done.stdout


@pytest.mark.long
def test_ctrl_c_ends_all_threads(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("wb") as file:
        command = [*COMMAND, sys.executable, program.name, "wait"]
        job = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT)
    try:
        until(lambda: out.read_text().count("has 3") == 2, "both workers", 60)
        os.kill(job.pid, signal.SIGINT)
        assert job.wait(20) == 128 + signal.SIGINT
    finally:
        job.kill()
        job.wait()
    assert "echelon: stopped by SIGINT" in out.read_text()
    assert "Traceback" not in out.read_text()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["python3.11", "-u", "{}", "x"], PythonProgram("{}", False, ("x",))),
        (["{}"], PythonProgram("{}", False, ())),
        (["/usr/bin/python", "-m", "package.module", "--flag"], PythonProgram("package.module", True, ("--flag",))),
    ],
)
def test_python_commands(program: Path, command: list[str], expected: PythonProgram) -> None:
    found = python_program([word.format(program) for word in command])
    assert found == PythonProgram(expected.name.format(program), expected.is_module, expected.arguments)


@pytest.mark.parametrize("command", [["bash", "train.sh"], ["python"], ["python", "-c", "pass"], ["mpirun", "x.py"]])
def test_other_commands_are_refused(command: list[str]) -> None:
    with pytest.raises(UsageError, match=r"give python FILE\.py or python -m MODULE, or use --launcher local"):
        python_program(command)


def test_a_job_without_servers_is_refused(program: Path) -> None:
    with pytest.raises(UsageError, match="one rank per process"):
        InprocLauncher().plan(Request(Job(num_workers=2, num_servers=0), [str(program)]))
