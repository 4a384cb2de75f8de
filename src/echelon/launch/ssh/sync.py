"""Copying a folder to the hosts of a job, for `--sync-dst-dir`: by rsync, or by tar over ssh where rsync is missing.

Several hosts are copied to at once. rsync sends only what has changed. Nothing is deleted on the hosts.
"""

from __future__ import annotations

import fnmatch
import gzip
import os
import re
import selectors
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from echelon.errors import JobError
from echelon.launch.addresses import is_this_machine
from echelon.launch.hosts import Host
from echelon.launch.ssh.client import SshClient, explain, recognize
from echelon.launch.supervision.processes import ChildProcess

NOT_COPIED = (".git", ".venv", "__pycache__", ".mypy_cache", ".pytest_cache", ".ruff_cache")
_AT_ONCE = 16  # hosts
_TICK_S = 0.2
_ALMOST = 0.99  # until the program has ended
_NO_RSYNC = re.compile(r"rsync: (command )?not found|(command not found|unknown command): rsync", re.IGNORECASE)
_PERCENT = re.compile(rb"(\d+)%")

OnProgress = Callable[[Host, float], None]  # gets a host, and how much of the folder it has, from 0 to 1
Write = Callable[[Host, IO[bytes]], None]  # writes the input of a program
Failures = dict[Host, tuple[int, str]]  # the exit code of a program, and what it wrote to its standard error


@dataclass(frozen=True)
class Copy:
    """What to copy: the content of `source` to the folder `destination` of every host, without some names."""

    source: Path
    destination: str
    client: SshClient = field(default_factory=SshClient)
    exclude: tuple[str, ...] = NOT_COPIED

    def rsync_command(self, host: Host) -> list[str]:
        """Return the command that copies by rsync. It makes the destination with the folders above it."""
        name = f"[{host.name}]" if ":" in host.name else host.name
        options = ["-az", "--protect-args", "--info=progress2", "--no-inc-recursive"]
        options += [f"--rsync-path=mkdir -p -- {shlex.quote(self.destination)} && rsync"]
        options += [f"--rsh={shlex.join(self.client.login(host))}"]
        options += [f"--exclude={pattern}" for pattern in self.exclude]
        return ["rsync", *options, "--", f"{self.source}/", f"{name}:{self.destination}/"]

    def tar_command(self, host: Host) -> list[str]:
        """Return the command that unpacks its input on the host."""
        folder = shlex.quote(self.destination)
        script = f"mkdir -p -- {folder} && exec tar -xzf - -C {folder}"
        return [*self.client.command(host), f"exec sh -c {shlex.quote(script)}"]

    def files(self) -> Iterator[tuple[Path, int]]:
        """Yield the paths to copy, relative to the source, and their sizes. A folder comes before its content."""
        for folder, folders, files in os.walk(self.source):
            here = Path(folder).relative_to(self.source)
            folders[:] = [name for name in folders if not self._excludes(here / name)]
            yield from ((here / name, 0) for name in folders)
            for name in files:
                if not self._excludes(here / name):
                    yield here / name, (self.source / here / name).lstat().st_size

    def _excludes(self, path: Path) -> bool:
        """Return whether a pattern matches the end of a path, or all of it if it begins with a slash, as in rsync."""
        for pattern in self.exclude:
            wanted = pattern.strip("/").split("/")
            parts = path.parts if pattern.startswith("/") else path.parts[-len(wanted) :]
            if len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted)):
                return True
        return False


def copy_to_hosts(copy: Copy, hosts: Sequence[Host]) -> None:
    """Copy to all hosts, and show progress on standard error. Raises JobError that names every host that failed.

    This machine is left out if the path is the same.
    """
    if copy.destination == str(copy.source):
        hosts = [host for host in hosts if not is_this_machine(host.name)]
    if not hosts:
        return
    without = f" (without {', '.join(copy.exclude)})" if copy.exclude else ""
    _say(f"copying {copy.source} to {copy.destination} on {', '.join(map(str, hosts))}{without}")
    failed: dict[Host, str] = {}
    with _progress(copy, hosts) as on_progress:
        for first in range(0, len(hosts), _AT_ONCE):
            failed |= _copy_to_some(copy, hosts[first : first + _AT_ONCE], on_progress)
    if failed:
        lines = [f"{copy.source} was not copied to {host}: {failed[host]}" for host in hosts if host in failed]
        raise JobError("\n".join(lines))


def _copy_to_some(copy: Copy, hosts: Sequence[Host], on_progress: OnProgress) -> dict[Host, str]:
    """Copy to a few hosts at once. Returns those that failed, and why."""
    if not shutil.which("rsync"):
        return _copy_by_tar(copy, hosts, on_progress)
    failed = _run({host: copy.rsync_command(host) for host in hosts}, on_progress)
    no_rsync = [host for host, (_, errors) in failed.items() if _NO_RSYNC.search(errors)]
    reasons = {host: _why_rsync_failed(host, *how) for host, how in failed.items() if host not in no_rsync}
    return reasons | _copy_by_tar(copy, no_rsync, on_progress)


