"""The only module that reads environment variables. Arguments override them.

The `DMLC_*` names are those of MXNet's launchers, so that scripts and clusters made for MXNet start Echelon unchanged.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from echelon import fault_points
from echelon.errors import UsageError

HIGHEST_PORT = 65535
ROLES = ("worker", "server", "scheduler")
SECURITY = ("auto", "proof", "none")
SECURITY_POLICY = "ECHELON_SECURITY"
CREDENTIALS = "ECHELON_CREDENTIALS"
CREDENTIALS_FILE = "ECHELON_CREDENTIALS_FILE"
MAX_RESTARTS = "ECHELON_MAX_RESTARTS"
HUB = "ECHELON_HUB"  # host:port of the launcher, for agents that another system has started
TASK = "ECHELON_TASK"  # the number of such an agent, or the name of the variable that has it
BATCH_TIMES = "ECHELON_BATCH_TIMES"  # folder in which workers write when each step ended, for `echelon bench run`
FAULTS = "ECHELON_FAULTS"  # the faults that tests make a process have; see fault_points.py
HISTORY = "ECHELON_HISTORY"  # 1: workers and servers record every push and update; see observe/history.py
SLURM_REQUEST = "ECHELON_SLURM_REQUEST"  # what the launcher in a batch job of Slurm has to run


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
    data_sharding: str | None = None  # the workers' shares of the data, as text or as a file
    run_dir: str | None = None
    stall_seconds: float = 10.0
    timeout_s: float = 600.0
    heartbeat_timeout_s: float = 6.0
    listen_fd: int | None = None
    device_index: int = 0  # among the devices of this worker, one process per device
    num_devices: int = 1
    device_port: int | None = None  # for the rendezvous of this worker's devices, on its own machine
    device_fd: int | None = None
    rendezvous_port: int | None = None  # where worker 0 listens for stores without servers in a job that has servers
    rendezvous_host: str | None = None  # the address of worker 0's machine, if it is not the scheduler's
    local_workers: int | None = None  # workers on this machine, if the launcher chose OMP_NUM_THREADS for them
    joined_file: str | None = None  # to which the workers that create a store add a line, for the launcher
    min_workers: int = 1  # with fewer living workers the job stops
    max_workers: int | None = None  # up to which workers may join the running job; None: as many as it starts with
    replicas: int = 0  # servers beside the first that have each slice
    max_restarts: int = 3  # of each process, by its launcher
    restarts: int = 0  # how often this process was started again
    joins: bool = False  # this worker joins a job that runs (`echelon join`), so a missing scheduler means its end
    allow_optimizers: str | None = None  # import paths of users' own optimizers that servers may run, with commas
    rendezvous_hosted: bool = False  # torchrun already hosts a store at the scheduler's address
    security: str = "auto"  # how connections are protected; see transport/admission/credentials.py
    credentials: str | None = field(default=None, repr=False)  # the secret of the job
    credentials_file: str | None = None  # where the secret is, if not in `credentials`

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Job:
        """Return the job that a launcher has described. Without `DMLC_PS_ROOT_PORT` it has only this process.

        An empty variable counts as unset. In a thread that runs a process of a job (`job_of_thread`), return that job.
        """
        if variables is None and (job_of_this_thread := _JOB_OF_THREAD.get()) is not None:
            return job_of_this_thread
        env = os.environ if variables is None else variables
        values = {field: parse(name, env[name]) for field, (name, parse) in _VARIABLES.items() if env.get(name)}
        job = cls(**values)
        if variables is None and job.distributed:
            fault_points.configure(env.get(FAULTS, ""), job.run_dir, job.role, job.rank, job.restarts)
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
        values = {name: getattr(self, field) for field, (name, _) in _VARIABLES.items() if field not in _INHERITED}
        return {name: str(value) for name, value in values.items() if value is not None and value is not False}

    def as_role(self, role: str, rank: int) -> Job:
        """Return the same job as another of its processes sees it."""
        return replace(self, role=role, rank=rank)


_JOB_OF_THREAD: ContextVar[Job | None] = ContextVar("job of this thread", default=None)


@contextmanager
def job_of_thread(job: Job) -> Iterator[None]:
    """Let `Job.from_environment()` return `job` in this thread, which runs a process of a job in one process."""
    token = _JOB_OF_THREAD.set(job)
    try:
        yield
    finally:
        _JOB_OF_THREAD.reset(token)


def _from_torchrun(job: Job, env: Mapping[str, str]) -> Job:
    """Return the job that torchrun has described: its nodes are workers, the processes of a node are its devices."""

    def read(name: str, parse: Callable[[str, str], int], default: int) -> int:
        return parse(name, env[name]) if env.get(name) else default

    devices = read("LOCAL_WORLD_SIZE", _positive, 1)
    size, rank = read("WORLD_SIZE", _positive, 1), read("RANK", _number, 0)
    if rank >= size:
        raise UsageError(f"RANK is {rank}, but WORLD_SIZE is {size}: ranks go from 0 to {size - 1}")
    return replace(
        job,
        scheduler_host=env.get("MASTER_ADDR", job.scheduler_host),
        scheduler_port=read("MASTER_PORT", _port, 0),
        num_workers=size // devices,
        rank=rank // devices,
        device_index=read("LOCAL_RANK", _number, 0) if devices > 1 else 0,
        num_devices=devices,
    )


def _check_rank(job: Job) -> None:
    """Reject a rank that is too large: all processes would wait for one another until the timeout."""
    count = {"worker": max(job.num_workers, job.max_workers or 0), "server": job.num_servers}.get(job.role)
    if count is not None and job.rank is not None and job.rank >= count:
        allowed = f"ranks go from 0 to {count - 1}" if count else f"it has no {job.role}s"
        raise UsageError(
            f"ECHELON_RANK is {job.rank}, but DMLC_NUM_{job.role.upper()} says that the job has {count} {job.role}s: "
            f"{allowed} (without ECHELON_RANK the scheduler assigns one)"
        )


def variable(name: str) -> str | None:
    """Return one of the variables that describe no job, or None if it is not set."""
    return os.environ.get(name)


def take_variable(name: str) -> str | None:
    """Remove a variable from the environment, so that no child process has it. Return its value, if it was set."""
    return os.environ.pop(name, None)


def task_from_environment() -> tuple[tuple[str, int], int | None]:
    """Return the address of the launcher's hub, and the number that the system that started this agent gave it."""
    host, _, port = os.environ.get(HUB, "").rpartition(":")
    if not host:
        raise UsageError(f"{HUB} is not set; a launcher starts agents, not a user")
    name = TASK
    text = os.environ.get(TASK, "")
    if text and not text.isdecimal():
        name, text = text, os.environ.get(text, "")
        if not text:
            raise UsageError(f"{name}, which numbers the tasks, is not set")
    return (host, _port(HUB, port)), _number(name, text) if text else None


