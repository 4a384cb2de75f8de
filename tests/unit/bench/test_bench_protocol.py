"""The lines between harness and worker programs: answers are read back as written, and other lines are ignored."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echelon.bench.harness.protocol import Ready, Times, commands, decode_answer, encode_answer, run_command, serve

numbers = st.lists(st.floats(0, 1e6, allow_nan=False)).map(tuple)
answers = st.one_of(st.just(Ready()), st.builds(Times, numbers, numbers))


@given(answers, st.sampled_from(["", "worker 0 | ", "[server 1] "]))
def test_an_answer_is_read_back_after_any_prefix(answer: Ready | Times, prefix: str) -> None:
    assert decode_answer(prefix + encode_answer(answer)) == answer


@pytest.mark.parametrize(
    "line",
    [
        "",
        "hello",
        "{",
        '{"ready": 1}',
        '{"step_s": 3}',
        '{"step_s": ["x"]}',
        '{"step_s": [[]]}',
        '{"step_s": [1], "losses": 2}',
        "{} {}",
        "[1]",
    ],
)
def test_other_lines_are_not_answers(line: str) -> None:
    assert decode_answer(line) is None


def test_serve_answers_each_command_until_quit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(run_command(2) + run_command(1) + "quit\n" + run_command(5)))
    serve(lambda num_steps: [0.25] * num_steps)
    answers = [decode_answer(line) for line in capsys.readouterr().out.splitlines()]
    assert answers == [Ready(), Times((0.25, 0.25)), Times((0.25,))]


def test_serve_sends_losses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(run_command(1)))
    serve(lambda num_steps: Times((0.25,), (2.5,)))
    assert decode_answer(capsys.readouterr().out.splitlines()[-1]) == Times((0.25,), (2.5,))


def test_the_end_of_the_stream_means_quit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(run_command(3)))
    assert list(commands()) == [3]


def test_an_unknown_command_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("walk 3\n"))
    with pytest.raises(ValueError, match="walk 3"):
        list(commands())
