"""A command whose output nobody reads any more, as in `echelon data info x.rec | head -1`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from echelon.data.records import Header, IndexedWriter, pack


def test_a_command_ends_silently(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "x.rec") as writer:
        writer.write(0, pack(Header(0.0), b"x"))
    # Unbuffered, so that writing fails inside the command and not at its end.
    command = [sys.executable, "-u", "-m", "echelon.cli.main", "data", "info", "x.rec"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        error = process.stderr.read().decode()
    assert (process.returncode, error) == (128 + signal.SIGPIPE, "")
