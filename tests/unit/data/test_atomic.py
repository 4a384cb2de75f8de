"""Files that appear whole or not at all, also when their writer is stopped or killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from echelon.atomic_file import AtomicFile, partial_folder
from echelon.data.records import IndexedWriter

WRITE_FILE = """
import sys
from echelon.atomic_file import AtomicFile
with AtomicFile(sys.argv[1]) as file:
    print(flush=True)
    sys.stdin.read()
"""
WRITE_FOLDER = """
import sys
from pathlib import Path
from echelon.atomic_file import partial_folder
with partial_folder(Path(sys.argv[1])) as folder:
    (folder / "some").mkdir()
    (folder / "some" / "file").touch()
    print(flush=True)
    sys.stdin.read()
"""


@contextmanager
def writer(program: str, path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is in the middle of writing `path`."""
    command = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def killed_while_writing(program: str, path: Path) -> None:
    before = set(path.parent.iterdir())
    with writer(program, path) as process:
        process.kill()
    (left,) = set(path.parent.iterdir()) - before
    assert left.name.startswith(f".{path.name}.{process.pid}-")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_what_a_killed_process_left_goes_when_its_file_is_written_again(tmp_path: Path) -> None:
    killed_while_writing(WRITE_FILE, tmp_path / "x.rec")
    killed_while_writing(WRITE_FILE, tmp_path / "x.rec")
    with AtomicFile(tmp_path / "x.rec") as file:
        assert len(names(tmp_path)) == 1, "room for the new file is made before it is written"
        file.stream.write(b"whole")
    assert names(tmp_path) == {"x.rec"}


def test_what_a_killed_process_left_of_a_folder_goes_too(tmp_path: Path) -> None:
    killed_while_writing(WRITE_FOLDER, tmp_path / "out")
    with partial_folder(tmp_path / "out") as folder:
        folder.rename(tmp_path / "out")
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("program", [WRITE_FILE, WRITE_FOLDER])
def test_what_others_are_writing_stays(tmp_path: Path, program: str) -> None:
    killed_while_writing(program, tmp_path / "y")  # another name: not asked for
    others = {"x.partial", ".x.notes.partial", ".x.12-notes.partial", ".x.99999999999-00000000.partial"}
    for name in others:
        (tmp_path / name).touch()
    with writer(program, tmp_path / "x") as process:
        before = names(tmp_path)
        with AtomicFile(tmp_path / "x"), AtomicFile(tmp_path / "x"):
            pass
        assert names(tmp_path) == before | {"x"}
        process.send_signal(signal.SIGKILL)


def test_a_number_used_again_does_not_protect_what_is_left(tmp_path: Path) -> None:
    """In a container the same command has the same process number every time."""
    (tmp_path / f".x.{os.getpid()}-0123abcd.partial").touch()
    with AtomicFile(tmp_path / "x"):
        pass
    assert names(tmp_path) == {"x"}


def test_a_number_that_says_nothing_here_does_not_condemn_what_is_being_written(tmp_path: Path) -> None:
    """Another container, which shares the folder but not the process numbers, is seen by its lock."""
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        pass
    with AtomicFile(tmp_path / "x") as file:
        (temporary,) = tmp_path.iterdir()
        elsewhere = tmp_path / f".x.{gone.pid}-0123abcd.partial"
        temporary.rename(elsewhere)
        with AtomicFile(tmp_path / "x"):
            pass
        assert names(tmp_path) == {"x", elsewhere.name}
        file.discard()


def test_an_interrupt_before_files_are_given_their_names_leaves_the_old_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = {"x.rec": b"old records", "x.idx": b"old index"}
    for name, data in old.items():
        (tmp_path / name).write_bytes(data)

    def interrupt(number: int) -> None:
        raise KeyboardInterrupt

    def write() -> None:
        with IndexedWriter(tmp_path / "x.rec") as records:
            records.write(0, b"one")
            monkeypatch.setattr(os, "fsync", interrupt)

    with pytest.raises(KeyboardInterrupt):
        write()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old


def test_a_file_that_nobody_finished_goes_with_the_process_but_not_with_a_fork(tmp_path: Path) -> None:
    program = """
import os, sys
from echelon.atomic_file import AtomicFile
file = AtomicFile(sys.argv[1])
if os.fork() == 0:
    sys.exit()
os.wait()
print(os.listdir())
"""
    run = subprocess.run([sys.executable, "-c", program, "x"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert run.stdout.startswith("['.x.")
    assert names(tmp_path) == set()
