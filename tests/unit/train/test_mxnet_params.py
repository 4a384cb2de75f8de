"""The format of MXNet's .params files: files of every version are read, and damaged ones are rejected."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from echelon.errors import DataError, UsageError
from echelon.train.checkpoint.mxnet import params

# Written by mx.nd.save of MXNet 1.9.1: a float32 array of (2, 2) and a float16 array of 3.
WRITTEN_BY_MXNET = bytes.fromhex(
    "120100000000000000000000000000000200000000000000c9fa93f90000000002000000020000000000000002000000000000000100000000"
    "000000000000000000c03f000000c00000803e00004040c9fa93f9000000000100000003000000000000000100000000000000020000000038"
    "0040ff7b02000000000000000d000000000000006172673a66635f77656967687411000000000000006175783a626e5f6d6f76696e675f7661"
    "72"
)
# Written by mx.npx.save, with np_shape semantics: an int32 scalar and an int64 array of 2.
WRITTEN_WITH_NP_SHAPE = bytes.fromhex(
    "120100000000000000000000000000000200000000000000cafa93f9000000000000000001000000000000000400000007000000cafa93f900"
    "0000000100000002000000000000000100000000000000060000000100000000000000020000000000000002000000000000000100000000"
    "00000073010000000000000076"
)
ROW_SPARSE = bytes.fromhex(
    "120100000000000000000000000000000100000000000000c9fa93f90100000002000000010000000000000002000000000000000200000003"
    "000000000000000200000000000000010000000000000000000000060000000100000001000000000000000000803f0000803f010000000000"
    "0000010000000000000005000000000000006172673a77"
)
V1, V2, V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
CPU_FLOAT32 = struct.pack("<iii", 1, 0, 0)
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
]


def file_of(*arrays: bytes, names: tuple[bytes, ...] = (b"a",), magic: int = 0x112) -> bytes:
    """Return a file with these arrays."""
    encoded = b"".join(struct.pack("<Q", len(name)) + name for name in names)
    return struct.pack("<QQQ", magic, 0, len(arrays)) + b"".join(arrays) + struct.pack("<Q", len(names)) + encoded


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor)


def test_files_that_mxnet_wrote() -> None:
    weight, variance = torch.tensor([[1.5, -2.0], [0.25, 3.0]]), torch.tensor([0.5, 2.0, 65504.0], dtype=torch.float16)
    expected = {"arg:fc_weight": weight, "aux:bn_moving_var": variance}
    assert_equal(params.parse(WRITTEN_BY_MXNET), expected)
    scalar, vector = torch.tensor(7, dtype=torch.int32), torch.tensor([1, 2])
    assert_equal(params.parse(WRITTEN_WITH_NP_SHAPE), {"s": scalar, "v": vector})


def test_the_written_bytes_are_those_of_mxnet() -> None:
    assert b"".join(params.encode(params.parse(WRITTEN_BY_MXNET))) == WRITTEN_BY_MXNET


def test_older_versions() -> None:
    data = struct.pack("<2f", 1.5, -2.0)
    legacy = struct.pack("<III", 2, 1, 2) + CPU_FLOAT32 + data
    version_1 = struct.pack("<IIqq", V1, 2, 2, 1) + struct.pack("<iii", 2, 7, 0) + data  # saved on GPU 7
    found = params.parse(file_of(legacy, version_1, names=(b"old", b"newer")))
    assert_equal(found, {"old": torch.tensor([[1.5, -2.0]]), "newer": torch.tensor([[1.5], [-2.0]])})


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(1, 4), min_size=1, max_size=5)), max_size=5))
def test_round_trip(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    arrays = {
        f"arg:weight {number} ü": torch.randint(0, 2, shape).to(dtype) for number, (dtype, shape) in enumerate(kinds)
    }
    assert_equal(params.parse(b"".join(params.encode(arrays))), arrays)


def test_a_file_on_disk(tmp_path: Path) -> None:
    arrays = {"arg:a": torch.arange(6.0).reshape(2, 3).t(), "aux:b": torch.ones(2, requires_grad=True)}
    params.save(tmp_path / "x-0001.params", arrays)
    assert_equal(params.load(tmp_path / "x-0001.params"), {name: one.detach() for name, one in arrays.items()})
    with pytest.raises(DataError, match=r"there is no file .*y\.params; list the files in its folder"):
        params.load(tmp_path / "y.params")
    (tmp_path / "z.params").write_text("a text that is not a list of arrays")
    with pytest.raises(DataError, match=r"z\.params as a \.params file of MXNet: it starts with 0x\w+, not 0x112"):
        params.load(tmp_path / "z.params")


@given(st.integers(0, len(WRITTEN_BY_MXNET) - 1))
def test_a_truncated_file_is_rejected(length: int) -> None:
    with pytest.raises(DataError, match=r"^cannot read the data as a \.params file of MXNet: "):
        params.parse(WRITTEN_BY_MXNET[:length])


@given(st.integers(0, len(WRITTEN_BY_MXNET) - 1), st.integers(1, 255))
def test_a_flipped_byte_is_an_error_or_another_value(position: int, flip: int) -> None:
    damaged = bytearray(WRITTEN_BY_MXNET)
    damaged[position] ^= flip
    try:
        found = params.parse(bytes(damaged))
    except DataError:
        return
    assert len(found) == 2


V2_DENSE = struct.pack("<Ii", V2, 0)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (ROW_SPARSE, r"array 1 of 1 is row_sparse; only dense arrays can be read"),
        (file_of(struct.pack("<Ii", V2, 2)), "array 1 of 1 is csr; only dense"),
        (file_of(struct.pack("<Ii", V2, 9)), "of the unknown storage type 9"),
        (file_of(V2_DENSE + struct.pack("<i", 0)), "array 1 of 1 has no shape, because it was never filled"),
        (file_of(struct.pack("<Iii", V3, 0, -1)), "array 1 of 1 has no shape"),
        (file_of(V2_DENSE + struct.pack("<iqq", 2, 3, 0) + CPU_FLOAT32), r"the shape \(3, 0\), which has no elements"),
        (file_of(V2_DENSE + struct.pack("<iq", 1, -1) + CPU_FLOAT32), r"the shape \(-1,\), which has no elements"),
        (file_of(V2_DENSE + struct.pack("<i", 2**31 - 1)), "has 2147483647 dimensions, more than 32"),
        (
            file_of(V2_DENSE + struct.pack("<iqq", 2, 2**62, 2**62) + CPU_FLOAT32),
            r"array 1 of 1, float32 of shape \(4611686018427387904, 4611686018427387904\), needs \d{38} bytes at byte",
        ),
        (file_of(V2_DENSE + struct.pack("<iqiii", 1, 1, 1, 0, 13) + bytes(4)), "dtype number 13; MXNet's are 0 to 12"),
        (file_of(struct.pack("<I", 0xF993FACB)), "starts with 0xf993facb, which is not a version of MXNet's arrays"),
        (struct.pack("<QQQ", 0x112, 0, 2**63), "cannot hold 9223372036854775808 arrays in its remaining 0 bytes"),
        (file_of(names=(b"a", b"b")), "it has 0 arrays and 2 names"),
        (file_of(V2_DENSE + struct.pack("<iq", 1, 1) + CPU_FLOAT32 + bytes(4), names=()), "1 arrays and 0 names"),
        (file_of(V2_DENSE + struct.pack("<iq", 1, 1) + CPU_FLOAT32 + bytes(4), names=(b"\xff",)), "not valid UTF-8"),
        (WRITTEN_BY_MXNET + b"\0", "1 bytes follow its last name"),
        (
            file_of(*[V2_DENSE + struct.pack("<iq", 1, 1) + CPU_FLOAT32 + bytes(4)] * 2, names=(b"a", b"a")),
            "two arrays named 'a'",
        ),
        (b"", "the magic number needs 8 bytes at byte 0, but only 0 are left"),
    ],
)
def test_invalid_files_are_rejected(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        params.parse(data)


@pytest.mark.parametrize("tensor", [torch.tensor(1.0), torch.ones(0, 3), torch.ones(2, dtype=torch.complex64)])
def test_tensors_that_mxnet_cannot_read_are_not_written(tensor: Tensor, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a \.params file cannot hold 'arg:x', a (float32|complex64) tensor of shape"):
        params.save(tmp_path / "x.params", {"arg:x": tensor})
    assert not list(tmp_path.iterdir())
