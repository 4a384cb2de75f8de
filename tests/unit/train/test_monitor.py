"""The monitor: every tensor of a monitored batch in MXNet's format, and no effect on other batches."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from echelon.train.loop.reports.monitor import Monitor, monitor_line, size_of

pytestmark = pytest.mark.numeric


class Pair(nn.Module):
    """Returns two tensors, and an object that is not a tensor."""

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor], str]:
        return x, [2 * x], "no tensor"


def small() -> nn.Sequential:
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 4.0]]))
        layer.bias.zero_()
    return nn.Sequential(layer, nn.BatchNorm1d(2)).eval()


def test_the_line_is_mxnets() -> None:
    assert monitor_line(20, "fc1.weight", 0.125) == "Batch:      20 fc1.weight                     0.125"


@pytest.mark.parametrize(
    ("tensor", "size"),
    [
        (torch.full((4, 5), -2.0), 2.0),
        (torch.tensor([3.0, 4.0, 0.0, 0.0]), 2.5),
        (torch.tensor(7), 7.0),
        (torch.full((1000,), 300.0, dtype=torch.float16), 300.0),  # float16 cannot hold their squares
        (torch.zeros(0), 0.0),
    ],
)
def test_the_size_of_a_tensor(tensor: Tensor, size: float) -> None:
    assert float(size_of(tensor)) == pytest.approx(size)


def test_a_monitored_batch_shows_outputs_parameters_and_buffers() -> None:
    model = small()
    monitor = Monitor(model, every=1)
    assert monitor.begin()
    model(torch.tensor([[1.0, 0.0]]))
    lines = [re.fullmatch(r"Batch:       1 (\S+) +(\S+)", line) for line in monitor.end()]
    assert [(line[1], float(line[2])) for line in lines if line] == [
        ("0.output", pytest.approx(3 / 2**0.5)),
        ("1.output", pytest.approx(3 / 2**0.5, rel=1e-4)),  # batch norm's epsilon
        ("output", pytest.approx(3 / 2**0.5, rel=1e-4)),
        ("0.weight", 2.5),
        ("0.bias", 0.0),
        ("1.weight", 1.0),
        ("1.bias", 0.0),
        ("1.running_mean", 0.0),
        ("1.running_var", 1.0),
        ("1.num_batches_tracked", 0.0),
    ]


def test_the_first_and_then_each_nth_batch_is_monitored() -> None:
    model = small()
    monitor = Monitor(model, every=3)
    told = []
    for _ in range(8):
        due = monitor.begin()
        assert due == any(module._forward_hooks for module in model.modules())
        model(torch.ones(1, 2))
        lines = monitor.end()
        assert bool(lines) == due
        told += [int(line.split()[1]) for line in lines[:1]]
        assert not any(module._forward_hooks for module in model.modules())
    assert told == [1, 4, 7]


def test_the_parameters_are_those_after_the_update() -> None:
    model = small()
    monitor = Monitor(model, every=1)
    monitor.begin()
    model(torch.ones(1, 2)).sum().backward()
    with torch.no_grad():
        model.get_parameter("0.weight").fill_(5.0)
    assert any(re.search(r"0\.weight +5$", line) for line in monitor.end())


def test_several_outputs_are_numbered_and_other_objects_ignored() -> None:
    model = Pair()
    monitor = Monitor(model, every=1)
    monitor.begin()
    model(torch.ones(3))
    assert [line.split()[2:] for line in monitor.end()] == [["output.0", "1"], ["output.1.0", "2"]]


def test_a_module_used_twice_is_shown_twice() -> None:
    model = nn.ReLU()
    monitor = Monitor(model, every=1)
    monitor.begin()
    model(torch.ones(1))
    model(torch.full((1,), 2.0))
    assert [line.split()[-1] for line in monitor.end()] == ["1", "2"]


def test_a_model_without_tensors_has_no_lines() -> None:
    monitor = Monitor(nn.ReLU(), every=1)
    assert monitor.begin()
    assert monitor.end() == []


def test_a_failed_batch_does_not_affect_the_next() -> None:
    model = small()
    monitor = Monitor(model, every=1)
    monitor.begin()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(torch.ones(1, 3))
    monitor.begin()
    model(torch.ones(1, 2))
    assert len(monitor.end()) == 10
    assert not model[0]._forward_hooks
