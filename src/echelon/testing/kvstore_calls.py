"""Checks of the calls: rank and type, init, push, pull, pushpull, broadcast, barrier, and rejected calls."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.testing.assertions import assert_equal, assert_raises, assert_tensor
from echelon.testing.trial import Trial, pull_all_pushes, sum_of_pushes

SHAPE = (4, 4)
KEYS: tuple[tuple[int | str, list[int | str]], ...] = ((3, [5, 7, 11]), ("a", ["b", "c", "d"]))


def each_worker_has_its_rank(trial: Trial) -> None:
    """Every worker has its rank, and all agree on num_workers, workers and type."""

    def program(kv: KVStore) -> tuple[int, int, list[int], str]:
        found = kv.rank, kv.num_workers, kv.workers, kv.type
        kv.barrier()  # a worker that ends leaves the job, which changes `workers` of the others
        return found

    ranks = list(range(trial.num_workers))
    assert_equal(
        "rank, num_workers, workers, type", trial(program), [(r, len(ranks), ranks, trial.store) for r in ranks]
    )


def pull_before_push_returns_the_initial_value(trial: Trial) -> None:
    """A pull fills every tensor of `out` with the value of rank 0, for int and string keys, one key and several."""
    for key, others in KEYS:

        def program(kv: KVStore, key: int | str = key, others: Sequence[int | str] = others) -> None:
            kv.init(key, torch.full(SHAPE, 7.0 + kv.rank))
            kv.init(others, [torch.full(SHAPE, 10.0 * kv.rank + i) for i in range(len(others))])
            out = torch.empty(SHAPE)
            kv.pull(key, out)
            assert_tensor(f"key {key!r}", out, 7.0)
            outs = [torch.empty(SHAPE), torch.empty(SHAPE)]
            kv.pull(key, outs)
            assert_tensor("every out of a list", torch.stack(outs), 7.0)
            several = [[torch.empty(SHAPE), torch.empty(SHAPE)] for _ in others]
            kv.pull(others, several)
            for index, pair in enumerate(several):
                assert_tensor(f"key {others[index]!r}", torch.stack(pair), float(index))

        trial(program)


def push_replaces_the_value_with_the_sum(trial: Trial) -> None:
    """Without an optimizer, the sum over the workers replaces the value; a key that is not pushed keeps its value."""
    if not trial.push_replaces:
        return
    workers = trial.num_workers
    for key, others in KEYS:

        def program(kv: KVStore, key: int | str = key, others: Sequence[int | str] = others) -> None:
            kv.init(key, torch.zeros(SHAPE))
            kv.init(others, [torch.zeros(SHAPE)] * len(others))
            out, outs = torch.empty(SHAPE), [torch.empty(SHAPE) for _ in others]
            for factor in (1.0, 3.0):  # the second push replaces the value of the first
                kv.push(key, torch.ones(SHAPE) * factor)
                kv.pull(key, out)
                assert_tensor("pushed ones", out, factor * workers)
            kv.push(others[:2], [torch.ones(SHAPE) * 4, torch.ones(SHAPE) * 5], priority=-1)
            kv.pull(others, outs, priority=-1)
            assert_tensor(
                "a list was pushed", torch.stack([o[0, 0] for o in outs]), torch.tensor([4.0, 5.0, 0.0]) * workers
            )

        trial(program)


def values_of_several_devices_are_summed(trial: Trial) -> None:
    """A worker may push one value per device; they are summed, and the pushed tensors do not change."""
    devices, workers = 4, trial.num_workers

    def program(kv: KVStore) -> None:
        kv.init(["x", "y", "z"], [torch.zeros(SHAPE)] * 3)
        if not trial.push_replaces:
            kv.set_optimizer("sgd", lr=1.0, maximize=True)
        ones = [torch.ones(SHAPE) for _ in range(devices)]
        out = torch.empty(SHAPE)
        kv.push("x", ones)
        pull_all_pushes(kv, "x", out)
        assert_tensor("one value per device", out, float(devices * workers))
        kv.push(["y", "z"], [[torch.full(SHAPE, 2.0)] * devices, ones[:1]])
        outs = [torch.empty(SHAPE), torch.empty(SHAPE)]
        pull_all_pushes(kv, ["y", "z"], outs)
        assert_tensor("one list per key", outs[0], 2.0 * devices * workers)
        assert_tensor("a list of one", outs[1], float(workers))
        assert_tensor("what was pushed is untouched", torch.stack(ones), 1.0)

    trial(program)


def pushpull_writes_in_place_or_to_out(trial: Trial) -> None:
    """Without `out`, the weights replace the pushed values; with `out`, the pushed values do not change."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        kv.init(["p", "q"], [torch.zeros(SHAPE)] * 2)
        if not trial.push_replaces:
            kv.set_optimizer("sgd", lr=1.0, maximize=True)
        value = torch.full(SHAPE, kv.rank + 1.0)
        kv.pushpull("p", value)
        includes_own_push = bool((value >= kv.rank + 1.0).all())
        assert_equal("the weights replaced the pushed value", includes_own_push, True)
        if trial.lock_step:
            assert_tensor("in place", value, sum_of_pushes(workers))
        per_device = [torch.ones(SHAPE), torch.ones(SHAPE)]
        outs = [torch.empty(SHAPE) for _ in range(3)]
        kv.pushpull("q", per_device, out=outs)
        pull_all_pushes(kv, "q", outs)
        assert_tensor("into every out", torch.stack(outs), 2.0 * workers)
        assert_tensor("what was pushed is untouched", torch.stack(per_device), 1.0)
        kv.pushpull(["p", "q"], [torch.zeros(SHAPE), torch.zeros(SHAPE)], out=outs[:2])
        if trial.push_replaces:
            assert_tensor("a list of keys", torch.stack(outs[:2]), 0.0)

    trial(program)


