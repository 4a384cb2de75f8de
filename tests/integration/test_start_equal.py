"""All workers start with rank 0's model: trained and frozen parameters, and buffers of any dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import echelon
import forked
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run
from echelon.train.trainer import start_equal

RUNS = pytest.mark.parametrize(
    ("runs", "store", "options"),
    [
        (run, "dist_sync", {}),
        (run, "dist_sync", {"update_on_kvstore": False}),
        (run, "dist_async", {}),
        (forked.run, "nccl_allreduce", {}),
        (forked.run, "nccl", {}),
    ],
)


class Mixed(nn.Module):
    """Has trained and frozen parameters, parameters of nobody's, and buffers of several dtypes."""

    flags: Tensor
    counts: Tensor
    narrow: Tensor
    empty: Tensor

    def __init__(self, fill: float, counts: int = 3) -> None:
        super().__init__()
        self.trained = nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 1).requires_grad_(False)
        self.other = nn.Linear(1, 2)  # not in the optimizer
        self.norm = nn.BatchNorm1d(2)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.fill_(fill)
        self.register_buffer("flags", torch.tensor([fill > 0, True]))
        self.register_buffer("counts", torch.full([counts], int(fill)))
        self.register_buffer("narrow", torch.full([2, 2], fill).half(), persistent=False)
        self.register_buffer("empty", torch.zeros(0))

    def everything(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in (*self.named_parameters(), *self.named_buffers())}


def trained(model: Mixed) -> list[nn.Parameter]:
    return [*model.trained.parameters(), *model.frozen.parameters()]


@RUNS
def test_everything_is_as_on_rank_0(
    runs: Callable[..., Any], store: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_equal, "CHUNK_BYTES", 7)  # several chunks, whose ends are inside tensors

    def program(kv: KVStore) -> dict[str, Tensor]:
        model = Mixed(float(kv.rank + 1))
        with echelon.Trainer(model, SGD(trained(model), lr=0.1), kv, **options):
            return model.everything()

    expected = Mixed(1.0).everything()
    for found in runs(program, store):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


@RUNS
def test_with_start_equal_false_each_worker_keeps_what_is_not_trained(
    runs: Callable[..., Any], store: str, options: dict[str, Any]
) -> None:
    def program(kv: KVStore) -> list[float]:
        model = Mixed(float(kv.rank + 1))
        with echelon.Trainer(model, SGD(trained(model), lr=0.1), kv, start_equal=False, **options):
            weights = [float(layer.bias.detach()[0]) for layer in (model.trained, model.frozen, model.other)]
            return [*weights, float(model.counts[0])]

    assert runs(program, store) == [[1.0] * 4, [1.0, 2.0, 2.0, 2.0]]


def test_different_models_are_refused() -> None:
    def program(kv: KVStore) -> None:
        model = Mixed(1.0, counts=3 + kv.rank)
        echelon.Trainer(model, SGD(trained(model), lr=0.1), kv).close()

    with pytest.raises(
        UsageError,
        match=r"worker 1: the frozen .* same names and shapes on all workers: 'buffer counts' is int64\(4,\) here, and "
        r"int64\(3,\) on the first worker; Trainer\(start_equal=False\)",
    ):
        run(program, "dist_sync")


def test_if_the_first_worker_dies_the_next_one_is_the_first() -> None:
    """Worker 0 has sent the form of its model, and leaves before it has sent the values."""

    def program(kv: KVStore) -> dict[str, Tensor]:
        model = Mixed(float(kv.rank + 1))
        tensors = start_equal.untrained_tensors(model, [])
        if kv.rank == 0:
            start_equal._check_same_forms(kv, tensors)
            return {}
        start_equal.copy_from_first_worker(kv, tensors)
        return model.everything()

    _, *others = run(program, "dist_sync", num_workers=3)
    expected = Mixed(2.0).everything()
    for found in others:
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=0)


def test_a_lazy_module_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"'1.weight' has no shape yet, .*: run one forward pass first"):
        echelon.Trainer(model, SGD(model.parameters(), lr=0.1))
    model(torch.ones(1, 2))
    echelon.Trainer(model, SGD(model.parameters(), lr=0.1)).close()


def test_a_parameter_can_be_in_one_trainer_at_a_time() -> None:
    def program(kv: KVStore) -> None:
        model = nn.Linear(2, 2)
        trainer = echelon.Trainer(model, SGD(model.parameters(), lr=0.1), kv)
        with pytest.raises(UsageError, match="'bias' is already trained by another Trainer; close that one first"):
            echelon.Trainer(model, SGD([model.bias], lr=0.1), "dist_sync")
        trainer.close()
        echelon.Trainer(model, SGD([model.bias], lr=0.1), "dist_sync").close()

    run(program, "dist_sync", num_workers=1)
