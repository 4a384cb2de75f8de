"""The body of a step that is captured with servers, run on the CPU without graphs, compared with eager steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon import models
from echelon.data.images.config import AugmentConfig
from echelon.data.loading.device import DeviceMemoryLoader
from echelon.data.loading.memory import MemorySource
from echelon.data.loading.order import ByPart, Sampling
from echelon.errors import UsageError
from echelon.kvstore import KVStore
from echelon.launch.threads.in_process import run
from echelon.train.recipe.optimizers import make_optimizer
from echelon.train.recipe.pace import Pace, Pacer
from echelon.train.step.captured_with_servers import ServerStepBody, why_not_capturable_with_servers
from echelon.train.step.eager import EagerStep, ForwardPass
from echelon.train.step.forward import Compiler
from echelon.train.step.metrics import Metrics
from echelon.train.step.precision import Precision
from echelon.train.step.staging import GradientStaging, WeightStaging
from echelon.train.trainer.regions import in_regions, regions_of, run_region
from echelon.train.trainer.servers.trainer import ServerTrainer

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
BATCH = 8


FIRST = models.build("resnet", num_classes=10, image_shape=(3, 12, 12), num_layers=8)


def network(first: nn.Module = FIRST) -> nn.Module:
    """Return a copy: the workers are threads, which cannot draw reproducibly from the global generator."""
    return copy.deepcopy(first)


def loader(rank: int, workers: int) -> DeviceMemoryLoader:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (64, 12, 12, 3), dtype=np.uint8)
    source = MemorySource(images, generator.integers(0, 10, 64))
    augment = AugmentConfig(shape=(3, 12, 12), rgb_std=(50.0, 50.0, 50.0))
    return DeviceMemoryLoader(source, augment, Sampling(64, BATCH, sharding=ByPart(rank, workers)), CPU)


def forward_pass_of(model: nn.Module, half: torch.dtype | None) -> ForwardPass:
    return ForwardPass(model, Precision(CPU, half, ""), Metrics(), BATCH)


def train(
    kv: KVStore,
    half: torch.dtype | None,
    captured: bool,
    compiler: Compiler | None = None,
    first: nn.Module = FIRST,
    compile_after: int = 0,
    max_grad_norm: float | None = None,
) -> dict[str, Tensor]:
    model = network(first)
    trainer = echelon.Trainer(model, make_optimizer("sgd", model, lr=0.05), kv, max_grad_norm=max_grad_norm)
    assert isinstance(trainer, ServerTrainer)
    forward_pass, batches = forward_pass_of(model, half), loader(kv.rank, kv.num_workers)
    samples = 64 // kv.num_workers  # read before another worker has finished and left
    if captured:
        body = ServerStepBody(forward_pass, trainer, None if compile_after else compiler)
        for index, _ in enumerate(body.forward.input.batches(batches)):
            if index and index == compile_after:
                body.forward.use(compiler)
                body(body.forward.run_first)
            else:
                body()
            for staging in body.gradients:
                trainer.push_bucket(staging.bucket, BATCH)
            for staging in body.gradients:
                trainer.wait_for_bucket(staging.bucket)
                body.weights.copy_in(staging.bucket.index)
            trainer.count(BATCH)
    else:
        step = EagerStep(forward_pass, trainer, None, Pacer(Pace(), 0))
        for batch in batches:
            step.step(batch)
    trainer.sync()
    assert trainer.samples_trained == samples
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def eager_and_captured(
    half: torch.dtype | None, num_workers: int = 1, first: nn.Module = FIRST
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Train with eager and with captured steps; returns the final states of all workers of each."""

    def states(captured: bool) -> list[dict[str, Tensor]]:
        return run(lambda kv: train(kv, half, captured, first=first), "dist_sync", num_workers=num_workers)

    return states(captured=False), states(captured=True)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_in_float32_the_weights_equal_those_of_eager_steps_bit_for_bit(num_workers: int) -> None:
    eager, captured = eager_and_captured(None, num_workers)
    for left, right in zip(eager, captured, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in left)
    first = network().state_dict()
    assert any(not torch.equal(first[name], captured[0][name]) for name in first)


