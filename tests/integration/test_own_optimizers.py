"""A user's own optimizer class on servers: by import path, if the launcher allows it."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from optimizer_cases import Case, plain, steps, trained
from own_optimizers import Lion, NeedsMore
from plain_loops import State, assert_close, assert_same_bits, batches, joined, parts_of, seeded, snapshot
from torch import nn

import echelon
import tolerances
from echelon.errors import UsageError
from echelon.kvstore import KVStore, create
from echelon.launch.threads.in_process import run
from jobs import TESTS, Job

pytestmark = pytest.mark.numeric

LION = "own_optimizers:Lion"
CASE = Case(Lion, {"weight_decay": 0.1}, lambda n: {"betas": (0.9 - n / 50, 0.99), "rule": f"lion {n}"})


def main_class() -> type[Lion]:
    """Return a class as the main script would define it."""
    return type("Mine", (Lion,), {"__module__": "__main__"})


@pytest.mark.parametrize("num_servers", [1, 3])
def test_one_worker_gives_the_bits_of_the_class(num_servers: int) -> None:
    model, data = seeded(CASE.model), batches(4)
    found = trained(CASE, model, [data], num_servers=num_servers, allow_optimizers=f"a.b:C,{LION}")
    assert_same_bits(found, plain(CASE, model, data))


def test_two_workers_equal_one_process_on_the_joined_batch() -> None:
    model, parts = seeded(CASE.model).double(), parts_of([5, 3], dtype=torch.float64)
    bound = tolerances.reordering(torch.float64, terms=8, steps=4) * 1e3
    expected = plain(CASE, model, joined(parts))
    assert_close(trained(CASE, model, parts, allow_optimizers=LION), expected, bound)


def test_its_state_of_tensors_and_numbers_survives_a_new_job(tmp_path: Path) -> None:
    model, data = seeded(CASE.model), batches(4)

    def first(kv: KVStore) -> State:
        torch.set_num_threads(1)
        own = copy.deepcopy(model)
        with echelon.Trainer(own, CASE.make(own), kv) as trainer:
            steps(CASE, trainer, data[:2])
            kv.save_optimizer_states(tmp_path / "states")
            state = trainer.optimizer_state()
            assert float(state["last.bias/scale"]) == 0.1 * 0.9 * 0.9, "a number of Python has all its bits"
            return snapshot(own)

    weights = run(first, "dist_sync", num_workers=1, allow_optimizers=LION)[0]

    def second(kv: KVStore) -> State:
        torch.set_num_threads(1)
        own = copy.deepcopy(model)
        optimizer = CASE.make(own)
        for number in range(2):
            CASE.set(optimizer, number)
        with echelon.Trainer(own, optimizer, kv) as trainer:
            trainer.load_weights(weights)
            kv.load_optimizer_states(tmp_path / "states")
            steps(CASE, trainer, data[2:], first=2)
            return snapshot(own)

    assert_same_bits(
        run(second, "dist_sync", num_workers=1, num_servers=3, allow_optimizers=LION)[0], plain(CASE, model, data)
    )


def test_stores_without_servers_run_it_without_permission() -> None:
    gradient = torch.linspace(-1, 1, 6).view(2, 3)
    expected = nn.Parameter(torch.ones(2, 3))
    optimizer = Lion([expected], lr=0.1)
    with create("local") as kv:
        kv.init("w", torch.ones(2, 3))
        kv.set_optimizer(LION, lr=0.1)
        out = torch.empty(2, 3)
        for _ in range(3):
            expected.grad = gradient.clone()
            optimizer.step()
            kv.pushpull("w", gradient, out)
    assert torch.equal(out, expected.detach())


@pytest.mark.parametrize(
    ("make", "allowed", "words"),
    [
        (
            Lion,
            "other:Class",
            f"the optimizer {LION} is not allowed on the servers: start the job with --allow-optimizer",
        ),
        (
            lambda p: Lion(p, decay=torch.ones(2)),
            LION,
            "the setting decay of Lion is a Tensor; servers take numbers, booleans, texts, None and tuples of these",
        ),
        (
            lambda p: NeedsMore(p, None),
            "own_optimizers:NeedsMore",
            r"NeedsMore cannot be made from its settings .*model",
        ),
    ],
)
def test_classes_that_are_refused(make: Any, allowed: str, words: str) -> None:
    def program(kv: KVStore) -> None:
        model = nn.Linear(2, 2)
        with pytest.raises(UsageError, match=words):
            echelon.Trainer(model, make(model.parameters()), kv)

    run(program, "dist_sync", num_workers=1, allow_optimizers=allowed)


def test_a_path_that_is_not_a_class() -> None:
    with create("local") as kv:
        for path, words in (
            ("own_optimizers:Tiger", r"cannot be imported \(AttributeError"),
            (
                "no_such_module:Lion",
                r"cannot be imported \(ModuleNotFoundError.*put the folder of its module on PYTHONPATH",
            ),
            ("own_optimizers:torch", "is not a subclass of torch.optim.Optimizer"),
            ("own optimizers:Lion", "write it as package.module:Class"),
        ):
            with pytest.raises(UsageError, match=words):
                kv.set_optimizer(path)


SCRIPT = """
import torch, echelon
from own_optimizers import {kind}

torch.manual_seed(0)
model = torch.nn.Linear(3, 2)
with echelon.Trainer(model, {kind}(model.parameters(), lr=0.1), "dist_sync") as trainer:
    for _ in range(3):
        model(torch.ones(4, 3)).square().sum().backward()
        trainer.step(4)
    print("sum", float(model.weight.sum()))
"""


def launched(tmp_path: Path, kind: str) -> tuple[int, str]:
    """Launch a job of one worker and two servers that trains with a class of `own_optimizers`."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(kind=kind))
    path = {"PYTHONPATH": f"{TESTS / 'integration'}:{':'.join(sys.path)}"}
    command, options = [sys.executable, str(script)], ["--allow-optimizer", f"own_optimizers:{kind}"]
    with Job(tmp_path, num_servers=2, num_workers=1, command=command, options=options, environment=path) as job:
        return job.wait(), job.out + job.err


def test_the_launcher_allows_a_class(tmp_path: Path) -> None:
    status, output = launched(tmp_path, "Lion")
    assert status == 0, output
    assert "sum " in output


@pytest.mark.long
def test_a_class_that_fails_ends_the_job_with_its_error(tmp_path: Path) -> None:
    status, output = launched(tmp_path, "Broken")
    assert status != 0
    failure = r"Broken.step\(\) failed on a parameter of shape \(2,.*\): RuntimeError\('no luck'\)"
    assert re.search(f"server stops: {failure}", output)
    assert re.search(rf"worker 0\].*server \d \(pid \d+ on .*\) failed: {failure}", output), "the worker says it, too"
