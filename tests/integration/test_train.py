"""`echelon train` with real processes: its files, its output and its errors."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from digits import load_float_digits
from echelon import models
from echelon.cli.main import main
from echelon.train.checkpoint.format import load
from echelon.train.loop.evaluation.evaluate import predict
from echelon.train.predict import Predictor
from jobs import until

NUM_TRAIN = 1437
EPOCHS = 4
WORKER_KEYS = {"rank", "clock", "samples", "wait_s", "staleness"}


@dataclass(frozen=True)
class Run:
    folder: Path
    status: int
    out: str
    err: str

    @property
    def directory(self) -> Path:
        return self.folder / "runs" / "latest"

    @property
    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "summary.json").read_text())
        return found


def train(folder: Path, *arguments: str) -> Run:
    command = [sys.executable, "-m", "echelon.cli.main", "train", *arguments]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    return Run(folder, done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def gsync(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four workers in two groups, with unequal shares of the data."""
    folder = tmp_path_factory.mktemp("gsync")
    (folder / "groups").write_text("0 1\n2 3\n")
    (folder / "data_sharding").write_text("0 0.1\n0.1 0.3\n0.3 0.6\n0.6 1\n")
    arguments = "-n 4 -s 2 --kv-store dist_gsync --data-allocator 1 --num-epochs 4 --batch-size 16 --name first"
    return train(folder, *arguments.split())


def test_a_run_writes_a_summary_of_itself_and_its_workers(gsync: Run) -> None:
    assert gsync.status == 0, gsync.out + gsync.err
    assert gsync.err == ""
    summary = gsync.summary
    assert summary["store"] == "dist_gsync"
    assert summary["accuracy"] > 0.5
    assert summary["seconds"] > 0
    assert summary["samples"] == EPOCHS * NUM_TRAIN
    assert summary["samples_per_s"] == pytest.approx(summary["samples"] / summary["seconds"], rel=0.01)
    assert [worker["rank"] for worker in summary["workers"]] == [0, 1, 2, 3]
    for worker in summary["workers"]:
        assert worker.keys() >= WORKER_KEYS
        assert sum(worker["staleness"].values()) == worker["clock"] > 0
        assert worker["rounds_ahead"] == {}, "without a bound, it would grow with the run"
        phases = [worker[f"{phase}_s"] for phase in ("compute", "push", "wait", "pull")]
        assert min(phases) >= 0
        assert sum(phases) <= worker["seconds"] + 1.0  # the Trainer exists a little longer than its first step
        assert worker["bytes"]["pushed"] > 0
    assert any(int(value) > 0 for worker in summary["workers"] for value in worker["staleness"])
    assert [row["epoch"] for row in summary["epochs"]] == list(range(1, EPOCHS + 1))
    for row, validation in zip(summary["epochs"], summary["validations"], strict=True):
        assert 0 < row["train_accuracy"] <= 1
        assert row["valid_accuracy"] == validation["accuracy"]
        assert 0 < row["seconds"] < summary["seconds"]
        assert row["samples_per_s"] > 0


