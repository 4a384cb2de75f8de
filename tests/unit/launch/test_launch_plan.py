"""Plans: which process runs on which host, and what it finds in its environment."""

from __future__ import annotations

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.hosts import Host
from echelon.launch.plan import Address, Addresses, Request, describe, make_plan

A, B, C = Host("a"), Host("b", slots=2), Host("c")
ADDRESSES = Addresses(Address("10.0.0.1", 4000), Address("10.0.0.2", 5000))


def placed(num_workers: int, num_servers: int, *hosts: Host) -> list[tuple[str, str]]:
    request = Request(Job(num_workers=num_workers, num_servers=num_servers), ["train"], hosts)
    return [(process.name, str(process.host)) for process in make_plan(request, scheduler_host=A).processes]


def test_servers_then_workers_go_to_the_hosts_in_turn() -> None:
    assert placed(2, 2, A, C) == [
        ("scheduler 0", "a"),
        ("server 0", "a"),
        ("server 1", "c"),
        ("worker 0", "a"),
        ("worker 1", "c"),
    ]


def test_a_host_gets_as_many_processes_in_a_row_as_it_has_slots() -> None:
    assert [host for _, host in placed(5, 0, A, B)] == ["a", "b", "b", "a", "b"]


def test_more_hosts_than_processes() -> None:
    assert placed(1, 1, A, B, C)[1:] == [("server 0", "a"), ("worker 0", "b")]


def test_every_process_finds_its_role_rank_and_addresses() -> None:
    request = Request(
        Job(num_workers=2, num_servers=1),
        ["train"],
        (A, C),
        variables={"ALL": "1"},
        variables_of={"worker": {"MINE": "w"}, "server": {"MINE": "s"}},
    )
    plan = make_plan(request, scheduler_host=A)
    found = {process.name: plan.complete(process, ADDRESSES).environment for process in plan.processes}
    for name, environment in found.items():
        role, rank = name.split()
        assert environment["DMLC_ROLE"] == role
        assert environment["ECHELON_RANK"] == rank
        assert (environment["DMLC_PS_ROOT_URI"], environment["DMLC_PS_ROOT_PORT"]) == ("10.0.0.1", "4000")
        assert (environment["ECHELON_RENDEZVOUS_HOST"], environment["ECHELON_RENDEZVOUS_PORT"]) == ("10.0.0.2", "5000")
        assert environment["ALL"] == "1"
        assert environment.get("MINE") == {"worker": "w", "server": "s"}.get(role)


def test_without_servers_worker_0_is_where_the_workers_meet() -> None:
    plan = make_plan(Request(Job(num_workers=2), ["train"], (A, C)))
    environment = plan.complete(plan.processes[1], ADDRESSES).environment
    assert (environment["DMLC_PS_ROOT_URI"], environment["DMLC_PS_ROOT_PORT"]) == ("10.0.0.2", "5000")
    assert "ECHELON_RENDEZVOUS_PORT" not in environment
    assert [process.listens for process in plan.processes] == [True, False]


def test_the_workers_of_a_host_share_its_cores() -> None:
    plan = make_plan(Request(Job(num_workers=3), ["train"], (A, B)))
    assert [process.local_workers for process in plan.processes] == [1, 2, 2]


def test_a_dry_run_shows_commands_hosts_and_variables() -> None:
    plan = make_plan(Request(Job(num_workers=1, num_servers=1), ["train", "a b", "$HOME"], (A,)), python="py")
    lines = describe(plan).splitlines()
    assert lines[0] == "scheduler 0 on this machine: py -m echelon.scheduler"
    assert lines[4] == "worker 0 on a: train 'a b' '$HOME'"
    assert "DMLC_PS_ROOT_PORT=<free port> DMLC_PS_ROOT_URI=<address of this machine>" in lines[5]


@pytest.mark.parametrize(("num_workers", "num_servers"), [(0, 1), (1, -1)])
def test_impossible_numbers(num_workers: int, num_servers: int) -> None:
    with pytest.raises(UsageError):
        make_plan(Request(Job(num_workers=num_workers, num_servers=num_servers), ["train"]))
