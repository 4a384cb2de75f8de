"""The `echelon` command. Every sub-command has its own module, which is imported only when it is used."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from echelon.errors import EchelonError
from echelon.train.flags.arguments import Parser

COMMANDS = {
    "train": "train a model on many workers of this machine",
    "score": "measure a checkpoint on a validation set",
    "launch": "start a scheduler, servers and workers around any command",
    "data": "download published data sets; create, check and convert RecordIO data",
    "bench": "benchmark Echelon against other systems",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(
        prog="echelon", description="Distributed training where one flag sets how strictly workers wait for each other."
    )
    wanted = given[0] if given and given[0] in COMMANDS else None
    kind = Parser if wanted == "train" else argparse.ArgumentParser  # it also accepts MXNet's abbreviated flags
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=kind)
    for name, summary in COMMANDS.items():
        if name == wanted:
            importlib.import_module(f"echelon.cli.{name}").add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    try:
        options = parser.parse_args(given)
        return int(options.run(options))
    except EchelonError as error:
        print(f"echelon: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
