"""The threads and processes that decode samples for a loader, and the fork server that starts the processes.

Threads alone do not scale: every image takes and releases the interpreter's lock a dozen times, and passing the lock
from one core to another takes longer than the work done under it. Two threads decode 1.2 times as many images as one,
and sixteen decode fewer than one (docs/decisions/0011). So each thread may have a decode process, which has a lock of
its own. Pixels go through shared memory; a request of a few hundred bytes lists the samples, a reply has the labels.

Importing torch takes two seconds of CPU time. The fork server imports it once for all processes of all loaders. It is a
separate program, not a fork of this process, which has threads, a GPU and memory that a fork would keep alive. It exits
when the last loader with processes is closed. `decode_process` has what runs in it and in the decode processes.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from echelon.data.loading.buffers import BufferPool
from echelon.data.loading.decode_process import DecodeRequest, DecodeSettings, DecodeSetup, SampleDecoder, SampleResult
from echelon.environment import child_environment
from echelon.errors import DataError

P = ParamSpec("P")
R = TypeVar("R")

log = logging.getLogger(__name__)

SLOW_S = 30.0
FORK_TIMEOUT_S = 120.0  # importing torch may take long on a busy machine
_THREADS_TIMEOUT_S = 300.0
_MESSAGE_BYTES = 64  # all messages of the fork server are shorter
_HINTS = {
    -signal.SIGBUS: "did the file change while it was being read?",
    -signal.SIGKILL: "is there enough memory?",
}

# Echelon's folder comes first, then the standard library, then the rest of this process's path, so that no file there
# shadows a standard module.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[2]); sys.path += sys.argv[3:]; "
    "from echelon.data.loading.decode_process import main; main(int(sys.argv[1]))"
)

_fork_servers_lock = threading.Lock()
_fork_servers: dict[int, weakref.ref[ForkServer]] = {}  # by pid: a fork of this process needs its own
_threads_lock = threading.Lock()


class ForkServer:
    """The loader's side of the fork server (`decode_process.serve_forks`). Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(FORK_TIMEOUT_S)
        folders = [str(Path(__file__).parents[3]), *(str(path) for path in sys.path if path)]
        with theirs, _signals_blocked():
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(theirs.fileno()), *folders],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=child_environment({"OMP_NUM_THREADS": "1"}),
            )
        self.pid = process.pid
        weakref.finalize(self, _end_fork_server, os.getpid(), process, self._control)

    def fork(self, connection: socket.socket, *, with_torch: bool) -> int:
        """Start a decode process that serves this connection; return its pid."""
        try:
            return self._ask(b"torch" if with_torch else b"plain", [connection.fileno()])
        except (OSError, ValueError) as error:
            raise DataError(f"the fork server of the decode processes (pid {self.pid}) is gone: {error}") from None

    def wait_for_exit(self, pid: int) -> int | None:
        """Wait until a process whose connection is closed has exited.

        Returns its status as subprocess does, or None if the fork server cannot say.
        """
        try:
            return self._ask(str(pid).encode(), [])
        except (OSError, ValueError):
            return None

    @property
    def is_open(self) -> bool:
        """Whether it can be asked."""
        return self._control.fileno() >= 0

    def _ask(self, request: bytes, files: list[int]) -> int:
        with self._lock:
            try:
                socket.send_fds(self._control, [request], files)
                return int(self._control.recv(_MESSAGE_BYTES))
            except BaseException:  # also Ctrl-C: a late reply would be taken for the reply to the next request
                self._control.close()
                raise


def shared_fork_server() -> ForkServer:
    """Return this process's fork server; start one if there is none."""
    with _fork_servers_lock:
        server = _fork_servers.get(os.getpid(), lambda: None)()
        if server is None or not server.is_open:
            server = ForkServer()
            _fork_servers[os.getpid()] = weakref.ref(server)
        return server


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """A process started inside never receives the signals that stop a whole job, because the loader ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_fork_server(owner: int, process: subprocess.Popen[bytes], control: socket.socket) -> None:
    if os.getpid() == owner:
        _shut_down(control)
        process.wait(FORK_TIMEOUT_S)


def _shut_down(connection: socket.socket) -> None:
    """Close a connection for the other side, even if a fork of this process has it open too."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class DecodeProcess:
    """The loader's side of one decode process. One thread at a time may use it; any thread may close it."""

    def __init__(self, *, with_torch: bool) -> None:
        """Start the process; it needs `set_up` before it can decode."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._fork_server, self.pid = _fork(theirs, with_torch)
        self._connection = Connection(os.dup(ours.fileno()))
        self.close = weakref.finalize(self, _end_process, os.getpid(), self._fork_server, self.pid, ours)

    def set_up(self, setup: bytes) -> bool:
        """Send a pickled DecodeSetup; return whether the process can attach this process's memory."""
        try:
            self._connection.send_bytes(setup)
            reply: bool | str = self._connection.recv()
        except (EOFError, OSError):
            raise self._exit_error("before its first image") from None
        if isinstance(reply, str):
            raise DataError(reply)
        return reply

    def decode(self, request: DecodeRequest) -> list[SampleResult]:
        """Send a request and wait for the reply."""
        try:
            self._connection.send(request)
            if not self._connection.poll(SLOW_S):
                log.warning(
                    "a decode process (pid %d) has been decoding samples %s for %g s; training waits for it",
                    self.pid,
                    _sample_numbers(request),
                    SLOW_S,
                )
            results: list[SampleResult] = self._connection.recv()
        except (EOFError, OSError):
            raise self._exit_error(f"while decoding one of the samples {_sample_numbers(request)}") from None
        return results

    def _exit_error(self, when: str) -> DataError:
        status: int | None = self.close()
        how = "" if status is None else f" by signal {-status}" if status < 0 else f" with status {status}"
        hint = _HINTS.get(status or 0, "see its output above, if there is any")
        return DataError(f"a decode process (pid {self.pid}) ended{how} {when}; {hint}")


