"""A hostile worker cannot stop a server, spoil what others get from it, or fill its memory."""

from __future__ import annotations

import pytest

from fuzz.requests import request_source
from fuzz.server import Episode, fuzz

ANSWERS = {"Done", "Failed", "Placed", "Status", "States", "Resumed", "Joined", "refused frames"}


def test_some_thousand_messages() -> None:
    assert fuzz(5000, seed=3).keys() >= ANSWERS, "messages reach what is behind the checks"


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_messages() -> None:
    assert fuzz(150_000, seed=4).keys() >= ANSWERS


def test_the_fuzzer_finds_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr("echelon.server.shard.shard.check_header", fail)
    with pytest.raises(AssertionError, match="a message raised ZeroDivisionError"):
        fuzz(5000, seed=3)


def test_the_fuzzer_finds_wrong_weights() -> None:
    episode = Episode(request_source(), seed=5)
    episode.run(200)
    storage = episode._servers[0].slices.hosted[0].shards[0].storage
    next(iter(storage._weights.values()))[0] += 1
    with pytest.raises(AssertionError, match="the weights are right"):
        episode.run(200)
