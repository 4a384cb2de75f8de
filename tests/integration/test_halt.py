"""A worker asks all to stop: under `dist_sync` all stop after the same step, whoever receives the request first."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from multi_device_jobs import Sizes, run, run_as_launched
from plain_loops import Net, assert_same_bits, batches, loss_of, seeded, snapshot
from torch.optim import SGD

import echelon
from echelon.cluster.messages import BarrierDone, Halt
from echelon.kvstore import KVStore
from echelon.train import log_lines
from echelon.train.checkpoint.format import load
from echelon.train.checkpoint.names import find, path_for
from echelon.train.loop.fit import fit
from echelon.train.loop.stopping import EXIT_STATUS
from echelon.train.recipe.options import TrainOptions

pytestmark = pytest.mark.numeric

REQUESTED_AFTER = 3


def until_halted(kv: KVStore) -> tuple[str | None, int, dict[str, torch.Tensor]]:
    """Train until rank 1 asks to stop. Rank 0 waits for its weights after every step, as evaluation does."""
    model = seeded(Net)
    trainer = echelon.Trainer(model, SGD(model.parameters(), lr=0.01, momentum=0.9), kv)
    for batch in batches(1000, 1, seed=kv.rank):
        loss_of(model, batch).backward()
        trainer.step()
        if kv.rank == 0:
            trainer.sync()
        if kv.rank == 1 and trainer.clock == REQUESTED_AFTER:
            kv.halt("enough")
        if kv.halted:
            break
    trainer.sync()
    state = snapshot(model)
    kv.retire()
    kv.barrier()
    trainer.close()
    return kv.halted, trainer.clock, state


@pytest.mark.parametrize(("sizes", "steps"), [((3, 1, 2), REQUESTED_AFTER + 2), ((2, 2, 1), REQUESTED_AFTER + 3)])
def test_trainers_stop_after_the_same_step_with_the_same_weights(sizes: Sizes, steps: int) -> None:
    """The request is part of the next push, whose answer comes a step later; between devices one more step later."""
    found = run(until_halted, "dist_sync", sizes=sizes)
    assert [one[:2] for one in found] == [("enough", steps)] * len(found)
    for one in found[1:]:
        assert_same_bits(one[2], found[0][2])


def test_a_single_worker_stops_immediately() -> None:
    def program(kv: KVStore) -> tuple[str | None, str | None]:
        before = kv.halted
        kv.halt("enough")
        return before, kv.halted

    assert run(program, "dist_sync", sizes=(1, 1, 1)) == [(None, "enough")]


def classic(kv: KVStore) -> tuple[str | None, int]:
    kv.init("w", torch.zeros(4))
    value = torch.ones(4)
    rounds = 0
    while not kv.halted and rounds < 1000:
        kv.pushpull("w", value.clone())
        rounds += 1
        if kv.rank == 1 and rounds == REQUESTED_AFTER:
            kv.halt("enough")
    kv.retire()
    kv.barrier()
    return kv.halted, rounds


def test_pushpull_receives_the_request_in_the_next_round() -> None:
    assert run(classic, "dist_sync", sizes=(3, 1, 1)) == [("enough", REQUESTED_AFTER + 1)] * 3


def at_a_barrier(kv: KVStore) -> list[str | None]:
    if kv.rank == 1:
        kv.halt("enough")
    reasons = [kv.halted]
    kv.barrier()
    kv.barrier()
    return [*reasons, kv.halted]


def test_barriers_pass_the_request_on() -> None:
    assert run(at_a_barrier, "dist_sync", sizes=(2, 1, 1)) == [[None, "enough"]] * 2


def after_a_barrier(kv: KVStore) -> list[str | None]:
    """Receive the request after the barrier is complete, but before this worker can have seen that."""
    session: Any = kv._session  # type: ignore[attr-defined]
    receive = session.receive

    def receive_both(message: object) -> None:
        receive(message)
        if isinstance(message, BarrierDone):
            session.receive = receive
            receive(Halt("enough"))

    session.receive = receive_both
    kv.barrier()
    reasons = [kv.halted]
    kv.barrier()
    return [*reasons, kv.halted]


def test_a_request_after_a_barrier_counts_at_the_next_one() -> None:
    assert run(after_a_barrier, "dist_sync", sizes=(1, 1, 1)) == [[None, "enough"]]


def two_reasons(kv: KVStore) -> list[str | None]:
    reasons = []
    for rank in (1, 0):
        if kv.rank == rank:
            kv.halt(f"worker {rank} has enough")
        kv.barrier()
        kv.barrier()
        reasons.append(kv.halted)
    return reasons


@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
def test_of_two_reasons_all_workers_have_the_first(store: str) -> None:
    assert run(two_reasons, store, sizes=(2, 1, 1)) == [["worker 1 has enough"] * 2] * 2


def test_a_run_that_one_worker_stopped_resumes_with_the_same_bits(tmp_path: Path) -> None:
    options = TrainOptions(
        kv_store="dist_sync", batch_size=64, num_epochs=2, num_examples=1280, lr=0.1, disp_batches=1, seed=7
    )
    line = log_lines.speed_line

    def print_and_interrupt(epoch: int, first: int, last: int, *rest: object) -> str:
        if (epoch, last) == (1, 4) and os.environ["ECHELON_RANK"] == "1":
            os.kill(os.getpid(), signal.SIGINT)  # SIGTERM to one worker lets it leave; the others continue
        return line(epoch, first, last, *rest)  # type: ignore[arg-type]

    def fitted(name: str, given: TrainOptions, speed_line: Callable[..., str] = line) -> list[int]:
        (tmp_path / name).mkdir(exist_ok=True)
        mine = replace(given, model_prefix=str(tmp_path / name / "m"))

        def program() -> int:
            log_lines.speed_line = speed_line  # in this process only
            return fit(mine)

        return run_as_launched(program, (2, 1, 1))

    assert fitted("whole", options) == [0, 0]
    assert fitted("parts", options, print_and_interrupt) == [EXIT_STATUS["SIGINT"]] * 2
    prefix = tmp_path / "parts" / "m"
    first, second = (find(str(prefix), rank=rank)[0].position for rank in (0, 1))
    assert first == second
    assert first in ((1, 6 * 128), (1, 7 * 128)), "worker 0 may learn of it from the scheduler, one push earlier"
    assert fitted("parts", replace(options, resume=True)) == [0, 0]
    found, whole = (load(path_for(tmp_path / name / "m", 0, 2)) for name in ("parts", "whole"))
    assert_same_bits(found.weights | found.optimizer, whole.weights | whole.optimizer)
