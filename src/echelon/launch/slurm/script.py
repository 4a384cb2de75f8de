"""The request for a batch job, and what `scontrol show job` says about it. Pure.

The batch job starts a launcher in the allocation. What that launcher has to run is in the environment of the batch job
(`to_text`), because command lines can be read by others, and the variables of a job may be secret.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from echelon.environment import Job
from echelon.errors import UsageError
from echelon.launch.plan import Request

WARNING_S = 60  # before the time limit: enough to save a checkpoint
PREFIX = "slurm_"  # of the launcher's own options
_UNFINISHED = {
    "PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING",
    "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT",
}  # fmt: skip
_FIELD = re.compile(r"(?:^|\s)(JobState|Reason|ExitCode)=(\S*)")


@dataclass(frozen=True)
class BatchOptions:
    """The launcher's own flags."""

    partition: str | None = None
    account: str | None = None
    time: str | None = None
    nodes: int | None = None
    arguments: tuple[str, ...] = ()
    requeue: bool = False
    detach: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> BatchOptions:
        """Return the options of a request. Raises UsageError for what cannot work."""
        nodes = options.get("slurm_nodes")
        if nodes is not None and nodes < 1:
            raise UsageError(f"--slurm-nodes must be 1 or more, not {nodes}")
        arguments = [word for text in options.get("slurm_args") or [] for word in _words(text)]
        return cls(
            options.get("slurm_partition"),
            options.get("slurm_account"),
            options.get("slurm_time"),
            nodes,
            tuple(arguments),
            bool(options.get("slurm_requeue")),
            bool(options.get("slurm_detach")),
        )


def sbatch_command(options: BatchOptions, num_tasks: int, folder: str, python: str) -> list[str]:
    """Return the command that submits a batch job, whose output goes to a file in `folder`."""
    words = [
        *("sbatch", "--parsable", "--job-name=echelon", "--export=ALL"),
        f"--output={output_file(folder.replace('%', '%%'), '%j')}",
        "--open-mode=append",  # a requeued job continues its file
        f"--ntasks={num_tasks}",
    ]
    if options.nodes is not None:
        words += [
            f"--nodes={min(options.nodes, num_tasks)}",
            f"--ntasks-per-node={math.ceil(num_tasks / options.nodes)}",
        ]
    for name in ("partition", "account", "time"):
        if value := getattr(options, name):
            words.append(f"--{name}={value}")
    if options.requeue:
        words += ["--requeue", f"--signal=B:USR1@{WARNING_S}"]
    # exec: signals that Slurm sends to the shell of the batch job reach the launcher.
    return [*words, *options.arguments, f"--wrap=exec {shlex.quote(python)} -m echelon.launch.slurm"]


def output_file(folder: str, job_id: str) -> Path:
    """Return the file that receives the output of a batch job."""
    return Path(folder) / f"echelon-{job_id}.out"


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--slurm-args {text!r} cannot be read: {error}") from error


def to_text(request: Request, folder: str) -> str:
    """Return a request as text, without credentials: the launcher in the allocation makes its own."""
    return msgspec.json.encode(
        {
            "job": replace(request.job, credentials=None).to_environment(),
            "command": list(request.command),
            "variables": dict(request.variables),
            "variables_of": {role: dict(values) for role, values in request.variables_of.items()},
            "options": {name: value for name, value in request.options.items() if name.startswith(PREFIX)},
            "folder": folder,
        }
    ).decode()


def from_text(text: str) -> tuple[Request, str]:
    """Return the request and the working directory of `to_text`."""
    values = msgspec.json.decode(text)
    folder = values.pop("folder")
    return Request(**values | {"job": Job.from_environment(values["job"])}), folder


@dataclass(frozen=True)
class BatchState:
    """What Slurm says about a batch job: its state, why it waits, and how its script has ended."""

    name: str
    reason: str
    exit_code: int
    signal: int

    @property
    def has_ended(self) -> bool:
        """Whether the job will not run any more."""
        return self.name not in _UNFINISHED

    @property
    def status(self) -> int:
        """The exit status of the job, once it has ended; 128 + the number of a signal that killed it."""
        if self.name == "COMPLETED":
            return 0
        return self.exit_code or (128 + self.signal if self.signal else 1)


def parse_state(text: str) -> BatchState:
    """Read the output of `scontrol --oneliner show job`."""
    fields = dict(_FIELD.findall(text))
    try:
        code, _, number = fields["ExitCode"].partition(":")
        return BatchState(fields["JobState"], fields.get("Reason", "None"), int(code), int(number or 0))
    except (KeyError, ValueError) as error:
        raise UsageError(f"scontrol show job printed no JobState and ExitCode: {text[:200]!r}") from error
