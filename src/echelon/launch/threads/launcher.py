"""`--launcher inproc`: the scheduler, the servers and the workers are threads of this process, for a debugger.

Every worker thread runs the Python program of the command. Breakpoints, watches and profilers of one process therefore
see the whole job. The threads share what a process has once: sys.argv, the working directory, os.environ, imported
modules, and torch's random generator and thread count. Numbers may therefore differ from those of a job of processes.
A program finds its rank in its store (`store.rank`), not in os.environ.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING

from echelon.cluster.messages import WorkerExited
from echelon.environment import Job, set_variables
from echelon.errors import UsageError
from echelon.launch.interface import Output
from echelon.launch.plan import Plan, Request, describe, make_plan, without_restarts
from echelon.launch.report import report_worker_exit
from echelon.launch.supervision.processes import how_ended
from echelon.launch.threads.output import labelled_output
from echelon.system import raised_by_sigterm
from echelon.transport.in_process import InProcessTransport
from echelon.transport.listening import LOOPBACK, listen

if TYPE_CHECKING:
    from echelon.launch.threads.in_process import JobThreads

PATIENCE_S = 86400.0  # a process that stands at a breakpoint is not dead
GRACE_S = 10.0  # for workers to end after Ctrl-C, and for the others to end after the workers
_PYTHON = re.compile(r"python[0-9.]*")
_POLL_S = 0.2
_STARTERS = (__file__, runpy.__file__, "<frozen runpy>")


@dataclass(frozen=True, slots=True)
class PythonProgram:
    """A Python program: the file `name`, or the module of that name (`python -m`)."""

    name: str
    is_module: bool
    arguments: tuple[str, ...]

    def run(self) -> None:
        """Run the program in this thread, as the module __main__."""
        if self.is_module:
            runpy.run_module(self.name, run_name="__main__", alter_sys=False)
            return
        # Not runpy.run_path: it changes sys.argv and sys.modules, which all threads share, for the time of the run.
        module = ModuleType("__main__")
        module.__file__ = self.name
        exec(compile(Path(self.name).read_bytes(), self.name, "exec"), module.__dict__)


def python_program(command: Sequence[str]) -> PythonProgram:
    """Return the Python program of a command. Raises UsageError for a command that cannot run in a thread."""
    words = list(command)
    if _PYTHON.fullmatch(Path(words[0]).name):
        words = words[1:]
        while words[:1] == ["-u"]:  # without effect here
            words = words[1:]
    if words[:1] == ["-m"] and len(words) > 1:
        return PythonProgram(words[1], True, tuple(words[2:]))
    if not words or not words[0].endswith(".py"):
        raise UsageError(
            f"--launcher inproc cannot run {' '.join(command)!r}, because its workers are threads of a Python process: "
            "give python FILE.py or python -m MODULE, or use --launcher local"
        )
    if not Path(words[0]).is_file():
        raise UsageError(f"there is no file {words[0]}")
    return PythonProgram(words[0], False, tuple(words[1:]))


class InprocLauncher:
    """Runs a job as threads of this process."""

    name = "inproc"
    no_restarts = "the processes of the job are threads of one process"

    def add_arguments(self, group: argparse._ArgumentGroup) -> None:
        """Add nothing: the flags of all launchers are enough."""

    def plan(self, request: Request) -> Plan:
        """Put every thread on this machine. Raises UsageError for what cannot run in a thread."""
        if request.hosts:
            raise UsageError("--launcher inproc runs in one process, but -H names hosts: omit -H, or use ssh or mpi")
        if not request.job.num_servers:
            raise UsageError(
                "--launcher inproc needs servers (-s 1 or more): stores without servers use torch.distributed, which "
                "has one rank per process"
            )
        if any(request.variables_of.values()):
            raise UsageError("--launcher inproc cannot set variables per role, because threads share one environment")
        python_program(request.command)
        return make_plan(without_restarts(replace(request, job=replace(request.job, scheduler_host=LOOPBACK))))

    def describe(self, plan: Plan) -> str:
        """Return the plan as text. Commands of the scheduler and the servers are what the threads stand for."""
        return f"threads of one process:\n{describe(plan)}"

    def run(self, plan: Plan, output: Output) -> int:
        """Run the job."""
        set_variables(plan.request.variables)
        return run_as_threads(plan.job, python_program(plan.request.command), output)


def run_as_threads(job: Job, program: PythonProgram, output: Output) -> int:
    """Run a job to its end, and return 0, the first failing status, or 128 + the number of a signal."""
    from echelon.launch.threads.in_process import JobThreads  # imports torch, which takes seconds

    with listen(LOOPBACK) as listener:
        own = replace(
            job,
            scheduler_host=LOOPBACK,
            scheduler_port=listener.getsockname()[1],
            timeout_s=PATIENCE_S,
            heartbeat_timeout_s=PATIENCE_S,
        )
        job_threads = JobThreads(own, listener, InProcessTransport(), lambda job: _run_worker(job, program))
        names = frozenset(thread.name for thread in job_threads.threads)
        with _prepared_for(program), labelled_output(names, output.on_line), raised_by_sigterm(_Terminated):
            return _run(job_threads, output)


class _Terminated(BaseException):
    """SIGTERM."""


def _run(job_threads: JobThreads, output: Output) -> int:
    job_threads.start()
    try:
        while not job_threads.join(_POLL_S, only="worker "):
            output.on_tick()
        job_threads.join(GRACE_S)
    except (KeyboardInterrupt, _Terminated) as error:
        number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
        _interrupt(job_threads)
        print(f"echelon: stopped by {number.name}", file=sys.stderr, flush=True)
        return 128 + number
    failed = [(name, error) for name, error in job_threads.errors.items() if _status(error)]
    if not failed:
        return job_threads.scheduler_status
    name, first = failed[0]
    print(f"echelon: {name} exited with status {_status(first)}", file=sys.stderr, flush=True)
    return _status(first)


def _interrupt(job_threads: JobThreads) -> None:
    """Raise KeyboardInterrupt in the worker threads and wait for them; the servers end when the workers have."""
    for thread in job_threads.threads:
        if thread.name.startswith("worker ") and thread.ident is not None and thread.is_alive():
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt)
            )
    job_threads.join(GRACE_S)


def _run_worker(job: Job, program: PythonProgram) -> None:
    """Run the program, print what ends it, and report the end to the scheduler, which may wait for this worker."""
    status = 1
    try:
        _run_program(program)
        status = 0
    finally:
        report_worker_exit(job, WorkerExited(job.rank or 0, how_ended(status), status != 0))


def _run_program(program: PythonProgram) -> None:
    """Run the program, and print what ends it. The thread then ends with that exception, which has the status."""
    try:
        program.run()
    except SystemExit as left:
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr, flush=True)
        if _status(left):
            raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        shown = error.with_traceback(_of_program(error.__traceback__))
        sys.excepthook(type(shown), shown, shown.__traceback__)
        raise


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the calls that started the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename in _STARTERS and trace.tb_next is not None:
        trace = trace.tb_next
    return trace


def _status(error: BaseException) -> int:
    """Return the exit status of a process that this exception ends."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    return 1


@contextmanager
def _prepared_for(program: PythonProgram) -> Iterator[None]:
    """Set sys.argv and sys.path as Python does for a program."""
    arguments, path = sys.argv, sys.path[:]
    sys.argv = [program.name, *program.arguments]
    sys.path.insert(0, str(Path.cwd() if program.is_module else Path(program.name).absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = arguments, path