def _sample_numbers(request: DecodeRequest) -> str:
    return ", ".join(map(str, request.records))


def _fork(theirs: socket.socket, with_torch: bool) -> tuple[ForkServer, int]:
    """Start a process; return its fork server and pid. Try twice, because the fork server may have been killed."""
    first = shared_fork_server()
    try:
        return first, first.fork(theirs, with_torch=with_torch)
    except DataError:
        second = shared_fork_server()
        return second, second.fork(theirs, with_torch=with_torch)


def _end_process(owner: int, fork_server: ForkServer, pid: int, connection: socket.socket) -> int | None:
    """Close the connection, which ends the process after its current request; return its exit status."""
    if os.getpid() != owner:
        return None
    _shut_down(connection)
    return fork_server.wait_for_exit(pid)


class _PerThread(threading.local):
    """What each thread decodes with: a process, or a decoder of its own."""

    decoder: SampleDecoder
    process: DecodeProcess | None = None


class DecodePool:
    """Threads that decode samples into buffers. With `processes`, each of them has a decode process."""

    def __init__(self, settings: DecodeSettings, buffers: BufferPool, threads: int, *, processes: bool) -> None:
        self._buffers = buffers
        self._local = _PerThread()
        self._executor: ThreadPoolExecutor | None = None
        self.processes = _start_processes(threads, settings.needs_torch) if processes else []
        try:
            setup = self._pickled_setup(settings) if processes else b""
            # The threads must not refer to this object, so that they end when it is dropped without close().
            prepare = partial(_prepare_thread, self._local, settings, deque(self.processes), setup)
            self._executor = _start_threads(threads, prepare)
        except BaseException:
            self.close()
            raise

    def _pickled_setup(self, settings: DecodeSettings) -> bytes:
        buffers = self._buffers
        descriptor = buffers.descriptor(buffers.take())
        return pickle.dumps(
            DecodeSetup(settings, buffers.shape, np.dtype(buffers.dtype).name, buffers.limit, descriptor)
        )

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._executor is None

    def submit(self, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Run a function on one of the threads."""
        assert self._executor is not None, "the pool is closed"
        return self._executor.submit(work, *args, **kwargs)

    def decode(self, records: list[int], draws: list[list[float]], images: Tensor, start: int) -> list[SampleResult]:
        """Decode some records into a batch's images, from image `start` on. Call it on one of the threads."""
        if self._local.process is None:
            return self._local.decoder.decode(records, draws, images[start : start + len(records)].numpy())
        return self._local.process.decode(DecodeRequest(records, draws, self._buffers.descriptor(images), start))

    def close(self) -> None:
        """Cancel waiting work and end all threads and processes."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)
        while self.processes:  # before waiting for the threads: one of them may be waiting for a stuck process
            self.processes.pop().close()
        if executor is not None:
            executor.shutdown(wait=True)


def _start_processes(count: int, with_torch: bool) -> list[DecodeProcess]:
    """Start decode processes, or none if the system has no resources for them."""
    try:
        return [DecodeProcess(with_torch=with_torch) for _ in range(count)]
    except OSError as error:
        log.warning("cannot start decode processes: %s; threads decode instead", error)
        return []


def _prepare_thread(local: _PerThread, settings: DecodeSettings, processes: deque[DecodeProcess], setup: bytes) -> None:
    """Give the calling thread a process; if that cannot attach this process's memory, the thread decodes itself."""
    process = processes.popleft() if processes else None
    if process is not None and process.set_up(setup):
        local.process = process
    else:
        local.decoder = SampleDecoder(settings)


def _start_threads(threads: int, prepare: Callable[[], None]) -> ThreadPoolExecutor:
    """Start threads with torch's own parallelism switched off, and run `prepare` in each; raise what it raises.

    torch.set_num_threads applies to the calling thread and to threads that have not used torch yet. So the old value is
    restored here once every thread has set its own.
    """
    started = threading.Barrier(threads + 1)
    failures: list[Exception] = []

    def begin() -> None:
        torch.get_num_threads()  # makes torch set its default now; later it would overwrite the value below
        torch.set_num_threads(1)
        try:
            prepare()
        except Exception as error:
            failures.append(error)
            started.abort()

    with _threads_lock:
        before = torch.get_num_threads()
        executor = ThreadPoolExecutor(threads, "echelon-data", begin)
        try:
            for _ in range(threads):
                executor.submit(started.wait, _THREADS_TIMEOUT_S)
            started.wait(_THREADS_TIMEOUT_S)
        except threading.BrokenBarrierError:
            executor.shutdown(cancel_futures=True)
            raise (failures or [DataError(f"{threads} threads did not start in {_THREADS_TIMEOUT_S:g} s")])[0] from None
        finally:
            torch.set_num_threads(before)
    return executor
