"""The texts that the Slurm launcher gives to Slurm, and those that it reads."""

from __future__ import annotations

import pytest

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.plan import Request
from echelon.launch.slurm.allocation import Allocation, parse_cpus
from echelon.launch.slurm.script import BatchOptions, from_text, output_file, parse_state, sbatch_command, to_text


def test_the_sbatch_command() -> None:
    flags = {
        "slurm_partition": "gpu",
        "slurm_account": "physics",
        "slurm_time": "2:00:00",
        "slurm_nodes": 2,
        "slurm_requeue": True,
        "slurm_args": ["--gpus-per-task=1 '--comment=two words'"],
    }
    command = sbatch_command(BatchOptions.of(flags), 5, "/home/anna/my runs 100%j", "/opt/my python/bin/python")
    assert command == [
        "sbatch",
        "--parsable",
        "--job-name=echelon",
        "--export=ALL",
        "--output=/home/anna/my runs 100%%j/echelon-%j.out",
        "--open-mode=append",
        "--ntasks=5",
        "--nodes=2",
        "--ntasks-per-node=3",
        "--partition=gpu",
        "--account=physics",
        "--time=2:00:00",
        "--requeue",
        "--signal=B:USR1@60",
        "--gpus-per-task=1",
        "--comment=two words",
        "--wrap=exec '/opt/my python/bin/python' -m echelon.launch.slurm",
    ]


def test_the_sbatch_command_without_options() -> None:
    assert sbatch_command(BatchOptions.of({}), 4, "/data", "/usr/bin/python3") == [
        "sbatch",
        "--parsable",
        "--job-name=echelon",
        "--export=ALL",
        "--output=/data/echelon-%j.out",
        "--open-mode=append",
        "--ntasks=4",
        "--wrap=exec /usr/bin/python3 -m echelon.launch.slurm",
    ]


def test_the_output_file_of_a_job() -> None:
    assert str(output_file("/data", "17")) == "/data/echelon-17.out"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"slurm_nodes": 0}, "--slurm-nodes must be 1 or more, not 0"),
        ({"slurm_args": ["--comment='open"]}, '--slurm-args "--comment=\'open" cannot be read: No closing quotation'),
    ],
)
def test_impossible_options(flags: dict[str, object], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        BatchOptions.of(flags)


def test_the_srun_command() -> None:
    allocation = Allocation("7", ("n1", "n2"), (2, 2))
    assert allocation.srun(4, ["python", "-m", "task"]) == [
        "srun",
        "--ntasks=4",
        "--distribution=cyclic",
        "--job-name=echelon",
        "--mpi=none",
        "--export=ALL",
        "--input=none",
        "--kill-on-bad-exit=0",
        "--wait=0",
        "python",
        "-m",
        "task",
    ]


@pytest.mark.parametrize(
    ("allocation", "more"),
    [
        (Allocation("7", ("n1", "n2"), (8, 8), cpus_per_task=4), ["--cpus-per-task=4"]),
        (Allocation("7", ("n1", "n2"), (4, 4), cpus_per_task=4), ["--cpus-per-task=4", "--overcommit"]),
        (Allocation("7", ("n1", "n2"), (2, 1)), ["--overcommit"]),
        (Allocation("7", ("n1", "n2"), (8, 8), in_step=True), ["--overlap"]),
    ],
)
def test_srun_options_follow_the_allocation(allocation: Allocation, more: list[str]) -> None:
    plain = Allocation("7", allocation.hosts, (8, 8)).srun(4, [])
    assert allocation.srun(4, []) == plain + more


@pytest.mark.parametrize(
    ("cpus", "cpus_per_task", "expected"),
    [
        ((8, 8), None, "n1 n2 n1 n2"),
        ((3, 1), None, "n1 n2 n1 n1"),
        ((1, 3), None, "n1 n2 n2 n2"),
        ((6, 2), 2, "n1 n2 n1 n1"),
        ((1, 1), None, "n1 n2 n1 n2"),  # overcommitted
    ],
)
def test_tasks_go_to_hosts_in_turn_while_they_have_cpus(
    cpus: tuple[int, ...], cpus_per_task: int | None, expected: str
) -> None:
    assert Allocation("7", ("n1", "n2"), cpus, cpus_per_task).placement(4) == expected.split()


def test_cpus_of_nodes() -> None:
    assert parse_cpus("72(x2),36") == (72, 72, 36)
    assert parse_cpus("4") == (4,)
    with pytest.raises(UsageError, match="SLURM_JOB_CPUS_PER_NODE is 'many'"):
        parse_cpus("many")


def test_a_request_arrives_in_the_batch_job_without_its_secret() -> None:
    job = Job(num_workers=2, num_servers=1, staleness=3, run_dir="/runs/1", credentials="secret")
    request = Request(
        job,
        ["python", "-c", "print('a b')\n"],
        variables={"KEY": "value with spaces"},
        variables_of={"worker": {"A": "1"}, "server": {}},
        options={"slurm_requeue": True, "slurm_nodes": 2, "run": print},
    )
    text = to_text(request, "/home/anna")
    assert "secret" not in text
    arrived, folder = from_text(text)
    assert folder == "/home/anna"
    assert arrived.job == Job(num_workers=2, num_servers=1, staleness=3, run_dir="/runs/1")
    assert (arrived.command, arrived.variables, arrived.variables_of) == (
        request.command,
        request.variables,
        request.variables_of,
    )
    assert arrived.options == {"slurm_requeue": True, "slurm_nodes": 2}


RECORD = "JobId=7 JobName=echelon UserId=root(0) JobState={} Reason={} Dependency=(null) ExitCode={} Command=(null)"


@pytest.mark.parametrize(
    ("state", "exit_code", "has_ended", "status"),
    [
        ("PENDING", "0:0", False, None),
        ("RUNNING", "0:0", False, None),
        ("COMPLETING", "0:15", False, None),
        ("COMPLETED", "0:0", True, 0),
        ("FAILED", "7:0", True, 7),
        ("FAILED", "143:0", True, 143),
        ("CANCELLED", "0:15", True, 143),
        ("CANCELLED", "0:0", True, 1),
        ("TIMEOUT", "0:0", True, 1),
        ("NODE_FAIL", "1:0", True, 1),
    ],
)
def test_the_state_of_a_batch_job(state: str, exit_code: str, has_ended: bool, status: int | None) -> None:
    found = parse_state(RECORD.format(state, "Resources", exit_code))
    assert (found.name, found.reason, found.has_ended) == (state, "Resources", has_ended)
    assert status is None or found.status == status


def test_another_text_than_a_state() -> None:
    with pytest.raises(UsageError, match="printed no JobState"):
        parse_state("slurm is down")
