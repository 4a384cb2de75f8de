"""The networks run: both memory layouts agree, every trained parameter gets a gradient, and one network is trained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from digits import load_float_digits
from echelon import models
from echelon.models.layers import BatchNorm

pytestmark = pytest.mark.numeric

SMALL = [
    ("mlp", 1, 28, {}),
    ("lenet", 1, 28, {}),
    ("lenet", 1, 28, {"add_stn": True}),
    ("digits-cnn", 1, 8, {}),
    ("alexnet", 3, 67, {}),
    ("googlenet", 3, 64, {}),
    ("inception-bn", 3, 28, {}),
    ("resnet", 3, 28, {"num_layers": 8}),
    ("resnet", 3, 32, {"num_layers": 18}),
    ("resnet-v1", 3, 28, {"num_layers": 8}),
    ("resnet-28-small", 3, 28, {}),
    ("resnext", 3, 28, {"num_layers": 8}),
    ("mobilenetv2", 3, 32, {}),
]
HEAVY = ("alexnet", "mobilenetv2")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _build(network: str, channels: int, size: int, options: dict[str, object]) -> nn.Module:
    torch.manual_seed(0)
    shape = (channels, size, size)
    return models.build(network, num_classes=10, image_shape=shape, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("network", "channels", "size", "options"), SMALL)
def test_gradients_reach_every_trained_parameter(
    network: str, channels: int, size: int, options: dict[str, object]
) -> None:
    model = _build(network, channels, size, options)
    output = model(torch.randn(2, channels, size, size))
    assert output.shape == (2, 10)
    output.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
        assert parameter.requires_grad or bool((parameter == 1).all()), name


@pytest.mark.parametrize(("network", "channels", "size", "options"), [case for case in SMALL if case[0] not in HEAVY])
def test_channels_last_gives_the_same(network: str, channels: int, size: int, options: dict[str, object]) -> None:
    model = _build(network, channels, size, options).eval()
    images = torch.randn(2, channels, size, size)
    with torch.no_grad():
        expected = model(images)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        output = model(images.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(output, expected, atol=1e-3 * expected.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize(("network", "channels", "size", "options"), [SMALL[2], SMALL[7]])
def test_compiles_as_one_graph(network: str, channels: int, size: int, options: dict[str, object]) -> None:
    model = _build(network, channels, size, options).eval()
    images = torch.randn(2, channels, size, size)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(images), model(images))


def test_autocast_gives_half_precision_outputs() -> None:
    model = _build("resnet", 3, 28, {"num_layers": 8})
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(2, 3, 28, 28)).dtype is torch.bfloat16
        assert BatchNorm(3)(torch.ones(1, 3, 1, 1, dtype=torch.bfloat16)).dtype is torch.bfloat16


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_one_value_per_channel_is_normalised_as_in_mxnet(layout: torch.memory_format) -> None:
    """The mean is the value and the variance is 0, also in the running averages; n / (n - 1) would make them NaN."""
    norm = BatchNorm(3, eps=1e-3)
    with torch.no_grad():
        norm.bias.copy_(torch.tensor([1.0, -2.0, 3.0]))
    images = torch.tensor([1.0, 2.0, -8.0]).reshape(1, 3, 1, 1).contiguous(memory_format=layout).requires_grad_()
    output = norm(images)
    assert torch.equal(output.flatten(), norm.bias)
    torch.testing.assert_close(norm.running_mean, torch.tensor([0.1, 0.2, -0.8]))
    torch.testing.assert_close(norm.running_var, torch.full((3,), 0.9))
    output.backward(torch.ones_like(output))
    assert [float(t.grad.abs().max()) for t in (images, norm.weight, norm.bias) if t.grad is not None] == [0, 0, 1]


@pytest.mark.parametrize(("count", "size"), [(2, 1), (1, 2), (5, 3)])
def test_batch_norm_of_several_values_equals_torchs_bit_for_bit(count: int, size: int) -> None:
    ours, theirs = BatchNorm(4), nn.BatchNorm2d(4)
    images = torch.randn(count, 4, size, size)
    assert torch.equal(ours(images), theirs(images))
    for name, buffer in theirs.named_buffers():
        assert name == "num_batches_tracked" or torch.equal(ours.get_buffer(name), buffer), name


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # raised inside torch
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager_decomp_partition"]
)  # the second uses the decompositions of Inductor
def test_one_value_per_channel_compiles_as_one_graph(backend: str) -> None:
    plain, other = BatchNorm(4), BatchNorm(4)
    compiled = torch.compile(other, backend=backend, fullgraph=True)
    for count in (1, 3):
        images = torch.randn(count, 4, 1, 1)
        expected, found = plain(images), compiled(images)
        torch.testing.assert_close(found, expected)
        found.sum().backward()
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(other.get_buffer(name), buffer)


def test_a_network_trains_on_a_single_image() -> None:
    model = _build("mobilenetv2", 3, 32, {})
    model(torch.randn(1, 3, 32, 32)).square().sum().backward()
    assert all(bool(buffer.isfinite().all()) for buffer in model.buffers())
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters() if p.requires_grad)


def test_spatial_transformer_starts_as_the_identity() -> None:
    model = _build("lenet", 1, 28, {"add_stn": True})
    transformer = model.get_submodule("features.stn")
    images = torch.randn(3, 1, 28, 28)
    torch.testing.assert_close(transformer(images), images, atol=1e-5, rtol=1e-4)


def test_digits_cnn_learns_the_digits() -> None:
    (images, labels), (val_images, val_labels) = load_float_digits()
    model = _build("digits-cnn", 1, 8, {})
    assert 20_000 <= sum(p.numel() for p in model.parameters()) <= 60_000
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(6):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    accuracy = (model(val_images).argmax(1) == val_labels).float().mean().item()
    assert accuracy >= 0.97


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_alexnet_normalises_large_activations_in_half_precision(half: torch.dtype) -> None:
    model = models.build("alexnet", num_classes=10, image_shape=(3, 224, 224))
    norm = model.get_submodule("features.norm1")
    activations = 400 * torch.rand(2, 96, 5, 5, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", half):
        found = norm(activations.to(half))
    assert found.dtype == half
    torch.testing.assert_close(found.float(), norm(activations), rtol=0.02, atol=0.1)
