"""`echelon bench train`: its command line, its workloads, and its handling of times and losses."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

from echelon.bench.harness.process import ProcessSpec
from echelon.bench.harness.turns import summarise
from echelon.bench.train.contenders import TrainContender
from echelon.bench.train.networks import make_batch, make_model, make_optimizer, make_step
from echelon.bench.train.run import check_learning, fill_in, make_contenders, print_rates
from echelon.bench.train.workloads import WORKLOADS, Loop
from echelon.cli.bench import add_parser
from echelon.errors import JobError, UsageError

ANSWER = "from echelon.bench.harness.protocol import Times, serve\nserve(lambda n: Times(({},) * n, ({},) * {}))"


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "train", *arguments])


def test_default_batch_size_and_threads_follow_from_model_and_machine() -> None:
    args = parsed("--model", "mlp25m", "-n", "1000", "--peer", "ddp", "--peer", "mxnet", "--json", "out.json")
    fill_in(args)
    assert (args.num_servers, args.kv_store, args.peer) == (2, "dist_sync", ["ddp", "mxnet"])
    assert args.json == Path("out.json")
    assert (args.batch_size, args.threads) == (32, 1)
    given = parsed("--batch-size", "7", "--threads", "3")
    fill_in(given)
    assert (given.model, given.batch_size, given.threads) == ("resnet20", 7, 3)


def test_echelon_comes_first_and_then_the_peers(tmp_path: Path) -> None:
    args = parsed("--peer", "ddp")
    fill_in(args)
    assert [contender.name for contender in make_contenders(args, tmp_path)] == ["echelon", "ddp"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-s", "0"], "-s 0"),
        (["--rounds", "0"], "--rounds is 0; it must be 1 or more"),
        (["--warmup", "-1"], "--warmup is -1; it must be 0 or more"),
        (["--peer", "ddp", "--peer", "ddp"], "each --peer only once"),
        (["--batch-size", "0"], "--batch-size is 0; it must be 1 or more"),
        (["--kv-store", "dist_ssync", "--peer", "mxnet"], "MXNet has no store 'dist_ssync'"),
    ],
)
def test_invalid_flags_are_rejected_before_anything_starts(arguments: list[str], message: str) -> None:
    args = parsed(*arguments)
    with pytest.raises(UsageError, match=message):
        args.run(args)


@pytest.mark.parametrize(("name", "weights"), [("resnet20", 272_541), ("mlp25m", 25_203_722)])
def test_a_workload_has_the_stated_size_and_the_same_initial_weights(name: str, weights: int) -> None:
    first, second = make_model(name), make_model(name)
    assert sum(parameter.numel() for parameter in first.parameters() if parameter.requires_grad) == weights
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    images, labels = make_batch(name, 2, rank=0)
    assert first(images).shape == (2, 10)
    assert labels.shape == (2,)
    assert not torch.equal(images, make_batch(name, 2, rank=1)[0])


def test_the_loop_times_every_step_and_finishes_once() -> None:
    model = make_model("resnet20")
    optimizer = make_optimizer("resnet20", model)
    calls: list[str] = []

    def update() -> None:
        calls.append("update")
        optimizer.step()
        optimizer.zero_grad()

    step = make_step(model, make_batch("resnet20", 4, rank=0), update)
    loop = Loop(step, lambda: calls.append("begin"), lambda: calls.append("finish"))
    times = loop.run_round(3)
    assert calls == ["begin", "update", "update", "update", "finish"]
    assert len(times.step_s) == 3
    assert all(step_s > 0 for step_s in times.step_s)
    assert times.losses[-1] < times.losses[0]


def contender(tmp_path: Path, *programs: str) -> TrainContender:
    specs = [ProcessSpec(f"worker {i}", [sys.executable, "-c", code], driven=True) for i, code in enumerate(programs)]
    return TrainContender("subject", specs, tmp_path)


def test_times_and_losses_are_means_over_the_workers(tmp_path: Path) -> None:
    with contender(tmp_path, ANSWER.format(0.25, 2.0, "n"), ANSWER.format(0.75, 1.0, "n")) as subject:
        assert subject.run_round(2) == [0.5, 0.5]
        assert subject.run_round(1) == [0.5]
    assert subject.losses == [1.5, 1.5, 1.5]


def test_a_worker_without_losses_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(JobError, match=r"subject: 2 steps, \[0\] losses"),
        contender(tmp_path, ANSWER.format(1, 1, 0)) as one,
    ):
        one.run_round(2)


def test_the_table_shows_the_rate_of_all_workers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "150")
    cases = summarise({"echelon": [[0.1, 0.1]], "ddp": [[0.25, 0.25]]})
    print_rates("title", cases, 64, {"echelon": [2.5, 1.5], "ddp": [2.5, 1.25]})
    rows = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert "640 " in rows["echelon"]
    assert "2.500 → 1.500" in rows["echelon"]
    assert "256 " in rows["ddp"]
    assert "2.50 ×" in rows["ddp"]


def test_a_loss_that_does_not_decrease_is_an_error() -> None:
    check_learning({"echelon": [2.0, 2.5, 2.0, 1.9, 1.8, 1.7, 1.6]})
    with pytest.raises(JobError, match=r"ddp did not learn: its loss went from 2.0000 to 2.0000"):
        check_learning({"echelon": [2.0, 1.0], "ddp": [2.0] * 20})
    with pytest.raises(JobError, match="mxnet did not learn"):
        check_learning({"mxnet": [2.0] * 10 + [float("nan")] * 10})


def test_the_command_accepts_every_workload() -> None:
    for name in WORKLOADS:
        assert parsed("--model", name).model == name
