"""Checks of values: dtypes and their precision, shapes without elements or dimensions, strides, sizes."""

from __future__ import annotations

import torch

from echelon.kvstore import KVStore
from echelon.testing.expect import equal
from echelon.testing.trial import Trial, everybody, rank_order_sum

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_SHAPES = ((), (0,), (3, 0, 2), (1,), (1, 1, 1), (7,), (63,), (64,), (65,), (2, 3, 5, 7))


def every_dtype_is_kept(trial: Trial) -> None:
    """Keys of all dtypes live in one store; int64 and float64 keep all their digits."""
    workers = trial.num_workers
    dtypes = (*_FLOATS, *_INTS) if trial.replaces else _FLOATS

    def program(kv: KVStore) -> None:
        names = [str(dtype) for dtype in dtypes]
        kv.init([*names, "long", "double"], [*(torch.ones(5, dtype=d) for d in dtypes), _long(), _double()])
        outs = [torch.empty(5, dtype=dtype) for dtype in dtypes]
        digits = [torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.float64)]
        kv.pull([*names, "long", "double"], [*outs, *digits])
        for name, out in zip(names, outs, strict=True):
            equal(name, out, 1.0)
        equal("all digits of an int64", digits[0], _long())
        equal("all digits of a float64", digits[1], _double())
        kv.barrier()
        if not trial.replaces:
            kv.set_optimizer("sgd", lr=1.0, maximize=True)
        first = 0 if trial.replaces else 1
        kv.push(names, [torch.full((5,), 3, dtype=dtype) for dtype in dtypes])
        everybody(kv, names, outs)
        for name, out in zip(names, outs, strict=True):
            equal(f"{name} after a push", out, 3.0 * workers + first)
        kv.push("double", _double() if kv.rank == 0 else torch.zeros_like(_double()))
        everybody(kv, "double", digits[1])
        equal("a float64 sum", digits[1], _double() * (1 + first))
        if trial.replaces:
            kv.push("long", _long() if kv.rank == 0 else torch.zeros_like(_long()))
            kv.pull("long", digits[0])
            equal("an int64 sum", digits[0], _long())

    trial(program)


def half_precision_is_summed_in_full(trial: Trial) -> None:
    """Half-precision keys are summed and kept in float32 on the servers: small parts are not lost."""
    workers = trial.num_workers

    def program(kv: KVStore) -> None:
        halves = [torch.float16, torch.bfloat16]
        kv.init(["f", "b"], [torch.ones(3, dtype=dtype) for dtype in halves])
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        outs = [torch.empty(3, dtype=dtype) for dtype in halves]
        rounds = 64
        for _ in range(rounds):
            kv.push(["f", "b"], [torch.full((3,), 2.0**-12, dtype=dtype) for dtype in halves])
        everybody(kv, ["f", "b"], outs)
        exact = torch.full((3,), 1 + workers * rounds * 2.0**-12)
        for out in outs:
            equal(f"{rounds} steps too small for {out.dtype}", out, exact.to(out.dtype))

    trial(program)
    if not trial.replaces:
        return

    def program_of_a_sum(kv: KVStore) -> None:
        kv.init("f", torch.zeros(3, dtype=torch.float16))
        out = torch.empty(3, dtype=torch.float16)
        kv.pushpull("f", torch.full((3,), 1.0 if kv.rank else 2048.0, dtype=torch.float16), out)
        equal("2048 + 1 + 1 ...", out, torch.full((3,), 2048.0 + workers - 1).half())

    trial(program_of_a_sum)


def any_shape_will_do(trial: Trial) -> None:
    """Scalars, empty tensors and odd sizes, alone and in one call."""
    workers = trial.num_workers
    momentum = 0.5 if trial.in_step else 0.0

    def program(kv: KVStore) -> None:
        names = [f"shape {shape}" for shape in _SHAPES]
        outs = [torch.empty(shape) for shape in _SHAPES]
        kv.init(names[0], torch.zeros(_SHAPES[0]))
        kv.init(names[1], torch.zeros(_SHAPES[1]))
        kv.init(names[2:], [torch.zeros(shape) for shape in _SHAPES[2:]])
        kv.set_optimizer("sgd", lr=1.0, momentum=momentum, maximize=True)
        for name, out in zip(names, outs, strict=True):
            kv.push(name, torch.full_like(out, kv.rank + 1.0))
            everybody(kv, name, out)
            equal(name, out, workers * (workers + 1) / 2)
        kv.push(names, [torch.zeros(shape) for shape in _SHAPES])
        everybody(kv, names, outs)
        if trial.in_step:
            for name, out in zip(names, outs, strict=True):
                equal(f"{name}: half the last step again", out, workers * (workers + 1) * 0.75)

    trial(program)


def values_need_not_be_contiguous(trial: Trial) -> None:
    """Transposed, strided, expanded values and outs, and values that require a gradient."""
    workers = trial.num_workers
    grid = torch.arange(12.0).view(3, 4)

    def program(kv: KVStore) -> None:
        names = ["transposed", "strided", "expanded", "graph"]
        kv.init(names, [grid.t(), torch.arange(12.0)[::3], torch.ones(1).expand(6), torch.ones(2, requires_grad=True)])
        kv.set_optimizer("sgd", lr=1.0, maximize=True)
        outs = [torch.empty(3, 4).t(), torch.empty(8)[::2], torch.empty(6), torch.empty(2)]
        kv.pull(names, outs)
        equal("first value, transposed", outs[0], grid.t())
        equal("first value, strided", outs[1], torch.tensor([0.0, 3.0, 6.0, 9.0]))
        kv.barrier()
        pushed = [grid.t(), torch.arange(12.0)[::3], torch.full((1,), 2.0).expand(6), torch.ones(2, requires_grad=True)]
        for _ in range(2):  # the second while the first may still be on its way
            kv.push(names, pushed)
        everybody(kv, names, outs)
        equal("transposed", outs[0], grid.t() * (2 * workers + 1))
        equal("strided", outs[1], torch.tensor([0.0, 3.0, 6.0, 9.0]) * (2 * workers + 1))
        equal("expanded", outs[2], 4.0 * workers + 1)
        equal("of a graph", outs[3], 2.0 * workers + 1)

    trial(program)


def big_and_tiny_keys_are_summed_bit_by_bit(trial: Trial) -> None:
    """Whatever is cut over servers and whatever lies beside it: sums are in rank order in float32, to the bit."""
    if not trial.replaces:
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
            equal(f"{sizes[i]} elements", out, rank_order_sum([part(r, i) for r in range(workers)]))

    trial(program)


def _long() -> torch.Tensor:
    return torch.tensor([2**53 + 1])


def _double() -> torch.Tensor:
    return torch.tensor([1 + 2.0**-40], dtype=torch.float64)
