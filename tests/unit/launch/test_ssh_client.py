"""The command line of ssh, the command on the other host, and the recognition of errors."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.launch.hosts import Host
from echelon.launch.ssh.client import READY, SshClient, explain, module_command, package_folder, target

ANNA = Host("node-3", user="anna", port=2222)


def settings_of(command: list[str]) -> dict[str, str]:
    """Return what ssh makes of the options: the first value of each counts."""
    given = [command[index + 1].split("=", 1) for index, word in enumerate(command) if word == "-o"]
    return dict(reversed([(name, value) for name, value in given]))


def test_the_command_line_has_the_user_the_port_and_the_host() -> None:
    command = SshClient(config="my_config").command(ANNA)
    assert command[0] == "ssh"
    assert command[-2:] == ["--", "node-3"]
    for flag, value in [("-l", "anna"), ("-p", "2222"), ("-F", "my_config")]:
        assert command[command.index(flag) + 1] == value
    assert {"-l", "-p", "-F"}.isdisjoint(SshClient().command(Host("h1")))


def test_ssh_never_asks_and_notices_a_lost_host() -> None:
    settings = settings_of(SshClient().command(Host("h1")))
    assert settings["BatchMode"] == "yes"
    assert int(settings["ServerAliveInterval"]) * (int(settings["ServerAliveCountMax"]) + 1) <= 15


def test_the_users_options_override_those_of_the_launcher() -> None:
    settings = settings_of(SshClient(options=("ConnectTimeout=99",)).command(Host("h1")))
    assert settings["ConnectTimeout"] == "99"


def test_a_host_name_cannot_be_an_option() -> None:
    command = SshClient().command(Host("-oProxyCommand=evil"))
    assert command[command.index("-oProxyCommand=evil") - 1] == "--"


@pytest.mark.parametrize("shell", ["sh", "bash"])
@pytest.mark.parametrize("before", [None, "/other"])
def test_the_agents_command_survives_a_shell(tmp_path: Path, shell: str, before: str | None) -> None:
    """The paths of Python and Echelon may have spaces, quotes and dollars, and PYTHONPATH is kept."""
    folder = tmp_path / "it's a $HOME"
    folder.mkdir()
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$PATH" "$PYTHONPATH" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin"} | ({"PYTHONPATH": before} if before else {})
    command = module_command(str(python), str(folder / "src"))
    out = subprocess.run([shell, "-c", command], env=environment, capture_output=True, check=True).stdout
    ready, rest = out[: len(READY)], out[len(READY) :].decode()
    assert ready == READY
    path = f"{folder}/src" if before is None else f"{before}:{folder}/src"
    assert rest.splitlines() == [f"{folder}:/usr/bin:/bin", path, "-P", "-m", "echelon.launch.agents.agent"]


def test_an_installed_package_needs_no_folder() -> None:
    command = module_command(sys.executable, None)
    assert "PYTHONPATH" not in command
    assert shlex.quote(sys.executable) in command


@pytest.mark.parametrize(
    ("package", "sync_dst_dir", "expected"),
    [
        ("/venv/lib/python3.11/site-packages/echelon", None, None),
        ("/home/anna/echelon/src/echelon", None, "/home/anna/echelon/src"),
        ("/home/anna/echelon/src/echelon", "/tmp/copy", "/home/anna/echelon/src"),  # not below the copied folder
        ("/home/anna/work/echelon", "/tmp/copy", "/tmp/copy"),
        ("/home/anna/work/lib/echelon", "/tmp/copy", "/tmp/copy/lib"),
        ("/home/anna/work/lib/echelon", None, "/home/anna/work/lib"),
    ],
)
def test_where_hosts_find_the_same_code(package: str, sync_dst_dir: str | None, expected: str | None) -> None:
    assert package_folder(Path(package), Path("/home/anna/work"), sync_dst_dir) == expected


def test_the_target_is_what_ssh_takes() -> None:
    assert target(ANNA) == "-p 2222 anna@node-3"
    assert target(Host("h1")) == "h1"


CASES = {
    "anna@node-3: Permission denied (publickey,password).": (
        "node-3 does not let this user log in without a password: Permission denied (publickey,password); "
        "copy your key there: ssh-copy-id -p 2222 anna@node-3"
    ),
    "ssh: Could not resolve hostname node-3: Name or service not known": (
        "the host name node-3 is unknown: Name or service not known; correct it in the hosts file, or write the address"
    ),
    "ssh: connect to host node-3 port 23: Connection refused": (
        "node-3 runs no ssh server at this port: Connection refused; "
        "start sshd there, or write the port in the hosts file as node-3:PORT"
    ),
    "ssh: connect to host node-3 port 22: Connection timed out": (
        "node-3 cannot be reached: Connection timed out; check that it runs, and the address and the network"
    ),
    "Connection timed out during banner exchange\nConnection to 10.0.0.1 port 22 timed out": (
        "node-3 cannot be reached: Connection timed out during banner exchange; "
        "check that it runs, and the address and the network"
    ),
    "No ED25519 host key is known for node-3 and you have requested strict checking.\nHost key verification failed.": (
        "the host key of node-3 is unknown; log in once to accept it: ssh -p 2222 anna@node-3 "
        "(or trust new hosts: --ssh-option StrictHostKeyChecking=accept-new)"
    ),
    "@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @\nHost key verification failed.": (
        "the host key of node-3 is not the known one: it was installed again, or another machine answers; "
        "if that is expected, forget the old key: ssh-keygen -R node-3"
    ),
    "Timeout, server node-3 not responding.": ("node-3 has stopped answering; check that it runs, and its network"),
    "Connection to node-3 closed by remote host.": (
        "the connection to node-3 was closed by the host; check that it runs, and the log of its sshd"
    ),
    "command-line: line 0: Bad configuration option: foo": (
        "ssh does not accept its settings: foo; correct --ssh-option, --ssh-config or ~/.ssh/config"
    ),
    "/x/python: Error while finding module specification for 'echelon.launch.agents.agent' "
    "(ModuleNotFoundError: No module named 'echelon')": (
        "Python of node-3 (/x/python) has no module echelon; "
        "install Echelon there, or name another Python with --ssh-python"
    ),
    "sh: 1: exec: /x/python: not found": (
        "node-3 cannot run /x/python: not found; install Python and Echelon there, or name its Python with --ssh-python"
    ),
    "sh: line 1: /x/python: Permission denied": (
        "node-3 cannot run /x/python: Permission denied; "
        "install Python and Echelon there, or name its Python with --ssh-python"
    ),
    "Unknown option: -P\nusage: /x/python [option] ... [-c cmd | -m mod | file | -] [arg] ...": (
        "Python of node-3 (/x/python) is older than 3.11; "
        "install Python 3.11 or later there, or name it with --ssh-python"
    ),
    "Welcome!\nsomething new\n\n": (
        "ssh to node-3 ended with status 255: something new; try it by hand: ssh -p 2222 anna@node-3"
    ),
    "": "ssh to node-3 ended with status 255 and printed nothing; try it by hand: ssh -p 2222 anna@node-3",
}


@pytest.mark.parametrize("errors", CASES)
def test_an_error_becomes_one_line_with_host_cause_and_advice(errors: str) -> None:
    assert explain(ANNA, 255, errors, "/x/python") == CASES[errors]


def test_a_killed_client_is_not_blamed_on_the_host() -> None:
    line = explain(Host("h1"), -9, "", "python")
    assert line == "ssh to h1 was killed by signal 9 and printed nothing; try it by hand: ssh h1"


def test_an_agent_that_fails_is_not_blamed_on_ssh() -> None:
    line = explain(Host("h1"), 1, "agent: something", "python")
    assert line == "the command on h1 ended with status 1: agent: something; try it by hand: ssh h1"


@pytest.mark.parametrize("banner", ["Permission denied to all others.", "Connection to the lab: closed"])
def test_a_banner_is_not_taken_for_an_error(banner: str) -> None:
    line = explain(Host("h1"), 255, f"{banner}\nTimeout, server h1 not responding.", "python")
    assert line.startswith("h1 has stopped answering")
