"""Workers that join a running job: `echelon join` starts them on any machine, and the scheduler gives them ranks.

A job takes workers up to `--max-workers`. Its launcher prints the command that joins it (`join_line`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.cluster.messages import WORKER, WorkerExited
from echelon.environment import HIGHEST_PORT, Job
from echelon.errors import JobError, UsageError
from echelon.launch.interface import Output
from echelon.launch.local.launcher import ChildBackend
from echelon.launch.plan import Address, Addresses, Plan, PlannedProcess, Request
from echelon.launch.run import run_job
from echelon.transport.admission.admission import ConnectionRefused, connect
from echelon.transport.admission.credentials import Security, read_credentials

CONNECT_S = 10.0


@dataclass(frozen=True)
class NewWorker(PlannedProcess):
    """A worker that joins a job. `rank` counts those of this command; the scheduler decides about its real rank."""

    @property
    def name(self) -> str:
        """How its lines are labelled."""
        return f"new worker {self.rank}"


class _JoinBackend(ChildBackend):
    """Child processes that join a job whose other processes another launcher has started."""

    def report_exit(self, exited: WorkerExited) -> None:
        """Do nothing: the scheduler has never waited for this worker."""


def parse_address(text: str) -> Address:
    """Return the address of a scheduler, written as HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) <= HIGHEST_PORT:
        raise UsageError(f"{text!r} is not the address of a scheduler; write HOST:PORT, as its launcher prints it")
    return Address(host, int(port))


def join_plan(job: Job, address: Address, command: Sequence[str], count: int) -> Plan:
    """Return a plan of `count` workers that join the job at this address."""
    if count < 1:
        raise UsageError(f"the number of workers (-n) must be 1 or more, not {count}")
    own = replace(job, role=WORKER, rank=None, joins=True, scheduler_host=address.host, scheduler_port=address.port)
    workers = [NewWorker(WORKER, index, None, command, own, {}, local_workers=count) for index in range(count)]
    return Plan(Request(own, command), tuple(workers))


def run_join(plan: Plan, output: Output) -> int:
    """Run workers that join a job until they have ended, and return their exit status."""
    address = Address(plan.job.scheduler_host, plan.job.scheduler_port)
    plan = with_secret(plan)
    _check_answers(address, plan.job)
    with ExitStack() as stack:
        backend = _JoinBackend(plan, {}, Addresses(address, address), stack, one_machine=False)
        return run_job(plan, output, backend, joins=True)


def with_secret(plan: Plan) -> Plan:
    """Return the plan with the secret itself: the launcher of the job removes the file when the job has ended."""
    path = plan.job.credentials_file
    if path is None or plan.job.security == "none":
        return plan
    if not Path(path).exists():
        raise UsageError(
            f"the credentials file {path} does not exist; that of a launcher exists only on its machine, and only "
            "while its job runs"
        )
    return plan.with_settings(credentials=read_credentials(Path(path)).to_text(), credentials_file=None)


def _check_answers(address: Address, job: Job) -> None:
    """Raise JobError if no scheduler with the same credentials answers: the workers would try for minutes."""
    try:
        connect(address, Security.of(job), CONNECT_S).close()
    except ConnectionRefused as error:
        raise JobError(
            f"no connection to {address.host}:{address.port}: {error.reason}; if a scheduler listens there, give "
            "--credentials-file the file in the command that its launcher printed, or a copy of that file"
        ) from error
    except OSError as error:
        raise JobError(
            f"no scheduler answers at {address.host}:{address.port}: {error}; check the address, which the launcher of "
            "the job prints, and that the job still runs"
        ) from error
