"""One node's part of a job."""

from __future__ import annotations

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.node import Rendezvous, node_plan, parse_rendezvous
from echelon.launch.plan import Plan, Request

RENDEZVOUS = Rendezvous("10.0.0.1", 29500, "eth0")


def plan(rank: int, num_nodes: int = 2, servers_per_node: int = 1) -> Plan:
    job = Job(num_workers=num_nodes, num_servers=num_nodes * servers_per_node)
    return node_plan(Request(job, ["train"]), rank, RENDEZVOUS)


def test_the_rendezvous_has_an_optional_interface() -> None:
    assert parse_rendezvous("ib0:10.0.0.1:29500") == Rendezvous("10.0.0.1", 29500, "ib0")
    assert parse_rendezvous("10.0.0.1:29500") == Rendezvous("10.0.0.1", 29500)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.1", "write INTERFACE:IP:PORT or IP:PORT"),
        ("a:b:c:d", "write INTERFACE:IP:PORT or IP:PORT"),
        (":10.0.0.1:29500", "write INTERFACE:IP:PORT or IP:PORT"),
        ("10.0.0.1:http", "'http' is not a port"),
        ("10.0.0.1:65535", "write a number from 1 to 65534"),
        ("INTERFACE:two..dots:29500", "'two..dots' is neither an IP address nor a known host"),
        ("INTERFACE:IP_ADDRESS.invalid:29500", "'IP_ADDRESS.invalid' is neither an IP address nor a known host"),
    ],
)
def test_another_rendezvous_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        parse_rendezvous(text, "mxnet.rendezvous in config.json")
    assert str(caught.value).startswith(f"mxnet.rendezvous in config.json is {text!r}")


def test_node_0_also_runs_the_scheduler() -> None:
    assert [process.name for process in plan(0).processes] == ["scheduler 0", "server 0", "worker 0"]
    assert [process.name for process in plan(1).processes] == ["server 1", "worker 1"]
    assert [process.name for process in plan(1, servers_per_node=2).processes] == ["server 2", "server 3", "worker 1"]
    assert [process.name for process in plan(0, servers_per_node=0).processes] == ["worker 0"]


def test_every_process_has_the_variables_of_dlbs() -> None:
    for rank in (0, 1):
        for process in plan(rank).processes:
            expected = {
                "DMLC_ROLE": process.role,
                "DMLC_PS_ROOT_URI": "10.0.0.1",
                "DMLC_PS_ROOT_PORT": "29500",
                "DMLC_NUM_SERVER": "2",
                "DMLC_NUM_WORKER": "2",
                "DMLC_INTERFACE": "eth0",
                "PS_VERBOSE": "0",
            }
            assert process.environment.items() >= expected.items()


def test_a_node_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="a job of 2 nodes has the nodes 0 to 1"):
        plan(2)
