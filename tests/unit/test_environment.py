"""The job in environment variables: reading and writing it, and the errors of invalid variables."""

from __future__ import annotations

import dataclasses

import pytest

from echelon.environment import Job
from echelon.errors import UsageError

LAUNCHED = {  # the variables of seed 002's nodes, and those that an Echelon launcher adds
    "DMLC_ROLE": "server",
    "DMLC_PS_ROOT_URI": "10.0.0.1",
    "DMLC_PS_ROOT_PORT": "9091",
    "DMLC_NUM_WORKER": "4",
    "DMLC_NUM_SERVER": "2",
    "DMLC_INTERFACE": "eth0",
    "DMLC_NODE_HOST": "10.0.0.7",
    "PS_VERBOSE": "2",
    "ECHELON_RANK": "1",
    "ECHELON_TRANSPORT": "tcp",
    "ECHELON_STALENESS": "3",
    "ECHELON_GROUPS": "0 1 / 2 3",
    "ECHELON_DATA_SHARDING": "0 0.3/0.3 1",
    "ECHELON_RUN_DIR": "runs/a",
    "ECHELON_STALL_SECONDS": "2.5",
    "ECHELON_TIMEOUT": "60",
    "PS_HEARTBEAT_TIMEOUT": "5",
    "ECHELON_LISTEN_FD": "11",
    "ECHELON_DEVICE_INDEX": "1",
    "ECHELON_NUM_DEVICES": "2",
    "ECHELON_DEVICE_PORT": "9092",
    "ECHELON_DEVICE_FD": "12",
    "ECHELON_LOCAL_WORKERS": "3",
    "ECHELON_RENDEZVOUS_HOST": "10.0.0.2",
    "ECHELON_RENDEZVOUS_PORT": "9093",
    "ECHELON_JOINED_FILE": "/tmp/joined",
    "ECHELON_MIN_WORKERS": "2",
    "ECHELON_MAX_WORKERS": "4",
    "ECHELON_REPLICAS": "1",
    "ECHELON_MAX_RESTARTS": "5",
    "ECHELON_RESTARTS": "1",
    "ECHELON_JOINS": "True",
    "ECHELON_ALLOW_OPTIMIZERS": "mine.optimizers:Lion,other:Outer.Inner",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "ECHELON_SECURITY": "proof",
    "ECHELON_CREDENTIALS": "secret",
    "ECHELON_CREDENTIALS_FILE": "/tmp/credentials",
}
JOB = Job(
    role="server",
    scheduler_host="10.0.0.1",
    scheduler_port=9091,
    num_workers=4,
    num_servers=2,
    rank=1,
    interface="eth0",
    host="10.0.0.7",
    verbose=2,
    transport="tcp",
    staleness=3,
    groups="0 1 / 2 3",
    data_sharding="0 0.3/0.3 1",
    run_dir="runs/a",
    stall_seconds=2.5,
    timeout_s=60.0,
    heartbeat_timeout_s=5.0,
    listen_fd=11,
    device_index=1,
    num_devices=2,
    device_port=9092,
    device_fd=12,
    local_workers=3,
    rendezvous_host="10.0.0.2",
    rendezvous_port=9093,
    joined_file="/tmp/joined",
    min_workers=2,
    max_workers=4,
    replicas=1,
    max_restarts=5,
    restarts=1,
    joins=True,
    allow_optimizers="mine.optimizers:Lion,other:Outer.Inner",
    rendezvous_hosted=True,
    security="proof",
    credentials="secret",
    credentials_file="/tmp/credentials",
)


def test_every_variable_is_read() -> None:
    assert Job.from_environment(LAUNCHED) == JOB
    default = Job()
    for field in dataclasses.fields(Job):  # each differs from the default, so that each is really read
        assert getattr(JOB, field.name) != getattr(default, field.name), field.name


def test_without_variables_the_job_is_one_process() -> None:
    assert Job.from_environment({}) == Job()
    assert not Job().distributed
    assert JOB.distributed


@pytest.mark.parametrize(
    "job",
    [
        Job(),
        dataclasses.replace(JOB, listen_fd=None, device_fd=None),
        dataclasses.replace(
            JOB, listen_fd=None, device_fd=None, rank=0, staleness=0, verbose=0, stall_seconds=0.1, timeout_s=1e9
        ),
        Job(role="scheduler", scheduler_port=1, num_servers=0),
    ],
)
def test_a_job_is_read_back_from_its_variables(job: Job) -> None:
    """All fields except inherited sockets, which belong to one process."""
    assert Job.from_environment(job.to_environment()) == job


def test_inherited_sockets_are_not_exported() -> None:
    assert not {"ECHELON_LISTEN_FD", "ECHELON_DEVICE_FD"} & JOB.to_environment().keys()


