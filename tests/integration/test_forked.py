"""Processes that are forked from one that has imported torch behave as those that `python` starts."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from echelon.environment import Job
from echelon.launch.local.forked import ForkedProcess, Preloaded, as_python_program
from echelon.launch.local.launcher import run

MAIN = """
import pickle, sys
class Mine: pass
if __name__ == "__main__":
    print(sys.argv, globals().get("__file__"), __name__, pickle.loads(pickle.dumps(Mine())).__class__)
    print(sys.path[0], sys.modules["__main__"].Mine is Mine)
"""
SPAWNS = """
import multiprocessing
def work(n): return n + 1
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(work, [1, 2]))
"""
PROGRAMS = {
    "what a script sees of itself": MAIN,
    "a traceback": "def inner():\n    raise ValueError('wrong')\ninner()\n",
    "a chained traceback": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise KeyError(1) from e\n",
    "a syntax error": "x = (\n",
    "an exit status": "import sys; sys.exit(5)",
    "an exit with a text": "import sys; sys.exit('stopped')",
    "a signal": "import os; os.abort()",
    "Ctrl-C": "raise KeyboardInterrupt",
    "what is printed at exit": "import atexit; atexit.register(print, 'bye'); print('hello')",
    "output without a line end": "print('no end', end='')",
    "threads that go on": "from threading import *; Thread(target=lambda: main_thread().join() or print(1)).start()",
    "processes of its own": SPAWNS,
    "annotations that are values": "x: int = 1\nprint(__annotations__)",
    "attributes of the main module": "print(sorted(globals()), __builtins__, __cached__, __loader__.get_filename())",
    "arguments of the interpreter": "import sys; print(sys.orig_argv[1:])",
    "its command line": "print(open('/proc/self/cmdline').read().rstrip('\\0').split('\\0')[1:])",
    "an empty standard input": "import sys; print(repr(sys.stdin.read()))",
    "another program": "import os, sys; os.execv(sys.executable, [sys.executable, '-c', 'print(1)'])",
}


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "mine.py").write_text(MAIN)
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


@pytest.fixture(scope="module")
def preloaded(variables: dict[str, str]) -> Iterator[Preloaded]:
    with closing(Preloaded(variables)) as preloaded:
        yield preloaded


def run_forked(preloaded: Preloaded, arguments: list[str]) -> tuple[int, list[str]]:
    """Run a command in a forked process. Return its exit status and its lines."""
    program = as_python_program(arguments)
    assert program is not None
    return read_all(preloaded.start(program, {}, None))


def read_all(process: ForkedProcess) -> tuple[int, list[str]]:
    """Wait for the end of a process. Return its exit status and its lines."""
    output_fd = process.fileno()
    assert output_fd is not None
    output = b""
    with closing(process):
        while (data := process.read_output()) != b"":
            output += data or b""
            process.exit_code()  # learns its number
            select.select([output_fd], [], [], 0.01)
        if process.pid:
            select.select([process.pidfd], [], [])
        return process.exit_code() or 0, output.decode().splitlines()


def run_plain(arguments: list[str], variables: Mapping[str, str] | None = None) -> tuple[int, list[str]]:
    """Run the same command alone, without Echelon."""
    environment = {**os.environ, **(variables or {})}
    done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize("title", PROGRAMS)
def test_a_script_runs_as_it_does_alone(preloaded: Preloaded, tmp_path: Path, title: str) -> None:
    path = tmp_path / "script.py"
    path.write_text(PROGRAMS[title])
    arguments = [sys.executable, os.path.relpath(path), "a b", "-c"]
    assert run_forked(preloaded, arguments) == run_plain(arguments)


@pytest.mark.parametrize("words", [["-c", MAIN, "x"], ["-u", "-c", MAIN, "x"], ["-m", "mine", "x"]])
def test_a_text_and_a_module_run_as_they_do_alone(
    preloaded: Preloaded, variables: dict[str, str], words: list[str]
) -> None:
    arguments = [sys.executable, *words]
    assert run_forked(preloaded, arguments) == run_plain(arguments, variables)


def test_random_numbers_differ_between_workers() -> None:
    program = "import random, numpy as np, torch; print(random.random(), np.random.random(), torch.rand(()).item())"
    lines: list[str] = []
    assert run(Job(num_workers=3), [sys.executable, "-c", program], on_line=lambda _, text: lines.append(text)) == 0
    assert len({word for line in lines for word in line.split()}) == 9


def test_only_programs_of_this_interpreter_are_forked(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    assert as_python_program([sys.executable, str(script), "-x"]) == [str(script), "-x"]
    for other in (
        ["true"],
        ["nosuch"],
        [sys.executable],
        [sys.executable, "-X", "dev", str(script)],
        ["/bin/sh", "-c", ""],
    ):
        assert as_python_program(other) is None, other
    assert as_python_program([sys.executable, "nosuch.py"]) is None, "python itself says that it does not exist"


@pytest.mark.parametrize("line", ["os.environ['OMP_NUM_THREADS'] = '1'", "# see TORCH_LOGS"])
def test_programs_that_set_variables_for_libraries_are_not_forked(tmp_path: Path, line: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(line)
    assert as_python_program([sys.executable, str(script)]) is None
    assert as_python_program([sys.executable, "-c", line]) is None


def test_modules_of_the_working_directory_do_not_replace_those_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "script.py").write_text("import random, sys; print(random.__file__ == sys.argv[1])")
    (tmp_path / "random.py").write_text("raise RuntimeError('a module of the working directory')")
    monkeypatch.chdir(tmp_path)
    with closing(Preloaded({})) as preloaded:
        arguments = [sys.executable, "scripts/script.py", random.__file__]
        assert run_forked(preloaded, arguments) == (0, ["True"])


def test_many_processes_with_large_environments_and_arguments_are_forked(tmp_path: Path) -> None:
    program = "import os, sys; print(len(os.environ['LARGE']), len(sys.argv[1]))"
    with closing(Preloaded({})) as preloaded:
        processes = [preloaded.start(["-c", program, "y" * 100_000], {"LARGE": "x" * 300_000}, None) for _ in range(40)]
        preloaded.no_more()
        assert [read_all(process) for process in processes] == [(0, ["300000 100000"])] * 40


def test_all_processes_say_why_torch_could_not_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libmissing.so: cannot open')")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with closing(Preloaded({"PYTHONPATH": path})) as preloaded:
        processes = [preloaded.start(["-c", "print(1)"], {}, None) for _ in range(2)]
        assert [read_all(process) for process in processes] == [(1, [])] * 2
        assert {process.how_ended() for process in processes} == {
            "could not be started: the process that imports torch exited with status 1: "
            "ImportError: libmissing.so: cannot open"
        }


def test_a_signal_while_torch_is_imported_stops_the_processes() -> None:
    with closing(Preloaded({})) as preloaded:
        processes = [preloaded.start(["-c", "print(1)"], {}, None) for _ in range(2)]
        processes[0].send_signal(signal.SIGINT)
        assert [read_all(process)[0] for process in processes] == [-signal.SIGINT, 1]
        assert processes[0].how_ended() == "was stopped"


def test_servers_of_a_batch_job_ignore_its_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm sends SIGTERM to all processes of a job, but servers must run until the workers have saved."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    program = """
import os, psutil, torch, echelon
store = echelon.kvstore.create("dist_sync")
roles = {"echelon.server", "echelon.scheduler"}
running = [p for p in psutil.Process(os.getppid()).children() if p.status() != psutil.STATUS_ZOMBIE]
others = [process for process in running if roles & {*process.cmdline()}]
for child in others:
    child.terminate()
