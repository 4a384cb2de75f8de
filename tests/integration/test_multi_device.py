"""Workers with several devices under the stores with servers: for the scheme, each is one worker."""

from __future__ import annotations

import copy
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from collective_loops import Normed, largest_difference
from multi_device_jobs import Sizes, run, run_as_launched
from plain_loops import (
    STEPS,
    Batch,
    Loop,
    Net,
    State,
    assert_same_bits,
    batches,
    differs,
    joined,
    loss_of,
    momentum,
    parts_of,
    seeded,
    snapshot,
    take_steps,
)
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

import echelon
import tolerances
from echelon.errors import NOT_WHOLE
from echelon.kvstore import KVStore
from echelon.testing import check_kvstore
from echelon.train.checkpoint.format import load
from echelon.train.loop.fit import fit
from echelon.train.recipe.options import TrainOptions
from jobs import Job, rows
from tiny_data import make_data

pytestmark = pytest.mark.numeric

EXAMPLES = Path(__file__).parents[2] / "examples" / "image-classification"


def results(found: list[Any]) -> list[Any]:
    """Raise the first error, if there is one."""
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found


def on_devices(store: str, loop: Loop, parts: Sequence[Sequence[Batch]], sizes: Sizes, **more: Any) -> list[State]:
    return results(run(lambda kv: loop.worker(kv, parts[kv.rank]), store, sizes=sizes, **more))


# --- the joined batch


