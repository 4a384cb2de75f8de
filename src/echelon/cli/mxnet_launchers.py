"""MXNet's own launch scripts: `tools/launch.py`, and `dmlc_local.py`, `dmlc_ssh.py`, `dmlc_mpi.py` and `dmlc_yarn.py`.

They are `echelon launch` with another default launcher, and with the names that these scripts have for its flags. Other
than in MXNet, the flags of the launcher end where the command begins, so the command keeps all of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from echelon.cli.launch import add_launch_arguments, run
from echelon.cli.main import run_command
from echelon.train.flags.parser import Parser

LAUNCHERS_OF_SCRIPTS = {
    "launch.py": None,  # what --launcher names: by default ssh with a hosts file, and local without
    "dmlc_local.py": "local",
    "dmlc_ssh.py": "ssh",
    "dmlc_mpi.py": "mpi",
    "dmlc_yarn.py": "yarn",
}
_OTHER_NAMES = {  # MXNet's names of flags
    "--num-workers": ["--nworker"],
    "--num-servers": ["--nserver", "--server-nodes"],
    "--hostfile": ["--host-file"],
    "--sync-dst-dir": ["--sync-dir"],
}
_YARN_NAMES: dict[str, tuple[tuple[str, ...], type]] = {  # of dmlc_yarn.py alone, by the field of `echelon launch`
    "yarn_queue": (("-q", "--queue"), str),
    "yarn_memory": (("-mem", "--memory-mb"), int),
    "yarn_vcores": (("--vcores",), int),
}
_WITHOUT_EFFECT = {  # flags that are accepted, and what the user is told
    "--host-ip": "the launcher announces the address that reaches the hosts; choose its interface with -i",
    "--log-level": "all lines of all processes are shown",
    "--log-file": "all lines are shown; write them to a file with > FILE",
    "--max-attempts": "--max-restarts says how often each process is restarted",
    "--local-num-attempt": "--max-restarts says how often each process is restarted",
    "--jobname": "the run has a name of its own",
}
_CHOOSE_HOSTS = {  # launchers that take no hosts file
    "local": "all processes start on this machine",
    "yarn": "YARN chooses the hosts",
}
_P3 = "gradients are always sent in small buckets during the backward pass, the last layers' first"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the scripts, and return its exit status."""
    script = Path(sys.argv[0]).name
    given = list(sys.argv[1:] if arguments is None else arguments)
    return run_command(lambda: make_parser(script), given)


def make_parser(script: str) -> Parser:
    """Return the parser of a script."""
    launcher = LAUNCHERS_OF_SCRIPTS[script]
    parser = Parser(prog=script, description=f"{script} of MXNet. 'echelon launch --help' says more about the flags.")
    parser.advice = f"the command's own flags come after it, as in: {script} -n 2 -H hosts python train.py --lr 0.1"
    add_launch_arguments(parser, _OTHER_NAMES)
    for field, (names, kind) in _YARN_NAMES.items() if launcher == "yarn" else ():
        parser.add_argument(*names, dest=field, type=kind, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name in _WITHOUT_EFFECT:
        parser.add_argument(name, dest=f"unused {name}", help=argparse.SUPPRESS)
    parser.add_argument("--p3", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(launcher=launcher, run=_run)
    return parser


def _run(options: argparse.Namespace) -> int:
    for name, instead in _WITHOUT_EFFECT.items():
        if getattr(options, f"unused {name}") is not None:
            _say(f"{name} has no effect: {instead}")
    if options.p3:
        _say(f"--p3 has no effect: {_P3}")
    options.launcher = options.launcher or ("ssh" if options.hostfile else "local")
    if options.hostfile and options.launcher in _CHOOSE_HOSTS:
        _say(f"-H {options.hostfile} has no effect: {_CHOOSE_HOSTS[options.launcher]}")
        options.hostfile = None
    return run(options)


def _say(text: str) -> None:
    print(f"echelon: {text}", file=sys.stderr, flush=True)
