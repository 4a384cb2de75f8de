"""Checkpoints of arbitrary tensors: they are loaded unchanged, safetensors reads them, and all damage is detected."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from echelon.errors import DataError
from echelon.train.checkpoint.format import Checkpoint, load, save

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Draw any dtype and shape, including empty and scalar, contiguous or permuted, with any bits, such as all NaNs."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    size = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if dtype is torch.bool:
        flat = torch.randint(2, (size,), generator=generator).bool()
    else:
        flat = torch.randint(256, (size * dtype.itemsize,), generator=generator, dtype=torch.uint8).view(dtype)
    whole = flat.reshape(shape)
    return whole.permute(draw(st.permutations(range(len(shape))))) if shape else whole


GROUPS = st.dictionaries(NAMES, tensors(), max_size=4)
CHECKPOINTS = st.builds(Checkpoint, GROUPS, GROUPS, GROUPS, st.dictionaries(NAMES, JSON, max_size=4))


def bits(group: dict[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    return {
        name: (one.dtype, one.shape, one.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for name, one in group.items()
    }


@contextmanager
def a_file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "x-0001.safetensors"


@given(CHECKPOINTS)
def test_saved_checkpoints_are_loaded_unchanged(checkpoint: Checkpoint) -> None:
    with a_file() as path:
        save(path, checkpoint)
        loaded = load(path)
        others = load_file(path)
    assert bits(loaded.weights) == bits(checkpoint.weights)
    assert bits(loaded.optimizer) == bits(checkpoint.optimizer)
    assert bits(loaded.extra) == bits(checkpoint.extra)
    assert loaded.metadata == checkpoint.metadata
    named = {
        f"{group}/{name}": tensor
        for group in ("weights", "optimizer", "extra")
        for name, tensor in getattr(checkpoint, group).items()
    }
    assert bits(others) == bits(named)


@given(CHECKPOINTS, st.data())
def test_a_file_cut_off_anywhere_is_detected(checkpoint: Checkpoint, draw: st.DataObject) -> None:
    with a_file() as path:
        save(path, checkpoint)
        whole = path.read_bytes()
        size = draw.draw(st.integers(0, len(whole) - 1))
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=rf"x-0001\.safetensors is damaged: it is cut off at {size} "):
            load(path)


@given(CHECKPOINTS, st.data())
def test_a_changed_byte_anywhere_is_detected(checkpoint: Checkpoint, draw: st.DataObject) -> None:
    with a_file() as path:
        save(path, checkpoint)
        changed = bytearray(path.read_bytes())
        at = draw.draw(st.integers(0, len(changed) - 1))
        changed[at] ^= draw.draw(st.integers(1, 255))
        path.write_bytes(changed)
        with pytest.raises(DataError, match=r"x-0001\.safetensors is "):
            load(path)


@given(CHECKPOINTS, st.binary(min_size=1, max_size=9))
def test_extra_bytes_are_detected(checkpoint: Checkpoint, more: bytes) -> None:
    with a_file() as path:
        save(path, checkpoint)
        size = path.stat().st_size
        with path.open("ab") as stream:
            stream.write(more)
        with pytest.raises(DataError, match=f"it has {size + len(more)} bytes, but its header describes {size};"):
            load(path)