def _why_rsync_failed(host: Host, exit_code: int, errors: str) -> str:
    return recognize(host, errors) or next(filter(None, errors.splitlines()), f"rsync ended with status {exit_code}")


def _copy_by_tar(copy: Copy, hosts: Sequence[Host], on_progress: OnProgress) -> dict[Host, str]:
    """Copy by a program that every host has. Returns the hosts that failed, and why."""
    if copy.destination == str(copy.source):  # on a shared disk, tar would overwrite the files that it reads
        return dict.fromkeys(hosts, "the path is the same there, which needs rsync; install rsync on both machines")
    unreadable: dict[Host, str] = {}

    def write(host: Host, pipe: IO[bytes]) -> None:
        try:
            write_tar(copy, pipe, lambda done: on_progress(host, done))
        except BrokenPipeError:
            pass  # the exit code and the errors of the program say why
        except OSError as error:
            unreadable[host] = f"{error.filename or copy.source} cannot be read: {error.strerror or error}"

    failed = _run({host: copy.tar_command(host) for host in hosts}, on_progress, write)
    return {host: unreadable.get(host) or explain(host, *how) for host, how in failed.items()}


def write_tar(copy: Copy, pipe: IO[bytes], on_progress: Callable[[float], None]) -> None:
    """Write the files as a compressed archive."""
    paths = list(copy.files())
    total, done = sum(size for _, size in paths) or 1, 0
    with (
        gzip.GzipFile(fileobj=pipe, mode="wb", compresslevel=1) as compressed,
        tarfile.open(fileobj=compressed, mode="w|", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, size in paths:
            archive.add(copy.source / path, arcname=str(path), recursive=False)
            done += size
            on_progress(_ALMOST * done / total)


class _Program:
    """A program that copies to one host. Its input is written by a thread, if `write` is given."""

    def __init__(self, host: Host, command: Sequence[str], write: Write | None) -> None:
        self.host = host
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        stdin = subprocess.DEVNULL if write is None else subprocess.PIPE
        self.child = ChildProcess(
            f"copying to {host}", command, {}, stdin=stdin, stdout=self._output, stderr=self._errors
        )
        self._thread = None if write is None else threading.Thread(target=self._write, args=(write,), daemon=True)

    def start_writing(self) -> None:
        """Start the thread that writes the input."""
        if self._thread is not None:
            self._thread.start()

    def _write(self, write: Write) -> None:
        assert self.child.stdin is not None
        try:
            write(self.host, self.child.stdin)
        finally:
            with suppress(OSError):
                self.child.stdin.close()

    def progress(self) -> float | None:
        """Return how much rsync has copied, if it has said so."""
        output = self._output.fileno()
        found = _PERCENT.findall(os.pread(output, 200, max(0, os.fstat(output).st_size - 200)))
        return int(found[-1]) / 100 if found else None

    def result(self) -> tuple[int, str]:
        """Return the exit code of the program, which has ended, and its errors."""
        if self._thread is not None:
            self._thread.join()
        self._errors.seek(0)
        return self.child.reap(), self._errors.read().decode(errors="replace")

    def close(self) -> None:
        """End the program."""
        self.child.reap()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()  # its pipe is broken now
        self.child.close()
        self._output.close()
        self._errors.close()


def _run(
    commands: Mapping[Host, Sequence[str]],
    on_progress: OnProgress,
    write: Write | None = None,
) -> Failures:
    """Run one program per host to its end. Returns those that failed."""
    failed: Failures = {}
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        programs = []
        for host, command in commands.items():
            programs.append(program := _Program(host, command, write))
            stack.callback(program.close)
        for program in programs:  # after all have started: forking beside threads is not safe
            program.start_writing()
            selector.register(program.child.pidfd, selectors.EVENT_READ, program)
        while selector.get_map():
            for key, _ in selector.select(_TICK_S):
                selector.unregister(key.fileobj)
                programs.remove(key.data)
                code, errors = key.data.result()
                if code:
                    failed[key.data.host] = code, errors
                else:
                    on_progress(key.data.host, 1.0)
            for program in programs:
                if (done := program.progress()) is not None:
                    on_progress(program.host, min(done, _ALMOST))
    return failed


@contextmanager
def _progress(copy: Copy, hosts: Sequence[Host]) -> Iterator[OnProgress]:
    """Show one bar per host on a terminal. Elsewhere show one line per host, when it has everything."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True)) as progress:
            tasks = {host: progress.add_task(host.name, total=1.0) for host in hosts}
            yield lambda host, done: progress.update(tasks[host], completed=done)
        return
    began = time.monotonic()

    def say_if_complete(host: Host, done: float) -> None:
        if done == 1.0:
            _say(f"copied to {host}:{copy.destination} in {time.monotonic() - began:.1f} s")

    yield say_if_complete


def _say(text: str) -> None:
    print(f"echelon: {text}", file=sys.stderr, flush=True)