def test_nodes_of_torchrun_are_workers_and_their_processes_are_devices() -> None:
    launched = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    job = Job.from_environment({**launched, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "29500"})
    assert (job.scheduler_host, job.scheduler_port, job.num_servers) == ("10.0.0.9", 29500, 0)
    assert (job.rank, job.num_workers, job.device_index, job.num_devices) == (1, 2, 1, 4)
    assert not job.rendezvous_hosted


def test_ranks_by_hand_are_workers() -> None:
    job = Job.from_environment({"RANK": "2", "WORLD_SIZE": "3", "MASTER_ADDR": "head", "MASTER_PORT": "1234"})
    assert (job.rank, job.num_workers, job.device_index, job.num_devices) == (2, 3, 0, 1)


def test_variables_of_mxnet_override_those_of_torchrun() -> None:
    assert Job.from_environment({**LAUNCHED, "RANK": "7", "WORLD_SIZE": "8", "MASTER_PORT": "1"}) == JOB


def test_unset_fields_are_not_exported() -> None:
    assert (
        Job()
        .to_environment()
        .keys()
        .isdisjoint(
            {
                "ECHELON_RANK",
                "ECHELON_STALENESS",
                "ECHELON_GROUPS",
                "ECHELON_RUN_DIR",
                "DMLC_INTERFACE",
                "DMLC_NODE_HOST",
            }
        )
    )
    assert all(isinstance(value, str) for value in JOB.to_environment().values())


def test_rank_0_and_staleness_0_are_not_unset() -> None:
    job = Job.from_environment({"ECHELON_RANK": "0", "ECHELON_STALENESS": "0"})
    assert (job.rank, job.staleness) == (0, 0)


@pytest.mark.parametrize(
    "name", ["DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_INTERFACE", "ECHELON_RANK", "ECHELON_GROUPS"]
)
def test_an_empty_variable_counts_as_unset(name: str) -> None:
    assert Job.from_environment({name: ""}) == Job()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DMLC_PS_ROOT_PORT", "http"),
        ("DMLC_NUM_WORKER", "-1"),
        ("DMLC_NUM_SERVER", "2.0"),
        ("ECHELON_RANK", "first"),
        ("ECHELON_STALENESS", "-1"),
        ("PS_VERBOSE", "yes"),
        ("ECHELON_LISTEN_FD", "stdin"),
    ],
)
def test_an_invalid_number_is_rejected_with_the_name_of_its_variable(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is '{value}'; it must be a whole number"):
        Job.from_environment({name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"DMLC_PS_ROOT_PORT": "99999"}, "DMLC_PS_ROOT_PORT is '99999'; a port is a number from 1 to 65535"),
        ({"DMLC_NUM_WORKER": "0"}, "DMLC_NUM_WORKER is '0'; it must be 1 or more"),
        ({"DMLC_ROLE": "worker", "ECHELON_RANK": "4"}, "ECHELON_RANK is 4, .* has 4 workers: ranks go from 0 to 3"),
        ({"DMLC_ROLE": "server", "ECHELON_RANK": "2"}, "ECHELON_RANK is 2, .* has 2 servers: ranks go from 0 to 1"),
        ({"DMLC_NUM_SERVER": "0"}, "ECHELON_RANK is 1, .* has 0 servers: it has no servers"),
        ({"ECHELON_NUM_DEVICES": "0"}, "ECHELON_NUM_DEVICES is '0'; it must be 1 or more"),
        ({"ECHELON_ALLOW_OPTIMIZERS": "a:B,Lion"}, "ECHELON_ALLOW_OPTIMIZERS Lion: write it as package.module:Class"),
        ({"ECHELON_DEVICE_PORT": "65536"}, "ECHELON_DEVICE_PORT is '65536'; a port is"),
    ],
)
def test_an_invalid_job_is_rejected(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Job.from_environment(LAUNCHED | given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is '0'; it must be 1 or more"),
        ({"RANK": "3"}, "RANK is 3, but WORLD_SIZE is 3: ranks go from 0 to 2"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'; a port is a number from 1 to 65535"),
    ],
)
def test_an_invalid_job_of_torchrun_is_rejected(given: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Job.from_environment({"RANK": "2", "WORLD_SIZE": "3", "MASTER_PORT": "1234"} | given)


def test_a_scheduler_may_have_port_0_and_any_rank() -> None:
    assert Job.from_environment({"DMLC_ROLE": "scheduler", "DMLC_PS_ROOT_PORT": "0"}).scheduler_port == 0
    assert Job.from_environment(LAUNCHED | {"DMLC_ROLE": "scheduler", "ECHELON_RANK": "9"}).rank == 9


def test_an_unknown_role_is_rejected_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match="DMLC_ROLE is 'sever'; it must be one of worker, server, scheduler"):
        Job.from_environment({"DMLC_ROLE": "sever"})


def test_as_role_changes_only_role_and_rank() -> None:
    other = JOB.as_role("worker", 3)
    assert (other.role, other.rank) == ("worker", 3)
    assert dataclasses.replace(other, role="server", rank=1) == JOB


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    assert Job.from_environment() == JOB
