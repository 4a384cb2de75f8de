"""The table of loops itself: it is large enough, consistent, and the documentation has its newest state."""

from __future__ import annotations

from loops.loop import SAME, Way, all_cases
from loops.table import COMMAND, DOCUMENT, with_table


def test_the_documentation_has_the_newest_table() -> None:
    text = DOCUMENT.read_text()
    assert with_table(text) == text, f"run: {COMMAND}"


def test_there_are_many_loops() -> None:
    assert len(all_cases()) >= 120


def test_a_way_that_differs_is_not_refused() -> None:
    for case in all_cases().values():
        assert all(case.outcomes[way] == SAME for way in case.differs), case.name
        assert set(case.outcomes) == set(Way)
