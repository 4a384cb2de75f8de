"""Following the folder of a run while it is written, replaced, deleted or damaged."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from pathlib import Path

import pytest
from test_state import begin, event, progress

from echelon.errors import UsageError
from echelon.observe.events import FILE_NAME
from echelon.report.follow import RunFollower, run_folder
from echelon.report.state.job import job_info_of
from echelon.report.state.run import Event, RunState
from echelon.report.terminal.lines import phase_of_start
from echelon.report.terminal.screen import line


def write(folder: Path, *events: Event | str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE_NAME).open("a") as file:
        for one in events:
            file.write((one if isinstance(one, str) else json.dumps(one)) + "\n")


def followed(folder: Path) -> RunFollower:
    follower = RunFollower(folder)
    follower.read_all()
    return follower


def test_events_are_taken_as_they_are_written(tmp_path: Path) -> None:
    follower = followed(tmp_path)
    assert follower.files.fraction_read == 1.0
    write(tmp_path, begin(0), progress(0, 1001.0, 3))
    assert not follower.read()
    assert follower.state.workers[0].clock == 3
    assert follower.files.last_event == 1001.0
    assert follower.files.fraction_read == 1.0


def test_a_log_is_read_in_pieces_of_bounded_memory(tmp_path: Path) -> None:
    """20 MB of events need less than a tenth of that, and the first pieces say how far the reader is."""
    line = json.dumps(progress(0, 1001.0, 3) | {"filler": "x" * 900})
    write(tmp_path, begin(0), *[line] * 20_000)
    follower = RunFollower(tmp_path)
    tracemalloc.start()
    assert follower.read(100_000)
    assert 0 < follower.files.fraction_read < 0.01
    while follower.read(100_000):
        pass
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert follower.files.fraction_read == 1.0
    assert peak < follower.files.total_bytes / 10


def test_lines_that_are_not_events_are_counted_and_skipped(tmp_path: Path) -> None:
    write(
        tmp_path, begin(0), '{"event": "progress", "rank"', '{"event": "progress"}', '{"at": 1}', progress(0, 1001.0, 3)
    )
    follower = followed(tmp_path)
    assert follower.state.workers[0].clock == 3
    assert follower.files.unreadable == 3


def test_a_link_is_followed_to_the_next_run(tmp_path: Path) -> None:
    for name, rank in (("first", 0), ("second", 1)):
        write(tmp_path / name, begin(rank))
    link = tmp_path / "latest"
    link.symlink_to("first")
    follower = followed(link)
    assert follower.files.folder.name == "first"
    link.unlink()
    link.symlink_to("second")
    follower.read_all()
    assert list(follower.state.workers) == [1]
    assert follower.files.folder.name == "second"


def test_the_last_state_of_a_deleted_run_stays(tmp_path: Path) -> None:
    write(tmp_path / "run", begin(0))
    follower = followed(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert not follower.read()
    assert list(follower.state.workers) == [0]
    assert not follower.files.exists


def test_a_new_run_of_the_same_name_replaces_the_old_one(tmp_path: Path) -> None:
    write(tmp_path / "run", begin(0), begin(1))
    follower = followed(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "old")  # keeps its inode, which a new file could otherwise get
    write(tmp_path / "run", *[begin(2)] * 5)
    follower.read_all()
    assert list(follower.state.workers) == [2]
    (tmp_path / "run" / FILE_NAME).write_text(json.dumps(begin(3)) + "\n")
    follower.read_all()
    assert list(follower.state.workers) == [3]
    assert follower.files.unreadable == 0


def test_a_log_that_cannot_be_opened_is_read_later(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    follower = followed(tmp_path)
    (tmp_path / FILE_NAME).rmdir()
    write(tmp_path, begin(0))
    follower.read_all()
    assert list(follower.state.workers) == [0]


def test_an_impossible_number_of_workers_is_not_taken(tmp_path: Path) -> None:
    write(tmp_path, event("job", num_workers=10**15), begin(0))
    follower = followed(tmp_path)
    assert follower.state.job is None
    assert follower.files.unreadable == 1


def test_a_line_of_the_screen_has_no_control_characters() -> None:
    assert line("a\x1b[2Jb\u202ec").plain == "a [2Jb c"


def test_a_job_of_unknown_size_is_starting() -> None:
    state = RunState()
    assert phase_of_start(job_info_of(state), state) == "starting"


def test_the_exit_status_is_read_from_the_summary(tmp_path: Path) -> None:
    write(tmp_path, event("begin", rank=0))
    follower = followed(tmp_path)
    assert follower.files.exit_status is None
    (tmp_path / "summary.json").write_text('{"exit_status": ')  # half-written
    assert follower.files.exit_status is None
    (tmp_path / "summary.json").write_text('{"exit_status": 3, "accuracy": null}')
    assert follower.files.exit_status == 3


def test_a_missing_run_is_an_error_that_names_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"there is no run in /.*/runs; start one with echelon train"):
        run_folder(None)
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / FILE_NAME).touch()
    assert run_folder("mine") == run_folder("runs/mine") == run_folder(f"runs/mine/{FILE_NAME}") == Path("runs/mine")
    with pytest.raises(UsageError, match=r"there is no folder nosuch; the newest runs here are runs/mine"):
        run_folder("nosuch")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="file is not a folder"):
        run_folder("file")
