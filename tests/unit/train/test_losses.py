"""The loss and mixup: correct values, the right distribution, reproducible draws, and no reads on the host."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from echelon.data.loading.order import uniforms
from echelon.errors import UsageError
from echelon.train.step.losses import Mixup, blend, cross_entropy, draw_weight

pytestmark = pytest.mark.numeric

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]])
LABELS = torch.tensor([0, 2])


def expected_loss(targets: list[list[float]]) -> float:
    """Return the mean cross-entropy with target distributions, computed in plain Python."""
    logs: list[list[float]] = [[x - math.log(sum(map(math.exp, row))) for x in row] for row in LOGITS.tolist()]
    samples = zip(targets, logs, strict=True)
    return -sum(t * log for target, row in samples for t, log in zip(target, row, strict=True)) / len(logs)


def test_without_options_it_is_torchs_cross_entropy() -> None:
    assert float(cross_entropy(LOGITS, LABELS)) == pytest.approx(expected_loss([[1, 0, 0], [0, 0, 1]]))
    assert torch.equal(cross_entropy(LOGITS, LABELS), functional.cross_entropy(LOGITS, LABELS))


def test_label_smoothing() -> None:
    smooth = [[0.8, 0.1, 0.1], [0.1, 0.1, 0.8]]
    assert float(cross_entropy(LOGITS, LABELS, label_smoothing=0.3)) == pytest.approx(expected_loss(smooth))


def test_mixed_labels_are_weighted() -> None:
    mixed = (torch.tensor([1, 1]), torch.tensor(0.75))
    assert float(cross_entropy(LOGITS, LABELS, mixed=mixed)) == pytest.approx(
        expected_loss([[0.75, 0.25, 0], [0, 0.25, 0.75]])
    )
    smooth = [[0.625, 0.275, 0.1], [0.1, 0.275, 0.625]]
    assert float(cross_entropy(LOGITS, LABELS, 0.3, mixed)) == pytest.approx(expected_loss(smooth))


def test_half_precision_logits_give_a_float32_loss() -> None:
    logits = torch.zeros(8, 1000, dtype=torch.float16, requires_grad=True)
    loss = cross_entropy(logits, torch.arange(8))
    loss.backward()
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(math.log(1000), rel=1e-6)
    assert logits.grad is not None


def test_every_image_is_blended_with_its_predecessor() -> None:
    images = torch.tensor([0.0, 10.0, 20.0, 40.0])[:, None, None, None].expand(4, 3, 2, 2)
    labels = torch.tensor([0, 1, 2, 3])
    blended, (others, weight) = blend(images, labels, torch.tensor(0.75))
    assert blended[:, 1, 1, 1].tolist() == [10.0, 7.5, 17.5, 35.0]
    assert others.tolist() == [3, 0, 1, 2]
    assert float(weight) == 0.75


def test_mixup_blends_with_the_drawn_weight() -> None:
    images, labels = torch.randn(5, 3, 4, 4), torch.arange(5)
    blended, (others, weight) = Mixup(0.4, seed=1, rank=2, first_step=1)(images, labels, clock=2)
    drawn = torch.tensor(draw_weight(0.4, 1, 2, 3))
    expected, (expected_others, _) = blend(images, labels, drawn)
    assert torch.equal(blended, expected)
    assert torch.equal(others, expected_others)
    assert (weight.shape, weight.dtype, float(weight)) == ((), torch.float32, float(drawn))


def test_a_blend_keeps_layout_and_precision() -> None:
    images = torch.randn(4, 3, 8, 8, dtype=torch.float16).to(memory_format=torch.channels_last)
    blended, (_, weight) = Mixup(0.2, seed=0, rank=0)(images, torch.arange(4), clock=0)
    assert (blended.dtype, weight.dtype) == (torch.float16, torch.float32)
    assert blended.is_contiguous(memory_format=torch.channels_last)


def test_no_value_is_read_on_the_host() -> None:
    """Tensors on the meta device have no values to read."""
    images = torch.empty(4, 3, 8, 8, device="meta")
    labels = torch.empty(4, dtype=torch.int64, device="meta")
    blended, mixed = blend(images, labels, torch.empty((), device="meta"))
    logits = torch.empty(4, 10, device="meta", requires_grad=True)
    assert blended.shape == images.shape
    assert cross_entropy(logits, labels, 0.1, mixed).shape == ()


def test_compiles_as_one_graph() -> None:
    def step(images: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        blended, mixed = blend(images, labels, weight)
        return cross_entropy(blended, labels, 0.1, mixed)

    arguments = (torch.randn(4, 10), torch.arange(4), torch.tensor(0.3))
    compiled = torch.compile(step, backend="eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), step(*arguments))


def weights(alpha: float, num: int = 4000) -> list[float]:
    return [draw_weight(alpha, 7, 0, step) for step in range(num)]


@pytest.mark.parametrize(
    ("alpha", "cumulative"),
    [
        (0.5, lambda x: 2 / math.pi * math.asin(math.sqrt(x))),
        (1.0, lambda x: x),
        (2.0, lambda x: 3 * x**2 - 2 * x**3),
        (3.0, lambda x: 10 * x**3 - 15 * x**4 + 6 * x**5),
    ],
)
def test_the_weights_are_beta_distributed(alpha: float, cumulative: Callable[[float], float]) -> None:
    """Kolmogorov-Smirnov distance of 4000 draws. The draws are fixed, so the test is not flaky."""
    drawn = sorted(weights(alpha))
    distance = max(abs(cumulative(x) - (i + 0.5) / len(drawn)) for i, x in enumerate(drawn))
    assert distance < 1.63 / math.sqrt(len(drawn))


@pytest.mark.parametrize("alpha", [0.001, 0.1, 0.2, 20.0, 1e6])
def test_mean_and_variance_for_any_alpha(alpha: float) -> None:
    drawn = np.array(weights(alpha))
    variance = 1 / (4 * (2 * alpha + 1))
    assert ((drawn >= 0) & (drawn <= 1)).all()
    assert abs(drawn.mean() - 0.5) < 4 * math.sqrt(variance / len(drawn))
    assert drawn.var() == pytest.approx(variance, rel=0.08)


def test_draws_are_a_function_of_seed_rank_and_step() -> None:
    assert draw_weight(0.2, 1, 2, 3) == draw_weight(0.2, 1, 2, 3)
    others = {draw_weight(0.2, *where) for where in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]}
    assert len(others) == 4
    assert draw_weight(1.0, 0, 0, 0) == pytest.approx(
        0.19843729416625921, abs=1e-12
    )  # published runs stay reproducible


def test_draws_differ_from_those_of_augmentation() -> None:
    """Augmentation draws from the seed itself with the same counters; these numbers would give other weights."""
    radius, angle = uniforms(7, 0, np.array([0]), 2)[0].tolist()
    cosine = math.cos(2 * math.pi * angle)
    ratio = (1 / (1 - radius) - 1) * cosine**2
    from_the_seed = (1 + math.copysign(math.sqrt(ratio / (1 + ratio)), cosine)) / 2
    assert abs(draw_weight(1.0, 7, 0, 0) - from_the_seed) > 1e-3


@pytest.mark.parametrize("alpha", [0.0, -1.0, math.nan, math.inf])
def test_alpha_must_be_finite_and_above_zero(alpha: float) -> None:
    with pytest.raises(UsageError, match=re.escape(f"mixup with alpha {alpha:g}: alpha must be finite and above 0")):
        draw_weight(alpha, 0, 0, 0)


def test_integer_images_are_rejected() -> None:
    with pytest.raises(UsageError, match=re.escape("mixup of torch.uint8 images would round them")):
        blend(torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.arange(2), torch.tensor(0.5))
