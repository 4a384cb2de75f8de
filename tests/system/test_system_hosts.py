"""The hosts that system tests run on: reachable by ssh, separate from each other, and gone afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Network, make_hosts

from jobs import until

pytestmark = pytest.mark.system


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with make_hosts(tmp_path, 2, networks=2) as network:
        yield network


def test_a_host_has_its_own_name_addresses_and_disk(network: Network) -> None:
    login, h1, h2 = network.login, *network.hosts
    assert login.run(["ssh", "h1", "hostname"]).stdout == "h1\n"
    assert h1.run(["ssh", "10.77.1.2", "hostname"]).stdout == "h2\n"
    login.run(["ssh", "h2", f"echo text > {network.disk}/file"])
    assert (h2.own / "file").read_text() == "text\n"
    assert not (network.disk / "file").exists()
    assert h2.run(["cat", "file"]).stdout == "text\n"
    assert not h1.run(["cat", "file"], check=False).stdout


def test_a_host_without_a_link_cannot_be_reached(network: Network) -> None:
    network["h1"].set_link(up=False)
    ssh = ["ssh", "-o", "ConnectTimeout=1"]
    assert network.login.run([*ssh, "h1", "true"], check=False).returncode == 255
    network.login.run([*ssh, "h2", "true"])


def test_what_still_runs_is_found_and_killed(network: Network) -> None:
    network.login.run(["ssh", "h1", "setsid -f sleep 1000 > /dev/null 2>&1 < /dev/null"])
    until(lambda: "sleep 1000" in network["h1"].processes().values(), "it is found")  # setsid returns before it runs
    assert not network["h2"].processes()
    with pytest.raises(AssertionError, match="sleep 1000"):
        network.assert_nothing_runs(within_s=0.0)
    network["h1"].kill_all()
    network.assert_nothing_runs()
