"""The command with which workers join a running job, which the job's launcher prints.

The credentials are in a file that only the user can read, because any user of a machine can read command lines.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from tempfile import TemporaryDirectory

from echelon.environment import Job
from echelon.launch.plan import Address, Plan
from echelon.transport.admission.credentials import FILE_NAME, Credentials, write_credentials

_SECURITY_FLAGS = {"proof": ["--no-encryption"], "none": ["--insecure"]}


class JoinLine:
    """The command with which workers join a job, and the file with its credentials, which exists as long as the job."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._was_taken = False
        self._folder: TemporaryDirectory[str] | None = None

    def take(self, address: Address | None) -> str | None:
        """Return what to tell the user, once: when the address of the scheduler is known, and if workers may join."""
        job = self._plan.job
        if address is None or self._was_taken or (job.max_workers or 0) <= job.num_workers:
            return None
        self._was_taken = True
        words = ["echelon", "join", f"{address.host}:{address.port}"]
        words += ["--job-workers", str(job.num_workers), "--job-servers", str(job.num_servers)]
        words += ["--run-dir", str(Path(job.run_dir).absolute())] if job.run_dir else []
        words += ["--max-restarts", str(job.max_restarts)] if job.max_restarts != Job().max_restarts else []
        words += _SECURITY_FLAGS.get(job.security, [])
        if job.security != "none":
            file = Path(job.credentials_file).absolute() if job.credentials_file else self._write_credentials()
            words += ["--credentials-file", str(file)]
        more = (job.max_workers or 0) - job.num_workers
        return f"up to {more} more workers can join this job: {shlex.join([*words, '--', *self._plan.request.command])}"

    def close(self) -> None:
        """Remove the file. A second call does nothing."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _write_credentials(self) -> str:
        assert self._plan.job.credentials is not None
        self._folder = TemporaryDirectory(prefix="echelon-join-")
        path = Path(self._folder.name) / FILE_NAME
        write_credentials(path, Credentials.parse(self._plan.job.credentials, "the job"))
        return str(path)