@pytest.mark.parametrize("batch_sizes", [(6, 2), (3, 4, 1, 5)], ids=["1x2", "2x2"])
def test_lock_step_is_one_process_on_the_joined_batch(batch_sizes: tuple[int, ...]) -> None:
    loop = Loop(seeded(Net), momentum, lambda optimizer: StepLR(optimizer, 2, gamma=0.5))
    parts = parts_of(batch_sizes)
    expected = loop.plain(joined(parts))
    found = on_devices("dist_sync", loop, parts, (len(parts) // 2, 2, 2))
    tolerance = tolerances.of_training(joined(parts))
    for state in found:
        assert largest_difference(state, expected) < tolerance
        assert_same_bits(state, found[0])
    assert largest_difference(expected, snapshot(loop.model)) > 100 * tolerance


def channels_last() -> nn.Module:
    """Return a model whose weights have another order in memory than the store's."""
    layers = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Conv2d(4, 5, 3), nn.Flatten())
    return layers.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize("make", [Normed, channels_last])
def test_unused_parameters_and_memory_layouts(make: Callable[[], nn.Module]) -> None:
    model = seeded(make).eval()  # the statistics of half a batch would differ
    loop = Loop(model, momentum)
    parts = parts_of((4, 3))
    for state in on_devices("dist_sync", loop, parts, (1, 2, 1)):
        assert largest_difference(state, loop.plain(joined(parts))) < tolerances.of_training(joined(parts))


@pytest.mark.parametrize(("store", "more"), [("dist_async", {}), ("dist_ssync", {"staleness": 1})])
def test_a_single_worker_is_plain_pytorch_under_schemes_that_wait_less(store: str, more: dict[str, int]) -> None:
    loop = Loop(seeded(Net), lambda model: Adam(model.parameters(), lr=0.01))
    parts = parts_of((2, 5, 3))
    for state in on_devices(store, loop, parts, (1, 3, 1), **more):
        # Adam divides by the root of a small number.
        tolerance = tolerances.of_training(joined(parts), magnification=10)
        assert largest_difference(state, loop.plain(joined(parts))) < tolerance


# --- the members of a scheme


def places(kv: KVStore) -> tuple[Any, ...]:
    """Return a device's ranks and progress after worker 0 has trained and worker 1 has not."""
    model = seeded(Net)
    trainer = echelon.Trainer(model, momentum(model), kv)
    facts = [kv.rank, kv.worker_rank, kv.workers, kv.num_workers]
    if kv.worker_rank == 0:
        take_steps(model, trainer, batches(3, 2, seed=kv.rank))
    kv.barrier()
    trainer.refresh()
    state = snapshot(model)
    reported = trainer.progress()
    trainer.close()
    return *facts, reported["clock"], reported["samples"], state


def test_groups_are_of_workers_not_of_devices() -> None:
    """If groups listed devices, the first group would wait for worker 1, and rank 3 would be in no group."""
    found = run(places, "dist_gsync", sizes=(2, 2, 1), groups=[[0], [1]])
    assert [one[:4] for one in found] == [(r, r // 2, [0, 1, 2, 3], 4) for r in range(4)]
    assert [one[4:6] for one in found] == [(3, 12), (3, 6), (0, 0), (0, 0)], "device 0 reports for the worker"
    for one in found[1:]:
        assert_same_bits(one[6], found[0][6])


def unequal(kv: KVStore) -> tuple[int, State]:
    """Train; device 1 of worker 0 has one batch more than the others."""
    model = seeded(Net)
    trainer = echelon.Trainer(model, momentum(model), kv)
    take_steps(model, trainer, batches(3 if kv.rank == 1 else 2, 2, seed=kv.rank))
    kv.retire()
    kv.barrier()
    trainer.refresh()
    state = snapshot(model)
    trainer.close()
    return trainer.progress()["clock"], state


def test_devices_without_more_data_make_steps_of_0_samples() -> None:
    found = run(unequal, "dist_sync", sizes=(2, 2, 1))
    assert [clock for clock, _ in found] == [3, 3, 2, 2]
    for _, state in found[1:]:
        assert_same_bits(state, found[0][1])


# --- stopping


def stopped(kv: KVStore) -> tuple[str | None, int]:
    """Train until the last device asks for a stop, after its second step."""
    model = seeded(Net)
    trainer = echelon.Trainer(model, momentum(model), kv)
    for batch in batches(1000, 1, seed=kv.rank):
        loss_of(model, batch).backward()
        trainer.step()
        if kv.rank == 3 and trainer.clock == 2:
            kv.halt("enough")
        if kv.halted:
            break
    kv.retire()
    kv.barrier()
    trainer.close()
    return kv.halted, trainer.clock


def test_all_stop_and_the_devices_of_a_worker_stop_after_the_same_step() -> None:
    found = run(stopped, "dist_async", sizes=(2, 2, 1))
    assert [reason for reason, _ in found] == ["enough"] * 4
    clocks = [clock for _, clock in found]
    assert (clocks[0], clocks[2]) == (clocks[1], clocks[3])
    assert max(clocks) < 1000


# --- states


def saved_and_loaded(kv: KVStore) -> tuple[State, State, State]:
    """Make two steps, a snapshot, two more steps; then load the snapshot and repeat the last two steps."""
    model = seeded(Normed)
    trainer = echelon.Trainer(model, momentum(model), kv, average_buffers=True)
    data = batches(STEPS, 2, seed=kv.rank)

    def steps(chosen: Sequence[Batch]) -> State:
        take_steps(model, trainer, chosen)
        return snapshot(model)

    weights = steps(data[:2])
    if kv.rank:  # only the weights of device 0 of worker 0 count
        weights = {name: torch.zeros_like(value) for name, value in weights.items()}
    optimizer = trainer.optimizer_state()
    first = steps(data[2:])
    trainer.load_weights(weights)
    trainer.load_optimizer_state(optimizer)
    second = steps(data[2:])
    trainer.average_buffers()
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    trainer.close()
    return first, second, optimizer | {f"buffer {name}": value for name, value in buffers.items()}


def test_weights_and_optimizer_are_loaded_on_all_devices() -> None:
    found = run(saved_and_loaded, "dist_sync", sizes=(1, 3, 1))
    names = [name for name, _ in seeded(Normed).named_parameters()]
    for first, second, shared in found:
        for name in names:
            assert torch.equal(first[name], second[name]), name
        assert_same_bits(shared, found[0][2])
    assert "last.weight/momentum_buffer" in found[0][2]
    running = [second["norm.running_mean"] for _, second, _ in found]
    assert not torch.equal(running[0], running[1]), "each device has its own statistics until they are averaged"
    torch.testing.assert_close(found[0][2]["buffer norm.running_mean"], torch.stack(running).mean(0))


# --- the store without a Trainer


def classic(kv: KVStore) -> list[float]:
    kv.init(["a", "b"], [torch.full((2,), 5.0), torch.zeros(3)])
    kv.push("a", torch.full((2,), kv.rank + 1.0))
    first, second = torch.empty(2), torch.empty(2)
    kv.pull("a", [first, second])
    assert torch.equal(first, second)
    kv.set_optimizer("sgd", lr=0.5)
    out = torch.empty(3)
    kv.pushpull("b", torch.full((3,), 2.0), out)
    kv.save_optimizer_states(f"states-{kv.worker_rank}")
    kv.barrier()
    return [*first.tolist(), *out.tolist()]


def test_the_classic_calls_sum_over_devices_and_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = run(classic, "dist_sync", sizes=(2, 2, 1))
    assert found == [[10.0, 10.0, -4.0, -4.0, -4.0]] * 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["states-0", "states-1"]


def with_own_dtype(kv: KVStore) -> tuple[torch.dtype, list[float]]:
    dtype = (torch.float16, torch.float64)[kv.rank]
    kv.init("a", torch.zeros(2))
    out = torch.empty(2, dtype=dtype)
    kv.pushpull("a", torch.full((2,), kv.rank + 1.0, dtype=dtype), out)
    return out.dtype, out.tolist()


def test_every_device_may_have_values_of_its_own_dtype() -> None:
    assert run(with_own_dtype, "dist_sync") == [(torch.float16, [3.0, 3.0]), (torch.float64, [3.0, 3.0])]


@pytest.mark.long
def test_the_devices_of_one_worker_pass_the_conformance_suite() -> None:
    """With several workers, sums have two stages, which is another order than the suite expects."""

    def on_one_worker(program: Callable[[KVStore], Any], store: str, **options: Any) -> list[Any]:
        sizes = (1, options.pop("num_workers"), options.pop("num_servers"))
        return results(run(program, store, sizes=sizes, **options))

    check_kvstore(on_one_worker, "dist_sync", num_workers=2)


# --- mistakes and failures


def wrong_model(kv: KVStore) -> None:
    model = nn.Linear(2, 2 + kv.rank)
    echelon.Trainer(model, momentum(model), kv)


def test_models_that_differ_are_an_error_before_a_server_gets_a_key() -> None:
    found = run(wrong_model, "dist_sync", status=1)
    assert (
        "worker 0, device 1: the model's parameters must be the same on all: worker 0, device 0 has bias (2,)"
        in str(found[1])
    )


def infinite(kv: KVStore) -> None:
    model = copy.deepcopy(seeded(Net))
    trainer = echelon.Trainer(model, momentum(model), kv, check_finite=True)
    loss = loss_of(model, batches(1)[0])
    (loss * (float("inf") if kv.rank else 1.0)).backward()
    trainer.step()


def test_a_gradient_that_is_not_finite_is_named_with_its_device() -> None:
    found = run(infinite, "dist_sync", status=1)
    assert "worker 1: the gradient of " in str(found[1])
    assert "at clock 0 contains NaN or infinity" in str(found[1])


def killed_in_the_third_step(kv: KVStore) -> tuple[list[int], int]:
    """Train; device 1 of worker 1 is killed in its third step."""
    model = seeded(Net)
    trainer = echelon.Trainer(model, momentum(model), kv)
    for batch in batches(6, 2, seed=kv.rank):
        loss_of(model, batch).backward()
        if kv.rank == 3 and trainer.clock == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step()
    trainer.close()
    return kv.workers, trainer.clock


def test_a_worker_ends_with_any_of_its_devices_and_the_others_continue() -> None:
    *living, orphan, killed = run(killed_in_the_third_step, "dist_sync", sizes=(2, 2, 1), status=NOT_WHOLE)
    assert living == [([0, 1], 6)] * 2
    assert re.match(r"worker 1, device 0: .* of 2 processes failed: one of them died", str(orphan))
    assert "a forked test process ended without a result" in str(killed)


# --- whole runs


@pytest.mark.long
def test_the_command_of_two_workers_of_two_devices(tmp_path: Path) -> None:
    data = make_data(tmp_path / "tiny") / "data"
    flags = ["--devices", "cpu:2", "--kv-store", "dist_sync", "--batch-size", "64", "--data-dir", str(data)]
    flags += ["--num-layers", "8", "--num-examples", "32", "--num-epochs", "1"]
    words = [sys.executable, str(EXAMPLES / "train_cifar10.py"), *flags]
    with Job(tmp_path / "job", num_workers=2, command=words, environment={"OMP_NUM_THREADS": "1"}) as job:
        assert job.wait() == 0, job.out + job.err
    for worker in (0, 1):
        lines = "\n".join(re.findall(rf"^\[worker {worker}\] INFO:root:(.*)$", job.out, re.MULTILINE))
        assert lines.count("Train-accuracy=") == 1, "only device 0 prints"
        assert lines.count("Validation-accuracy=") == (worker == 0)
    assert len(job.events("registered")) == 3, "a server and two workers"
    done = sorted((row["rank"], row["clock"], row["samples"]) for row in job.events("done"))
    assert done == [(0, 1, 16), (1, 1, 16)], "one line per worker"


def fitted(folder: Path, **options: Any) -> list[int]:
    """Train the digits' network on two workers of two devices, and return their exit statuses."""
    given = TrainOptions(
        network="mlp", num_examples=256, batch_size=32, num_epochs=2, devices=("cpu", "cpu"), **options
    )
    folder.mkdir(exist_ok=True)
    return run_as_launched(lambda: fit(replace(given, model_prefix=str(folder / "m"))), (2, 2, 1))


def test_a_run_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert fitted(whole, kv_store="dist_sync") == [0] * 4
    parts.mkdir()
    for path in whole.glob("*-0001.safetensors"):
        (parts / path.name).write_bytes(path.read_bytes())
    assert fitted(parts, kv_store="dist_sync", resume=True) == [0] * 4
    names = sorted(path.name for path in parts.glob("*-0002.safetensors"))
    assert names == ["m-0002.safetensors", *(f"m-{rank}-0002.safetensors" for rank in (1, 2, 3))]
    assert_same_bits(load(parts / names[0]).weights, load(whole / names[0]).weights)
    measured = [load(whole / f"m{one}-0002.safetensors").metadata["metrics"] for one in ("", "-1", "-2", "-3")]
    assert measured[0] == measured[1], "metrics are those of all devices of a worker"
    assert measured[2] == measured[3] != measured[0]
    assert differs(load(whole / names[0]).weights, load(whole / "m-0001.safetensors").weights)


def test_unequal_shares_under_gsync(tmp_path: Path) -> None:
    """Worker 1 has three times the data. The devices of a worker make equally many steps; workers need not."""
    shares = tmp_path / "data_sharding"
    shares.write_text("0 0.25\n0.25 1\n")
    run_dir = tmp_path / "run"
    given = TrainOptions(
        network="mlp",
        kv_store="dist_gsync",
        groups="0/1",
        batch_size=32,
        num_epochs=1,
        devices=("cpu", "cpu"),
        data_allocator=1,
        data_sharding=str(shares),
    )
    assert run_as_launched(lambda: fit(given, str(run_dir)), (2, 2, 1), run_dir=str(run_dir)) == [0] * 4
    done = {row["rank"]: row for row in rows(run_dir / "events.jsonl") if row["event"] == "done"}
    clocks = {rank: row["clock"] for rank, row in done.items()}
    assert clocks == {0: 12, 1: 34}, "1437 digits, of which 359 and 1078, by 32"
    assert {rank: row["samples"] for rank, row in done.items()} == {0: 32 * 12, 1: 32 * 34}
