"""What the doctor makes of the answers of hosts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from echelon.doctor.diagnose import Examination, diagnose, table
from echelon.doctor.messages import Facts, Measured

HEALTHY = Facts(
    hostname="a",
    python="3.11.7",
    versions={"torch": "2.13.0", "numpy": "2.1"},
    digest="aaaa",
    cores=8,
    memory=16 << 30,
    open_files=65536,
    memfd=True,
    gpus=[],
    interfaces=[("eth0", "10.0.0.1")],
    address="10.0.0.1",
    listening=4000,
    token=b"",
)
FAST = Measured(0.0001, 1e9)


def examine(pair: Measured = FAST, skew: float = 0.0, **changes: Any) -> list[str]:
    """Return the findings if host b differs from a healthy one by `changes`."""
    facts = {"a": HEALTHY, "b": msgspec.structs.replace(HEALTHY, **changes)}
    pairs = {("a", "b"): FAST, ("b", "a"): pair, ("a", "c"): FAST}
    return [str(finding) for finding in diagnose(Examination(HEALTHY, {}, facts, {"b": skew}, pairs, None, 29500))]


def test_equal_hosts_have_no_findings() -> None:
    assert examine() == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"python": "3.12.1"}, "error: b: its Python is 3.12.1, and this machine's 3.11.7; install the same version"),
        ({"versions": {"torch": "2.6.0", "numpy": "2.1"}}, "error: b: its torch is 2.6.0, and this machine's 2.13.0"),
        ({"versions": {"torch": "2.13.0", "numpy": "1"}}, "warning: b: its numpy is 1, and this machine's 2.1"),
        ({"versions": {"torch": "", "numpy": "2.1"}}, "error: b: its Python has no package torch; install it there"),
        ({"digest": "bbbb"}, "error: b: its Echelon has other code (digest bbbb) than this machine's (digest aaaa)"),
        ({"folder": "the folder /x does not exist there"}, "error: b: the folder /x does not exist there; create it"),
        ({"problem": "no interface eth7; name another"}, "error: b: no interface eth7; name another"),
        (
            {"interfaces": [("eth0", "10.0.0.2"), ("eth1", "10.1.0.2")], "address": "10.0.0.2"},
            "warning: b: it has 2 addresses (eth0 10.0.0.2, eth1 10.1.0.2), and the job would use 10.0.0.2; name",
        ),
        ({"busy": "Address already in use"}, "error: b: port 29500 cannot be used there: Address already in use; end"),
        ({"open_files": 1024}, "warning: b: a process may open only 1024 files there; raise the limit"),
        ({"memfd": False}, "warning: b: it has no shared memory (memfd)"),
        ({"gpus": ["H200"]}, "warning: a: it has 0 GPUs, and other hosts have up to 1; check nvidia-smi there"),
        ({"skew": 2.5}, "warning: b: its clock is 2.5 s ahead of this machine's; synchronise the clocks"),
        ({"skew": -9.0}, "warning: b: its clock is 9.0 s behind this machine's"),
        (
            {"pair": Measured(problem="No route to host")},
            "error: b: it cannot connect to a at 10.0.0.1: No route to host; check the route and the firewall",
        ),
        (
            {"pair": Measured(0.01, 1e7)},
            "warning: b: it sends 10.0 MB/s to a, where the median of all pairs is 1.00 GB/s; check the cable",
        ),
    ],
)
def test_each_difference_is_named_with_its_host_and_what_to_do(changes: dict[str, Any], text: str) -> None:
    (finding,) = examine(**changes)
    assert finding.startswith(text)


def test_a_host_that_cannot_be_reached_is_an_error_with_its_cause() -> None:
    found = Examination(HEALTHY, {"c": "c cannot be reached: timed out; check the network"}, {}, {}, {})
    assert [str(one) for one in diagnose(found)] == ["error: c: c cannot be reached: timed out; check the network"]


def test_the_table_has_every_pair() -> None:
    facts = {"a": HEALTHY, "b": HEALTHY}
    pairs = {("a", "b"): Measured(0.0005, 1.25e9), ("b", "a"): Measured(problem="refused")}
    lines = table(Examination(HEALTHY, {}, facts, {}, pairs))
    assert lines[2:] == [
        "from \\ to  a            b",
        "a          -            1.25 GB/s, 0.50 ms",
        "b          unreachable  -",
    ]
