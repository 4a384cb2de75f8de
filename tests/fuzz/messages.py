"""Random messages from a seed: well-formed ones of any msgspec type, and damaged ones. All fuzzers take theirs here.

    source = MessageSource(get_args(Request), seed=7)
    source.well_formed()   # bytes that decode; the values are plausible or at a limit of their type
    source.damaged()       # bytes of such a message with a wrong value, a wrong length, or wrong bytes
    source.any()           # one of both
    source.frames()        # what may follow a data message

`POOLS` has plausible values by the name of a field, so that messages pass the first checks and reach the code behind
them. Two sources with the same arguments give the same messages.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import msgspec
from msgspec import inspect as types

Make = Callable[[], Any]  # returns a value that the encoder accepts

LOWEST, HIGHEST = -(2**63), 2**64 - 1  # of MessagePack's integers
LENGTH = 4  # of most lists and strings
POOLS: dict[str, Sequence[Any]] = {
    "role": ("worker", "server"),
    "rank": (0, 1, None),
    "pid": (1, 4711),
    "host": ("127.0.0.1", "a.example"),
    "address": ("", "tcp://127.0.0.1:9"),
    "gradients": ("", "memfd:1:3", "1:3:4096"),
    "weights": ("", "memfd:1:4", "1:4:4096"),
    "dtype": ("float32", "float16", "int64", "uint8"),
    "lr_scale": ("share", "mxnet"),
    "name": ("sgd", "adam", "0", "1", "weight", 0, 1),
    "id": tuple(range(1, 9)),
    "about": tuple(range(1, 9)),
    "clock": tuple(range(4)),
    "sequence": tuple(range(1, 4)),
    "number": (0, 1),
    "key": tuple(range(4)),
    "index": (0, 1),
    "start": (0, 64, 4096),
    "stripe": (0, 64, 4096),
    "capacity": (64, 4096),
    "samples": (None, 1.0, 32.0),
}
LIMITS = (-1, 0, 1, 2, 3, 127, 128, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, HIGHEST, LOWEST)
FLOATS = (0.0, 1.0, 0.5, -1.0, 1e-45, 1e300, -0.0, math.inf, -math.inf, math.nan)
TEXTS = ("", "a", "worker", "dist_sync", "dist_async", "é漢", "\0\n", "x" * 300)
ODD: tuple[Any, ...] = (  # in place of any value
    None,
    True,
    -1,
    2**63,
    LOWEST,
    HIGHEST,
    math.nan,
    math.inf,
    "",
    "x" * 70_000,
    b"\xff\xfe",
    [],
    [[]] * 100,
    {},
    {"a": {"b": [1]}},
    list(range(5000)),
    msgspec.Raw(b"\x91" * 3000 + b"\x00"),  # nested arrays
    msgspec.Raw(b"\x81\xa1a" * 2000 + b"\x00"),  # nested maps
    msgspec.Raw(b"\xdd\xff\xff\xff\xff"),  # claims of lengths that never come
    msgspec.Raw(b"\xdf\xff\xff\xff\xff"),
    msgspec.Raw(b"\xdb\xff\xff\xff\xff"),
    msgspec.Raw(b"\xa3\xff\xfe\xfd"),  # not UTF-8
    msgspec.Raw(b"\xc1"),  # a byte that MessagePack never uses
    msgspec.Raw(b"\xc7\x04\xff" + bytes(4)),  # a timestamp that is too short
    msgspec.Raw(b""),
)


class MessageSource:
    """Makes random messages of some kinds."""

    def __init__(
        self,
        kinds: Sequence[type[msgspec.Struct]],
        seed: int,
        pools: Mapping[str, Sequence[Any]] = POOLS,
        *,
        wild: float = 0.2,
    ) -> None:
        """`wild`: how many of the values that have a pool are not from it."""
        self.random = Random(seed)
        self._wild = wild
        self._pools = pools
        self._encode = msgspec.msgpack.Encoder().encode
        self._makers = [self._of_struct(types.type_info(kind)) for kind in kinds]

    def well_formed(self) -> bytes:
        """Return a message that can be decoded."""
        return self._encode(self._value())

    def damaged(self) -> bytes:
        """Return a message with something wrong. In rare cases it can still be decoded."""
        value = self._value()
        how = self.random.random()
        if how < 0.6:
            return self._encode(self._wrong(value))
        written = bytearray(self._encode(value))
        at = self.random.randrange(len(written))
        if how < 0.75:
            written[at] = self.random.randrange(256)
        elif how < 0.85:
            del written[at:]
        elif how < 0.95:
            written[at:at] = self.random.randbytes(self.random.randrange(1, 5))
        else:
            return self.random.randbytes(self.random.randrange(0, 60))
        return bytes(written)

    def any(self) -> bytes:
        """Return a message that is well-formed in two of three cases."""
        return self.damaged() if self.random.random() < 1 / 3 else self.well_formed()

    def frames(self, limit: int = 4096) -> list[bytes]:
        """Return frames as they may follow a data message: often none, or whole float32 or int64 values."""
        count = self.random.choice((0, 0, 1, 1, 2, 3))
        return [self._frame(limit) for _ in range(count)]

    def _frame(self, limit: int) -> bytes:
        size = self.random.choice((0, 4, 8, 64, 256, limit, self.random.randrange(limit)))
        if self.random.random() < 0.5:
            return struct.pack("<q", self.random.choice((-1, 0, 1, 2**62))) * (size // 8)
        return bytes(size)

    def _value(self) -> Any:
        return self.random.choice(self._makers)()

    def _wrong(self, value: Any) -> Any:
        """Return a message whose value at a random place is another one, or is missing."""
        if isinstance(value, list) and value and self.random.random() < 0.9:
            at = self.random.randrange(len(value))
            chance = self.random.random()
            if chance < 0.1:
                return value[:at] + value[at + 1 :]
            if chance < 0.2:
                at = self.random.randint(1, len(value))  # also after the last field
                return [*value[:at], self.random.choice(ODD), *value[at:]]
            return [*value[:at], self._wrong(value[at]), *value[at + 1 :]]
        if isinstance(value, dict) and value and self.random.random() < 0.9:
            key = self.random.choice(list(value))
            return value | {key: self._wrong(value[key])}
        return self.random.choice(ODD)

    def _maker(self, kind: types.Type, name: str = "") -> Make:
        """Return a function that makes values of a type. `name`: of the field, for its pool."""
        plain = self._plain(kind)
        pool = [value for value in self._pools.get(name, ()) if _has_type(value, kind)]
        if not pool:
            return plain
        pick, chance, wild = self.random.choice, self.random.random, self._wild
        return lambda: plain() if chance() < wild else pick(pool)

    def _plain(self, kind: types.Type) -> Make:
        pick = self.random.choice
        match kind:
            case types.IntType():
                numbers = [number for number in LIMITS if _within(number, kind)]
                return lambda: pick(numbers)
            case types.FloatType():
                floats = [number for number in FLOATS if _within(number, kind)]
                return lambda: pick(floats)
            case types.StrType():
                texts = [text for text in TEXTS if len(text) <= (kind.max_length or len(text))]
                texts = [text for text in texts if len(text) >= (kind.min_length or 0)]
                return lambda: pick(texts)
            case types.BoolType():
                return lambda: pick((False, True))
            case types.NoneType():
                return lambda: None
            case types.BytesType():
                return lambda: self.random.randbytes(self.random.randint(0, LENGTH))
            case types.EnumType(cls):
                members = [member.value for member in cls]
                return lambda: pick(members)
            case types.UnionType(kinds):
                makers = [self._plain(one) for one in kinds]
                return lambda: pick(makers)()
            case types.StructType():
                return self._of_struct(kind)
        return self._of_container(kind)

    def _of_container(self, kind: types.Type) -> Make:
        random = self.random
        match kind:
            case types.ListType(item_type) | types.VarTupleType(item_type):
                item = self._maker(item_type)
                most = LENGTH if kind.max_length is None else min(LENGTH, kind.max_length)
                return lambda: [item() for _ in range(random.randint(kind.min_length or 0, most))]
            case types.TupleType(item_types):
                items = [self._maker(one) for one in item_types]
                return lambda: [item() for item in items]
            case types.DictType():
                key, value = self._maker(kind.key_type), self._maker(kind.value_type)
                return lambda: {key(): value() for _ in range(random.randint(0, 3))}
        raise TypeError(f"the fuzzers cannot make values of {kind}; add its kind here")

    def _of_struct(self, kind: types.Type) -> Make:
        assert isinstance(kind, types.StructType)
        makers = {field.encode_name: self._maker(field.type, field.name) for field in kind.fields}
        required = sum(field.required for field in kind.fields)
        random = self.random
        if not kind.array_like:
            return lambda: {name: make() for name, make in makers.items()}
        fields = list(makers.values())
        head = [] if kind.tag is None else [kind.tag]

        def make() -> list[Any]:
            count = len(fields) if random.random() < 0.8 else random.randint(required, len(fields))
            return head + [field() for field in fields[:count]]

        return make


def _within(number: float, kind: types.IntType | types.FloatType) -> bool:
    """Return whether a number obeys the constraints of a type. NaN obeys none."""
    return (
        (kind.ge is None or number >= kind.ge)
        and (kind.gt is None or number > kind.gt)
        and (kind.le is None or number <= kind.le)
        and (kind.lt is None or number < kind.lt)
        and (kind.multiple_of is None or number % kind.multiple_of == 0)
    )


def _has_type(value: Any, kind: types.Type) -> bool:
    """Return whether a value of a pool has a field's type: fields of one name may differ in type."""
    match kind:
        case types.UnionType(kinds):
            return any(_has_type(value, one) for one in kinds)
        case types.IntType():
            return type(value) is int and _within(value, kind)
        case types.FloatType():
            return type(value) is float and _within(value, kind)
        case types.StrType():
            return type(value) is str and len(value) <= (kind.max_length or len(value))
        case types.NoneType():
            return value is None
    return False