def test_the_shares_of_the_data_come_from_data_sharding(gsync: Run) -> None:
    samples = [worker["samples"] for worker in gsync.summary["workers"]]
    assert samples == [pytest.approx(EPOCHS * NUM_TRAIN * share, abs=EPOCHS) for share in (0.1, 0.2, 0.3, 0.4)]
    clocks = [worker["clock"] for worker in gsync.summary["workers"]]
    assert clocks == [EPOCHS * -(-count // (EPOCHS * 16)) for count in samples], "each its own epoch"


def test_the_run_directory_has_a_link_curves_and_events(gsync: Run) -> None:
    assert (gsync.folder / "runs" / "latest").readlink() == Path("first")
    assert (gsync.directory / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert gsync.summary["training"][0]["loss"] > gsync.summary["training"][-1]["loss"] > 0
    kinds = {json.loads(line)["event"] for line in (gsync.directory / "events.jsonl").read_text().splitlines()}
    assert kinds >= {"loading", "registered", "begin", "progress", "training", "validation"}
    assert kinds >= {"done", "final", "checkpoint", "view", "left"}


def test_the_checkpoint_holds_the_validated_weights_and_the_optimizer_state(gsync: Run) -> None:
    checkpoint = load(gsync.directory / "checkpoint.safetensors")
    model = models.build("digits-cnn", num_classes=10, image_shape=(1, 8, 8))
    model.load_state_dict(checkpoint.weights)
    images, labels = load_float_digits()[1]
    accuracy = float((predict(model.eval(), images).argmax(1) == labels).double().mean())
    assert accuracy == gsync.summary["accuracy"] == checkpoint.metadata["metrics"]["accuracy"]
    assert (checkpoint.metadata["epoch"], checkpoint.metadata["network"]) == (EPOCHS, "digits-cnn")
    assert checkpoint.metadata["classes"] == list("0123456789")
    parameters = dict(model.named_parameters())
    assert checkpoint.optimizer.keys() == {f"{name}/momentum_buffer" for name in parameters}
    assert all(state.shape == parameters[name.rpartition("/")[0]].shape for name, state in checkpoint.optimizer.items())
    assert not (gsync.directory / "optimizer.safetensors").exists()


def test_score_and_predictor_read_the_checkpoint_of_a_run(gsync: Run, capsys: pytest.CaptureFixture[str]) -> None:
    path = gsync.directory / "checkpoint.safetensors"
    assert main(["score", "--model", str(path), "--data", "digits"]) == 0
    assert f"('accuracy', {gsync.summary['accuracy']})" in capsys.readouterr().out
    images, labels = load_float_digits()[1]
    rankings = Predictor.load(path)(images)
    right = sum(ranking[0][0] == label for ranking, label in zip(rankings, labels.tolist(), strict=True))
    assert right / len(labels) == gsync.summary["accuracy"]


@pytest.mark.long
def test_the_checkpoint_of_a_sharded_store_holds_the_whole_optimizer_state(tmp_path: Path) -> None:
    flags = "--devices cpu:2 --kv-store nccl --optimizer adam --lr 0.005 --num-epochs 1"
    run = train(tmp_path, *flags.split())
    assert run.status == 0, run.out + run.err
    checkpoint = load(run.directory / "checkpoint.safetensors")
    for name in ("exp_avg", "exp_avg_sq"):
        assert all(
            checkpoint.optimizer[f"{key}/{name}"].shape == tensor.shape for key, tensor in checkpoint.weights.items()
        )


def test_the_final_weights_include_updates_of_workers_that_finished_after_rank_0(gsync: Run) -> None:
    lines = (gsync.directory / "events.jsonl").read_text().splitlines()
    (final,) = [event for event in map(json.loads, lines) if event["event"] == "final"]
    assert final["accuracy"] == gsync.summary["accuracy"]
    assert final["loss"] != gsync.summary["validations"][-1]["loss"], "rank 0 has the smallest share and ends first"


def test_the_result_is_printed(gsync: Run) -> None:
    summary = gsync.summary
    (accuracy,) = [line for line in gsync.out.splitlines() if line.startswith("accuracy")]
    assert accuracy == f"accuracy      {summary['accuracy']:.4f}  validation of the final weights, after epoch {EPOCHS}"
    assert f"samples/s     {summary['samples_per_s']:.0f}  ({summary['samples']} samples in " in gsync.out
    assert "staleness     steps by updates of others between a read and its push\n" in gsync.out
    assert "written to    runs/first/  (also runs/latest)\n" in gsync.out
    assert "starting 7 processes: 1 scheduler, 2 servers, 4 workers\n" in gsync.out
    assert "\x1b" not in gsync.out


@pytest.mark.numeric
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param("--kv-store dist_sync --transport tcp", id="sync"),
        pytest.param("--kv-store dist_async", id="async", marks=pytest.mark.long),
        pytest.param("--kv-store dist_ssync --staleness 3 --optimizer adamw --lr 0.005", id="ssync"),
    ],
)
def test_other_stores_stop_at_the_target_accuracy(tmp_path: Path, arguments: str) -> None:
    run = train(tmp_path, *f"-n 2 -s 1 --num-epochs 40 --eval-every 10 --target-accuracy 0.9 {arguments}".split())
    assert run.status == 0, run.out + run.err
    summary = run.summary
    assert summary["validations"][-1]["accuracy"] >= 0.9
    assert all(point["accuracy"] < 0.9 for point in summary["validations"][:-1])
    assert 0 < summary["samples"] < 20 * NUM_TRAIN, "all workers stopped"
    clocks = [worker["clock"] for worker in summary["workers"]]
    if "dist_sync" in arguments:
        assert len(set(clocks)) == 1, "all stop after the same step"
        assert [worker["staleness"] for worker in summary["workers"]] == [{"0": clock} for clock in clocks]
    if "dist_ssync" in arguments:
        assert max(int(value) for worker in summary["workers"] for value in worker["staleness"]) <= 2 * 3 + 1
        assert max(int(value) for worker in summary["workers"] for value in worker["rounds_ahead"]) <= 3
        assert "staleness     steps by rounds ahead of the slowest worker (bound 3)\n" in run.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--kv-store dist_snyc", "unknown store 'dist_snyc'; did you mean 'dist_sync'?"),
        ("-n 2 --kv-store local", "--kv-store local is for one worker; with -n 2 use a dist_ store"),
        ("-n 2 --kv-store dist_ssync", "dist_ssync needs a bound: give staleness=N"),
        ("-n 2 --kv-store dist_sync --staleness 3", "--staleness 3 has no meaning for --kv-store dist_sync"),
        ("-n 2 --kv-store dist_gsync", "dist_gsync needs groups"),
        ("-n 2 --kv-store dist_gsync --groups 0,1/1", "line 2: worker 1 is already in line 1"),
        ("-n 2 --kv-store dist_gsync --groups nosuch", "no groups file nosuch"),
        ("-n 2 --kv-store dist_sync --transport pigeon", "unknown transport 'pigeon'; choose one of auto, shm, tcp"),
        ("--data-allocator 1", "--data-allocator 1 needs the file data_sharding"),
        ("--data-allocator 3", "--data-allocator '3': use one of 0, 1, 2"),
        ("--data-sharding nofile", "--data-sharding nofile is not read without --data-allocator 1: give both"),
        ("--stall-seconds 0", "--stall-seconds must be above 0 and finite, not 0"),
        ("-i nosuch0", "network interface 'nosuch0' has no IPv4 address"),
        ("-s 0 --kv-store dist_async", "--kv-store dist_async needs a server, but -s is 0: give -s 1 or more"),
        ("--data nosuch", "unknown data set 'nosuch'; choose one of digits, "),
        ("--network digits_cnn", "unknown network 'digits_cnn'; did you mean 'digits-cnn'?"),
        ("--optimizer nosuch", "unknown optimizer 'nosuch'; "),
        ("--pace 0.1 --slow 1:3", "--slow names worker 1, but ranks go from 0 to 0"),
        ("--slow 3", "--slow '3' is not RANK:FACTOR, for example 3:3"),
        ("--stall 2:5", "--stall 2:5: the probability must be between 0 and 1"),
        ("--lr-step-epochs 3,x", "--lr-step-epochs '3,x' is neither a list"),
        ("--num-epochs 0", "--num-epochs must be 1 or more, not 0"),
        ("--gpus 0", "--gpus 0 asks for GPU 0, but this machine has none"),
        ("--devices cpu:3", "--batch-size 32 cannot be divided among 3 devices; use 30 or 33"),
        ("-n 0", "a job needs at least one worker (-n), not 0"),
        ("--name a/b", "'a/b' is not a valid name of a run"),
    ],
)
def test_wrong_flags_are_rejected_in_one_line_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("echelon: ")
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_a_data_sharding_file_with_a_gap_is_rejected_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data_sharding").write_text("0 0.5\n0.6 1\n")
    assert main(["train", "-n", "2", "--kv-store", "dist_sync", "--data-allocator", "1"]) == 2
    assert re.search(r"data_sharding line 2: .*leaves a gap", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("groups", b"127.0.0.1\nelsewhere", r"groups line 2: no worker runs on 'elsewhere'; .* hosts are 127\.0\.0\.1"),
        ("groups", b"0 \xe9", r"groups is not valid UTF-8 \(byte 2\)"),
        ("data_sharding", b"0 \xe9", r"data_sharding is not valid UTF-8 \(byte 2\)"),
    ],
)
def test_a_wrong_file_is_rejected_before_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: bytes,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    flags = ["--kv-store", "dist_gsync"] if name == "groups" else ["--kv-store", "dist_sync", "--data-allocator", "1"]
    assert main(["train", "-n", "2", *flags]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("job", ["", "-n 2 -s 1 --kv-store dist_sync"])
def test_a_job_that_fails_before_its_first_step_shows_the_error_and_deletes_the_run(tmp_path: Path, job: str) -> None:
    run = train(tmp_path, *f"--data mnist --data-dir nowhere {job}".split())
    assert run.status == 1
    assert len(re.findall(r"\[worker \d\] error: MNIST: no file train-images-idx3-ubyte", run.out)) == 1, run.out
    assert "samples/s" not in run.out
    assert "runs/" not in run.out
    assert re.fullmatch(r"echelon: worker [01] \(pid \d+\) exited with status 1\n", run.err)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("job", "number"),
    [pytest.param("", signal.SIGINT, marks=pytest.mark.long), ("-n 2 -s 1 --kv-store dist_async", signal.SIGTERM)],
)
def test_an_interrupted_run_leaves_its_checkpoint_curves_and_summary(tmp_path: Path, job: str, number: int) -> None:
    flags = f"--num-epochs 1000 --pace 0.02 {job}".split()
    command = [sys.executable, "-m", "echelon.cli.main", "train", *flags]
    run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    directory = tmp_path / "runs" / "latest"
    try:
        until(lambda: _num_events(directory, "progress") >= 2, "training", 60)
        run.send_signal(number)
        out, err = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 128 + number
    name = signal.Signals(number).name
    assert err.strip() == f"echelon: stopped by {name}"
    assert "Traceback" not in out
    assert f"runs/{directory.readlink()}" in out.replace("\n", ""), "the name of the folder is printed"
    assert {"checkpoint.safetensors", "curves.png", "events.jsonl", "summary.json"} <= set(os.listdir(directory))
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["exit_status"] == 128 + number
    assert summary["samples"] > 0
    assert len(Predictor.load(directory)(load_float_digits()[1][0][:2])) == 2


def _num_events(directory: Path, kind: str) -> int:
    path = directory / "events.jsonl"
    return path.read_text().count(f'"event":"{kind}"') if path.exists() else 0
