"""Three processes that stay alive between loops: two workers, and the scheduler and servers of their jobs.

A worker that has raised an error ends, as a user's script does, and all three are replaced. They are forks of a process
that has imported everything they need, so that this takes milliseconds.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import pickle
import random
import signal
import socket
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import TCPStore

import forked
import leaks
from echelon.environment import Job, variable
from echelon.errors import EchelonError
from echelon.kvstore.servers.session import SESSIONS
from echelon.transport.listening import LOOPBACK, listen
from loops.kinds import Plain, WithDdp, WithTrainer
from loops.loop import all_cases
from loops.results import Flat, flatten
from loops.servers import TIMEOUT_S, RunningJob

WORKERS = 2
DEVICE = "ECHELON_LOOPS_DEVICE"  # a variable: the device to run the loops on, for example cuda
STUCK_S = 2 * TIMEOUT_S  # after which a worker that hangs prints where, and ends
LINGER_S = 2.0  # which a worker that failed waits for the others: one that is left alone may do what two may not
END_S = 10.0  # which a job may take to end after its workers have left


@dataclass(frozen=True)
class Task:
    """A run of a loop in one process."""

    case: str
    steps: int
    dtype: torch.dtype
    kind: str = "plain"  # plain, trainer, or ddp
    ranks: Sequence[int] = (0,)
    size: int = 1
    store: str = ""  # of the Trainer
    servers: bool = True  # whether its job has some
    delay_s: float = 0.0  # of each push
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Error:
    """An error that ended a loop. `refused`: Echelon raised it because of what the loop does."""

    text: str
    trace: str
    refused: bool


class Pool:
    """The processes. They start with the first task."""

    def __init__(self) -> None:
        self._workers: list[_Process] = []
        self._servers: _Process | None = None

    def run(self, *tasks: Task) -> list[Flat | Error]:
        """Run one task per worker, all of one kind, in a job of their own. Return what came out."""
        if not self._workers:
            self._start()
        workers = self._workers[: len(tasks)]
        with self._job(tasks[0], len(tasks)) as job:
            for rank, (worker, task) in enumerate(zip(workers, tasks, strict=True)):
                files = [job.listen_fd] if rank == 0 and job.listen_fd is not None else []
                worker.send((task, replace(job.as_role("worker", rank), listen_fd=None)), files)
            found: list[Flat | Error] = [worker.receive() for worker in workers]
            if any(isinstance(one, Error) for one in found):
                self._stop()
        return found

    @contextmanager
    def _job(self, task: Task, num_workers: int) -> Iterator[Job]:
        """Start the servers, or listen for the rendezvous of a process group."""
        if task.kind == "trainer" and task.servers:
            assert self._servers is not None
            self._servers.send((num_workers, task.delay_s))
            yield self._servers.receive()
            if self._servers is not None and isinstance(self._servers.receive(END_S), Error):
                self._stop()
                raise AssertionError(f"the workers have left, but the job did not end within {END_S:g} s")
        else:
            with listen(LOOPBACK) as listener:
                port = listener.getsockname()[1]
                yield Job(
                    scheduler_port=port, num_workers=num_workers, listen_fd=listener.fileno(), timeout_s=TIMEOUT_S
                )

    def _start(self) -> None:
        self._workers = [_Process(_work) for _ in range(WORKERS)]
        self._servers = _Process(_serve)
        for process in (*self._workers, self._servers):
            process.wait_until_started()

    def _stop(self) -> None:
        for process in (*self._workers, self._servers):
            if process is not None:
                process.stop()
        self._workers, self._servers = [], None


class _Process:
    """A forked process that answers messages."""

    def __init__(self, program: Callable[[socket.socket], None]) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            self._fork = forked.Fork(program, sockets=[theirs], server=_fork_server())

    def wait_until_started(self) -> None:
        self._pid: int = self.receive()
        leaks.SHARED.add(self._pid)  # tests share it

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        _send(self._connection, message, files)

    def receive(self, timeout_s: float = STUCK_S) -> Any:
        self._connection.settimeout(timeout_s)
        try:
            return _receive(self._connection)[0]
        except TimeoutError:
            return Error("no answer", f"the process did not answer within {timeout_s:g} s", refused=False)
        except EOFError:
            return Error("no answer", f"the process ended: {self._end()}", refused=False)

    def stop(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._connection.close()
        self._end()

    @functools.cache  # noqa: B019  (the processes of a session are few)
    def _end(self) -> Any:
        """Wait for the end of the process. Return its result or its exception."""
        return self._fork.result()


_kept: list[forked.Fork] = []  # until this process ends


@functools.cache
def _fork_server() -> socket.socket:
    """Return the socket of a fork server that has imported the loops."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection, other = socket.socketpair()
    with theirs, other, connection:
        _kept.append(forked.Fork(_serve_forks, sockets=[theirs, other]))
        leaks.SHARED.add(_receive(connection)[0])
    return control


