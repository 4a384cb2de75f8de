"""The ssh program as the launcher uses it: its command line, the command on the other host, and its errors. Pure.

All data of a job goes through the standard input of the agent. The command on the other host has only the path of
Python and of Echelon, because the login shell there, whichever it is, parses it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from echelon.launch.hosts import Host

AGENT = "echelon.launch.agents.agent"
SSH_FAILED = 255  # the exit code of ssh itself
CONNECT_S = 10  # to connect, and to exchange keys
READY = b"echelon-agent\n"  # printed before the agent starts; a shell's start-up files may print before it
_ALIVE_INTERVAL_S, _ALIVE_COUNT = 5, 2  # a host that vanished is noticed after 5 * (2 + 1) s
_INSTALLED = ("site-packages", "dist-packages")
_MAX_SHOWN = 300  # characters of an error that is not recognized


@dataclass(frozen=True)
class SshClient:
    """How to call ssh. `config` and `options` are the user's: a file for -F, and values for -o."""

    config: str | None = None
    options: tuple[str, ...] = ()

    def command(self, host: Host) -> list[str]:
        """Return the command line up to the host; the command to run there follows."""
        return [*self.login(host), "--", host.name]

    def login(self, host: Host) -> list[str]:
        """Return the command line without the host.

        The user's options come first, because ssh uses the first value of an option. Nothing may ask a question, since
        nobody could answer several hosts at once. Settings of the user's configuration that belong to interactive
        sessions are switched off: a second session that forwards the same port would fail.
        """
        config = ["-F", self.config] if self.config else []
        user = ["-l", host.user] if host.user else []
        port = ["-p", str(host.port)] if host.port else []
        own = {
            "BatchMode": "yes",
            "ConnectTimeout": CONNECT_S,
            "ServerAliveInterval": _ALIVE_INTERVAL_S,
            "ServerAliveCountMax": _ALIVE_COUNT,
            "LogLevel": "INFO",  # errors are recognized by their text
            "ControlPath": "none",
            "RemoteCommand": "none",
            "ClearAllForwardings": "yes",
        }
        settings = [*self.options, *(f"{name}={value}" for name, value in own.items())]
        return ["ssh", "-T", "-x", *config, *user, *port, *(word for setting in settings for word in ("-o", setting))]


def module_command(python: str, package_folder: str | None, module: str = AGENT) -> str:
    """Return what the login shell of a host runs. `package_folder` is searched for Echelon, after PYTHONPATH.

    The folder of Python comes first in PATH, so that `python` in the job's command is the same program. With -P, the
    home folder, where the command starts, is not searched: it may have files with names of modules.
    """
    variables = [f'PATH={shlex.quote(str(PurePosixPath(python).parent))}:"$PATH"'] if "/" in python else []
    if package_folder:
        variables += [f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}"{shlex.quote(package_folder)}']
    export = f"export {' '.join(variables)}; " if variables else ""
    ready = shlex.quote(READY.decode().strip())
    script = f"echo {ready}; {export}exec {shlex.quote(python)} -P -m {module}"
    return f"exec sh -c {shlex.quote(script)}"


def package_folder(package: Path, cwd: Path, sync_dst_dir: str | None) -> str | None:
    """Return the folder where hosts find Echelon if they have the same files as this one; None if it is installed.

    If it is below the folder that is copied, it is the copy. Otherwise it is the same path, as on a shared disk or
    after `scp_mxnet.py`.
    """
    folder = package.parent
    if folder.name in _INSTALLED:
        return None
    if sync_dst_dir is not None and folder.is_relative_to(cwd):
        return str(PurePosixPath(sync_dst_dir) / folder.relative_to(cwd))
    return str(folder)


def target(host: Host) -> str:
    """Return a host as ssh-copy-id and ssh take it: `-p 2222 anna@node-3`."""
    port = f"-p {host.port} " if host.port else ""
    return f"{port}{host.user}@{host.name}" if host.user else f"{port}{host.name}"


