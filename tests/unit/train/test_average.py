"""The moving average of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from echelon.train.step.average import MovingAverage, averaged

pytestmark = pytest.mark.numeric


def model(value: float) -> nn.Module:
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in (*net.parameters(), net.get_buffer("1.running_mean")):
            tensor.fill_(value)
    return net


def train_with(net: nn.Module, average: MovingAverage, values: list[float]) -> None:
    for value in values:
        with torch.no_grad():
            net.get_parameter("0.weight").fill_(value)
        average.update()
        average.num_steps += 1


def test_the_average_is_exact_from_the_first_step() -> None:
    net = model(5.0)
    average = MovingAverage(net, 10)
    train_with(net, average, [5.0])
    with average.applied():
        assert net.state_dict()["0.weight"].tolist() == [[pytest.approx(5.0)] * 2] * 2


def test_later_values_weigh_more_and_training_weights_are_restored() -> None:
    net = model(0.0)
    average = MovingAverage(net, 2)
    train_with(net, average, [0.0, 0.0, 1.0])
    with average.applied():
        # weights 1/2, 1/4, 1/8 from the last value backwards, 7/8 in total
        assert net.state_dict()["0.weight"][0, 0] == pytest.approx(4 / 7)
        assert net.state_dict()["1.running_mean"][0] == 0
    assert net.state_dict()["0.weight"][0, 0] == 1.0


def test_before_the_first_step_the_average_is_the_model() -> None:
    net = model(3.0)
    with MovingAverage(net, 2).applied():
        assert net.state_dict()["0.weight"][0, 0] == 3.0
    assert MovingAverage(net, 2).state() == {}


def test_an_average_continues_from_a_checkpoint() -> None:
    net, other = model(0.0), model(0.0)
    average, resumed = MovingAverage(net, 4), MovingAverage(other, 4)
    train_with(net, average, [1.0, 2.0])
    resumed.load(average.state())
    for one, of in ((average, net), (resumed, other)):
        train_with(of, one, [7.0])
    assert torch.equal(average.state()["average.0.weight"], resumed.state()["average.0.weight"])
    weights = averaged(net.state_dict(), average.state())
    with average.applied():
        assert torch.equal(weights["0.weight"], net.state_dict()["0.weight"])
    assert averaged(net.state_dict(), {})["0.weight"][0, 0] == 7.0


@pytest.mark.parametrize("horizon", [1, 4, 8, 16, 80])
def test_a_resumed_average_is_rescaled_to_another_horizon(horizon: int) -> None:
    net = model(1.0)
    average, resumed = MovingAverage(net, 8), MovingAverage(net, horizon)
    train_with(net, average, [1.0] * 8)
    resumed.load(average.state())
    with resumed.applied():
        assert net.state_dict()["0.weight"][0, 0] == pytest.approx(1.0)
    train_with(net, resumed, [1.0] * 3)
    with resumed.applied():
        assert net.state_dict()["0.weight"][0, 0] == pytest.approx(1.0)
    assert averaged(net.state_dict(), resumed.state())["0.weight"][0, 0] == pytest.approx(1.0)


def test_a_float32_share_in_an_older_file_does_not_rescale_the_sums() -> None:
    net = model(1.0)
    average, resumed = MovingAverage(net, 10), MovingAverage(net, 10)
    train_with(net, average, [1.0, 3.0])
    state = average.state()
    resumed.load(state | {"average.share": state["average.share"].float()})
    assert torch.equal(resumed.state()["average.0.weight"], state["average.0.weight"])
