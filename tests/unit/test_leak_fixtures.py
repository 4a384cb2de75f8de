"""The leak fixtures themselves: a pytest of their own runs tests that leak, and each is caught."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from leaks import MARK, leaks, take_snapshot

TESTS = Path(__file__).parents[1]

LEAKY = """
import atexit, mmap, os, socket, subprocess, sys, threading
import pytest

def start(*arguments):
    return subprocess.Popen([sys.executable, "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

kept = []

def test_process():
    kept.append(start("input()"))

def test_orphan():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
    subprocess.run([sys.executable, "-c", code], check=True)

def test_zombie():
    child = start("pass")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    kept.append(child)

def test_thread():
    thread = threading.Thread(target=threading.Event().wait, name="idle", daemon=True)
    thread.start()

def test_segment():
    file = os.memfd_create("echelon")
    os.ftruncate(file, 4096)
    kept.append(mmap.mmap(file, 4096))
    os.close(file)

def test_segment_file():
    os.memfd_create("echelon")

def test_shm():
    path = "/dev/shm/echelon-leak-" + os.environ["ECHELON_TEST_ID"]
    kept.append(open(path, "w"))  # held: other sessions on this machine must not take it for theirs
    atexit.register(os.unlink, path)

def test_port():
    kept.append(socket.create_server(("127.0.0.1", 0)))

def test_new_variable():
    os.environ["LEAKED"] = "1"

def test_changed_variable():
    os.environ["HOME"] = "/nowhere"

def test_removed_variable():
    del os.environ["KEPT"]

@pytest.fixture
def helper():
    child = start("input()")
    yield
    child.communicate()

def test_clean(helper, monkeypatch):
    monkeypatch.setenv("KEPT", "2")
    with socket.create_server(("127.0.0.1", 0)):
        pass
    thread = threading.Thread(target=print)
    thread.start()
    thread.join()
    assert os.environ.get("LEAKED") is None

@pytest.fixture(scope="module")
def shared():
    kept.append(start("input()"))

def test_of_a_fixture_that_leaks(shared):
    pass
"""
CAUGHT = {
    "test_process": "process ",
    "test_orphan": "signal.pause()",
    "test_zombie": "(a zombie: ended, but not waited for)",
    "test_thread": "thread 'idle'",
    "test_segment": "shared-memory segment memfd:echelon",
    "test_segment_file": "shared-memory segment memfd:echelon",
    "test_shm": "shared-memory file /dev/shm/echelon-leak-",
    "test_port": "listening port ",
    "test_new_variable": "environment variable LEAKED: None -> '1'",
    "test_changed_variable": "-> '/nowhere'",
    "test_removed_variable": "environment variable KEPT: '1' -> None",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a pytest says that runs the leaky tests."""
    folder = tmp_path_factory.mktemp("leaky")
    (folder / "test_leaky.py").write_text(LEAKY)
    (folder / "conftest.py").write_text(
        "import leaks\nleaks.SETTLE_S = 0.1\nfrom leaks import leaves_nothing, marked_session\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--rootdir=."]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "KEPT": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CAUGHT)
def test_a_leak_is_caught_and_named(report: str, name: str) -> None:
    _, _, section = report.partition(f"ERROR at teardown of {name} _")
    said = section.partition("ERROR at teardown")[0]
    assert CAUGHT[name] in said
    assert said.count("\n  ") == 1, "one leak, one line: the test before cleaned up"


def test_a_clean_test_passes_and_what_a_shared_fixture_leaks_is_caught_at_the_end(report: str) -> None:
    assert "teardown of test_clean" not in report
    assert re.search(r"the session left behind:(\n  .*)*\n  process \d+: .* input\(\)\n", report)
    assert f"{len(CAUGHT) + 2} passed, {len(CAUGHT) + 1} error" in report


HOLD = "import sys; file = open(sys.argv[1], 'w'); print(flush=True); input()"


@pytest.mark.parametrize("ours", [False, True], ids=["a stranger's", "our own"])
def test_whose_a_file_of_shared_memory_is(tmp_path: Path, ours: bool) -> None:
    """Whoever holds it says so, by the mark in its environment: other programs of this machine are no leaks."""
    path = Path("/dev/shm", f"echelon-held-{tmp_path.name}-{os.getpid()}")
    environment = {name: value for name, value in os.environ.items() if ours or name != MARK}
    before = take_snapshot()
    command = [sys.executable, "-c", HOLD, str(path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        found = leaks(before, os.environ[MARK])
        path.unlink()
        holder.communicate(b"\n")
    assert (f"shared-memory file {path}" in found) == ours