def broadcast_sends_the_values_of_rank_0(trial: Trial) -> None:
    """`broadcast` initializes keys with the values of rank 0 and pulls them into one tensor or a list."""

    def program(kv: KVStore) -> None:
        out, outs = torch.empty(SHAPE), [torch.empty(SHAPE), torch.empty(SHAPE)]
        kv.broadcast("one", torch.full(SHAPE, kv.rank + 5.0), out)
        assert_tensor("rank 0's value", out, 5.0)
        kv.broadcast(["two", "three"], [torch.ones(SHAPE) * (kv.rank + 1), torch.zeros(SHAPE)], [outs, [out]])
        assert_tensor("into a list", torch.stack(outs), 1.0)
        assert_tensor("the other key", out, 0.0)

    trial(program)


def keys_of_one_call_may_have_different_clocks(trial: Trial) -> None:
    """One call may contain keys that were pushed a different number of times."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        names = ["often", "once", "never"]
        kv.init(names, [torch.zeros(2)] * 3)
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        kv.push("often", torch.ones(2))
        kv.push(["often", "once"], [torch.ones(2), torch.ones(2)])
        outs = [torch.empty(2) for _ in names]
        pull_all_pushes(kv, names, outs)
        wanted = torch.tensor([[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]) * workers
        assert_tensor("after two pushes, one and none", torch.stack(outs), wanted)

    trial(program)


def a_key_named_twice_is_pushed_once_with_the_sum(trial: Trial) -> None:
    """The values of a key that a call names twice are summed into one push, and a pull fills all of its outs."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        names = ["a", "b", "a"]
        kv.init(["a", "b"], [torch.zeros(2), torch.zeros(2)])
        kv.set_optimizer("sgd", lr=1.0, momentum=0.5 if trial.lock_step else 0.0, maximize=True)
        ones = torch.ones(2)
        kv.push(names, [ones, ones * 10, [ones, ones * 2]])
        outs = [torch.empty(2) for _ in names]
        pull_all_pushes(kv, names, outs)
        wanted = torch.tensor([4.0, 10.0, 4.0]) * workers
        assert_tensor("a, b, a", torch.stack([out[0] for out in outs]), wanted)
        kv.pushpull(names, [torch.zeros(2) for _ in names], out=outs)
        kv.barrier()
        if trial.lock_step:  # two pushes of key a would be two steps of the momentum
            assert_tensor("after one more step", torch.stack([out[0] for out in outs]), wanted * 1.5)

    trial(program)


def barrier_waits_for_all_workers(trial: Trial) -> None:
    """No worker leaves a barrier before the last worker has reached it."""
    rounds = 20

    def program(kv: KVStore) -> list[tuple[float, float]]:
        times = []
        for _ in range(rounds):
            reached = time.monotonic()
            kv.barrier()
            times.append((reached, time.monotonic()))
        return times

    for times in zip(*trial(program), strict=True):
        last_reached, first_left = max(time[0] for time in times), min(time[1] for time in times)
        assert_equal("no worker leaves before the last one arrives", last_reached <= first_left, True)


def a_rejected_call_changes_nothing(trial: Trial) -> None:
    """An invalid call raises a UsageError that names the worker and the key, and the store does not change."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        kv.init("k", torch.zeros(2, 3))
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        out = torch.empty(2, 3)
        me = f"worker {kv.rank}"
        good = torch.ones(2, 3)
        assert_raises(
            "push of another shape", UsageError, (me, "'k'", "2x3", "3x2"), lambda: kv.push("k", torch.ones(3, 2))
        )
        complex_value = good.to(torch.complex64)
        assert_raises(
            "push of complex numbers", UsageError, (me, "'k'", "complex64"), lambda: kv.push("k", complex_value)
        )
        assert_raises(
            "out of another shape", UsageError, (me, "'k'", "scalar"), lambda: kv.pull("k", torch.tensor(1.0))
        )
        wrong_out = torch.ones(6)
        assert_raises("pushpull's out", UsageError, (me, "'k'", "2x3"), lambda: kv.pushpull("k", good, out=wrong_out))
        assert_raises("an unknown key", UsageError, (me, "'nowhere'", "init"), lambda: kv.pull("nowhere", out))
        assert_raises("init twice", UsageError, (me, "'k'", "already"), lambda: kv.init("k", torch.zeros(2, 3)))
        assert_raises("an int among strings", UsageError, (me, "3"), lambda: kv.push(3, good))
        pull_all_pushes(kv, "k", out)
        assert_tensor("after seven invalid calls", out, 0.0)
        kv.push("k", good)
        pull_all_pushes(kv, "k", out)
        assert_tensor("after a correct push", out, float(workers))

    trial(program)
