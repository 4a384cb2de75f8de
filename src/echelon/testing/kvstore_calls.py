"""Checks of the calls: who am I, init, push, pull, pushpull, broadcast, barrier, and what a mistake does."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.testing.expect import equal, raises, same
from echelon.testing.trial import Trial, everybody, total

SHAPE = (4, 4)
KEYS: tuple[tuple[int | str, list[int | str]], ...] = ((3, [5, 7, 11]), ("a", ["b", "c", "d"]))


def workers_know_who_they_are(trial: Trial) -> None:
    """rank, num_workers, workers and type."""

    def program(kv: KVStore) -> tuple[int, int, list[int], str]:
        found = kv.rank, kv.num_workers, kv.workers, kv.type
        kv.barrier()  # one that ends leaves the job, and the others have fewer companions
        return found

    ranks = list(range(trial.num_workers))
    same("rank, num_workers, workers, type", trial(program), [(r, len(ranks), ranks, trial.store) for r in ranks])


def pull_before_push_gives_the_first_value(trial: Trial) -> None:
    """Int and string keys, one and several; rank 0's value counts; every tensor of a list of outs is filled."""
    for key, others in KEYS:

        def program(kv: KVStore, key: int | str = key, others: Sequence[int | str] = others) -> None:
            kv.init(key, torch.full(SHAPE, 7.0 + kv.rank))
            kv.init(others, [torch.full(SHAPE, 10.0 * kv.rank + i) for i in range(len(others))])
            out = torch.empty(SHAPE)
            kv.pull(key, out)
            equal(f"key {key!r}", out, 7.0)
            outs = [torch.empty(SHAPE), torch.empty(SHAPE)]
            kv.pull(key, outs)
            equal("every out of a list", torch.stack(outs), 7.0)
            several = [[torch.empty(SHAPE), torch.empty(SHAPE)] for _ in others]
            kv.pull(others, several)
            for index, pair in enumerate(several):
                equal(f"key {others[index]!r}", torch.stack(pair), float(index))

        trial(program)


def push_replaces_by_the_sum(trial: Trial) -> None:
    """Without an optimizer the sum over workers takes the value's place; a key that was not pushed keeps its own."""
    if not trial.replaces:
        return
    workers = trial.num_workers
    for key, others in KEYS:

        def program(kv: KVStore, key: int | str = key, others: Sequence[int | str] = others) -> None:
            kv.init(key, torch.zeros(SHAPE))
            kv.init(others, [torch.zeros(SHAPE)] * len(others))
            out, outs = torch.empty(SHAPE), [torch.empty(SHAPE) for _ in others]
            for factor in (1.0, 3.0):  # replaced, not added
                kv.push(key, torch.ones(SHAPE) * factor)
                kv.pull(key, out)
                equal("pushed ones", out, factor * workers)
            kv.push(others[:2], [torch.ones(SHAPE) * 4, torch.ones(SHAPE) * 5], priority=-1)
            kv.pull(others, outs, priority=-1)
            equal("a list was pushed", torch.stack([o[0, 0] for o in outs]), torch.tensor([4.0, 5.0, 0.0]) * workers)

        trial(program)


def values_of_several_devices_are_summed(trial: Trial) -> None:
    """One value per device: their sum is this worker's; the given tensors are left as they were."""
    devices, workers = 4, trial.num_workers

    def program(kv: KVStore) -> None:
        kv.init(["x", "y", "z"], [torch.zeros(SHAPE)] * 3)
        if not trial.replaces:
            kv.set_optimizer("sgd", lr=1.0, maximize=True)
        ones = [torch.ones(SHAPE) for _ in range(devices)]
        out = torch.empty(SHAPE)
        kv.push("x", ones)
        everybody(kv, "x", out)
        equal("one value per device", out, float(devices * workers))
        kv.push(["y", "z"], [[torch.full(SHAPE, 2.0)] * devices, ones[:1]])
        outs = [torch.empty(SHAPE), torch.empty(SHAPE)]
        everybody(kv, ["y", "z"], outs)
        equal("one list per key", outs[0], 2.0 * devices * workers)
        equal("a list of one", outs[1], float(workers))
        equal("what was pushed is untouched", torch.stack(ones), 1.0)

    trial(program)


