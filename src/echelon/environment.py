"""The only module that reads environment variables. Arguments override them.

The `DMLC_*` names are those of MXNet's launchers, so that scripts and clusters made for MXNet start Echelon unchanged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.errors import UsageError

HIGHEST_PORT = 65535
ROLES = ("worker", "server", "scheduler")


@dataclass(frozen=True, slots=True)
class Job:
    """What a process needs before it can register with the scheduler: its role, the addresses, and the settings."""

    role: str = "worker"
    scheduler_host: str = "127.0.0.1"
    scheduler_port: int = 0
    num_workers: int = 1
    num_servers: int = 0
    rank: int | None = None
    interface: str | None = None
    host: str | None = None
    verbose: int = 0
    transport: str = "auto"
    staleness: int | None = None
    groups: str | None = None
    run_dir: str | None = None
    stall_seconds: float = 10.0
    timeout_s: float = 600.0
    heartbeat_timeout_s: float = 10.0
    listen_fd: int | None = None
    device_index: int = 0  # among the devices of this worker, one process per device
    num_devices: int = 1
    device_port: int | None = None  # for the rendezvous of this worker's devices, on its own machine
    device_fd: int | None = None
    rendezvous_hosted: bool = False  # torchrun already hosts a store at the scheduler's address

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Job:
        """Return the job that a launcher has described. Without `DMLC_PS_ROOT_PORT` it has only this process."""
        env = os.environ if variables is None else variables
        role = env.get("DMLC_ROLE", "worker")
        if role not in ROLES:
            raise UsageError(f"DMLC_ROLE is {role!r}; it must be one of {', '.join(ROLES)}")
        job = cls(
            role=role,
            scheduler_host=env.get("DMLC_PS_ROOT_URI", "127.0.0.1"),
            scheduler_port=_port(env, "DMLC_PS_ROOT_PORT"),
            num_workers=_number(env, "DMLC_NUM_WORKER", 1, low=1),
            num_servers=_number(env, "DMLC_NUM_SERVER", 0),
            rank=_optional(env, "ECHELON_RANK"),
            interface=env.get("DMLC_INTERFACE") or None,
            host=env.get("DMLC_NODE_HOST") or None,
            verbose=_number(env, "PS_VERBOSE", 0),
            transport=env.get("ECHELON_TRANSPORT", "auto"),
            staleness=_optional(env, "ECHELON_STALENESS"),
            groups=env.get("ECHELON_GROUPS") or None,
            run_dir=env.get("ECHELON_RUN_DIR") or None,
            stall_seconds=_seconds(env, "ECHELON_STALL_SECONDS", 10.0),
            timeout_s=_seconds(env, "ECHELON_TIMEOUT", 600.0),
            heartbeat_timeout_s=_seconds(env, "PS_HEARTBEAT_TIMEOUT", 10.0),
            listen_fd=_optional(env, "ECHELON_LISTEN_FD"),
            device_index=_number(env, "ECHELON_DEVICE_INDEX", 0),
            num_devices=_number(env, "ECHELON_NUM_DEVICES", 1, low=1),
            device_port=_port(env, "ECHELON_DEVICE_PORT") or None,
            device_fd=_optional(env, "ECHELON_DEVICE_FD"),
            rendezvous_hosted=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )
        if not job.distributed and env.get("WORLD_SIZE"):
            return _from_torchrun(job, env)
        if job.distributed:
            _check_rank(job)
        return job

    @property
    def distributed(self) -> bool:
        """Whether the job has a scheduler or a rendezvous, and so more than this process."""
        return self.scheduler_port > 0

    def to_environment(self) -> dict[str, str]:
        """Return the variables that make `from_environment` return this job, without inherited sockets."""
        values: dict[str, object | None] = {
            "DMLC_ROLE": self.role,
            "DMLC_PS_ROOT_URI": self.scheduler_host,
            "DMLC_PS_ROOT_PORT": self.scheduler_port,
            "DMLC_NUM_WORKER": self.num_workers,
            "DMLC_NUM_SERVER": self.num_servers,
            "ECHELON_RANK": self.rank,
            "DMLC_INTERFACE": self.interface,
            "DMLC_NODE_HOST": self.host,
            "PS_VERBOSE": self.verbose,
            "ECHELON_TRANSPORT": self.transport,
            "ECHELON_STALENESS": self.staleness,
            "ECHELON_GROUPS": self.groups,
            "ECHELON_RUN_DIR": self.run_dir,
            "ECHELON_STALL_SECONDS": self.stall_seconds,
            "ECHELON_TIMEOUT": self.timeout_s,
            "PS_HEARTBEAT_TIMEOUT": self.heartbeat_timeout_s,
            "ECHELON_DEVICE_INDEX": self.device_index,
            "ECHELON_NUM_DEVICES": self.num_devices,
            "ECHELON_DEVICE_PORT": self.device_port,
            "TORCHELASTIC_USE_AGENT_STORE": self.rendezvous_hosted or None,
        }
        return {name: str(value) for name, value in values.items() if value is not None}

    def as_role(self, role: str, rank: int) -> Job:
        """Return the same job as another of its processes sees it."""
        return replace(self, role=role, rank=rank)


def _from_torchrun(job: Job, env: Mapping[str, str]) -> Job:
    """Return the job that torchrun has described: its nodes are workers, the processes of a node are its devices."""
    devices = _number(env, "LOCAL_WORLD_SIZE", 1, low=1)
    size, rank = _number(env, "WORLD_SIZE", 1, low=1), _number(env, "RANK", 0)
    if rank >= size:
        raise UsageError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks go from 0 to {size - 1}")
    return replace(
        job,
        scheduler_host=env.get("MASTER_ADDR", job.scheduler_host),
        scheduler_port=_port(env, "MASTER_PORT"),
        num_workers=size // devices,
        rank=rank // devices,
        device_index=_number(env, "LOCAL_RANK", 0) if devices > 1 else 0,
        num_devices=devices,
    )


def _check_rank(job: Job) -> None:
    """Reject a rank that is too large: all processes would wait for one another until the timeout."""
    count = {"worker": job.num_workers, "server": job.num_servers}.get(job.role)
    if count is not None and job.rank is not None and job.rank >= count:
        allowed = f"ranks go from 0 to {count - 1}" if count else f"it has no {job.role}s"
        raise UsageError(
            f"ECHELON_RANK is {job.rank}, but DMLC_NUM_{job.role.upper()} says that the job has {count} {job.role}s: "
            f"{allowed} (without ECHELON_RANK the scheduler assigns one)"
        )


def variable(name: str) -> str | None:
    """Return one of the variables that describe no job, or None if it is not set."""
    return os.environ.get(name)


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this process's own, changed by `variables`."""
    return {**os.environ, **variables}


def use_compile_cache() -> str:
    """Let torch keep compiled kernels in the user's cache, unless a folder is configured. Return the folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon" / "inductor"
    return os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default))


def _number(env: Mapping[str, str], name: str, default: int, low: int = 0) -> int:
    text = env.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r}; it must be a whole number")
    if int(text) < low:
        raise UsageError(f"{name} is {text!r}; it must be {low} or more")
    return int(text)


def _port(env: Mapping[str, str], name: str) -> int:
    """Return a port number. 0 means no port or, for a scheduler, any free port."""
    port = _number(env, name, 0)
    if port > HIGHEST_PORT:
        raise UsageError(f"{name} is {str(port)!r}; a port is a number from 1 to {HIGHEST_PORT}")
    return port


def _seconds(env: Mapping[str, str], name: str, default: float) -> float:
    text = env.get(name, "")
    try:
        seconds = float(text or default)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name} is {text!r}; it must be a number of seconds above 0")
    return seconds


def _optional(env: Mapping[str, str], name: str) -> int | None:
    return _number(env, name, 0) if env.get(name) else None