def find_own_python() -> None:
    """Let `python` in commands mean the Python of this process, as it does where the launcher runs."""
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def child_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a child process: this process's own, changed by `variables`."""
    return {**os.environ, **variables}


def in_batch_job() -> bool:
    """Return whether Slurm, Grid Engine, PBS or LSF has started this process. They signal all processes of a job."""
    return any(os.environ.get(name) for name in ("SLURM_JOB_ID", "SGE_TASK_ID", "PBS_JOBID", "LSB_JOBID"))


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process."""
    os.environ.update(variables)


def replace_environment(variables: Mapping[str, str]) -> None:
    """Give this process the environment of another one, for which it was forked."""
    os.environ.clear()
    os.environ.update(variables)


def user_threads() -> int | None:
    """Return OMP_NUM_THREADS, or None if it is not set."""
    text = os.environ.get("OMP_NUM_THREADS")
    return _positive("OMP_NUM_THREADS", text.partition(",")[0].strip()) if text else None


def sleeping_threads() -> dict[str, str]:
    """Return the variable that lets waiting OpenMP threads sleep, unless the user has chosen otherwise.

    By default they wait in a loop for some milliseconds, which takes the cores from threads with work on a busy
    machine. OpenMP reads the variable once, when torch is imported.
    """
    return {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY") or "PASSIVE"}


def let_threads_sleep() -> None:
    """Set that variable in this process, before it imports torch."""
    os.environ.update(sleeping_threads())


def user_configuration() -> Path:
    """Return the folder of this user's own settings."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "echelon"