def pushpull_writes_in_place_or_out(trial: Trial) -> None:
    """Without `out` the weights replace what was pushed; with it, what was pushed stays."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        kv.init(["p", "q"], [torch.zeros(SHAPE)] * 2)
        if not trial.replaces:
            kv.set_optimizer("sgd", lr=1.0, maximize=True)
        value = torch.full(SHAPE, kv.rank + 1.0)
        kv.pushpull("p", value)
        own_is_in = bool((value >= kv.rank + 1.0).all())
        same("the pushed value became the weights", own_is_in, True)
        if trial.in_step:
            equal("in place", value, total(workers))
        per_device = [torch.ones(SHAPE), torch.ones(SHAPE)]
        outs = [torch.empty(SHAPE) for _ in range(3)]
        kv.pushpull("q", per_device, out=outs)
        everybody(kv, "q", outs)
        equal("into every out", torch.stack(outs), 2.0 * workers)
        equal("what was pushed is untouched", torch.stack(per_device), 1.0)
        kv.pushpull(["p", "q"], [torch.zeros(SHAPE), torch.zeros(SHAPE)], out=outs[:2])
        if trial.replaces:
            equal("a list of keys", torch.stack(outs[:2]), 0.0)

    trial(program)


def broadcast_gives_everybody_the_first_workers_values(trial: Trial) -> None:
    """`broadcast` is init and pull: rank 0's values, into one out or a list."""

    def program(kv: KVStore) -> None:
        out, outs = torch.empty(SHAPE), [torch.empty(SHAPE), torch.empty(SHAPE)]
        kv.broadcast("one", torch.full(SHAPE, kv.rank + 5.0), out)
        equal("rank 0's value", out, 5.0)
        kv.broadcast(["two", "three"], [torch.ones(SHAPE) * (kv.rank + 1), torch.zeros(SHAPE)], [outs, [out]])
        equal("into a list", torch.stack(outs), 1.0)
        equal("the other key", out, 0.0)

    trial(program)


def keys_of_one_call_may_have_different_clocks(trial: Trial) -> None:
    """A call may name keys that were pushed a different number of times."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        names = ["often", "once", "never"]
        kv.init(names, [torch.zeros(2)] * 3)
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        kv.push("often", torch.ones(2))
        kv.push(["often", "once"], [torch.ones(2), torch.ones(2)])
        outs = [torch.empty(2) for _ in names]
        everybody(kv, names, outs)
        wanted = torch.tensor([[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]) * workers
        equal("after two pushes, one and none", torch.stack(outs), wanted)

    trial(program)


def barrier_holds_until_all_are_there(trial: Trial) -> None:
    """Nobody is past a barrier before the last one has reached it."""
    rounds = 20

    def program(kv: KVStore) -> list[tuple[float, float]]:
        times = []
        for _ in range(rounds):
            reached = time.monotonic()
            kv.barrier()
            times.append((reached, time.monotonic()))
        return times

    for meeting in zip(*trial(program), strict=True):
        last_to_come, first_to_go = max(t[0] for t in meeting), min(t[1] for t in meeting)
        same("the last comes before the first goes", last_to_come <= first_to_go, True)


def a_refused_call_changes_nothing(trial: Trial) -> None:
    """A mistake is a UsageError on the worker that makes it, names the key, and leaves the store as it was."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        kv.init("k", torch.zeros(2, 3))
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        out = torch.empty(2, 3)
        me = f"worker {kv.rank}"
        good = torch.ones(2, 3)
        raises("push of another shape", UsageError, (me, "'k'", "2x3", "3x2"), lambda: kv.push("k", torch.ones(3, 2)))
        raises("push of another dtype", UsageError, (me, "'k'", "float64"), lambda: kv.push("k", good.double()))
        raises("out of another shape", UsageError, (me, "'k'", "scalar"), lambda: kv.pull("k", torch.tensor(1.0)))
        wrong_out = torch.ones(6)
        raises("pushpull's out", UsageError, (me, "'k'", "2x3"), lambda: kv.pushpull("k", good, out=wrong_out))
        raises("an unknown key", UsageError, (me, "'nowhere'", "init"), lambda: kv.pull("nowhere", out))
        raises("init twice", UsageError, (me, "'k'", "already"), lambda: kv.init("k", torch.zeros(2, 3)))
        raises("an int among strings", UsageError, (me, "3"), lambda: kv.push(3, good))
        everybody(kv, "k", out)
        equal("after seven mistakes", out, 0.0)
        kv.push("k", good)
        everybody(kv, "k", out)
        equal("after a correct push", out, float(workers))

    trial(program)
