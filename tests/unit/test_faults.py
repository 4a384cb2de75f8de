"""Faults: their addresses, how often they fire, what they do to a process, and the record that they leave."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon import fault_points
from echelon.atomic_file import AtomicFile
from echelon.environment import FAULTS
from echelon.errors import UsageError
from echelon.faults import FILE_NAME, Fault, Faults, Kind, parse
from echelon.observe.events import EventLog, EventReader
from echelon.testing.faults import check_fired, faults_in, fired, flip_bit, partition, small_disk


@pytest.fixture(autouse=True)
def no_faults_afterwards() -> Iterator[None]:
    yield
    fault_points.configure("", None, "worker", None)


def use(run: Path, *faults: Fault, role: str = "worker", rank: int = 0, restarts: int = 0) -> None:
    fault_points.configure(faults_in(faults)[FAULTS], str(run), role, rank, restarts)


def run_process(run: Path, fault: Fault, program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process that has a fault."""
    begin = f"from echelon import fault_points; fault_points.configure({faults_in([fault])[FAULTS]!r}, {str(run)!r}, "
    code = f"{begin}'server', 1)\nfrom echelon.fault_points import fault_point\n{program}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("fault", "reached"),
    [
        (Fault(Kind.CALL, "worker", 1, 3, "worker.push"), [("worker.push", 3)]),
        (Fault(Kind.CALL, "worker", 1, None, "worker.push"), [("worker.push", 2)]),
        (Fault(Kind.CALL, "worker", None, 3), [("worker.sent", 3)]),
        (Fault(Kind.CALL, "worker", 2, 3, "worker.push"), []),
        (Fault(Kind.CALL, "server", 1, 3, "worker.push"), []),
        (Fault(Kind.CALL, "worker", 1, None, "worker.push", after=1), [("worker.push", 3)]),
        (
            Fault(Kind.CALL, "worker", 1, None, "", times=3),
            [("worker.push", 2), ("worker.sent", 3), ("worker.push", 3)],
        ),
        (Fault(Kind.CALL, "worker", 1, None, "worker.push", restarts=1), []),
        (Fault(Kind.DROP, "worker", 1, 3, "worker.push"), []),  # messages only
    ],
)
def test_a_fault_fires_where_its_address_says(fault: Fault, reached: list[tuple[str, int]], tmp_path: Path) -> None:
    use(tmp_path, fault, rank=1)
    for point, clock in (("worker.push", 2), ("worker.sent", 3), ("worker.push", 3), ("worker.push", 3)):
        fault_points.fault_point(point, clock)
    assert [(one.point, one.clock) for one in fired(tmp_path)] == reached


def test_a_restarted_process_has_only_the_faults_of_its_start(tmp_path: Path) -> None:
    use(tmp_path, Fault(Kind.CALL), Fault(Kind.CALL, restarts=1, point="again"), restarts=1)
    fault_points.fault_point("again")
    fault_points.fault_point("again")
    assert [one.point for one in fired(tmp_path)] == ["again"]


def test_the_rank_may_become_known_later(tmp_path: Path) -> None:
    fault_points.configure(faults_in([Fault(Kind.CALL, rank=4)])[FAULTS], str(tmp_path), "worker", None)
    fault_points.fault_point("worker.push")
    assert fired(tmp_path) == []
    fault_points.identify("worker", 4)
    fault_points.fault_point("worker.push")
    assert [one.rank for one in fired(tmp_path)] == [4]


def test_without_faults_a_point_does_nothing(tmp_path: Path) -> None:
    fault_points.configure("", str(tmp_path), "worker", 0)
    fault_points.fault_point("worker.push", 1)
    assert fault_points.ACTIVE is None
    assert not (tmp_path / FILE_NAME).exists()


@pytest.mark.parametrize("text", ["{", '[{"kind": "explode"}]', '[{"kind": "crash", "rnak": 1}]'])
def test_wrong_faults_are_one_clear_error(text: str) -> None:
    with pytest.raises(UsageError, match=r"ECHELON_FAULTS is not a JSON list of faults: .*kinds are crash, stop"):
        parse(text)


def test_faults_need_a_folder_for_their_record() -> None:
    with pytest.raises(UsageError, match=r"needs ECHELON_RUN_DIR.*faults\.jsonl"):
        fault_points.configure('[{"kind": "crash"}]', None, "worker", 0)


