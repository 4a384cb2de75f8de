"""The address that a machine announces to the other hosts of a job."""

from __future__ import annotations

import pytest

from echelon.errors import UsageError
from echelon.launch.addresses import announced_address, interface_towards
from echelon.transport.listening import listen


def test_a_job_on_one_machine_may_use_the_loopback() -> None:
    assert announced_address(None, "localhost", ["localhost"]) == "127.0.0.1"
    assert announced_address("lo", "anything", ["elsewhere"]) == "127.0.0.1"


def test_a_job_on_several_machines_does_not_announce_the_loopback() -> None:
    with pytest.raises(UsageError, match=r"the address of localhost for the other hosts is unknown.*lo 127.0.0.1"):
        announced_address(None, "localhost", ["localhost", "nosuch.invalid"])
    with pytest.raises(UsageError, match=r"the address of two..dots for the other hosts is unknown"):
        announced_address(None, "two..dots", ["two..dots", "localhost"])


def test_the_interface_of_an_address() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("nosuch.invalid") is None
    assert interface_towards("two..dots") is None


def test_a_listener_belongs_to_its_address_only() -> None:
    with listen("127.0.0.1") as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
