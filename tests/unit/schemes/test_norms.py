"""Norms of rounds that a server was told by workers, because its predecessor was lost."""

from __future__ import annotations

import pytest

from echelon.errors import UsageError
from echelon.schemes.norms import NormRequest, Norms


def ask(norms: Norms, clock: int, applied: int) -> float | None:
    return norms.ask(0, NormRequest(1, 7, (4, 5), clock, None, [4, 5]), [applied, applied])


def test_a_norm_that_a_worker_was_told_is_the_answer_for_the_others() -> None:
    norms = Norms()
    with pytest.raises(UsageError, match="norm of different keys"):
        ask(norms, clock=3, applied=4)
    norms.know(0, [4, 5], 3, 2.5)
    assert ask(norms, clock=3, applied=4) == 2.5


def test_an_older_norm_does_not_replace_a_newer_one() -> None:
    norms = Norms()
    norms.know(0, [4, 5], 3, 2.5)
    norms.know(0, [4, 5], 2, 9.0)
    assert ask(norms, clock=3, applied=4) == 2.5
