"""Notes of a job's processes for their launcher: lines of a file of their machine.

The launcher, or its agent on that machine, reads them; `launch.joining` lists them. A process that no launcher started
has no such file, and its notes are dropped.
"""

from __future__ import annotations

from contextlib import suppress

from echelon.environment import Job


def add_note(job: Job, text: str) -> None:
    """Add a note. A line of this length is written at once or not at all; a full disk must not end a process."""
    if job.joined_file is not None:
        with suppress(OSError), open(job.joined_file, "a") as file:
            file.write(f"{text}\n")
