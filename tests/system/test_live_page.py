"""The live page of a run in a real browser: wide and on a phone, light and dark, with and without JavaScript.

One worker of the run has a slow backward pass. It trains in lock-step, so that all workers make the same steps per
second: only the arrival of the pushes says who is slow.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from browser import PHONE, WIDE, Browser, open_browser

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

PROGRAM = Path(__file__).parent / "slow_backward_worker.py"
SLOW_RANK, KILLED_RANK = 2, 1


@dataclass
class Run:
    """A run with a live page."""

    url: str
    folder: Path
    stop_file: Path
    process: subprocess.Popen[str]

    def state(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}api/state", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def kill(self, rank: int) -> None:
        """Kill a worker, whose process number is in its registration."""
        log = (self.folder / "events.jsonl").read_text()
        registered = re.search(rf"worker {rank} \(pid (\d+) on ", log)
        assert registered is not None
        os.kill(int(registered[1]), signal.SIGKILL)

    def end(self) -> None:
        self.stop_file.touch()
        self.process.wait(60)


@contextmanager
def launched(folder: Path, num_workers: int = 3) -> Iterator[Run]:
    """Launch the workers with --dash, and end them with the block."""
    stop = folder / "stop"
    words = ["launch", "--dash", "0", "--run-dir", str(folder), "-n", str(num_workers), "-s", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "echelon", *words, sys.executable, str(PROGRAM), str(stop)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    with process.stderr:
        first = process.stderr.readline()
        address = re.fullmatch(r"echelon: live page: (http://127\.0\.0\.1:\d+/)\n", first)
        assert address is not None, first
        run = Run(address[1], folder, stop, process)
        try:
            yield run
        finally:
            run.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with launched(tmp_path) as run:
        yield run


def wait_for_slow_worker(browser: Browser) -> None:
    browser.until(lambda: browser.text(f"#slow-{SLOW_RANK}"), "the slow worker is named")


def test_the_slow_worker_is_named_and_a_killed_one_turns_red(run: Run, browser: Browser) -> None:
    browser.open(run.url)
    wait_for_slow_worker(browser)
    named = browser.text(f"#slow-{SLOW_RANK}")
    assert re.match(rf"Worker {SLOW_RANK}\s+[\d.]+× slower\n\d+ ms per step, .*: it computes for \d+ ms", named), named
    assert browser.count("[id^=slow-]") == 1, "the workers that wait for it are not slow"
    clocks = [worker["clock"] for worker in run.state()["workers"]]
    assert max(clocks) - min(clocks) <= max(clocks) / 2, f"in lock-step all have about the same rate: {clocks}"
    assert "dist_sync" in browser.text(".decision")

    living = browser.colour(f"#worker-{KILLED_RANK}")
    assert browser.classes(f"#worker-{KILLED_RANK}") >= {"worker", "good"}
    run.kill(KILLED_RANK)
    browser.until(lambda: "bad" in browser.classes(f"#worker-{KILLED_RANK}"), "the killed worker turns red")
    assert "died" in browser.text(f"#worker-{KILLED_RANK}")
    red, green, blue = browser.colour(f"#worker-{KILLED_RANK}")
    assert (red, green, blue) != living
    assert red > green + 15 and red > blue + 15  # noqa: PT018
    browser.until(lambda: "died" in browser.text(".events"), "the failure is listed")
    assert f"worker {KILLED_RANK}" in browser.text(".events")
    assert browser.errors() == []


def test_the_page_keeps_its_last_state_after_the_run(run: Run, browser: Browser) -> None:
    browser.open(run.url)
    wait_for_slow_worker(browser)
    run.end()
    browser.until(lambda: "The page gets no answer" in browser.text("#connection"), "the end is noticed")
    assert f"Worker {SLOW_RANK}" in browser.text(".workers")


def test_it_is_readable_without_scripts(run: Run, browser: Browser) -> None:
    browser.open(run.url, scripts=False)
    wait_for_slow_worker(browser)  # the page reloads itself
    text = browser.text()
    for expected in ("training", f"Worker {SLOW_RANK}", "× slower", "Worker 0", "SERVERS", "LAST DECISION"):
        assert expected in text
    assert browser.errors() == []


def test_it_fits_every_screen_in_readable_colours(run: Run, browser: Browser) -> None:
    browser.open(run.url)
    wait_for_slow_worker(browser)
    run.kill(KILLED_RANK)
    for width, dark in itertools.product((WIDE, PHONE), (False, True)):
        browser.open(run.url, width=width, dark=dark)
        browser.until(lambda: "bad" in browser.classes(f"#worker-{KILLED_RANK}"), "all states are on the page")
        browser.until(lambda: browser.count(".uplot canvas") == 2, "the curves are drawn")
        assert browser.overflow() <= 0, f"the page scrolls sideways at {width} pixels"
        assert browser.low_contrasts() == [], f"{dark=}"
        brightness = sum(browser.colour("body")) / 3
        assert (brightness < 60) if dark else (brightness > 200)
