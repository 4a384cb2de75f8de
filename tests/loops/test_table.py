"""The table of loops itself: it is large enough, consistent, and the documentation has its newest state."""

from __future__ import annotations

from loops.loop import Way, all_cases
from loops.pending import PENDING
from loops.table import COMMAND, DOCUMENT, with_table


def test_the_documentation_has_the_newest_table() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, f"run: {COMMAND}"


def test_pending_loops_exist() -> None:
    assert set(PENDING) <= set(all_cases())


def test_a_skipped_way_has_no_outcome_of_its_own() -> None:
    for case in all_cases().values():
        for way in case.skip:
            assert case.outcomes[way].refused is None, f"{case.name}: {way.value} is skipped"
        assert set(case.outcomes) == set(Way)
