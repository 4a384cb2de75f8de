"""The command line of `echelon bench pushpull`."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from echelon.bench.pushpull.run import make_contenders
from echelon.cli.bench import add_parser
from echelon.errors import UsageError


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    return parser.parse_args(["bench", "pushpull", *arguments])


def test_the_documented_command_is_accepted() -> None:
    line = "--model resnet50 -n 2 -s 2 --kv-store dist_sync --peer gloo --peer mxnet --json out.json --transport tcp"
    args = parsed(*line.split())
    assert (args.model, args.num_workers, args.num_servers, args.kv_store) == ("resnet50", 2, 2, "dist_sync")
    assert (args.peer, args.json, args.transport) == (["gloo", "mxnet"], Path("out.json"), "tcp")
    assert callable(args.run)


def test_echelon_comes_first_and_then_the_peers(tmp_path: Path) -> None:
    contenders = make_contenders(parsed("--model", "mlp", "--peer", "gloo"), tmp_path)
    assert [contender.name for contender in contenders] == ["echelon", "gloo"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0"], "-n 0"),
        (["--peer", "gloo", "--peer", "gloo"], "each --peer only once"),
        (["--model", "resnet51"], "resnet50"),
        (["--kv-store", "dist_gsync", "--peer", "mxnet"], "MXNet has no store 'dist_gsync'"),
    ],
)
def test_invalid_flags_are_rejected_before_anything_starts(arguments: list[str], message: str) -> None:
    args = parsed(*arguments)
    with pytest.raises(UsageError, match=message):
        args.run(args)
