"""What a launcher does with a signal, on real processes."""

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
SAVES, IS_DEAF = WORKER.format(handler="save"), WORKER.format(handler="signal.SIG_IGN")


def run_and_terminate(program: str) -> tuple[int, list[str]]:
    """The status of a job that gets SIGTERM when its worker is at work, and what the worker said."""
    said: list[str] = []

    def hear(name: str, text: str) -> None:
        said.append(text)
        if text == "at work":
            os.kill(os.getpid(), signal.SIGTERM)

    worker = Command("worker 0", [sys.executable, "-c", program], {}, essential=False)
    return Supervisor(hear).run([worker]), said


def test_a_worker_has_longer_to_save_than_one_that_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "GRACE_S", 0.05)
    assert run_and_terminate(SAVES) == (143, ["at work", "saved"])


def test_who_does_not_end_is_killed_and_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "SAVING_S", 0.05)
    assert run_and_terminate(IS_DEAF) == (143, ["at work"])
    said = capsys.readouterr().err
    assert said.startswith("echelon: stopped by SIGTERM; worker 0 (pid ")
    assert said.endswith(") had not ended and was killed\n")


SERVER = Command("server 0", [sys.executable, "-c", ""], {}, essential=True)
IS_FROZEN = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
WORKS_ON = "import time\nwhile time.process_time() < 3: pass"


def run_beside_a_server_that_ends(program: str) -> int:
    worker = Command("worker 1", [sys.executable, "-c", program], {}, essential=False)
    return Supervisor().run([SERVER, worker])


def test_a_frozen_worker_is_not_waited_for_when_the_servers_have_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervise, "IDLE_S", 0.4)
    assert run_beside_a_server_that_ends(IS_FROZEN) == 1
    said = capsys.readouterr().err
    assert said.startswith("echelon: worker 1 (pid ")
    assert said.endswith(") used no CPU time for 0.4 s after the servers had ended, and was killed\n")


def test_a_worker_that_works_on_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervise, "IDLE_S", 2.0)
    in_a_shell = "import subprocess, sys; subprocess.run([sys.executable, '-c', " + repr(WORKS_ON) + "], check=True)"
    assert run_beside_a_server_that_ends(in_a_shell) == 0
