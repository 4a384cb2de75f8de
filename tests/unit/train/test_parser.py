"""The parser of every command line: nearest flags, recorded flags, and help that fits the terminal."""

from __future__ import annotations

import argparse
import re

import pytest

from echelon.cli.main import COMMANDS, main, make_parser
from echelon.errors import UsageError
from echelon.schemes.stores import STORES
from echelon.train.flags.parser import Parser, was_given
from echelon.train.script import make_parser as make_script_parser

TRAIN = make_script_parser("Train.\n\n    python train.py             # an example\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--batchsize 3", "unknown flag --batchsize; did you mean --batch-size? "),
        ("--batch_size 3", "unknown flag --batch_size; did you mean --batch-size? "),
        ("--epochs=3", "unknown flag --epochs; did you mean --num-epochs? "),
        ("--learning-rate 1", "unknown flag --learning-rate; did you mean --lr? "),
        ("--xyzzy 3", "unknown flag --xyzzy; "),
        ("5", "unexpected argument '5'; "),
        ("--resume yes", "unknown --resume 'yes'; choose one of auto, no"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'; "),
    ],
)
def test_a_mistake_is_one_line_with_the_nearest_flag(flags: str, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        TRAIN.parse_args(flags.split())
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "unknown command 'trian'; did you mean 'train'? Choose one of train, score, "),
        ("train --kvstore dist_sync", "unknown flag --kvstore; did you mean --kv-store? echelon train --help "),
        ("launch -n 2 --kv-store dist_sync python train.py", "unknown flag --kv-store; the command's own flags come "),
        ("data im2erc a b", "unknown command 'im2erc'; did you mean 'im2rec'? "),
        ("data get mnist --data_dir x", "unknown flag --data_dir; did you mean --data-dir? echelon data get --help "),
        ("bench pushpull --worker 2", "unknown flag --worker; "),
        ("launch python train.py", "the following arguments are required: -n/--num-workers; "),
    ],
)
def test_sub_commands_report_mistakes_alike(capsys: pytest.CaptureFixture[str], words: str, message: str) -> None:
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"echelon: {message}")


def test_given_flags_are_recorded_and_defaults_are_not() -> None:
    parser = Parser()
    parser.add_argument("--store", default="local")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.set_defaults(lr=0.2)
    given = parser.parse_args(["--store", "local"])
    assert (given.store, given.lr) == ("local", 0.2)
    assert was_given(given, "store")
    assert not was_given(given, "lr")


def valued_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the flags that the help lists and that may be left out."""
    shown = (action for action in parser._actions if action.option_strings and action.help != argparse.SUPPRESS)
    return [action for action in shown if not action.required and action.dest not in ("help", "version")]


def commands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of all commands below a parser, and the parser itself."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                found += commands(below)
    return found


def all_commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every command. make_parser([name]) has the flags of that command only."""
    found: dict[str, argparse.ArgumentParser] = {"script": TRAIN}
    for name in COMMANDS:
        whole = make_parser([name])
        found |= {one.prog: one for one in commands(whole) if one is whole or one.prog.split()[1] == name}
    return found


ALL = all_commands()


@pytest.mark.parametrize("prog", ALL)
def test_the_help_shows_every_default_and_fits(monkeypatch: pytest.MonkeyPatch, prog: str) -> None:
    parser = ALL[prog]
    for columns in (80, 52):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = parser.format_help()
        assert max(map(len, text.splitlines())) <= columns
    rows = re.split(r"\n  (?=-)", parser.format_help())  # one flag each
    for action in valued_flags(parser):
        names = ", ".join(action.option_strings)
        (row,) = (row for row in rows if re.match(rf"{names}\s", row))
        explained = " ".join(row.split())
        assert re.search(r"default: [^)]", explained), explained
        assert not re.search(r"\(\S+\) \(default: none\)", explained), "two defaults"


def test_the_usage_shows_that_several_files_can_be_given() -> None:
    assert ALL["echelon predict"].format_usage() == "usage: echelon predict [flags] FILE…\n"


def test_the_help_of_a_trainer_lists_every_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = TRAIN.format_help().partition("stores (--kv-store):\n")[2].splitlines()
    names = [row.split()[0] for row in rows if row[2:3] != " "]
    assert names == list(STORES)
    assert all(len(row) > len(name) + 20 for row, name in zip(rows, names, strict=False))


def test_examples_in_a_description_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "\n    python train.py             # an example\n" in TRAIN.format_help()


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out.startswith("usage: echelon ")
    assert err == ""


def test_the_version_names_torch_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("echelon 0.")


def test_help_is_also_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["help", "launch"])
    assert capsys.readouterr().out.startswith("usage: echelon launch ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-n 4 --staleness 3", "--staleness 3 has no meaning for --kv-store dist_sync; use --kv-store dist_ssync or "),
        (
            "-n 4 --groups 0,1/2,3",
            "--groups 0,1/2,3 has no meaning for --kv-store dist_sync; use --kv-store dist_g",
        ),
        (
            "--staleness 3",
            "--staleness 3 has no meaning for --kv-store local; use --kv-store dist_ssync or ",
        ),
        ("--devices gpu:0", "--devices 'gpu:0' is neither cpu:COUNT nor a list like cuda:0,cuda:1; write cuda:0"),
    ],
)
def test_a_flag_of_another_store_names_that_store(capsys: pytest.CaptureFixture[str], flags: str, message: str) -> None:
    assert main(["train", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(f"echelon: {message}")
