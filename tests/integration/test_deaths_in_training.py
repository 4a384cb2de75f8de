"""`echelon train` when workers are killed: the others finish, and the result is that of the final weights."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from echelon.environment import HISTORY
from echelon.errors import NOT_WHOLE
from echelon.observe.history import from_ranges
from echelon.testing.history import check
from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import RESULT_FILE, find
from jobs import until

Event = dict[str, Any]
EPOCHS = 4
RESTART_EPOCHS = 8  # a restart takes seconds
NUM_TRAIN = 1437
START_S = 90.0  # on a busy machine a job may start slowly


class Training:
    """A run of `echelon train` whose workers can be killed when its events say so."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.directory = folder / "runs" / "latest"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "echelon.cli.main", "train", *arguments],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, HISTORY: "1"},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # the launcher ends all processes
            self._process.communicate()

    def interrupt(self, number: signal.Signals) -> None:
        """Send a signal to the launcher."""
        self._process.send_signal(number)

    def events(self, kind: str) -> list[Event]:
        try:
            lines = (self.directory / "events.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def send(self, number: signal.Signals, rank: int, when: Callable[[], object], what: str) -> None:
        """Send a signal to a worker as soon as a condition is true."""
        until(lambda: when() or self._process.poll() is not None, what, START_S)
        assert self._process.poll() is None, f"the run ended before {what}"
        who = [event["who"] for event in self.events("registered")]
        found = [match for name in who if (match := re.match(rf"worker {rank} \(pid (\d+)", name))]
        os.kill(int(found[-1][1]), number)

    def wait(self) -> tuple[int, str]:
        out, _ = self._process.communicate(timeout=START_S)
        return self._process.returncode, out

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found


def trained(training: Training) -> dict[int, list[tuple[int, int]]]:
    """Return the positions of each epoch that the server has applied, in the order of the positions."""
    found: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in training.events("history"):
        for keys, _, _, parts, _ in event.get("updates", ()):
            if 0 in from_ranges(keys):
                for _, works in parts:
                    for _, epoch, start, stop in works:
                        found[epoch].append((start, stop))
    return {epoch: sorted(intervals) for epoch, intervals in sorted(found.items())}


def joined(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return sorted intervals with adjacent ones as one; those that overlap stay, and fail a comparison."""
    result: list[tuple[int, int]] = []
    for start, stop in intervals:
        if result and result[-1][1] == start:
            result[-1] = (result[-1][0], stop)
        else:
            result.append((start, stop))
    return result


def an_epoch_ends(training: Training, epoch: int = 1) -> Callable[[], object]:
    return lambda: [event for event in training.events("epoch") if event["epoch"] == epoch]


@pytest.mark.parametrize(
    ("store", "allocator"),
    [
        ("dist_async", 2),
        pytest.param("dist_sync", 2, marks=pytest.mark.long),
        pytest.param("dist_async", 0, marks=pytest.mark.long),
    ],
)
def test_when_rank_0_is_killed_the_next_one_validates_saves_and_writes_the_result(
    tmp_path: Path, store: str, allocator: int
) -> None:
    flags = f"-n 3 -s 1 --max-restarts 0 --kv-store {store} --data-allocator {allocator} --pace 0.02"
    rest = f"--num-epochs {EPOCHS} --model-prefix m --tensorboard board --ema-epochs 1"
    with Training(tmp_path, *flags.split(), *rest.split()) as training:
        training.send(signal.SIGKILL, 0, an_epoch_ends(training), "an epoch has ended")
        status, out = training.wait()
    assert status == (0 if allocator else NOT_WHOLE), out
    summary = training.summary
    assert (summary["accuracy_at_epoch"], summary["accuracy_is_final"]) == (EPOCHS, True), out
    assert {event["epoch"] for event in training.events("validation") if "accuracy" in event} >= {3.0, 4.0}
    assert find(tmp_path / "m")[0].position == (EPOCHS, 0)
    result = load(training.directory / RESULT_FILE)
    assert result.metadata["epoch"] == EPOCHS
    assert result.optimizer, "the new first worker saves the optimizer's state, too"
    assert any(name.startswith("average.") for name in result.extra)
    assert result.metadata["metrics"]["accuracy"] == pytest.approx(summary["accuracy"])
    assert len(list((tmp_path / "board").iterdir())) == 2, "the new first worker continues the curves in its own file"
    if allocator:
        report = check(training.directory, num_samples=NUM_TRAIN)
        assert not report.problems
        assert report.epochs == EPOCHS
        assert report.partial_steps == summary["partial_steps"] <= 1


@pytest.mark.long
@pytest.mark.parametrize("store", ["dist_sync", pytest.param("dist_async", marks=pytest.mark.long)])
def test_a_run_that_was_stopped_in_mid_epoch_continues_exactly_with_fewer_workers(tmp_path: Path, store: str) -> None:
    flags = f"-s 1 --kv-store {store} --pace 0.02 --num-epochs 3 --model-prefix m --name".split()
    with Training(tmp_path, "-n", "3", *flags, "first") as first:
        until(an_epoch_ends(first), "an epoch has ended", START_S)
        first.interrupt(signal.SIGTERM)
        status, out = first.wait()
    assert status == 128 + signal.SIGTERM, out
    saved = find(tmp_path / "m")[0]
    metadata = load(saved.path).metadata
    epoch, done = metadata["epoch"], [(start, stop) for start, stop in metadata["done"]]
    of_first = joined(trained(first).get(epoch, []))
    assert of_first == done, "the checkpoint has exactly the updates that it names"
    with Training(tmp_path, "-n", "2", *flags, "second", "--resume", "auto") as second:
        status, out = second.wait()
    assert status == 0, out
    rest = trained(second)
    assert joined(sorted(done + rest[epoch])) == [(0, NUM_TRAIN)], "no sample twice, none left out"
    assert [joined(rest[later]) for later in range(epoch + 1, 3)] == [[(0, NUM_TRAIN)]] * (2 - epoch)


@pytest.mark.long
def test_sigterm_to_one_worker_lets_it_leave_and_the_others_train_its_samples(tmp_path: Path) -> None:
    flags = f"-n 3 -s 1 --kv-store dist_async --pace 0.02 --num-epochs {EPOCHS} --model-prefix m"
    with Training(tmp_path, *flags.split()) as training:
        training.send(signal.SIGTERM, 1, an_epoch_ends(training), "an epoch has ended")
        status, out = training.wait()
    assert status == 0, out
    assert "left" in [event["departure"] for event in training.events("view") if 1 not in event["workers"]]
    report = check(training.directory, num_samples=NUM_TRAIN)
    assert not report.problems
    assert (report.epochs, report.partial_steps) == (EPOCHS, 0)
    assert training.summary["accuracy_at_epoch"] == EPOCHS


@pytest.mark.parametrize(
    "store",
    [
        "dist_sync",
        pytest.param("dist_async", marks=pytest.mark.long),
        pytest.param("dist_ssync --staleness 2", marks=pytest.mark.long),
        pytest.param("dist_gsync --groups 0,1/2", marks=pytest.mark.long),
    ],
)
def test_a_worker_that_was_killed_is_restarted_and_trains_with_the_others(tmp_path: Path, store: str) -> None:
    flags = f"-n 3 -s 2 --kv-store {store} --pace 0.05 --num-epochs {RESTART_EPOCHS}"
    with Training(tmp_path, *flags.split()) as training:
        training.send(signal.SIGKILL, 1, an_epoch_ends(training), "an epoch has ended")
        status, out = training.wait()
    assert status == 0, out
    assert not check(training.directory, num_samples=NUM_TRAIN).problems
    of_restarted = [event for event in training.events("begin") if event["rank"] == 1]
    assert len(of_restarted) == 2, "the restarted worker trains before the others have ended"
    summary = training.summary
    assert summary["accuracy_at_epoch"] == RESTART_EPOCHS
    assert summary["samples"] == RESTART_EPOCHS * NUM_TRAIN
    assert [worker["restarts"] for worker in summary["workers"]] == [0, 1, 0]
    assert [lost["who"] for lost in summary["lost_workers"]] == ["worker 1"]


@pytest.mark.long
def test_when_all_workers_are_killed_they_continue_with_the_weights_of_the_servers(tmp_path: Path) -> None:
    flags = f"-n 2 -s 2 --kv-store dist_sync --pace 0.05 --num-epochs {EPOCHS} --model-prefix m"
    with Training(tmp_path, *flags.split()) as training:
        for rank in (0, 1):
            training.send(signal.SIGKILL, rank, an_epoch_ends(training, 2), "epoch 2 has ended")
        saved = {path.name: path.read_bytes() for path in tmp_path.glob("m-*")}
        status, out = training.wait()
    assert status == 0, out
    assert saved, "epoch 1 at least was saved before"
    assert {name: (tmp_path / name).read_bytes() for name in saved} == saved, "no good file is written again"
    assert not check(training.directory, num_samples=NUM_TRAIN).problems
    assert all(event["samples"] for event in training.events("epoch")), "nobody runs an epoch again"
    assert len(training.events("settings")) == 1, "the run goes on; it does not start again"
    assert training.summary["accuracy"] > 0.9
    assert "starts from the beginning" not in out


def test_an_error_that_would_repeat_ends_the_job_and_is_not_restarted(tmp_path: Path) -> None:
    flags = "-n 2 -s 1 --kv-store dist_sync --num-epochs 3 --lr 1e6 --check-finite"
    with Training(tmp_path, *flags.split()) as training:
        status, out = training.wait()
    assert status == 1, out
    assert "; restart 1 of" not in out
    assert "contains NaN or infinity" in out
    assert not training.events("restart")
