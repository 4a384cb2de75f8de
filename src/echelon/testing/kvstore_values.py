"""Checks of values: dtypes and their precision, scalars and empty tensors, strides, sizes."""

from __future__ import annotations

import torch

from echelon.kvstore import KVStore
from echelon.testing.assertions import assert_tensor
from echelon.testing.trial import Trial, pull_all_pushes, rank_order_sum

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SHAPES = ((), (0,), (3, 0, 2), (1,), (1, 1, 1), (7,), (63,), (64,), (65,), (2, 3, 5, 7))


def every_dtype_is_preserved(trial: Trial) -> None:
    """One store can hold keys of all dtypes; int64 and float64 keep full precision."""
    workers = trial.num_workers
    dtypes = (*_FLOATS, *_INTS) if trial.push_replaces else _FLOATS

    def program(kv: KVStore) -> None:
        names = [str(dtype) for dtype in dtypes]
        kv.init([*names, "long", "double"], [*(torch.ones(5, dtype=d) for d in dtypes), _long(), _double()])
        outs = [torch.empty(5, dtype=dtype) for dtype in dtypes]
        digits = [torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.float64)]
        kv.pull([*names, "long", "double"], [*outs, *digits])
        for name, out in zip(names, outs, strict=True):
            assert_tensor(name, out, 1.0)
        assert_tensor("full precision of an int64", digits[0], _long())
        assert_tensor("full precision of a float64", digits[1], _double())
        kv.barrier()
        if not trial.push_replaces:
            kv.set_optimizer("sgd", lr=1.0, maximize=True)
        first = 0 if trial.push_replaces else 1
        kv.push(names, [torch.full((5,), 3, dtype=dtype) for dtype in dtypes])
        pull_all_pushes(kv, names, outs)
        for name, out in zip(names, outs, strict=True):
            assert_tensor(f"{name} after a push", out, 3.0 * workers + first)
        kv.push("double", _double() if kv.rank == 0 else torch.zeros_like(_double()))
        pull_all_pushes(kv, "double", digits[1])
        assert_tensor("a float64 sum", digits[1], _double() * (1 + first))
        if trial.push_replaces:
            kv.push("long", _long() if kv.rank == 0 else torch.zeros_like(_long()))
            kv.pull("long", digits[0])
            assert_tensor("an int64 sum", digits[0], _long())

    trial(program)


def other_dtypes_are_cast(trial: Trial) -> None:
    """A pushed value is cast to the dtype of its key, and a pulled one to the dtype of `out`, as in MXNet."""
    workers = trial.num_workers
    pushed = (torch.float16, torch.float64, torch.bfloat16, torch.int32, torch.uint8)

    def program(kv: KVStore) -> None:
        names = [str(dtype) for dtype in pushed]
        kv.init([*names, "half"], [*(torch.zeros(3) for _ in names), torch.zeros(3, dtype=torch.float16)])
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        kv.push(names, [torch.full((3,), 2.5, dtype=dtype) for dtype in pushed])
        kv.push("half", [torch.full((3,), 0.5), torch.full((3,), 2, dtype=torch.int64)])
        outs = [torch.empty(3, dtype=dtype) for dtype in pushed]
        pull_all_pushes(kv, names, [[torch.empty(3), out] for out in outs])
        for name, out in zip(names, outs, strict=True):
            exact = (2.5 if out.is_floating_point() else 2.0) * workers
            assert_tensor(f"{name} into a float32 key and back", out, torch.full((3,), exact).to(out.dtype))
        wide = torch.empty(3, dtype=torch.float64)
        pull_all_pushes(kv, "half", wide)
        assert_tensor("float32 and int64 into a float16 key", wide, 2.5 * workers)

    trial(program)
    if not trial.push_replaces:
        return

    def program_of_integers(kv: KVStore) -> None:
        kv.init("i", torch.zeros(3, dtype=torch.int32))
        out = torch.empty(3, dtype=torch.float32)
        kv.pushpull("i", torch.full((3,), 2.7), out)
        assert_tensor("a float into an int key", out, 2.0 * workers)

    trial(program_of_integers)