def test_captured_steps_are_clipped_as_eager_ones() -> None:
    eager, captured, unclipped = (
        run(lambda kv, c=c, limit=limit: train(kv, None, c, max_grad_norm=limit), "dist_sync")  # type: ignore[misc]
        for c, limit in ((False, 0.5), (True, 0.5), (True, None))
    )
    assert all(torch.equal(eager[0][name], captured[0][name]) for name in eager[0])
    assert any(not torch.equal(unclipped[0][name], captured[0][name]) for name in eager[0])


def test_a_worker_that_clips_its_own_gradient_is_not_captured() -> None:
    def why(kv: KVStore) -> str | None:
        model = network()
        with echelon.Trainer(model, make_optimizer("sgd", model, lr=0.05), kv, max_grad_norm=1.0) as trainer:
            assert isinstance(trainer, ServerTrainer)
            return why_not_capturable_with_servers(trainer)

    assert run(why, "dist_async", num_workers=1) == ["this worker clips its own gradient before it sends it"]


def test_in_bfloat16_the_servers_keep_float32_weights() -> None:
    (eager,), (captured,) = eager_and_captured(torch.bfloat16)
    flat = [
        torch.cat([weights[name].flatten() for name in weights if "weight" in name]) for weights in (eager, captured)
    ]
    assert flat[1].dtype is torch.float32
    assert float((flat[0] - flat[1]).norm() / flat[0].norm()) < 5e-3


@pytest.mark.parametrize("compile_after", [0, 4], ids=["from the start", "after four of eight steps"])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # raised inside torch
def test_compiling_in_regions_gives_the_same(compile_after: int) -> None:
    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, backend="aot_eager")

    (plain,), (compiled,) = (
        run(lambda kv, one=one: train(kv, None, True, one, compile_after=compile_after), "dist_sync", num_workers=1)  # type: ignore[misc]
        for one in (None, compiler)
    )
    for name in plain:
        assert torch.allclose(plain[name], compiled[name], rtol=1e-4, atol=1e-6), name


@pytest.mark.parametrize("part", ["gather", "network"])
def test_a_step_with_servers_whose_compiler_fails_is_made_once(part: str) -> None:
    def compiler(function: Callable[..., Any]) -> Callable[..., Any]:
        def fail(*inputs: Tensor) -> Any:
            if not inputs if part == "gather" else inputs:
                function(*inputs)
                raise RuntimeError("ptxas was killed")
            return function(*inputs)

        return fail

    (plain,), (failed,) = (
        run(lambda kv, one=one: train(kv, None, True, one, compile_after=4), "dist_sync", num_workers=1)  # type: ignore[misc]
        for one in (None, compiler)
    )
    assert all(torch.equal(plain[name], failed[name]) for name in plain)  # running statistics and batches, too


@pytest.mark.parametrize(
    ("network", "layers", "shape"),
    [("resnet", 50, (3, 28, 28)), ("inception-bn", None, (3, 224, 224)), ("mlp", None, (1, 8, 8))],
)
def test_regions_cover_the_whole_network_in_order(
    network: str, layers: int | None, shape: tuple[int, int, int]
) -> None:
    model = models.build(network, num_classes=10, image_shape=shape, num_layers=layers).eval()
    regions = regions_of(model)
    names = [f"{prefix}{name}" for region in regions for prefix, module in region for name in module.state_dict()]
    assert names == list(model.state_dict())
    x = torch.rand(2, *shape)
    with torch.no_grad():
        assert torch.equal(in_regions(model, {}, lambda function: function)(x), model(x))
    if network == "resnet":
        counts = [sum(len(list(module.parameters())) for _, module in region) for region in regions]
        assert len(counts) >= 3
        assert max(counts) < 0.45 * sum(counts)


def test_a_network_that_is_not_a_chain_is_one_region() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + x  # type: ignore[no-any-return]

    model = Own()
    assert regions_of(model) == [[("", model)]]
    doubled = {"one.weight": model.one.weight.detach() * 2}
    x = torch.rand(3, 4)
    out = in_regions(model, doubled, lambda function: function)(x)
    assert torch.allclose(out, x @ doubled["one.weight"].T + model.one.bias + x)


