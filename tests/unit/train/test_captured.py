"""The body of a captured step, run on the CPU without a graph: only capturing needs a GPU, not the arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, AdamW, RMSprop

from echelon import Trainer, models
from echelon.data.images.config import AugmentConfig
from echelon.data.loading.device import DeviceMemoryLoader
from echelon.data.loading.memory import MemorySource
from echelon.data.loading.order import Sampling
from echelon.optim import Rule, create
from echelon.optim.create import MXNET
from echelon.train.recipe.pace import Pace, Pacer
from echelon.train.step.captured import StepBody, set_learning_rate, why_not_capturable
from echelon.train.step.eager import EagerStep, ForwardPass
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import LossScaler, Precision

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
BATCH = 8


def network() -> nn.Module:
    torch.manual_seed(3)
    return models.build("resnet", num_classes=10, image_shape=(3, 12, 12), num_layers=8)


def loader() -> DeviceMemoryLoader:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (64, 16, 16, 3), dtype=np.uint8)
    source = MemorySource(images, generator.integers(0, 10, 64))
    augment = AugmentConfig(shape=(3, 12, 12), random_crop=True, random_mirror=True, rgb_std=(50.0, 50.0, 50.0))
    return DeviceMemoryLoader(source, augment, Sampling(64, BATCH, seed=1), CPU)


def forward_pass_of(model: nn.Module, half: torch.dtype | None) -> ForwardPass:
    return ForwardPass(model, Precision(CPU, half, ""), Metrics(top_k=3, losses="ce"), BATCH, label_smoothing=0.1)


def sgd(model: nn.Module, **settings: Any) -> SGD:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9, weight_decay=1e-4, **settings)


def train_eager(
    half: torch.dtype | None, scaler: LossScaler | None = None, make: Callable[[], nn.Module] = network
) -> tuple[nn.Module, Tensor]:
    model = make()
    step = EagerStep(forward_pass_of(model, half), Trainer(model, sgd(model, fused=True)), scaler, Pacer(Pace(), 0))
    for batch in loader():
        step.step(batch)
    return model, step.forward_pass.sums


def train_captured(
    half: torch.dtype | None,
    scaler: LossScaler | None = None,
    compiler: Callable[..., Any] | None = None,
    in_memory: bool = True,
    make: Callable[[], nn.Module] = network,
) -> tuple[nn.Module, Tensor]:
    model = make()
    forward_pass, batches = forward_pass_of(model, half), loader()
    step = StepBody(forward_pass, Trainer(model, sgd(model)), scaler, compiler)
    if in_memory:
        step.forward.input.loader = batches
        for _ in range(batches.begin()):
            step()
    else:
        for batch in batches:
            step.forward.input.buffer = batch
            step()
    return model, forward_pass.sums


def same(left: nn.Module, right: nn.Module) -> bool:
    pairs = zip(left.state_dict().values(), right.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def distance(left: nn.Module, right: nn.Module) -> float:
    a, b = (torch.cat([p.detach().flatten() for p in model.parameters()]) for model in (left, right))
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("in_memory", [True, False], ids=["loader on the device", "batches copied in"])
def test_in_float32_the_weights_equal_those_of_eager_steps_bit_for_bit(in_memory: bool) -> None:
    eager, sums = train_eager(None)
    captured, measured = train_captured(None, in_memory=in_memory)
    assert same(captured, eager)
    assert torch.equal(measured, sums)
    assert measured[-1] == 64


def test_in_bfloat16_half_copies_give_what_autocast_gives() -> None:
    eager, sums = train_eager(torch.bfloat16)
    captured, measured = train_captured(torch.bfloat16)
    assert distance(captured, eager) < 2e-3  # both round gradients to bfloat16, but cast in a different order
    assert measured[-1] == sums[-1]
    assert all(p.dtype is torch.float32 for p in captured.parameters()), "the parameters themselves stay float32"
    first = network()
    assert distance(captured, first) > 0.01, "training must change the weights, or the comparison means nothing"


def tied() -> nn.Module:
    torch.manual_seed(3)
    one, other, last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 10)
    other.weight = one.weight
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), one, nn.Tanh(), other, nn.Tanh(), last)


def all_shared() -> nn.Module:
    torch.manual_seed(3)
    same = nn.Linear(12, 12)
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), same, nn.Tanh(), same)


@pytest.mark.parametrize("make", [tied, all_shared])
def test_in_bfloat16_a_weight_that_is_used_twice_learns_from_both_uses(make: Callable[[], nn.Module]) -> None:
    eager, _ = train_eager(torch.bfloat16, make=make)
    captured, _ = train_captured(torch.bfloat16, make=make)
    assert distance(captured, eager) < 1e-4
    assert distance(captured, make()) > 0.01, "training must change the weights, or the comparison means nothing"


class PartlyUsed(nn.Module):
    """Has weights that no forward pass uses."""

    def __init__(self) -> None:
        super().__init__()
        self.features = network()
        self.never = nn.Linear(4, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.features(images)  # type: ignore[no-any-return]


def partly_used() -> nn.Module:
    torch.manual_seed(3)
    return PartlyUsed()


@pytest.mark.parametrize("half", [None, torch.bfloat16])
def test_unused_weights_do_not_change(half: torch.dtype | None) -> None:
    captured, _ = train_captured(half, make=partly_used)
    eager, _ = train_eager(half, make=partly_used)
    never = partly_used().get_submodule("never")
    assert same(captured.get_submodule("never"), never)
    assert same(eager.get_submodule("never"), never)
    assert distance(captured, eager) < 2e-3


def test_a_compiled_body_gives_the_same() -> None:
    captured, measured = train_captured(torch.bfloat16)
    compiled, sums = train_captured(torch.bfloat16, compiler=lambda f: torch.compile(f, backend="aot_eager"))
    assert distance(compiled, captured) < 2e-3
    assert measured[-1] == sums[-1]


def test_a_step_that_overflows_in_float16_is_skipped_and_the_scale_halves() -> None:
    model = network()
    forward_pass, batches, scaler = forward_pass_of(model, torch.float16), loader(), LossScaler(CPU)
    step = StepBody(forward_pass, Trainer(model, sgd(model)), scaler)
    step.forward.input.loader = batches
    batches.begin()
    step()
    before = [p.detach().clone() for p in model.parameters()]
    good = float(scaler.scale)
    scaler.scale.fill_(2.0**40)
    step()
    assert scaler.found_inf == 1
    assert scaler.scale == 2.0**39
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    scaler.scale.fill_(good)
    step()
    assert scaler.found_inf == 0
    assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


@pytest.fixture
def uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("uninitialised_memory_is_nan")
def test_a_first_step_that_overflows_has_no_effect() -> None:
    def trained(overflow: bool) -> list[Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 10))
        forward_pass, scaler = forward_pass_of(model, torch.float16), LossScaler(CPU)
        step = StepBody(forward_pass, Trainer(model, sgd(model)), scaler)
        batches = list(loader())
        if overflow:
            scaler.scale.fill_(2.0**40)
            step.forward.input.buffer = batches[0]
            step()
            assert scaler.found_inf == 1
        scaler.scale.fill_(2.0**8)
        for step.forward.input.buffer in batches[1:4]:
            step()
            assert scaler.found_inf == 0
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(p, q) for p, q in zip(trained(True), trained(False), strict=True))


def test_the_learning_rate_of_a_captured_optimizer_is_a_tensor() -> None:
    model = network()
    optimizer = sgd(model)
    StepBody(forward_pass_of(model, None), Trainer(model, optimizer), None)
    rate = optimizer.param_groups[0]["lr"]
    set_learning_rate(optimizer, 0.25)
    assert rate is optimizer.param_groups[0]["lr"]
    assert rate == 0.25


def test_why_not_capturable_names_the_reason() -> None:
    parameters = [nn.Parameter(torch.zeros(1))]
    assert why_not_capturable(SGD(parameters, lr=1), torch.float16) is None
    assert why_not_capturable(AdamW(parameters), torch.float16) is None
    assert why_not_capturable(RMSprop(parameters), None) is None
    assert "overflowed" in str(why_not_capturable(RMSprop(parameters), torch.float16))
    assert "Adagrad" in str(why_not_capturable(Adagrad(parameters), None))


def test_which_of_mxnets_optimizers_can_be_captured() -> None:
    """The scripts' default, sgd, is captured in all precisions."""
    captured: dict[torch.dtype | None, set[str]] = {None: set(), torch.float16: set()}
    for name in MXNET:
        optimizer = create(name, [nn.Parameter(torch.zeros(1))], learning_rate=0.1)
        for half, names in captured.items():
            if why_not_capturable(optimizer, half) is None:
                names.add(name)
    assert captured[None] == {"sgd", "ccsgd", "nag", "adam", "adagrad", "rmsprop", "adadelta", "adamax"}
    assert captured[torch.float16] == {"sgd", "ccsgd", "adam"}