# What ssh and the host write, the cause, and what to do. The first match counts. {host} is the name, {target} what ssh
# takes, {python} the program, and {0} the group of the expression.
_CAUSES_OF_SSH = [
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED",
        "the host key of {host} is not the known one: it was installed again, or another machine answers",
        "if that is expected, forget the old key: ssh-keygen -R {host}",
    ),
    (
        r"Host key verification failed",
        "the host key of {host} is unknown",
        "log in once to accept it: ssh {target} (or trust new hosts: --ssh-option StrictHostKeyChecking=accept-new)",
    ),
    (
        r"(Permission denied \([^)]*\)|Too many authentication failures)",
        "{host} does not let this user log in without a password: {0}",
        "copy your key there: ssh-copy-id {target}",
    ),
    (
        r"Could not resolve hostname [^:]*: (.*)",
        "the host name {host} is unknown: {0}",
        "correct it in the hosts file, or write the address",
    ),
    (
        r"connect to host .*: (Connection refused)",
        "{host} runs no ssh server at this port: {0}",
        "start sshd there, or write the port in the hosts file as {host}:PORT",
    ),
    (
        r"connect to host .*: (.*)|(Connection timed out during banner exchange)",
        "{host} cannot be reached: {0}",
        "check that it runs, and the address and the network",
    ),
    (
        r"kex_exchange_identification: (.*)",
        "the ssh server of {host} closed the connection at once: {0}",
        "check its log, and MaxStartups and access rules in its sshd_config",
    ),
    (
        r"Timeout, server .* not responding",
        "{host} has stopped answering",
        "check that it runs, and its network",
    ),
    (
        r"Connection (?:to .* )?closed by remote host|Connection reset|Broken pipe",
        "the connection to {host} was closed by the host",
        "check that it runs, and the log of its sshd",
    ),
    (
        r"Bad configuration option: (.*)|(Bad owner or permissions on .*)|(Can't open user config file .*)",
        "ssh does not accept its settings: {0}",
        "correct --ssh-option, --ssh-config or ~/.ssh/config",
    ),
]
_CAUSES_OF_PYTHON = [
    (
        r"ModuleNotFoundError: No module named '([^']*)'|No module named (\S+)",
        "Python of {host} ({python}) has no module {0}",
        "install Echelon there, or name another Python with --ssh-python",
    ),
    (
        r"Unknown option: -P",
        "Python of {host} ({python}) is older than 3.11",
        "install Python 3.11 or later there, or name it with --ssh-python",
    ),
    (
        r"(?:exec: )?\S*: (not found|No such file or directory|Permission denied)$",
        "{host} cannot run {python}: {0}",
        "install Python and Echelon there, or name its Python with --ssh-python",
    ),
]


def explain(host: Host, exit_code: int, errors: str, python: str | None = None) -> str:
    """Say in one line why ssh, or the agent that `python` runs on the host, ended: the cause and what to do."""
    if known := recognize(host, errors, python):
        return known
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    last = f": {lines[-1][:_MAX_SHOWN]}" if lines else " and printed nothing"
    what = f"ssh to {host.name}" if exit_code < 0 or exit_code == SSH_FAILED else f"the command on {host.name}"
    ended = f"was killed by signal {-exit_code}" if exit_code < 0 else f"ended with status {exit_code}"
    return f"{what} {ended}{last}; try it by hand: ssh {target(host)}"


def recognize(host: Host, errors: str, python: str | None = None) -> str | None:
    """Return the cause and what to do, if the errors of ssh, or of `python` on the host, are known ones."""
    for pattern, cause, advice in [*_CAUSES_OF_SSH, *(_CAUSES_OF_PYTHON if python else [])]:
        if found := re.search(pattern, errors, re.MULTILINE):
            group = next(filter(None, found.groups()), "").strip()
            return f"{cause}; {advice}".format(group, host=host.name, target=target(host), python=python)
    return None
