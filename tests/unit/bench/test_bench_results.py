"""The result file and the table of a benchmark."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest

from echelon.bench.harness.results import figures, print_times, write_result
from echelon.bench.harness.turns import Case, summarise
from echelon.observe.machine import command_line, commit, machine


def two_cases() -> list[Case]:
    return summarise({"echelon": [[0.010, 0.012], [0.011, 0.013]], "mxnet": [[0.1, 0.1], [0.2, 0.2]]})


def test_the_result_file_is_complete_and_can_be_read_back(tmp_path: Path) -> None:
    cases = two_cases()
    path = tmp_path / "new" / "result.json"
    body = {"settings": {"model": "mlp", "rounds": 2}, **figures(cases)}
    write_result(path, body, command="echelon bench pushpull")
    body = json.loads(path.read_text())
    assert list(body) == ["command", "commit", "machine", "date", "settings", "cases", "ratios", "ratio_spread"]
    assert body["command"] == "echelon bench pushpull"
    assert body["settings"] == {"model": "mlp", "rounds": 2}
    assert body["ratios"] == {"echelon_vs_mxnet": round(150 / 11.5, 4)}
    assert body["ratio_spread"]["echelon_vs_mxnet"]["low"] == round(100 / 11, 4)
    restored = [Case(**{**case, "rounds": tuple(map(tuple, case["rounds"]))}) for case in body["cases"]]
    assert restored == cases
    assert [file.name for file in path.parent.iterdir()] == ["result.json"]


def test_the_description_of_the_machine_has_no_host_name() -> None:
    described = machine()
    assert set(described) == {"cpu", "cores", "memory_gib", "kernel", "python", "torch"}
    assert socket.gethostname() not in json.dumps(described)
    assert "/" not in json.dumps(described["kernel"])


def test_commit_and_command_have_no_paths() -> None:
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?|unknown", commit())
    assert "/" not in command_line().split()[0]


def test_the_table_shows_medians_and_ratios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    print_times("pushpull", two_cases())
    out = capsys.readouterr().out
    assert "13.04 ×" in out
    assert "9.09 – 16.67" in out
    assert "echelon_vs_mxnet: 13.04" in out