@pytest.mark.parametrize("name", ["sgd", "nag", "adam"])
def test_the_weights_of_mxnets_optimizers_equal_those_of_eager_steps(name: str) -> None:
    """The rate is float32 in captured steps and float64 in eager ones."""

    def optimizer(model: nn.Module) -> Rule:
        settings = {"momentum": 0.9} if name != "adam" else {}
        return create(name, [p for p in model.parameters() if p.requires_grad], learning_rate=0.01, wd=1e-4, **settings)

    eager, captured = network(), network()
    eager_step = EagerStep(forward_pass_of(eager, None), Trainer(eager, optimizer(eager)), None, Pacer(Pace(), 0))
    for batch in loader():
        eager_step.step(batch)
    body, batches = StepBody(forward_pass_of(captured, None), Trainer(captured, optimizer(captured)), None), loader()
    body.forward.input.loader = batches
    for _ in range(batches.begin()):
        body()
    assert distance(captured, eager) < 1e-5
    assert distance(captured, network()) > 0.01


class LostAfterForward(torch.autograd.Function):
    """Passes a tensor on. Its backward pass fails once, as a compiler of backward does."""

    failures = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if LostAfterForward.failures:
            LostAfterForward.failures -= 1
            raise RuntimeError("ptxas was killed")
        return gradient


def failing_compiler(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    def compiled() -> tuple[Tensor, Tensor]:
        loss, sums = function()
        return LostAfterForward.apply(loss), sums  # type: ignore[no-untyped-call]

    return compiled


def test_a_step_whose_compiler_fails_in_backward_is_made_once(caplog: pytest.LogCaptureFixture) -> None:
    plain, plain_sums = train_captured(None)
    model = network()
    forward_pass, batches = forward_pass_of(model, None), loader()
    step = StepBody(forward_pass, Trainer(model, sgd(model)), None)
    for index, _ in enumerate(step.forward.input.batches(batches)):
        if index == 3:
            LostAfterForward.failures = 1
            step.forward.use(failing_compiler)
            step.update(step.forward.run_first(step.forward_backward))
            assert not step.forward.compiled
        else:
            step()
    assert same(model, plain)  # weights, running statistics of batch normalisation, and the batches
    assert torch.equal(forward_pass.sums, plain_sums)
    assert "engine graph instead of compile: RuntimeError: ptxas was killed" in caplog.text
