"""Fails a test that leaves a process, thread, shared-memory segment, listening port or environment variable behind.

The state of this process is recorded before and after each test. Child processes carry ECHELON_TEST_ID in their
environment, so that they are found even if their parent has ended. What is still shutting down has SETTLE_S to finish.
After that the error names what is left, and processes are killed, so that the next test starts clean.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

SETTLE_S = 2.0
MARK = "ECHELON_TEST_ID"
_OWN = {MARK, "PYTEST_CURRENT_TEST", "PYTEST_VERSION"}
_OWN |= {"TORCHINDUCTOR_CACHE_DIR"}  # set by torch when it compiles
SHARED: set[int] = set()  # processes that tests share, and that end with this process
_PROC = Path("/proc")
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Snapshot:
    """Resources of this process, each by a name to print."""

    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    segments: frozenset[str]
    shm: frozenset[str]
    ports: frozenset[tuple[str, str]]
    environment: dict[str, str]


def take_snapshot() -> Snapshot:
    """Return the resources that this process has now."""
    return Snapshot(
        pids=frozenset(all_pids()),
        threads=frozenset(threading.enumerate()),
        segments=frozenset(segments_of(os.getpid())),
        shm=frozenset(os.listdir(_SHM)) if _SHM.is_dir() else frozenset(),
        ports=frozenset(_own_ports()),
        environment={name: value for name, value in os.environ.items() if name not in _OWN},
    )


def leaks(before: Snapshot, mark: str) -> list[str]:
    """Return one line for each resource that exists now and did not before."""
    now = take_snapshot()
    lines = [f"process {pid}: {command_of(pid)}" for pid in left_processes(before.pids, mark)]
    lines += [f"thread {t.name!r}" for t in now.threads - before.threads if t.is_alive() and not _dummy(t)]
    lines += [f"shared-memory segment {name}" for name in now.segments - before.segments]
    lines += [f"shared-memory file /dev/shm/{name}" for name in now.shm - before.shm if not _used_by_others(name)]
    lines += [f"listening port {address}" for address, _ in now.ports - before.ports]
    for name in sorted(now.environment.keys() | before.environment.keys()):
        if now.environment.get(name) != before.environment.get(name):
            lines.append(
                f"environment variable {name}: {before.environment.get(name)!r} -> {now.environment.get(name)!r}"
            )
    return lines


@contextmanager
def nothing_left(what: str) -> Iterator[None]:
    """Fail if the body of the `with` statement leaves something behind."""
    mark = os.environ.get(MARK, "")
    before = take_snapshot()
    yield
    end = time.monotonic() + SETTLE_S
    found = leaks(before, mark)
    while found and time.monotonic() < end:
        gc.collect()  # a reference cycle may still hold a segment; garbage is not a leak
        time.sleep(0.01)
        found = leaks(before, mark)
    if found:
        for pid in left_processes(before.pids, mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in set(os.environ) - _OWN - set(before.environment):
            del os.environ[name]
        os.environ.update(before.environment)
        pytest.fail(f"{what} left behind:\n  " + "\n  ".join(found), pytrace=False)


@pytest.fixture(scope="session", autouse=True)
def marked_session() -> Iterator[None]:
    """Mark every process that this session starts, and check once more at the end of the session."""
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(4)}"
    with nothing_left("the session"):
        yield
    del os.environ[MARK]


@pytest.fixture(autouse=True)
def leaves_nothing(marked_session: None) -> Iterator[None]:
    """Check every test, including its function-scoped fixtures."""
    with nothing_left("the test"):
        yield


# --- reading /proc


def all_pids() -> set[int]:
    """Return the ids of all processes."""
    return {int(name) for name in os.listdir(_PROC) if name.isdigit()}


def left_processes(before: frozenset[int], mark: str) -> list[int]:
    """Return the new living processes that are marked or are children of this process."""
    me = os.getpid()
    return sorted(
        pid
        for pid in all_pids() - before - SHARED
        if (mark and f"{MARK}={mark}".encode() in _read(pid, "environ").split(b"\0")) or _parent(pid) == me
    )


def marked_processes(name: str, value: str) -> list[int]:
    """Return the processes that have this variable in their environment."""
    wanted = f"{name}={value}".encode()
    return sorted(pid for pid in all_pids() if wanted in _read(pid, "environ").split(b"\0"))


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment that a process was started with."""
    pairs = (entry.decode(errors="replace").partition("=") for entry in _read(pid, "environ").split(b"\0"))
    return {name: value for name, _, value in pairs}


def command_of(pid: int) -> str:
    """Return the command line of a process."""
    return (
        _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        or "(a zombie: ended, but not waited for)"
    )


def segments_of(pid: int) -> set[str]:
    """Return the shared-memory segments that a process has mapped or open, by inode."""
    found = set()
    for line in _read(pid, "maps").splitlines():
        if b"memfd:echelon" in line:
            found.add(f"memfd:echelon {line.split()[4].decode()}")
    for file, target in _files(pid):
        if "memfd:echelon" in target:
            with suppress(OSError):
                found.add(f"memfd:echelon {os.stat(file).st_ino}")
    return found


def listening_ports(pid: int) -> list[int]:
    """Return the TCP ports that a process listens on."""
    listening: dict[str, int] = {}
    for line in (_read(pid, "net/tcp") + _read(pid, "net/tcp6")).splitlines():
        words = line.split()
        if words[3] == b"0A":
            listening[f"socket:[{words[9].decode()}]"] = int(words[1].rsplit(b":", 1)[1], 16)
    return sorted(listening[target] for _, target in _files(pid) if target in listening)


def ports_connected_to(pid: int, port: int) -> list[int]:
    """Return the local TCP ports of a process's network that are connected to a port elsewhere."""
    words = [line.split() for line in _read(pid, "net/tcp").splitlines()[1:]]
    ends = [(int(word[1].rsplit(b":", 1)[1], 16), int(word[2].rsplit(b":", 1)[1], 16)) for word in words]
    return [own for own, other in ends if other == port]


def _own_ports() -> Iterator[tuple[str, str]]:
    """Yield this process's listening sockets by address and inode; cheaper than reading the kernel's whole table."""
    for file, target in _files(os.getpid()):
        if target.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(file.rsplit("/", 1)[1]))) as own:
                if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield str(own.getsockname()), target


def _parent(pid: int) -> int:
    stat = _read(pid, "stat")
    return int(stat.rsplit(b") ", 1)[1].split()[1]) if stat else 0


def _used_by_others(name: str) -> bool:
    """Return whether a process of another session holds a file of /dev/shm; then it is not a leak of this test."""
    mark = f"{MARK}={os.environ.get(MARK, '')}".encode()
    path = str(_SHM / name)
    for pid in all_pids() - {os.getpid()}:
        held = path.encode() in _read(pid, "maps") or any(target == path for _, target in _files(pid))
        if held and mark not in _read(pid, "environ").split(b"\0"):
            return True
    return False


def _dummy(thread: threading.Thread) -> bool:
    return isinstance(thread, threading._DummyThread)


def _files(pid: int) -> Iterator[tuple[str, str]]:
    with suppress(OSError), os.scandir(_PROC / str(pid) / "fd") as entries:  # also closed if the caller stops early
        for entry in entries:
            with suppress(OSError):
                yield entry.path, os.readlink(entry.path)


def _read(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""


if sys.platform != "linux":
    raise RuntimeError("the tests read /proc: they need Linux")
