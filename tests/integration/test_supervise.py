"""The supervisor of a job: what it does on signals, and with workers that do not end, on real processes."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from echelon.launch import supervise
from echelon.launch.supervise import Command, Supervisor

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
