"""The command line of mpirun, for Open MPI and MPICH, and what it says about itself."""

from __future__ import annotations

import shlex

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.hosts import Host
from echelon.launch.mpi import MPICH, OPEN_MPI, Flavour, MpiLauncher, flavour_of, hosts_text, mpirun_command
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
    assert arguments[-3:] == ["-P", "-m", "echelon.launch.task"]
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
