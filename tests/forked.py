"""Real processes for tests that start in milliseconds: forks of a fork server that has imported torch and is idle.

They are not forks of the process that runs the tests, because locks that its other threads hold at that moment (MKL's
allocator, OpenMP's thread pool) would stay locked in the fork. A program is sent by value, together with this process's
environment, working directory and output streams; its result or its exception is sent back. Forks end with the fork
server, and the fork server ends with this process.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle
import torch
from torch.optim import SGD

import leaks
from echelon.environment import Job
from echelon.errors import JobError
from echelon.kvstore import KVStore, create
from echelon.kvstore.worker import thread_is_worker
from echelon.schemes.stores import store_kind
from echelon.transport.choose import by_name

T = TypeVar("T")
STUCK_S = 60.0
_MAX_FILES = 64
_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the other check initialises CUDA, which forks then cannot use
}
_PROGRAM = "import sys; sys.path.insert(0, sys.argv[2]); import forked; forked.serve_forks(int(sys.argv[1]))"
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def run(
    program: Callable[[KVStore], T],
    store: str,
    *,
    num_workers: int = 2,
    num_servers: int = 0,
    check_finite: bool = False,
    timeout_s: float = 60.0,
) -> list[T]:
    """Run `program` in one process per worker, without servers; return their results by rank."""

    def work(rank: int, port: int, *listener: socket.socket) -> T:
        job = _job(store, rank, num_workers, port, listener[0].detach() if listener else None, timeout_s)
        with thread_is_worker(job, by_name(job.transport)), create(store, check_finite=check_finite) as kv:
            return program(kv)

    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        port = listener.getsockname()[1]
        forks = [Fork(work, rank, port, sockets=[] if rank else [listener]) for rank in range(num_workers)]
    found = [fork.result() for fork in forks]
    for error in found:
        if isinstance(error, BaseException):
            raise error
    return found


def _job(store: str, rank: int, size: int, port: int, fd: int | None, timeout_s: float) -> Job:
    if not store_kind(store).spans_workers:
        return Job(num_devices=size, device_index=rank, device_port=port, device_fd=fd, timeout_s=timeout_s)
    return Job(scheduler_port=port, listen_fd=fd, num_workers=size, rank=rank, timeout_s=timeout_s)


class Fork:
    """A forked process that calls `program` with the arguments and its own copies of the sockets.

    `server` is the socket of another fork server, a fork that calls `serve_forks` after more imports.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        *arguments: Any,
        sockets: Sequence[socket.socket] = (),
        server: socket.socket | None = None,
    ) -> None:
        self._connection, theirs = socket.socketpair()
        with theirs:
            files = [theirs.fileno(), 1, 2, *(one.fileno() for one in sockets)]
            socket.send_fds(server or _fork_server()[0], [b"fork"], files)
        context = (sys.path, dict(os.environ), os.getcwd())
        payload = (pickle.dumps(context), cloudpickle.dumps((program, arguments)))
        self._connection.sendall(pickle.dumps(payload))
        self._connection.shutdown(socket.SHUT_WR)

    def result(self) -> Any:
        """Return what the program returned, or the exception that it raised."""
        with self._connection, self._connection.makefile("rb") as stream:
            data = stream.read()
        return (
            pickle.loads(data)
            if data
            else JobError("a forked test process ended without a result; its output may say why")
        )


@functools.cache
def _fork_server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return the socket that takes requests for a fork. The first test that needs the server starts it."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(Path(__file__).parent)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **_ENVIRONMENT},
        )
    leaks.SHARED.add(process.pid)
    atexit.register(_end, control, process)
    return control, process


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    """End the fork server: it ends when its socket is closed."""
    control.close()
    process.wait()


def serve_forks(control: int) -> None:
    """Fork on every request, until the other end of the socket is closed."""
    torch.set_num_threads(1)
    SGD([torch.zeros(1, requires_grad=True)], lr=0.1).step()  # imports what torch.optim loads late, which takes seconds
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # a fork reports its end on its own connection
    requests = socket.socket(fileno=control)
    while True:
        request, files, *_ = socket.recv_fds(requests, len(b"fork"), _MAX_FILES)
        if not request:
            return
        if os.fork() == 0:
            requests.close()
            _run_program(*files)
        for file in files:
            os.close(file)


def _run_program(connection: int, output: int, errors: int, *sockets: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(output, 1)
    os.dup2(errors, 2)
    faulthandler.dump_traceback_later(STUCK_S, exit=True)  # prints where it hangs, and ends it
    warnings.simplefilter("error")  # as in the tests
    with socket.socket(fileno=connection) as channel:
        with channel.makefile("rb") as stream:
            context, work = pickle.load(stream)
        channel.sendall(_outcome(context, work, [socket.socket(fileno=file) for file in sockets]))
    sys.stdout.flush()
    os._exit(0)


def _outcome(context: bytes, work: bytes, sockets: list[socket.socket]) -> bytes:
    """Run the program; return its pickled result or exception."""
    try:
        sys.path[:], environment, folder = pickle.loads(context)
        os.environ.clear()
        os.environ.update(environment, **_ENVIRONMENT)
        os.chdir(folder)
        program, arguments = pickle.loads(work)
        result = program(*arguments, *sockets)
    except BaseException as error:
        result = error
        error.add_note(f"in a forked process:\n{traceback.format_exc()}")
    try:
        return pickle.dumps(result)
    except Exception as error:
        return pickle.dumps(JobError(f"{result!r} cannot be sent back: {error}"))
