"""`echelon data` stopped by a signal: exit status, message, and no partial files."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from echelon.cli.data import records
from echelon.cli.main import main

NUM_LINES = 4000


@contextmanager
def echelon_data(*words: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "echelon.cli.main", "data", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with a list of many times the same large image; its bad first line is reported when packing starts."""
    noise = np.random.default_rng(0).integers(0, 256, (800, 800, 3), np.uint8)
    Image.fromarray(noise).save(tmp_path / "large.png", compress_level=1)
    lines = [f"{number}\t0\tlarge.png\n" for number in range(1, NUM_LINES)]
    (tmp_path / "p.lst").write_text("".join(["0\t0\tgone.png\n", *lines]))
    return tmp_path


@contextmanager
def im2rec_at_work(work: Path) -> Iterator[subprocess.Popen[str]]:
    with echelon_data("im2rec", str(work / "p"), str(work), "--skip-bad-records", "--threads", "2") as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("bad: ")
        assert sum(name.endswith(".partial") for name in names(work)) == 2
        yield process


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_im2rec_stopped_by_a_signal_leaves_no_files(work: Path, number: signal.Signals, status: int) -> None:
    with im2rec_at_work(work) as process:
        process.send_signal(number)
        assert process.stderr is not None
        assert (process.stderr.read(), process.wait()) == (f"echelon: stopped by {number.name}\n", status)
    assert names(work) == {"large.png", "p.lst"}


def test_the_next_run_removes_the_partial_files_of_a_killed_one(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with im2rec_at_work(work) as process:
        process.kill()
        process.wait()
    assert len(names(work)) == 4
    (work / "p.lst").write_text("1\t0\tlarge.png\n")
    assert main(["data", "im2rec", str(work / "p"), str(work)]) == 0
    assert names(work) == {"large.png", "p.lst", "p.rec", "p.idx"}


class Slow(BaseHTTPRequestHandler):
    """Sends only the beginning of a file."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        self.wfile.write(bytes(1000))
        self.server.has_begun.set()  # type: ignore[attr-defined]
        with suppress(ConnectionError):
            self.rfile.read()  # until the client disconnects

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def slow_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    monkeypatch.setenv("no_proxy", "*")
    with HTTPServer(("127.0.0.1", 0), Slow) as http:
        http.has_begun = threading.Event()  # type: ignore[attr-defined]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield http
        http.shutdown()
        thread.join()


@contextmanager
def get_at_work(server: HTTPServer, folder: Path) -> Iterator[subprocess.Popen[str]]:
    server.has_begun.clear()  # type: ignore[attr-defined]
    mirror = f"http://127.0.0.1:{server.server_port}"
    with echelon_data("get", "mnist", "--mirror", mirror, "--data-dir", str(folder)) as process:
        assert server.has_begun.wait(60)  # type: ignore[attr-defined]
        assert any(name.endswith(".partial") for name in names(folder))
        yield process


def test_get_stopped_by_a_signal_leaves_no_files(slow_server: HTTPServer, tmp_path: Path) -> None:
    with get_at_work(slow_server, tmp_path) as process:
        process.kill()
        process.wait()
    assert len(names(tmp_path)) == 1
    with get_at_work(slow_server, tmp_path) as process:
        assert len(names(tmp_path)) == 1, "the partial files of the killed process are gone"
        process.terminate()
        assert process.stderr is not None
        assert (process.stderr.read().splitlines()[-1:], process.wait()) == (["echelon: stopped by SIGTERM"], 143)
    assert names(tmp_path) == set()


def test_a_second_sigterm_does_not_interrupt_the_clean_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM to its command, and then to the command's process group too."""
    cleaned: list[str] = []

    def run(args: argparse.Namespace) -> int:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned.append(args.rec)
        return 0

    def fail(number: int, frame: object) -> None:
        pytest.fail("SIGTERM was not handled")

    monkeypatch.setattr(records, "run_info", run)
    before = signal.signal(signal.SIGTERM, fail)
    try:
        assert main(["data", "info", "x.rec"]) == 143
        assert signal.getsignal(signal.SIGTERM) is fail, "the caller's handler is restored"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert cleaned == ["x.rec"]


def test_a_command_runs_outside_the_main_thread(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only the main thread can set a signal handler."""
    (tmp_path / "x.rec").touch()
    statuses: list[int] = []
    thread = threading.Thread(target=lambda: statuses.append(main(["data", "rec2idx", str(tmp_path / "x.rec")])))
    thread.start()
    thread.join()
    assert statuses == [0]
