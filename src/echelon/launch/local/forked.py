"""The Python processes of a local job, forked from one process that has imported torch (`preload.py`)."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from echelon.environment import child_environment
from echelon.launch.supervision.processes import ChildProcess, OwnChild, adopt_orphans, how_ended


class ForkRequest(msgspec.Struct, frozen=True, array_like=True):
    """A process to fork. `program` is what follows `python` on its command line. `parent` is the launcher.

    `shielded`: it ignores SIGTERM.

    It is written to a file, because a message of a socket is limited to about 200 kB. A message of one byte brings this
    file, the one for the output of the process and, if there is one, the socket at which it listens.
    """

    number: int
    program: list[str]
    environment: dict[str, str]
    parent: int
    shielded: bool


class Forked(msgspec.Struct, frozen=True, array_like=True):
    """The process of a request."""

    number: int
    pid: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Forked).decode
_REPLY_BYTES = 64
# Not `-m`, which would import modules of the working directory instead of Python's own.
_START = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from echelon.launch.local.preload import main; main(int(sys.argv[1]))"
)
_ROOM = " " * 4096  # an argument that forked processes overwrite with their own command line
_READ_BY_LIBRARIES = re.compile(rb"\b(OMP|GOMP|KMP|MKL|OPENBLAS|DNNL|ATEN|TORCH|PYTORCH)_[A-Z]")


def as_python_program(arguments: Sequence[str]) -> list[str] | None:
    """Return what follows the interpreter on a command line that a forked process can run, or None for all others.

    It must name this interpreter. Options of the interpreter other than -u are not supported. A program that sets
    variables such as OMP_NUM_THREADS sets them for libraries that it imports, so they must not be imported yet.
    """
    path, here = shutil.which(arguments[0]), Path(sys.executable)
    if path is None or Path(path).parent != here.parent or not os.path.samefile(path, here):
        return None
    program = list(arguments[1:])
    first, *rest = (program[1:] if program[:1] == ["-u"] else program) or [""]
    if first == "-m":
        return program if rest else None
    if first == "-c":
        if not rest:
            return None
        text = os.fsencode(rest[0])
    elif first and not first.startswith("-") and os.path.isfile(first) and os.access(first, os.R_OK):
        text = Path(first).read_bytes()
    else:
        return None
    return program if not _READ_BY_LIBRARIES.search(text) else None


class ForkedProcess(OwnChild):
    """A process that is being forked, then a child of this process. Until then its number is unknown."""

    def __init__(self, number: int, preloaded: Preloaded, output: int, shielded: bool) -> None:
        self.pid = 0
        self._shielded = shielded
        self.stdout = os.fdopen(output, "rb", buffering=0)
        self._number, self._preloaded = number, preloaded
        self._how = ""

    @property
    def where(self) -> str:
        """Its number, once it is known."""
        return f"pid {self.pid}" if self.pid else "not started"

    def how_ended(self) -> str:
        """Say how it ended."""
        return self._how or super().how_ended()

    def exit_code(self) -> int | None:
        """Return the exit code, or None while it runs or is being forked."""
        return super().exit_code() if self._has_number() else self._returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, or keep it from being forked."""
        if self._has_number():
            super().send_signal(number)
        elif self._returncode is None:
            self._fail(-number, "was stopped")
            self._preloaded.kill()

    def reap(self) -> int:
        """Kill the process, wait for it, and return its exit code."""
        if self._has_number():
            return super().reap()
        self.send_signal(signal.SIGKILL)
        assert self._returncode is not None
        return self._returncode

    def _has_number(self) -> bool:
        if not self.pid and self._returncode is None:
            self.pid = self._preloaded.pid_of(self._number) or 0
            if not self.pid and (why := self._preloaded.failure()):
                self._fail(1, f"could not be started: {why}")
        return bool(self.pid)

    def _fail(self, code: int, how: str) -> None:
        self._returncode, self._how = code, how


class Preloaded:
    """The process that has imported torch, and from which others are forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """`environment`: variables that torch reads when it is imported."""
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            arguments = [sys.executable, "-c", _START, str(theirs.fileno()), _ROOM]
            self._process = ChildProcess("preload", arguments, environment, pass_fds=[theirs.fileno()])
        self._requests.setblocking(False)
        self._pids: dict[int, int] = {}
        self._count = 0
        self._ended = False
        self._failure: str | None = None
        self._waiting: deque[list[int]] = deque()  # the files of requests that are not sent yet
        self._finished = False

    def start(
        self, program: Sequence[str], environment: Mapping[str, str], listener: int | None, *, shielded: bool = False
    ) -> ForkedProcess:
        """Ask for a process. It runs as soon as torch is imported."""
        adopt_orphans(True)
        number, self._count = self._count, self._count + 1
        reading, writing = os.pipe2(os.O_CLOEXEC)
        request = ForkRequest(number, list(program), child_environment(environment), os.getpid(), shielded)
        written = os.memfd_create("request")
        with open(written, "wb", closefd=False) as file:
            file.write(_encode(request))
        os.lseek(written, 0, os.SEEK_SET)
        self._waiting.append([written, writing, *([] if listener is None else [os.dup(listener)])])
        self._send_waiting()
        return ForkedProcess(number, self, reading, shielded)

    def _send_waiting(self) -> None:
        """Send what the socket takes. It takes few requests while torch is imported."""
        with suppress(BlockingIOError, BrokenPipeError):
            while self._waiting:
                socket.send_fds(self._requests, [b"\0"], self._waiting[0])
                _close_all(self._waiting.popleft())
        if self._finished and not self._waiting:
            with suppress(OSError):
                self._requests.shutdown(socket.SHUT_WR)

    def no_more(self) -> None:
        """Let the process end when it has forked what was asked for. Called several times per second."""
        self._finished = True
        self._send_waiting()
        self._receive_numbers()
        # A forked process belongs to the session of this one, which `reap` kills, until it has reported its number.
        are_all_forked = len(self._pids) == self._count
        if are_all_forked and self._process.exit_code() is not None:
            self._process.reap()  # otherwise it is a zombie until the job ends

    def pid_of(self, number: int) -> int | None:
        """Return the number of the process that was forked for a request, once it is known."""
        self._send_waiting()
        self._receive_numbers()
        return self._pids.get(number)

    def _receive_numbers(self) -> None:
        while not self._ended:
            try:
                data = self._requests.recv(_REPLY_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:  # it ended before it read all requests
                data = b""
            if not data:
                self._ended = True
            else:
                forked = _decode(data)
                self._pids[forked.number] = forked.pid
                if len(self._pids) == self._count:
                    adopt_orphans(False)  # other orphans are not ours to wait for

    def failure(self) -> str | None:
        """Say why no more processes will be forked, or return None."""
        if self._ended and not self._failure:
            code = self._process.reap()
            lines = (self._process.read_output() or b"").decode(errors="replace").strip().splitlines()
            self._failure = f"the process that imports torch {how_ended(code)}{': ' + lines[-1] if lines else ''}"
        return self._failure

    def kill(self) -> None:
        """Kill the process, so that it forks nothing more."""
        self._process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """End the process."""
        adopt_orphans(False)
        self._process.close()
        self._requests.close()
        while self._waiting:
            _close_all(self._waiting.popleft())


def _close_all(files: Sequence[int]) -> None:
    for number in files:
        os.close(number)
