"""The processes of a job: what the supervisor needs of each of them, and those that are children of this process.

A child leads a session of its own, so that its own children can be killed with it. It is killed when this process dies,
even by SIGKILL (PDEATHSIG). The session is signalled only until its leader is reaped, because afterwards the kernel may
give the leader's number to another process. The supervisor of jobs and the benchmark harness both start their processes
here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from echelon.environment import child_environment
from echelon.errors import UsageError
from echelon.transport.listening import LOOPBACK

READ_BYTES = 1 << 16
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STAT_SESSION = 3  # fields of /proc/PID/stat after the command name, which may contain spaces and brackets
_STAT_CPU_TIMES = slice(11, 15)  # user and system time, of the process and of the children it has waited for
_libc = ctypes.CDLL(None)


class RunningProcess(Protocol):
    """A process of the job that was started, on this machine or on another one."""

    @property
    def where(self) -> str:
        """Its number and, if it runs on another machine, the host."""
        ...

    def fileno(self) -> int | None:
        """Return what becomes readable when there is something to read; None: not yet."""
        ...

    def read_output(self) -> bytes | None:
        """Return the next part of the output, None if there is none now, or b"" if it has ended."""
        ...

    def exit_code(self) -> int | None:
        """Return the exit status, the negative number of the signal that killed it, or None while it runs."""
        ...

    def how_ended(self) -> str:
        """Say how it ended, as in "exited with status 1"."""
        ...

    def send_signal(self, number: int) -> None:
        """Send a signal to the process and all that it has started, unless it has ended."""
        ...

    def reap(self) -> int:
        """Kill what is left of it, wait for its end, and return its exit code."""
        ...

    def close(self) -> None:
        """Reap the process and release what belongs to it. A second call does nothing."""
        ...

    def cpu_ticks(self) -> int:
        """Return the processor time that it has used, in clock ticks of the kernel."""
        ...


def how_ended(code: int) -> str:
    """Say what an exit code means, as in "was killed by signal 9"."""
    return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, or exit if that has happened already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans(adopt: bool) -> None:
    """Let the kernel make this process the parent of descendants whose own parent ends, or init again."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


class OwnChild:
    """A child of this process, which leads a session.

    A shielded one is ended by SIGTERM only if it comes from this object. A batch system sends SIGTERM to all processes
    of a job at once, but servers and the scheduler must run until the workers have saved.
    """

    pid: int
    stdin: IO[bytes] | None = None
    stdout: IO[bytes] | None = None
    _returncode: int | None = None
    _pidfd: int | None = None
    _shielded = False

    @property
    def where(self) -> str:
        """Its number."""
        return f"pid {self.pid}"

    def fileno(self) -> int | None:
        """Return the pipe of its output, which does not block from now on."""
        assert self.stdout is not None
        os.set_blocking(self.stdout.fileno(), False)
        return self.stdout.fileno()

    def read_output(self) -> bytes | None:
        """Return the next part of the output, None if there is none now, or b"" if it has ended."""
        assert self.stdout is not None
        if self.stdout.closed:
            return b""
        data: bytes | None = self.stdout.read(READ_BYTES)
        if data == b"":
            self.stdout.close()
        return data

    def how_ended(self) -> str:
        """Say how it ended."""
        return how_ended(self.reap())

    @property
    def pidfd(self) -> int:
        """A file descriptor that becomes readable when the process ends. Opened on first use: it needs Linux 5.3."""
        if self._pidfd is None:
            self._pidfd = os.pidfd_open(self.pid)
        return self._pidfd

    def exit_code(self) -> int | None:
        """Return the exit status, the negative number of the signal that killed it, or None while it runs."""
        if self._returncode is not None:
            return self._returncode
        # WNOWAIT: the process is not reaped yet, so its number stays valid.
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send_signal(self, number: int) -> None:
        """Send a signal to the whole session, unless the process was reaped. SIGTERM kills a shielded one."""
        if self._returncode is None:
            os.killpg(self.pid, signal.SIGKILL if self._shielded and number == signal.SIGTERM else number)

    def reap(self) -> int:
        """Kill what is left of the session, wait for the process, and return its exit code."""
        if self._returncode is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._returncode = self._wait()
        return self._returncode

    def _wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        """Reap the process and close its pipes. A second call does nothing."""
        self.reap()
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def cpu_ticks(self) -> int:
        """Return the processor time used by the living processes of the session, in clock ticks of the kernel."""
        found = (_stat_fields(int(name)) for name in os.listdir("/proc") if name.isdecimal())
        return sum(
            sum(map(int, fields[_STAT_CPU_TIMES]))
            for fields in found
            if fields and int(fields[_STAT_SESSION]) == self.pid
        )


class ChildProcess(OwnChild):
    """A running child process and its pipes. The file arguments are those of `subprocess.Popen`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        stdin: int = subprocess.DEVNULL,
        stdout: int | IO[bytes] = subprocess.PIPE,
        stderr: int | IO[bytes] = subprocess.STDOUT,
        pass_fds: Sequence[int] = (),
        shielded: bool = False,
    ) -> None:
        try:
            self._popen = subprocess.Popen(
                arguments,
                env=child_environment(environment),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,
                pass_fds=pass_fds,
                preexec_fn=partial(_prepare_child, os.getpid(), shielded),
            )
        except OSError as error:
            raise UsageError(f"{name} cannot run {arguments[0]!r}: {error.strerror}") from error
        self.pid = self._popen.pid  # of the process and of its session
        self.stdin, self.stdout = self._popen.stdin, self._popen.stdout
        self._shielded = shielded

    def _wait(self) -> int:
        return self._popen.wait()


def _prepare_child(parent: int, shielded: bool) -> None:
    die_with_parent(parent)
    if shielded:
        ignore_termination()


def ignore_termination() -> None:
    """Shield this process from SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _stat_fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []  # the process has just ended


def free_port() -> int:
    """Return a port of this machine that is free now, for programs that cannot inherit a socket (MXNet's scheduler).

    Another program may take the port before that program listens. Use `transport.listening.listen` wherever possible.
    """
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