# --- in the processes


def _serve_forks(control: socket.socket, connection: socket.socket) -> None:
    faulthandler.cancel_dump_traceback_later()
    all_cases()
    with connection:
        _send(connection, os.getpid())
    forked.serve_forks(control.detach())


def _serve(connection: socket.socket) -> None:
    """Run jobs, one after the other."""
    _send(connection, os.getpid())
    faulthandler.cancel_dump_traceback_later()
    while True:
        num_workers, delay_s = _next(connection)[0]
        running = RunningJob(num_workers, delay_s)
        _send(connection, running.job)
        running.join()
        _send(connection, None)


def _work(connection: socket.socket) -> None:
    """Run tasks until one of them raises an error."""
    _send(connection, os.getpid())
    environment = dict(os.environ)
    outcome: Flat | Error | None = None
    while not isinstance(outcome, Error):
        faulthandler.cancel_dump_traceback_later()
        (task, job), files = _next(connection)
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        os.environ.clear()
        os.environ.update(environment, **job.to_environment())
        if files:
            os.environ["ECHELON_LISTEN_FD"] = str(files[0])
        outcome = _perform(task, replace(job, listen_fd=files[0] if files else None))
        _send(connection, outcome)
    connection.settimeout(LINGER_S)
    with connection, suppress(TimeoutError):
        connection.recv(1)  # until the pool stops all


def _perform(task: Task, job: Job) -> Flat | Error:
    try:
        _start_equal(task.dtype)
        with _run(task, job) as run:
            return flatten(run.result(all_cases()[task.case].function(run)))
    except BaseException as error:
        return Error(str(error), traceback.format_exc(), isinstance(error, EchelonError))


def _start_equal(dtype: torch.dtype) -> None:
    """Undo what the last loop may have left, so that every loop starts in the same way."""
    torch.set_num_threads(1)
    torch.set_default_dtype(dtype)
    if device := variable(DEVICE):
        torch.set_default_device(device)
    if "torch._dynamo" in sys.modules:
        with warnings.catch_warnings(action="ignore"):  # of modules that it imports
            torch._dynamo.reset()
    torch.manual_seed(0)
    random.seed(0)


@contextmanager
def _run(task: Task, job: Job) -> Iterator[Plain]:
    rank = task.ranks[0]
    if task.kind == "trainer":
        run = WithTrainer(task.steps, rank, task.size, task.store, task.options)
        yield run
        run.close()
        SESSIONS.finish(Job.from_environment())  # otherwise a process leaves its job when it exits
    elif task.kind == "ddp":
        with _process_group(job, rank):
            yield WithDdp(task.steps, rank, task.size)
    else:
        yield Plain(task.steps, task.ranks, task.size)


@contextmanager
def _process_group(job: Job, rank: int) -> Iterator[None]:
    """Join the process group that DDP uses. Worker 0 hosts its store."""
    own: Any = {"master_listen_fd": job.listen_fd} if rank == 0 else {}
    wait = timedelta(seconds=TIMEOUT_S)
    store = TCPStore(job.scheduler_host, job.scheduler_port, WORKERS, rank == 0, wait, **own)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    yield
    distributed.destroy_process_group()


def _next(connection: socket.socket) -> tuple[Any, list[int]]:
    """Return the next message and its files. If the tests have ended, end."""
    try:
        return _receive(connection)
    except EOFError:
        os._exit(0)


def _send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    data = pickle.dumps(message)
    socket.send_fds(connection, [struct.pack("q", len(data))], files)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[Any, list[int]]:
    head, files, *_ = socket.recv_fds(connection, 8, 1)
    if not head:
        raise EOFError("a process of the pool ended; its output may say why")
    size = struct.unpack("q", head)[0]
    data = bytearray()
    while len(data) < size and (part := connection.recv(size - len(data))):
        data += part
    return pickle.loads(data), list(files)
