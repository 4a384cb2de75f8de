"""The supervisor of a job: what it does on signals, and with workers that do not end, on real processes."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from echelon.launch.supervision import children, supervise
from echelon.launch.supervision.children import Command
from echelon.launch.supervision.supervise import Supervisor

WORKER = """
import signal, sys, time
def save(*_):
    time.sleep(0.5)  # a long step
    print("saved", flush=True)
    sys.exit(143)
signal.signal(signal.SIGTERM, {handler})
print("at work", flush=True)
while True:
    signal.pause()
"""
SAVES, IGNORES = WORKER.format(handler="save"), WORKER.format(handler="signal.SIG_IGN")


def run_and_terminate(program: str) -> tuple[int, list[str]]:
    """Return the status of a job that gets SIGTERM while its worker works, and the lines of the worker."""
    lines: list[str] = []

    def on_line(name: str, text: str) -> None:
        lines.append(text)
        if text == "at work":
            os.kill(os.getpid(), signal.SIGTERM)

    worker = Command("worker 0", [sys.executable, "-c", program], {}, essential=False)
    return Supervisor(on_line).run([worker]), lines


def test_a_worker_that_gets_a_signal_has_time_to_save(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.05)
    assert run_and_terminate(SAVES) == (143, ["at work", "saved"])


def test_a_worker_that_does_not_end_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "SAVING_S", 0.05)
    assert run_and_terminate(IGNORES) == (143, ["at work"])
    printed = capsys.readouterr().err
    assert printed.startswith("echelon: stopped by SIGTERM; worker 0 (pid ")
    assert printed.endswith(") had not ended and was killed\n")


def test_a_server_that_does_not_end_is_killed_soon_after_the_workers_were_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It may still be starting, and has nothing to save. The job was stopped by the signal, so it is not an error."""
    monkeypatch.setattr(supervise, "ABANDONED_S", 0.05)

    def on_line(name: str, text: str) -> None:
        if name == "worker 0" and text == "at work":
            os.kill(os.getpid(), signal.SIGTERM)

    waits = "import signal\nwhile True: signal.pause()"
    server = Command("server 0", [sys.executable, "-c", waits], {}, essential=True)
    worker = Command("worker 0", [sys.executable, "-c", SAVES], {}, essential=False)
    assert Supervisor(on_line).run([server, worker]) == 143
    assert capsys.readouterr().err == "echelon: stopped by SIGTERM\n"


SERVER = Command("server 0", [sys.executable, "-c", ""], {}, essential=True)
STOPS_ITSELF = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
STILL_WORKS = "import time\nwhile time.process_time() < 3: pass"


def run_beside_a_server_that_ends(program: str) -> int:
    worker = Command("worker 1", [sys.executable, "-c", program], {}, essential=False)
    return Supervisor().run([SERVER, worker])


def test_an_idle_worker_is_killed_after_the_servers_have_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "IDLE_S", 0.4)
    assert run_beside_a_server_that_ends(STOPS_ITSELF) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("echelon: worker 1 (pid ")
    assert printed.endswith(") used no CPU time for 0.4 s after the servers had ended, and was killed\n")


def test_a_worker_that_still_works_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "IDLE_S", 2.0)
    in_a_shell = "import subprocess, sys; subprocess.run([sys.executable, '-c', " + repr(STILL_WORKS) + "], check=True)"
    assert run_beside_a_server_that_ends(in_a_shell) == 0


def make_fifo(path: Path) -> str:
    """Make a named pipe, through which one process waits for another: opening it to read waits for a writer."""
    os.mkfifo(path)
    return str(path)


FAILS_FIRST = """
import signal, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("error: the cause", flush=True)
failed, may_end = sys.argv[1:]
open(failed, "w").close()
open(may_end).readline()
sys.exit(3)
"""
FAILS_BECAUSE_OF_IT = """
import sys
open(sys.argv[1]).read()
print("error: lost the connection", flush=True)
sys.exit(4)
"""


def test_the_process_that_failed_first_is_named_although_another_ends_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []
    failed, may_end = (make_fifo(tmp_path / name) for name in ("failed", "may end"))
    programs = {"server 0": FAILS_FIRST, "worker 0": FAILS_BECAUSE_OF_IT}
    commands = [
        Command(name, [sys.executable, "-c", program, failed, may_end], {}, essential=name == "server 0")
        for name, program in programs.items()
    ]
    turns = 0  # of the supervisor, after the worker's end
    with open(os.open(may_end, os.O_RDWR), "w") as let_end:  # O_RDWR: opening does not wait for the reader

        def on_tick() -> None:
            """Let the server end only when the supervisor has had a turn in which it saw that the worker ended."""
            nonlocal turns
            turns += any(child.status() == psutil.STATUS_ZOMBIE for child in psutil.Process().children())
            if turns == 2:
                print(file=let_end, flush=True)

        assert Supervisor(lambda name, text: lines.append(f"{name}: {text}"), on_tick).run(commands) == 3
    assert lines == ["server 0: error: the cause", "worker 0: error: lost the connection"]
    printed = capsys.readouterr().err
    assert printed.startswith("echelon: server 0 (pid ")
    assert printed.endswith(") exited with status 3\n"), "its only line was just shown"


KILLS_ITSELF = """
import os, signal, sys
open(sys.argv[1]).read()
os.kill(os.getpid(), signal.SIGKILL)
"""
SAYS_STOPPED = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
open(sys.argv[1], "w").close()
signal.sigwait([signal.SIGTERM])
sys.exit("error: stopped")
"""


def test_a_killed_server_is_named_before_the_errors_of_others(tmp_path: Path) -> None:
    lines: list[str] = []
    ready = make_fifo(tmp_path / "ready")
    dies = Command("server 0", [sys.executable, "-c", KILLS_ITSELF, ready], {}, essential=True)
    waits = Command("worker 0", [sys.executable, "-c", SAYS_STOPPED, ready], {}, essential=False)
    assert Supervisor(lambda name, text: lines.append(f"{name}: {text}")).run([waits, dies]) == 128 + signal.SIGKILL
    assert lines == ["server 0: was killed by signal 9", "worker 0: error: stopped"]


def test_a_line_without_end_is_shown_in_parts() -> None:
    length = 3 * children.MAX_LINE_BYTES
    lines: list[str] = []
    program = f"import sys; sys.stdout.write('x' * {length}); sys.stdout.write('end')"
    worker = Command("worker 0", [sys.executable, "-c", program], {}, essential=False)
    assert Supervisor(lambda name, text: lines.append(text)).run([worker]) == 0
    assert lines == ["x" * children.MAX_LINE_BYTES] * 3 + ["end"]
