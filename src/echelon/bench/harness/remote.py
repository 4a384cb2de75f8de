"""Contenders on several hosts: their processes start over ssh.

`ssh HOST python -m echelon.bench.harness.remote` reads one line with the environment, the working directory and the
command of a process from its standard input, and becomes that process. So nothing of it is on a command line, and the
rest of the input is the process's own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.environment import child_environment, replace_environment
from echelon.launch.addresses import announced_address
from echelon.launch.hosts import Host
from echelon.launch.ssh.client import SshClient, module_command, package_folder
from echelon.system import PACKAGE

MODULE = "echelon.bench.harness.remote"


@dataclass(frozen=True, slots=True)
class Hosts:
    """The hosts of a benchmark, how ssh reaches them, and their interface."""

    names: tuple[str, ...]
    interface: str
    ssh_config: str | None = None

    def at(self, index: int) -> str:
        """Return the host of a process: they go to the hosts in turn."""
        return self.names[index % len(self.names)]

    def command(self, host: str) -> list[str]:
        """Return the ssh command that starts a process on a host."""
        folder = package_folder(PACKAGE, Path.cwd(), None)
        return [*SshClient(self.ssh_config).command(Host(host)), module_command(sys.executable, folder, MODULE)]

    def own_address(self) -> str:
        """Return the address of this machine that the hosts reach."""
        return announced_address(None, os.uname().nodename, self.names)

    def run(self, host: str, argv: Sequence[str]) -> subprocess.Popen[str]:
        """Start a program on a host, with pipes to it."""
        return subprocess.Popen(
            [*SshClient(self.ssh_config).command(Host(host)), *argv], stdout=subprocess.PIPE, text=True
        )


def first_line(argv: Sequence[str], environment: Mapping[str, str]) -> bytes:
    """Return the line that makes the program of this module another one."""
    return json.dumps([list(argv), dict(environment), os.getcwd()]).encode() + b"\n"


def main() -> None:
    """Become the process that the first line describes."""
    print("", flush=True)  # ends the line of the login shell
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(0, 1)  # not more: the rest is for the process
    argv, environment, folder = json.loads(line)
    os.chdir(folder)
    replace_environment(child_environment(environment))
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main()
