"""The fuzzers' messages: well-formed ones decode, damaged ones mostly do not, and a seed gives the same ones again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import pytest

from echelon.cluster.messages import (
    ControlMessage,
    Malformed,
    Request,
    Response,
    decode_control,
    decode_request,
    decode_response,
)
from fuzz.messages import MessageSource

FAMILIES = pytest.mark.parametrize(
    ("family", "decode"),
    [(ControlMessage, decode_control), (Request, decode_request), (Response, decode_response)],
    ids=["control", "request", "response"],
)
COUNT = 3000


@FAMILIES
def test_well_formed_messages_of_every_kind_decode(family: Any, decode: Callable[[bytes], msgspec.Struct]) -> None:
    source = MessageSource(get_args(family), seed=1)
    kinds = Counter(type(decode(source.well_formed())) for _ in range(COUNT))
    assert kinds.keys() == set(get_args(family))


@FAMILIES
def test_most_damaged_messages_are_malformed(family: Any, decode: Callable[[bytes], msgspec.Struct]) -> None:
    source = MessageSource(get_args(family), seed=2)
    refused = 0
    for _ in range(COUNT):
        try:
            decode(source.damaged())
        except Malformed:
            refused += 1
    assert COUNT / 2 < refused < COUNT


def test_a_seed_gives_the_same_messages_again() -> None:
    def some(seed: int) -> list[bytes]:
        source = MessageSource(get_args(Request), seed)
        return [source.any() for _ in range(100)] + source.frames()

    assert some(3) == some(3)
    assert some(3) != some(4)
