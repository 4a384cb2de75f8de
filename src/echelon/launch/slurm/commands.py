"""Running commands of Slurm, such as scontrol, that answer at once."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from echelon.environment import child_environment
from echelon.errors import JobError, UsageError

ANSWER_S = 60.0  # a busy slurmctld may be slow


def run_command(arguments: Sequence[str], *, variables: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output. Raises JobError with what it printed if it fails."""
    try:
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            env=child_environment(variables or {}),
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            start_new_session=True,  # Ctrl-C is for the launcher, which may be waiting for this answer
        )
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no program {arguments[0]!r} in PATH: start the launcher where Slurm's commands are installed"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise JobError(f"{arguments[0]} has not answered within {ANSWER_S:g} s") from error
    if done.returncode:
        text = " ".join(done.stderr.split()) or f"it exited with status {done.returncode}"
        raise JobError(f"{' '.join(arguments[:2])} failed: {text}")
    return done.stdout
