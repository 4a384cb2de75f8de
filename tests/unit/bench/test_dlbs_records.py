"""Log lines `__key__=json`, and what an existing log means."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.bench.dlbs.records import benchmark_data, read_records, record_line
from echelon.bench.dlbs.rerun import decide

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.from_regex(r"[a-z]+(\.[a-z0-9_]*[a-z0-9])*", fullmatch=True).filter(lambda key: "__" not in key)
NOISE = st.text(alphabet=st.characters(exclude_characters="_\r\n", exclude_categories=["Cs"]))
DLBS = re.compile(r"[ \t]*__(.+?(?=__[ \t]*[=]))__[ \t]*=(.+)")  # logparser.py of DLBS


@given(st.dictionaries(KEYS, VALUES, max_size=5), st.lists(NOISE, max_size=5))
def test_what_is_written_is_read(records: dict[str, Any], noise: list[str]) -> None:
    lines = [*noise, *(record_line(key, value) for key, value in records.items()), *noise]
    assert all("\n" not in line for line in lines)
    assert read_records(line + "\n" for line in lines) == records


@given(KEYS, VALUES)
def test_dlbs_reads_the_lines(key: str, value: Any) -> None:
    match = DLBS.match(record_line(key, value))
    assert match is not None
    assert (match[1], json.loads(match[2])) == (key, value)


def test_the_last_line_of_a_key_counts_and_other_lines_do_not() -> None:
    lines = ['__exp.status__="running"', '[worker 0] __exp.status__="spoofed"', "__results.time__=", "__a__={torn"]
    assert read_records([*lines, '  __exp.status__ = "ok"']) == {"exp.status": "ok"}


@pytest.mark.parametrize("key", ["", " a", "a__=b", "a\nb"])
def test_a_key_that_could_not_be_read_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="cannot be the key of a log line"):
        record_line(key, 1)


def test_the_results_have_the_form_of_dlbs() -> None:
    assert benchmark_data([{"exp.id": "1"}, {"exp.id": "2"}]) == {"data": [{"exp.id": "1"}, {"exp.id": "2"}]}


def parameters(rerun: str) -> dict[str, Any]:
    return {"exp.rerun": rerun, "exp.log_file": "logs/a.log", "exp.replica_batch": 32}


@pytest.mark.parametrize(
    ("status", "rerun", "runs"),
    [
        (None, "never", True),
        ("running", "never", True),
        ("running", "onfail", True),
        ("ok", "never", False),
        ("ok", "onfail", False),
        ("ok", "always", True),
        ("failure", "never", False),
        ("failure", "onfail", True),
        ("failure", "always", True),
    ],
)
def test_the_log_and_the_policy_decide_about_a_run(status: str | None, rerun: str, runs: bool) -> None:
    log = None if status is None else {"exp.status": status, "exp.replica_batch": 32}
    assert decide(parameters(rerun), log).runs is runs


def test_the_log_of_another_experiment_is_not_taken_for_this_one() -> None:
    decision = decide(parameters("never"), {"exp.status": "ok", "exp.replica_batch": 64})
    assert (decision.runs, decision.conflict) == (False, True)
    assert "logs/a.log holds another experiment, with exp.replica_batch 64 instead of 32" in decision.reason
    assert decide(parameters("always"), {"exp.status": "ok", "exp.replica_batch": 64}).runs