store.init("weight", torch.ones(3))
weight = torch.zeros(3)
store.pull("weight", weight)
print(len(others), weight.tolist())
"""
    lines: list[str] = []
    job = Job(num_workers=1, num_servers=1)
    status = run(job, [sys.executable, "-c", program], on_line=lambda _, text: lines.append(text))
    assert (status, lines) == (0, ["2 [1.0, 1.0, 1.0]"])


def test_forked_processes_have_an_environment_and_a_session_of_their_own() -> None:
    program = "import os; print(os.environ['ECHELON_RANK'], os.getsid(0) == os.getpid(), os.getppid())"
    lines: list[str] = []
    assert run(Job(num_workers=2), [sys.executable, "-c", program], on_line=lambda _, text: lines.append(text)) == 0
    assert sorted(lines) == [f"{rank} True {os.getpid()}" for rank in range(2)]


SLOW_TO_LEAVE = """
import os, socket, sys
from echelon.launch.local.forked import Forked
import msgspec
requests = socket.socket(fileno=int(sys.argv[1]))
_, fds, _, _ = socket.recv_fds(requests, 1, 3)
if os.fork() == 0:
    released = open({fifo!r}).read()  # waits
    os.setsid()
    requests.send(msgspec.msgpack.encode(Forked(0, os.getpid())))
    os._exit(0)
while socket.recv_fds(requests, 1, 3)[1]:
    pass
"""


def test_a_process_that_is_slow_to_start_is_not_killed_with_the_one_that_it_was_forked_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fifo = tmp_path / "released"
    os.mkfifo(fifo)
    monkeypatch.setattr("echelon.launch.local.forked._START", SLOW_TO_LEAVE.format(fifo=str(fifo)))
    with closing(Preloaded({})) as preloaded:
        process = preloaded.start([], {}, None)
        preloaded.no_more()
        os.waitid(os.P_PID, preloaded._process.pid, os.WEXITED | os.WNOWAIT)
        preloaded.no_more()  # called several times per second, also when only the forked process is left
        with fifo.open("w") as file:  # nobody would read it if the process were dead
            file.write("go")
        select.select([preloaded._requests], [], [], 10)
        process.exit_code()  # learns its number
        assert process.pid
        process.close()
