"""Every loop with a Trainer and two workers equals DistributedDataParallel, or gives the error of the table.

The workers are in lock-step, with two servers or without any. Parameters are float64, so that the tolerance is small
and a real difference cannot hide in it.
"""

from __future__ import annotations

import pytest

from loops.checks import check, parameters
from loops.loop import Case, Way
from loops.servers import DELAY_S

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(("case", "way"), parameters([Way.SYNC, Way.COLLECTIVE]))
def test_loop(case: Case, way: Way) -> None:
    check(case, way)


@pytest.mark.parametrize(("case", "way"), parameters([Way.SYNC], only_reading=True))
def test_loop_with_delayed_pushes(case: Case, way: Way) -> None:
    """A race between the loop and the new weights shows every time."""
    check(case, way, delay_s=DELAY_S)
