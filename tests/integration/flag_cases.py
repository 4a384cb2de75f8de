"""Runs many commands in one process, because each import of torch takes seconds: `flag_cases.py CASES.json`.

The file maps names to command lines: `train_imagenet.py …` runs the script, `echelon …` the command. A line with the
name is written to standard error before and after each case; the second one has the exit status.
"""

from __future__ import annotations

import json
import runpy
import shlex
import sys
from pathlib import Path

from echelon.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples" / "image-classification"


def run(command: list[str]) -> int:
    """Run a command in this process; returns the exit status that the interpreter would return."""
    if command[0] == "echelon":
        return main(command[1:])
    sys.argv = [str(EXAMPLES / command[0]), *command[1:]]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
            return 1
        return leaving.code or 0
    return 0


if __name__ == "__main__":
    for name, line in json.loads(Path(sys.argv[1]).read_text()).items():
        print(f"case {name}", file=sys.stderr, flush=True)
        status = run(shlex.split(line))
        sys.stdout.flush()
        print(f"ends {name} {status}", file=sys.stderr, flush=True)