def half_precision_is_summed_in_float32(trial: Trial) -> None:
    """Servers sum and store half-precision keys in float32, so that small updates are not lost."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        halves = [torch.float16, torch.bfloat16]
        kv.init(["f", "b"], [torch.ones(3, dtype=dtype) for dtype in halves])
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        outs = [torch.empty(3, dtype=dtype) for dtype in halves]
        rounds = 64
        for _ in range(rounds):
            kv.push(["f", "b"], [torch.full((3,), 2.0**-12, dtype=dtype) for dtype in halves])
        pull_all_pushes(kv, ["f", "b"], outs)
        exact = torch.full((3,), 1 + workers * rounds * 2.0**-12)
        for out in outs:
            assert_tensor(f"{rounds} steps below the precision of {out.dtype}", out, exact.to(out.dtype))

    trial(program)
    if not trial.push_replaces:
        return

    def program_of_a_sum(kv: KVStore) -> None:
        kv.init("f", torch.zeros(3, dtype=torch.float16))
        out = torch.empty(3, dtype=torch.float16)
        kv.pushpull("f", torch.full((3,), 1.0 if kv.rank else 2048.0, dtype=torch.float16), out)
        assert_tensor("2048 + 1 + 1 ...", out, torch.full((3,), 2048.0 + workers - 1).half())

    trial(program_of_a_sum)


def any_shape_is_accepted(trial: Trial) -> None:
    """Scalars, empty tensors and odd sizes are accepted, in one call each and in one call together."""
    workers = trial.num_workers
    momentum = 0.5 if trial.lock_step else 0.0

    def program(kv: KVStore) -> None:
        names = [f"shape {shape}" for shape in _SHAPES]
        outs = [torch.empty(shape) for shape in _SHAPES]
        kv.init(names[0], torch.zeros(_SHAPES[0]))
        kv.init(names[1], torch.zeros(_SHAPES[1]))
        kv.init(names[2:], [torch.zeros(shape) for shape in _SHAPES[2:]])
        kv.set_optimizer("sgd", lr=1.0, momentum=momentum, maximize=True)
        for name, out in zip(names, outs, strict=True):
            kv.push(name, torch.full_like(out, kv.rank + 1.0))
            pull_all_pushes(kv, name, out)
            assert_tensor(name, out, workers * (workers + 1) / 2)
        kv.push(names, [torch.zeros(shape) for shape in _SHAPES])
        pull_all_pushes(kv, names, outs)
        if trial.lock_step:
            for name, out in zip(names, outs, strict=True):
                assert_tensor(f"{name}: momentum repeats half of the last step", out, workers * (workers + 1) * 0.75)

    trial(program)


def values_need_not_be_contiguous(trial: Trial) -> None:
    """Values and outs may be transposed, strided or expanded, and values may require a gradient."""
    workers = trial.num_workers
    grid = torch.arange(12.0).view(3, 4)

    def program(kv: KVStore) -> None:
        names = ["transposed", "strided", "expanded", "graph"]
        kv.init(names, [grid.t(), torch.arange(12.0)[::3], torch.ones(1).expand(6), torch.ones(2, requires_grad=True)])
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        outs = [torch.empty(3, 4).t(), torch.empty(8)[::2], torch.empty(6), torch.empty(2)]
        kv.pull(names, outs)
        assert_tensor("initial value, transposed", outs[0], grid.t())
        assert_tensor("initial value, strided", outs[1], torch.tensor([0.0, 3.0, 6.0, 9.0]))
        kv.barrier()
        pushed = [grid.t(), torch.arange(12.0)[::3], torch.full((1,), 2.0).expand(6), torch.ones(2, requires_grad=True)]
        for _ in range(2):  # the first push may still be in flight during the second
            kv.push(names, pushed)
        pull_all_pushes(kv, names, outs)
        assert_tensor("transposed", outs[0], grid.t() * (2 * workers + 1))
        assert_tensor("strided", outs[1], torch.tensor([0.0, 3.0, 6.0, 9.0]) * (2 * workers + 1))
        assert_tensor("expanded", outs[2], 4.0 * workers + 1)
        assert_tensor("requires a gradient", outs[3], 2.0 * workers + 1)

    trial(program)


def large_and_small_keys_are_summed_in_rank_order(trial: Trial) -> None:
    """Sums are in rank order in float32, bit for bit, whether or not a key is split over servers."""
    if not trial.push_replaces:
        return
    sizes = [3, 700_001, 1, 4096, 12_289, *[2] * 50, 300_000]
    workers = trial.num_workers

    def part(rank: int, index: int) -> torch.Tensor:
        return torch.randn(sizes[index], generator=torch.Generator().manual_seed(100 * rank + index))

    def program(kv: KVStore) -> None:
        names = list(range(len(sizes)))
        kv.init(names, [torch.zeros(size) for size in sizes])
        outs = [torch.empty(size) for size in sizes]
        kv.pushpull(names, [part(kv.rank, i) for i in names], out=outs)
        for i, out in enumerate(outs):
            assert_tensor(f"{sizes[i]} elements", out, rank_order_sum([part(r, i) for r in range(workers)]))

    trial(program)


def _long() -> torch.Tensor:
    return torch.tensor([2**53 + 1])


def _double() -> torch.Tensor:
    return torch.tensor([1 + 2.0**-40], dtype=torch.float64)
