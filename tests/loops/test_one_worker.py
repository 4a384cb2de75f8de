"""Every loop with a Trainer and one worker gives the bits of plain PyTorch, or the error of the table.

Both runs have the same number of threads and float32 parameters on the CPU.
"""

from __future__ import annotations

import pytest

from loops.checks import check, parameters
from loops.loop import Case, Way
from loops.servers import DELAY_S

pytestmark = pytest.mark.numeric


@pytest.mark.parametrize(("case", "way"), parameters([Way.ONE]))
def test_loop(case: Case, way: Way) -> None:
    check(case, way)


@pytest.mark.parametrize(("case", "way"), parameters([Way.ONE], only_reading=True))
def test_loop_with_delayed_pushes(case: Case, way: Way) -> None:
    """A race between the loop and the new weights shows every time."""
    check(case, way, delay_s=DELAY_S)
