"""Every loop ends and learns with two workers that do not wait for each other, or gives the error of the table."""

from __future__ import annotations

import pytest

from loops.checks import check, parameters
from loops.loop import RELAXED, Case, Way


@pytest.mark.parametrize(("case", "way"), parameters(RELAXED))
def test_loop(case: Case, way: Way) -> None:
    check(case, way)
