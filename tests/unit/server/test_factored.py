"""A factored gradient has the same bits as the gradient, wherever it is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.cluster.placement import ALIGN, KeySpec, Layout, Slot
from echelon.errors import UsageError
from echelon.server.storage.factored import Factored, factors_length

pytestmark = pytest.mark.numeric


def slot_of(shape: tuple[int, ...], dtype: str = "float32") -> Slot:
    """Return the second key of a segment, which does not start at 0."""
    return Layout(2).place([KeySpec("first", (70,), dtype), KeySpec("weight", shape, dtype)])[1]


@given(
    shape=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    rank=st.integers(1, 9),
    places=st.tuples(st.integers(0, 200), st.integers(1, 200)),
)
@settings(max_examples=60, deadline=None)
def test_every_range_equals_the_product_and_the_padding_is_zero(
    shape: tuple[int, int], rank: int, places: tuple[int, int]
) -> None:
    slot = slot_of(shape)
    generator = torch.Generator().manual_seed(rank)
    left, right = (torch.randint(-4, 5, (rank, size), generator=generator).float() for size in shape)
    whole = torch.zeros(slot.padded)
    whole[: slot.length] = left.t().mm(right).view(-1)
    window = Factored(slot, rank, torch.cat([left.view(-1), right.view(-1)]))
    start = min(places[0] * ALIGN, slot.padded - ALIGN)
    stop = min(start + places[1] * ALIGN, slot.padded)
    assert torch.equal(window.view(slot.segment, slot.start + start, slot.start + stop), whole[start:stop])
    assert window.seams(slot.segment, slot.start, slot.start + slot.padded) == ()


def test_large_products_have_the_bits_of_one_product() -> None:
    slot = slot_of((700, 1100))
    generator = torch.Generator().manual_seed(3)
    left, right = (torch.randn(16, size, generator=generator) for size in (700, 1100))
    window = Factored(slot, 16, torch.cat([left.view(-1), right.view(-1)]))
    parts = [
        window.view(slot.segment, slot.start + at, slot.start + min(at + 131_072, slot.padded)).clone()
        for at in range(0, slot.padded, 131_072)
    ]
    assert torch.equal(torch.cat(parts)[: slot.length].view(700, 1100), left.t().mm(right))


@pytest.mark.parametrize("rank", [2, 32, 200])
def test_parts_of_a_row_and_sums_of_high_rank_have_these_bits_too(rank: int) -> None:
    """The last range of a key may have 64 elements, and BLAS sums a product of one row in another order."""
    rows, columns = 1024, 1100
    slot = slot_of((rows, columns))
    generator = torch.Generator().manual_seed(4)
    pairs = [[torch.randn(rank, size, generator=generator) for size in (rows, columns)] for _ in range(2)]
    windows = [Factored(slot, rank, torch.cat([left.view(-1), right.view(-1)])) for left, right in pairs]
    one, other = (left.t().mm(right).view(-1) for left, right in pairs)
    for start in (0, 640, 3 * columns // ALIGN * ALIGN, slot.length - slot.length % ALIGN - ALIGN):
        place = slot.start + start, slot.start + start + ALIGN
        assert torch.equal(windows[0].view(slot.segment, *place), one[start : start + ALIGN])
        summed = windows[0].summed_with(windows[1:], *place)
        assert torch.equal(summed, (one + other)[start : start + ALIGN])


@pytest.mark.parametrize(
    ("shape", "dtype", "rank", "said"),
    [
        ((70,), "float32", 1, "'weight' is 70 float32; only a matrix of float32 or float64"),
        ((8, 8), "float16", 1, "'weight' is 8x8 float16; only a matrix"),
        ((8, 8), "float32", 5, "factors of rank 5 have 80 elements, its gradient 64; push the gradient"),
        ((8, 8), "float32", -1, "factors of rank -1 have -16 elements"),
    ],
)
def test_invalid_factors_are_rejected(shape: tuple[int, ...], dtype: str, rank: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        factors_length(slot_of(shape, dtype), rank)
    assert factors_length(slot_of((8, 8)), 4) == 64