def test_crash_kills_the_process_after_it_was_recorded(tmp_path: Path) -> None:
    fault = Fault(Kind.CRASH, "server", 1, 5, "server.applied")
    ended = run_process(
        tmp_path,
        fault,
        "fault_point('server.applied', 4); print('lives', flush=True)\n"
        "fault_point('server.applied', 5); print('still lives')",
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "lives\n")
    (one,) = check_fired(tmp_path, [fault])
    assert (one.role, one.rank, one.clock) == ("server", 1, 5)


def test_a_stopped_process_continues_after_its_time(tmp_path: Path) -> None:
    fault = Fault(Kind.STOP, "server", 1, seconds=0.5)
    program = "import time; a = time.monotonic(); fault_point('server.push'); print(time.monotonic() - a)"
    ended = run_process(tmp_path, fault, program)
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout) >= 0.5
    check_fired(tmp_path, [fault])


def test_delay_delays_the_process(tmp_path: Path) -> None:
    use(tmp_path, Fault(Kind.DELAY, seconds=0.05))
    began = time.monotonic()
    fault_points.fault_point("worker.push", 0)
    assert time.monotonic() - began >= 0.05


def test_a_partition_and_a_slow_link_last_for_their_time() -> None:
    faults = Faults(
        [
            *partition(["worker 0"], ["server 1", "server 2"], 0.05, point="worker.push"),
            Fault(Kind.SLOW, seconds=60, bytes_per_s=1000, point="worker.sent"),
        ],
        rank=0,
    )
    assert not faults.is_cut("server 1")
    faults.reach("worker.push", 0)
    assert faults.is_cut("server 1")
    assert faults.is_cut("server 2")
    assert not faults.is_cut("server 0")
    time.sleep(0.05)  # the length of the cut, which is what is tested
    assert not faults.is_cut("server 1")
    assert faults.sending_s(500) == 0
    faults.reach("worker.sent", 0)
    assert faults.sending_s(500) == pytest.approx(0.5)


@pytest.mark.parametrize("point", ["file.write", "file.sync"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, point: str) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "file").write_bytes(b"old")
    fault = Fault(Kind.DISK_FULL, point=point, below=str(folder))
    use(tmp_path, fault)
    with AtomicFile(tmp_path / "elsewhere") as file:
        file.stream.write(b"fine")
    with pytest.raises(OSError, match="No space left") as error, AtomicFile(folder / "file") as file:
        file.stream.write(b"new")
    assert error.value.errno == errno.ENOSPC
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("file", b"old")]
    check_fired(tmp_path, [fault])


def test_a_full_disk_loses_events_and_says_how_many(tmp_path: Path) -> None:
    use(tmp_path, Fault(Kind.DISK_FULL, point="events.write", below=str(tmp_path)))
    with EventLog(tmp_path, "worker", 0) as log:
        log.write("lost")
        while not fired(tmp_path):
            time.sleep(0.01)
        log.write("kept")
    assert [event["event"] for event in EventReader(tmp_path).poll()] == ["kept", "dropped"]


def test_a_bit_of_a_written_file_flips(tmp_path: Path) -> None:
    fault = Fault(Kind.BIT_FLIP, point="file.renamed", below=str(tmp_path))
    use(tmp_path, fault)
    with AtomicFile(tmp_path / "file") as file:
        file.stream.write(bytes(9))
    assert (tmp_path / "file").read_bytes() == bytes(4) + b"\1" + bytes(4)
    flip_bit(tmp_path / "file", 0)
    assert (tmp_path / "file").read_bytes()[0] == 1
    check_fired(tmp_path, [fault])


def test_a_fault_that_did_not_happen_fails_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="happened 0 times instead of 1"):
        check_fired(tmp_path, [Fault(Kind.CRASH)])
    use(tmp_path, Fault(Kind.CALL, times=2))
    fault_points.fault_point("worker.push")
    with pytest.raises(AssertionError, match="happened 1 times instead of 2"):
        check_fired(tmp_path, [Fault(Kind.CALL, times=2)])
    with pytest.raises(AssertionError, match="no test asked for them"):
        check_fired(tmp_path, [])


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a file system")
def test_a_small_disk_is_full_after_its_megabytes(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path / "disk", 1) as disk:
            (disk / "fits").write_bytes(bytes(1 << 19))
            with pytest.raises(OSError, match="No space left"):
                (disk / "too large").write_bytes(bytes(1 << 20))
    except subprocess.CalledProcessError:
        pytest.skip("this container may not mount file systems")
