"""`python -m echelon.server` and `python -m echelon.scheduler` print one line and exit with 2 for bad variables."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from echelon.transport.registration import interface_address

JOB = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "1", "DMLC_NUM_WORKER": "1", "DMLC_NUM_SERVER": "1"}


def outcome(role: str, **variables: str) -> tuple[int, str, str]:
    """Return the exit status, stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", f"echelon.{role}"],
        env={**os.environ, "DMLC_ROLE": role, **JOB, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("role", ["server", "scheduler"])
def test_an_invalid_variable_prints_one_line(role: str) -> None:
    said = "echelon: DMLC_NUM_WORKER is 'two'; it must be a whole number\n"
    assert outcome(role, DMLC_NUM_WORKER="two") == (2, "", said)


def test_an_interface_that_does_not_exist_prints_one_line() -> None:
    with pytest.raises(ValueError) as expected:
        interface_address("nowhere0")
    found = outcome("server", DMLC_INTERFACE="nowhere0")
    assert found == (2, "", f"echelon: {expected.value}\n")


@pytest.mark.parametrize(
    ("role", "said"),
    [
        ("scheduler", "the scheduler has no port: set DMLC_PS_ROOT_PORT, to the same value for all roles"),
        ("server", "the server has no scheduler address: set DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"),
    ],
)
def test_a_role_without_a_job_fails_at_once(role: str, said: str) -> None:
    assert outcome(role, DMLC_PS_ROOT_PORT="") == (2, "", f"echelon: {said}\n")


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        status, out, said = outcome("scheduler", DMLC_PS_ROOT_PORT=str(port))
    assert (status, out) == (2, "")
    assert said == (
        f"echelon: the scheduler cannot listen at 127.0.0.1:{port}: Address already in use; set another "
        "DMLC_PS_ROOT_PORT for all roles\n"
    )


def test_the_scheduler_listens_only_at_its_own_address() -> None:
    """192.0.2.1 is an address of documentation, which no machine has."""
    status, out, said = outcome("scheduler", DMLC_PS_ROOT_URI="192.0.2.1")
    assert (status, out) == (2, "")
    assert said.startswith("echelon: cannot listen at 192.0.2.1, which is not an address of this machine; set ")
