"""The command line of mpirun, for Open MPI and MPICH, and what it says about itself."""

from __future__ import annotations

import shlex

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.hosts import Host
from echelon.launch.mpi import MPICH, OPEN_MPI, Flavour, MpiLauncher, cause_of, flavour_of, hosts_text, mpirun_command
from echelon.launch.plan import Plan, Request, make_plan

VERSIONS = {
    "mpirun.openmpi (OpenRTE) 4.1.4\n\nReport bugs to http://www.open-mpi.org/community/help/": OPEN_MPI,
    "mpirun (Open MPI) 5.0.3": OPEN_MPI,
    "HYDRA build details:\n    Version:                                 4.0.2\n": MPICH,
    "Intel(R) MPI Library for Linux* OS, Version 2021.9": MPICH,
}


def plan(*hosts: str, num_servers: int = 2) -> Plan:
    return make_plan(
        Request(Job(num_workers=2, num_servers=num_servers), ["train"], tuple(Host(name) for name in hosts))
    )


def command(flavour: Flavour, plan: Plan, *extra: str) -> str:
    arguments = mpirun_command(
        flavour,
        plan,
        program="mpirun",
        variables=["ECHELON_HUB", "ECHELON_CREDENTIALS"],
        hosts_file="FILE",
        address="10.0.0.9",
        extra=extra,
    )
    assert arguments[-3:] == ["-P", "-m", "echelon.launch.agents.task"]
    return shlex.join(arguments[:-4])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_version_names_the_implementation(version: str) -> None:
    assert flavour_of("mpirun", version) is VERSIONS[version]


def test_another_mpirun_is_refused() -> None:
    with pytest.raises(UsageError, match="says 'LAM 7"):
        flavour_of("mpirun", "LAM 7.1\n")


def test_open_mpi() -> None:
    assert command(OPEN_MPI, plan("a", "b"), "--tag-output") == (
        "mpirun -n 4 --bind-to none --wdir / --mca orte_abort_on_non_zero_status 0 --map-by seq --hostfile FILE "
        "-x ECHELON_HUB -x ECHELON_CREDENTIALS --tag-output"
    )
    assert command(OPEN_MPI, plan()) == (
        "mpirun -n 4 --bind-to none --wdir / --mca orte_abort_on_non_zero_status 0 --oversubscribe "
        "-x ECHELON_HUB -x ECHELON_CREDENTIALS"
    )


def test_mpich() -> None:
    assert command(MPICH, plan("a", "b"), "-verbose") == (
        "mpirun -n 4 -bind-to none -wdir / -disable-auto-cleanup -f FILE -localhost 10.0.0.9 "
        "-genvlist ECHELON_HUB,ECHELON_CREDENTIALS -verbose"
    )
    assert command(MPICH, plan()) == (
        "mpirun -n 4 -bind-to none -wdir / -disable-auto-cleanup -genvlist ECHELON_HUB,ECHELON_CREDENTIALS"
    )


def test_the_hosts_file_has_the_host_of_each_rank() -> None:
    assert hosts_text(plan("a", "b", "c")) == "a\nb\nc\na\n"
    assert hosts_text(plan("a", "b", num_servers=0)) == "a\nb\n"


@pytest.mark.parametrize("host", [Host("a", user="anna"), Host("a", port=2222)])
def test_users_and_ports_of_ssh_belong_into_its_configuration(host: Host) -> None:
    with pytest.raises(UsageError, match=r"into ~/.ssh/config \('Host a'\)"):
        MpiLauncher().plan(Request(Job(num_workers=1), ["train"], (host,)))


def test_a_missing_mpirun_says_what_to_install() -> None:
    launcher = MpiLauncher()
    request = Request(Job(num_workers=1), ["train"], options={"mpi_program": "no-such-mpirun"})
    with pytest.raises(UsageError, match=r"needs the program no-such-mpirun, .*apt-get install openmpi-bin"):
        launcher.describe(launcher.plan(request))


@pytest.mark.parametrize(
    ("line", "host", "text"),
    [
        (
            "root@h2: Permission denied (publickey,password).",
            "h2",
            "h2 does not let this user log in without a password",
        ),
        ("h2: Permission denied (publickey).", "h2", "h2 does not let this user log in without a password"),
        ("ssh: Could not resolve hostname nohost: Name or service not known", "nohost", "host name nohost is unknown"),
        ("ssh: connect to host 10.0.0.9 port 22: No route to host", "10.0.0.9", "10.0.0.9 cannot be reached: No route"),
        ("ssh: connect to host h2 port 22: Connection refused", "h2", "h2 runs no ssh server"),
        (
            "No ED25519 host key is known for h2 and you have requested strict checking.",
            "h2",
            "host key of h2 is unknown",
        ),
        ("/opt/bin/python: No module named 'echelon'", None, "a host has no Echelon for this Python"),
        (
            "[proxy:0:1@h2] HYDU_create_process (x.c:75): execvp error on file /opt/python (No such file)",
            "h2",
            "has no /",
        ),
        ("Node:       h2", "h2", "the host has no /"),
        ("bash: line 1: /usr/bin/hydra_pmi_proxy: No such file or directory", None, "a host has no hydra_pmi_proxy"),
        ("bash: line 1: orted: command not found", None, "a host has no orted"),
        (
            "the agent on h2 cannot start: no connection to {x}",
            "h2",
            "the agent on h2 cannot start: no connection to {x}",
        ),
        ("mpirun.openmpi has detected an attempt to run as root.", None, "refuses to run as root"),
    ],
)
def test_known_errors_name_host_and_cause(line: str, host: str | None, text: str) -> None:
    cause = cause_of(line)
    assert cause is not None
    assert cause.host == host
    assert text in cause.text


@pytest.mark.parametrize(
    "line",
    ["Permission denied, please try again.", "ORTE was unable to reliably start one or more daemons.", "[h1:77] x"],
)
def test_other_lines_are_no_causes(line: str) -> None:
    assert cause_of(line) is None
