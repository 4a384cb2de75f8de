"""Fails a test that leaves something behind: a process, a thread, a shared-memory segment, a port or a variable.

A picture of this process is taken before and after. What a test started carries ECHELON_TEST_ID in its environment, so
a process is found when its parent is long gone. What is on its way out has SETTLE_S to go; what is left after that is
named in the error, and processes are ended, so that the next test starts clean.
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
_OWN |= {"TORCHINDUCTOR_CACHE_DIR"}  # torch sets it when it compiles
SHARED: set[int] = set()  # processes that tests have in common, and that end with this one
_PROC = Path("/proc")
_SHM = Path("/dev/shm")


@dataclass(frozen=True)
class Picture:
    """What there is, by a name to show."""

    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    segments: frozenset[str]
    shm: frozenset[str]
    ports: frozenset[tuple[str, str]]
    environment: dict[str, str]


def picture() -> Picture:
    """This process as it is."""
    return Picture(
        pids=frozenset(all_pids()),
        threads=frozenset(threading.enumerate()),
        segments=frozenset(segments_of(os.getpid())),
        shm=frozenset(os.listdir(_SHM)) if _SHM.is_dir() else frozenset(),
        ports=frozenset(_own_ports()),
        environment={name: value for name, value in os.environ.items() if name not in _OWN},
    )


def leaks(before: Picture, mark: str) -> list[str]:
    """What is there now and was not before, a line each."""
    now = picture()
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
    """Fail if the body leaves something behind."""
    mark = os.environ.get(MARK, "")
    before = picture()
    yield
    end = time.monotonic() + SETTLE_S
    found = leaks(before, mark)
    while found and time.monotonic() < end:
        gc.collect()  # a segment may hang on a cycle; garbage is no leak
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
    """Marks everything this session starts, and looks once more at the end."""
    os.environ[MARK] = f"{os.getpid()}-{secrets.token_hex(4)}"
    with nothing_left("the session"):
        yield
    del os.environ[MARK]


@pytest.fixture(autouse=True)
def leaves_nothing(marked_session: None) -> Iterator[None]:
    """Around every test and its function-scoped fixtures."""
    with nothing_left("the test"):
        yield


# --- looking


def all_pids() -> set[int]:
    """Every process."""
    return {int(name) for name in os.listdir(_PROC) if name.isdigit()}


def left_processes(before: frozenset[int], mark: str) -> list[int]:
    """Processes that are new, alive, and children of this one or marked."""
    me = os.getpid()
    return sorted(
        pid
        for pid in all_pids() - before - SHARED
        if (mark and f"{MARK}={mark}".encode() in _read(pid, "environ").split(b"\0")) or _parent(pid) == me
    )


def marked_processes(name: str, value: str) -> list[int]:
    """Processes with a variable in their environment."""
    wanted = f"{name}={value}".encode()
    return sorted(pid for pid in all_pids() if wanted in _read(pid, "environ").split(b"\0"))


def read_environment(pid: int) -> dict[str, str]:
    """A process's variables as it was started with them."""
    pairs = (entry.decode(errors="replace").partition("=") for entry in _read(pid, "environ").split(b"\0"))
    return {name: value for name, _, value in pairs}


def command_of(pid: int) -> str:
    """A process's command line."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace").strip() or "(ended, not waited for)"


def segments_of(pid: int) -> set[str]:
    """The shared-memory segments a process has mapped or open, by inode."""
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
    """A process's listening TCP ports."""
    listening: dict[str, int] = {}
    for line in (_read(pid, "net/tcp") + _read(pid, "net/tcp6")).splitlines():
        words = line.split()
        if words[3] == b"0A":
            listening[f"socket:[{words[9].decode()}]"] = int(words[1].rsplit(b":", 1)[1], 16)
    return sorted(listening[target] for _, target in _files(pid) if target in listening)


def _own_ports() -> Iterator[tuple[str, str]]:
    """This process's listening sockets, by address and inode. Asking each costs less than the kernel's whole table."""
    for file, target in _files(os.getpid()):
        if target.startswith("socket:"):
            with suppress(OSError), socket.socket(fileno=os.dup(int(file.rsplit("/", 1)[1]))) as own:
                if own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield str(own.getsockname()), target


def _parent(pid: int) -> int:
    stat = _read(pid, "stat")
    return int(stat.rsplit(b") ", 1)[1].split()[1]) if stat else 0


def _used_by_others(name: str) -> bool:
    """Whether a process that is none of ours holds a file of /dev/shm: then it is not this test's."""
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
    with suppress(OSError), os.scandir(_PROC / str(pid) / "fd") as entries:  # closed also where a caller stops early
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