def use_compile_cache() -> str:
    """Let torch keep compiled kernels in the user's cache, unless a folder is configured. Return the folder."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "echelon" / "inductor"
    return os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(default))


def _text(name: str, text: str) -> str:
    return text


def _role(name: str, text: str) -> str:
    if text not in ROLES:
        raise UsageError(f"{name} is {text!r}; it must be one of {', '.join(ROLES)}")
    return text


def _security(name: str, text: str) -> str:
    if text not in SECURITY:
        raise UsageError(f"{name} is {text!r}; it must be one of {', '.join(SECURITY)}")
    return text


def _number(name: str, text: str) -> int:
    if not text.isdecimal():
        raise UsageError(f"{name} is {text!r}; it must be a whole number")
    return int(text)


def _positive(name: str, text: str) -> int:
    number = _number(name, text)
    if number < 1:
        raise UsageError(f"{name} is {text!r}; it must be 1 or more")
    return number


def _port(name: str, text: str) -> int:
    """Return a port number. 0 means no port or, for a scheduler, any free port."""
    port = _number(name, text)
    if port > HIGHEST_PORT:
        raise UsageError(f"{name} is {text!r}; a port is a number from 1 to {HIGHEST_PORT}")
    return port


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{name} is {text!r}; it must be a number of seconds above 0")
    return seconds


def import_paths(name: str, text: str) -> str:
    """Check import paths with commas between them, `package.module:Class`."""
    for path in text.split(","):
        module, _, kind = path.partition(":")
        if not all(part.isidentifier() for part in (*module.split("."), *kind.split("."))):
            raise UsageError(f"{name} {path}: write it as package.module:Class")
    return text


_VARIABLES: dict[str, tuple[str, Callable[[str, str], Any]]] = {  # the variable of each field, and its parser
    "role": ("DMLC_ROLE", _role),
    "scheduler_host": ("DMLC_PS_ROOT_URI", _text),
    "scheduler_port": ("DMLC_PS_ROOT_PORT", _port),
    "num_workers": ("DMLC_NUM_WORKER", _positive),
    "num_servers": ("DMLC_NUM_SERVER", _number),
    "rank": ("ECHELON_RANK", _number),
    "interface": ("DMLC_INTERFACE", _text),
    "host": ("DMLC_NODE_HOST", _text),
    "verbose": ("PS_VERBOSE", _number),
    "transport": ("ECHELON_TRANSPORT", _text),
    "staleness": ("ECHELON_STALENESS", _number),
    "groups": ("ECHELON_GROUPS", _text),
    "data_sharding": ("ECHELON_DATA_SHARDING", _text),
    "run_dir": ("ECHELON_RUN_DIR", _text),
    "stall_seconds": ("ECHELON_STALL_SECONDS", _seconds),
    "timeout_s": ("ECHELON_TIMEOUT", _seconds),
    "heartbeat_timeout_s": ("PS_HEARTBEAT_TIMEOUT", _seconds),
    "listen_fd": ("ECHELON_LISTEN_FD", _number),
    "device_index": ("ECHELON_DEVICE_INDEX", _number),
    "num_devices": ("ECHELON_NUM_DEVICES", _positive),
    "device_port": ("ECHELON_DEVICE_PORT", lambda name, text: _port(name, text) or None),
    "device_fd": ("ECHELON_DEVICE_FD", _number),
    "local_workers": ("ECHELON_LOCAL_WORKERS", _positive),
    "rendezvous_host": ("ECHELON_RENDEZVOUS_HOST", _text),
    "rendezvous_port": ("ECHELON_RENDEZVOUS_PORT", lambda name, text: _port(name, text) or None),
    "joined_file": ("ECHELON_JOINED_FILE", _text),
    "min_workers": ("ECHELON_MIN_WORKERS", _positive),
    "max_workers": ("ECHELON_MAX_WORKERS", _positive),
    "replicas": ("ECHELON_REPLICAS", _number),
    "max_restarts": (MAX_RESTARTS, _number),
    "restarts": ("ECHELON_RESTARTS", _number),
    "joins": ("ECHELON_JOINS", lambda name, text: text == "True"),
    "allow_optimizers": ("ECHELON_ALLOW_OPTIMIZERS", import_paths),
    "rendezvous_hosted": ("TORCHELASTIC_USE_AGENT_STORE", lambda name, text: text == "True"),
    "security": (SECURITY_POLICY, _security),
    "credentials": (CREDENTIALS, _text),
    "credentials_file": (CREDENTIALS_FILE, _text),
}
_INHERITED = ("listen_fd", "device_fd")  # sockets of one process, which others do not have
