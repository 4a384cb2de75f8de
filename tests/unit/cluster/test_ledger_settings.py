"""Workers that open a ledger with other settings are refused, with both settings."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from echelon.cluster.ledger.ledger import Ledger
from echelon.cluster.messages import LedgerRefused, OpenLedger

OPENED = OpenLedger(0, 8, 4, 3, order="seed 0, shuffled")


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (replace(OPENED, order="seed 1, shuffled"), ("seed 0, shuffled", "seed 1, shuffled")),
        (replace(OPENED, order="not shuffled"), ("seed 0, shuffled", "not shuffled")),
        (replace(OPENED, num_samples=9), ("of 8 samples", "of 9 samples")),
    ],
)
def test_a_worker_with_another_ledger_is_refused(other: OpenLedger, said: tuple[str, str]) -> None:
    ledger = Ledger(OPENED, 1, ())
    ledger.open(0, OPENED)
    ((rank, refused),) = ledger.open(1, other)
    assert rank == 1
    assert isinstance(refused, LedgerRefused)
    assert all(part in refused.reason for part in said)


def test_a_worker_that_resumes_later_has_the_same_ledger() -> None:
    ledger = Ledger(OPENED, 1, ())
    ledger.open(0, OPENED)
    ledger.open(1, replace(OPENED, epoch=1, done=[(0, 4)]))
    assert ledger.members == {0, 1}