class Transposed(nn.Module):
    """Multiplies by the weight of a linear layer. Its own type would not get a half-precision copy."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def chain(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), *modules, nn.Linear(12, 10))


def one_activation() -> nn.Module:
    same = nn.Tanh()
    return chain(nn.Linear(12, 12), same, nn.Linear(12, 12), same)


def one_layer() -> nn.Module:
    same = nn.Linear(12, 12)
    return chain(same, nn.Tanh(), same, nn.Tanh())


def one_block() -> nn.Module:
    same = nn.Sequential(nn.Linear(12, 12), nn.Tanh())
    return chain(same, nn.Linear(12, 12), same)


def tied_layers() -> nn.Module:
    one, other = nn.Linear(12, 12), nn.Linear(12, 12)
    other.weight = one.weight
    return chain(one, nn.Tanh(), other, nn.Tanh())


def tied_kinds() -> nn.Module:
    one = nn.Linear(12, 12)
    return chain(Transposed(one.weight), nn.Tanh(), one, nn.Tanh())


@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("make", [one_activation, one_layer, one_block, tied_layers, tied_kinds])
def test_a_module_that_is_used_twice_learns_from_both_uses(
    make: Callable[[], nn.Module], half: torch.dtype | None
) -> None:
    torch.manual_seed(1)
    first = make()
    (eager,), (captured,) = eager_and_captured(half, first=first)
    moved, off = (
        torch.cat([(eager[name] - other[name]).flatten() for name in eager]).norm()
        for other in (first.state_dict(), captured)
    )
    assert moved > 0.1, "training must change the weights, or the comparison means nothing"
    assert off <= (0.01 * moved if half else 0)


def forward_hook(module: nn.Module, called: list[str]) -> None:
    module.register_forward_hook(lambda *_: called.append("forward"))


def forward_pre_hook(module: nn.Module, called: list[str]) -> None:
    module.register_forward_pre_hook(lambda *_: called.append("forward_pre"))


def full_backward_hook(module: nn.Module, called: list[str]) -> None:
    module.register_full_backward_hook(lambda *_: called.append("backward"))


def full_backward_pre_hook(module: nn.Module, called: list[str]) -> None:
    module.register_full_backward_pre_hook(lambda *_: called.append("backward_pre"))


@pytest.mark.parametrize("inner", [True, False], ids=["inner chain", "whole network"])
@pytest.mark.parametrize("hook", [forward_hook, forward_pre_hook, full_backward_hook, full_backward_pre_hook])
def test_a_chain_with_a_hook_is_not_divided(hook: Callable[[nn.Module, list[str]], None], inner: bool) -> None:
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model = nn.Sequential(block, nn.Linear(4, 4), nn.Linear(4, 2))
    called: list[str] = []
    hook(block if inner else model, called)
    in_regions(model, {}, lambda function: function)(torch.rand(3, 4, requires_grad=True)).sum().backward()
    assert len(called) == 1
    assert len(regions_of(model)) == (3 if inner else 1)


def test_the_trainers_own_hooks_are_removed_before_the_network_is_divided() -> None:
    def drive(kv: KVStore) -> None:
        model = network()
        before = regions_of(model)
        trainer = echelon.Trainer(model, make_optimizer("sgd", model, lr=0.05), kv)
        assert isinstance(trainer, ServerTrainer)
        trainer.take_control()
        assert regions_of(model) == before
        assert len(before) > 1

    run(drive, "dist_sync", num_workers=1)


class PartlyUsed(nn.Module):
    """Has unused layers. With `steps`, another layer is used only after that many steps."""

    def __init__(self, steps: int | None = None) -> None:
        super().__init__()
        self.before, self.used, self.after = nn.Linear(432, 12), nn.Linear(12, 10), nn.Linear(10, 10)
        self._left = steps

    def forward(self, images: Tensor) -> Tensor:
        if self._left is not None:
            self._left -= 1
        hidden: Tensor = self.used(torch.tanh(images.flatten(1)[:, :12]))
        return hidden if self._left is None or self._left >= 0 else self.after(hidden)


@pytest.mark.parametrize("half", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_workers", [1, 2])
def test_unused_weights_do_not_change(half: torch.dtype | None, num_workers: int) -> None:
    torch.manual_seed(1)
    first = PartlyUsed()
    eager, captured = eager_and_captured(half, num_workers, first)
    start = first.state_dict()
    for left, right in zip(eager, captured, strict=True):
        assert all(torch.equal(right[name], start[name]) for name in start if "used" not in name)
        assert not torch.equal(right["used.weight"], start["used.weight"])
        if half is None:
            assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_layer_that_is_used_in_some_steps_only_needs_the_eager_engine() -> None:
    with pytest.raises(UsageError, match="has a gradient in some steps and none in others: use --engine eager"):
        run(lambda kv: train(kv, None, True, first=PartlyUsed(steps=2)), "dist_sync", num_workers=1)


@pytest.mark.parametrize(
    ("frozen", "expected"),
    [(True, None), (False, "weights of float32 and float64 cannot be copied with one staging buffer")],
)
def test_weights_of_two_dtypes_are_not_captured(frozen: bool, expected: str | None) -> None:
    def build(kv: KVStore) -> str | None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2).double().requires_grad_(not frozen))
        trainer = echelon.Trainer(model, make_optimizer("sgd", model, lr=0.05), kv)
        assert isinstance(trainer, ServerTrainer)
        return why_not_capturable_with_servers(trainer)

    assert run(build, "dist_sync", num_workers=1) == [expected]


def test_gradients_and_weights_are_staged_correctly_for_any_layout_on_the_device() -> None:
    """Tensors are channels-last and half precision, as on a GPU; on the CPU parameters are the store's memory."""

    def stage(kv: KVStore) -> None:
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 7, 1), nn.Flatten(), nn.Linear(7, 4))
        trainer = echelon.Trainer(model, make_optimizer("sgd", model, lr=0.05), kv)
        assert isinstance(trainer, ServerTrainer)
        (bucket,) = trainer.take_control()
        full: dict[str, Tensor] = dict(model.named_parameters())
        like = {4: torch.channels_last}
        leaves = {
            name: full[name].detach().to(torch.bfloat16, memory_format=like.get(full[name].ndim, torch.preserve_format))
            for name in bucket.names
        }
        assert leaves["0.weight"].stride() != full["0.weight"].stride()
        weights = WeightStaging(trainer.kvstore, [bucket], full, leaves)
        gradients = GradientStaging(trainer.kvstore, bucket, leaves)
        for leaf in leaves.values():
            leaf.grad = torch.randn_like(leaf)
        gradients.copy_out()
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            assert torch.equal(trainer.kvstore.views(name)[1], leaf.grad.float()), name
        before = {name: weight.detach().clone() for name, weight in full.items()}
        trainer.push_bucket(bucket, BATCH)
        trainer.wait_for_bucket(bucket)
        for step in (False, True):
            if step:
                weights.copy_in(0)
            weights.unpack()
            for name in bucket.names:
                weight = trainer.kvstore.views(name)[0] if step else before[name]
                assert torch.equal(leaves[name], weight.bfloat16()), name

    run(stage, "dist_sync", num_workers=1)


def test_every_region_is_compiled_however_many_there_are() -> None:
    compiled = []

    def count(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiled.append(module)
        return module.forward

    many = 2 * torch._dynamo.config.recompile_limit
    for size in range(1, many + 1):
        region = run_region([("", nn.Linear(size, size))], {})
        torch.compile(region, backend=count)(torch.rand(2, size))
    assert len(compiled) == many


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # raised inside torch
def test_every_region_is_compiled_for_its_own_shape() -> None:
    fixed = []

    def record(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        fixed.append(all(isinstance(one, Tensor) for one in inputs))  # a shape that may vary is an input, too
        return module.forward

    model = nn.Sequential(*(nn.Conv2d(3, 3, 3) for _ in range(4)))  # each output is smaller than its input
    network = in_regions(model, {}, lambda function: torch.compile(function, backend=record))
    network(torch.rand(2, 3, 12, 12))
    assert fixed == [True] * len(regions_of(model))
    assert len(fixed) > 1
