"""Decode processes: identical batches, no processes left behind, and errors that name a killed process."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
import torch
from sample_images import NUM_RECORDS, jpeg, make_records, picture, write_records
from torch import Tensor

from echelon.data.images.config import AugmentConfig
from echelon.data.loading import decode_pool, sources
from echelon.data.loading.buffers import BufferPool
from echelon.data.loading.decode_pool import DecodeProcess, shared_fork_server
from echelon.data.loading.loader import Loader
from echelon.data.loading.order import Sampling
from echelon.data.loading.sources import FolderSource, RecordSource
from echelon.data.records import Header, IndexedWriter, pack
from echelon.data.sets.datasets import make_loader
from echelon.errors import DataError, UsageError

pytestmark = pytest.mark.numeric

PLAIN = AugmentConfig(shape=(3, 24, 32), random_crop=True, random_mirror=True, rgb_std=(50.0, 51.0, 52.0))
EVERYTHING = AugmentConfig(
    shape=(3, 24, 32), random_crop=True, random_mirror=True, min_random_scale=0.6, max_random_rotate_angle=10,
    brightness=0.3, max_random_h=20, pca_noise=0.1, rgb_mean=(120.0, 115.0, 105.0), rgb_std=(50.0, 51.0, 52.0),
)  # fmt: skip
GONE_S = 30.0


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordSource:
    return RecordSource(make_records(tmp_path_factory.mktemp("records") / "some.rec"))


def loader(source: RecordSource | FolderSource, config: AugmentConfig = PLAIN, **options: object) -> Loader:
    given = {"sampling": Sampling(len(source), 5, seed=3), "threads": 2, "processes": True, **options}
    return Loader(source, config, **given)  # type: ignore[arg-type]


def take(source: RecordSource | FolderSource, config: AugmentConfig = PLAIN, **options: object) -> list[list[Tensor]]:
    """Return the batches of two epochs."""
    with loader(source, config, **options) as batches:
        return [list(batch) for _ in range(2) for batch in batches]


def same(some: list[list[Tensor]], others: list[list[Tensor]]) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(one, other) for mine, yours in pairs for one, other in zip(mine, yours, strict=True))


def pids(batches: Loader) -> list[int]:
    return [process.pid for process in batches._decoders.processes]


def assert_gone(numbers: list[int]) -> None:
    processes = []
    for number in numbers:
        with suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(number))
    assert not psutil.wait_procs(processes, GONE_S)[1]


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (PLAIN, {}),
        (PLAIN, {"output": "uint8", "threads": 3, "prefetch": 4}),
        (PLAIN, {"exact": True}),
        (EVERYTHING, {"threads": 1}),
    ],
)
def test_processes_and_threads_give_identical_batches(
    records: RecordSource, config: AugmentConfig, options: dict[str, object]
) -> None:
    assert same(take(records, config, **options), take(records, config, **options | {"processes": False}))


def test_folders_of_images_are_decoded_in_processes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(3):
            (tmp_path / name / f"{number}.jpg").write_bytes(jpeg(picture(number + ord(name))))
    source = FolderSource.from_classes(tmp_path)
    assert same(take(source), take(source, processes=False))


def test_several_labels_are_rows(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "pairs.rec") as writer:
        for number in range(4):
            writer.write(number, pack(Header([number, 0.5]), jpeg(picture(number))))
    (labels, _) = (batch[1] for batch in take(RecordSource(tmp_path / "pairs.rec"), sampling=Sampling(4, 4)))
    assert sorted(labels.tolist()) == [[0, 0.5], [1, 0.5], [2, 0.5], [3, 0.5]]


def test_processes_that_only_crop_do_not_load_torch(records: RecordSource) -> None:
    with loader(records) as batches:
        next(iter(batches))
        for number in pids(batches):
            assert "libtorch" not in Path(f"/proc/{number}/maps").read_text()


def test_kept_batches_are_never_overwritten_and_other_buffers_are_reused(records: RecordSource) -> None:
    with loader(records) as batches:
        kept = [(images, images.clone()) for _ in range(4) for images, _ in batches]
    assert all(torch.equal(now, then) for now, then in kept)
    with loader(records) as batches:
        assert len({images.data_ptr() for _ in range(10) for images, _ in batches}) <= 5


def test_memory_of_a_decode_process_does_not_grow(records: RecordSource) -> None:
    with Loader(records, AugmentConfig(shape=(3, 300, 300), random_crop=True), Sampling(NUM_RECORDS, 5),
                threads=1, processes=True) as batches:  # fmt: skip
        process = psutil.Process(pids(batches)[0])
        for _ in range(6):
            list(batches)
        before = process.memory_info().rss
        for _ in range(30):
            for _ in batches:
                pass
        assert process.memory_info().rss - before < 16e6


def test_close_ends_the_processes(records: RecordSource) -> None:
    batches = loader(records)
    numbers = pids(batches)
    next(iter(batches))
    assert all(psutil.pid_exists(number) for number in numbers)
    batches.close()
    assert not any(psutil.pid_exists(number) for number in numbers)


def test_a_dropped_loader_ends_its_processes(records: RecordSource) -> None:
    batches = loader(records)
    numbers = pids(batches)
    next(iter(batches))
    del batches
    gc.collect()
    assert_gone(numbers)


def test_processes_ignore_signals_to_the_whole_job(records: RecordSource) -> None:
    with loader(records) as batches:
        iterator = iter(batches)
        next(iterator)  # the processes have started
        for number in pids(batches):
            os.kill(number, signal.SIGTERM)
            os.kill(number, signal.SIGINT)
        assert len(list(iterator)) == len(batches) - 1


def test_a_killed_process_is_reported_and_closes_the_loader(records: RecordSource) -> None:
    batches = loader(records, threads=1)
    (number,) = pids(batches)
    next(iter(batches))
    batches.wait()
    os.kill(number, signal.SIGKILL)
    message = rf"\(pid {number}\) ended by signal 9 while decoding one of the samples [\d, ]+; is there enough memory\?"
    with pytest.raises(DataError, match=message):
        [list(batches) for _ in range(3)]
    with pytest.raises(UsageError, match="closed"):
        next(iter(batches))


def test_processes_end_when_the_loader_is_killed(records: RecordSource) -> None:
    program = (
        "import os, sys\n"
        "from echelon.data.images.config import AugmentConfig\n"
        "from echelon.data.loading.order import Sampling\n"
        "from echelon.data.loading.loader import Loader\n"
        "from echelon.data.loading.sources import RecordSource\n"
        "source = RecordSource(sys.argv[1])\n"
        "batches = Loader(source, AugmentConfig((3, 24, 32)), Sampling(len(source), 5), threads=2, processes=True)\n"
        "next(iter(batches))\n"
        "print(*(process.pid for process in batches._decoders.processes), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    path = records._reader.files[0].path
    ran = subprocess.run([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == -signal.SIGKILL
    numbers = [int(number) for number in ran.stdout.split()]
    assert len(numbers) == 2
    assert_gone(numbers)


def test_errors_of_processes_name_file_record_and_byte(tmp_path: Path) -> None:
    payloads = [jpeg(picture(number)) for number in range(8)]
    payloads[4] = b"no image"
    source = RecordSource(write_records(tmp_path / "damaged.rec", payloads))
    sampling = Sampling(8, 4, shuffle=False)
    with (
        pytest.raises(DataError, match=r"damaged\.rec: record 4 at byte \d+: 8 bytes .* are not an image"),
        loader(source, sampling=sampling) as batches,
    ):
        list(batches)
    with loader(source, sampling=sampling, skip_bad_records=True) as batches:
        assert [labels.tolist() for _, labels in batches] == [[0, 1, 2, 3], [5, 6, 7]]
        assert batches.num_bad == 1


def test_threads_decode_if_memory_cannot_be_attached(records: RecordSource, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = take(records)
    monkeypatch.setattr(BufferPool, "descriptor", lambda pool, taken: "of another machine")
    assert same(take(records), expected)


def test_only_large_sets_use_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = RecordSource(write_records(tmp_path / "some.rec", [jpeg(picture(number)) for number in range(6)]))
    for many, count in ((6, 2), (7, 0)):
        monkeypatch.setattr(sources, "MANY", many)
        batches = make_loader(source, PLAIN, Sampling(6, 3), threads=2)
        with closing(batches):
            assert isinstance(batches, Loader)
            assert len(pids(batches)) == count


def test_loaders_share_a_fork_server_which_ends_with_the_last_of_them(records: RecordSource) -> None:
    first, second = loader(records), loader(records)
    number = shared_fork_server().pid
    parents = {psutil.Process(process).ppid() for process in pids(first) + pids(second)}
    assert parents == {number}
    first.close()
    assert len(list(second)) == len(second)
    second.close()
    gc.collect()
    assert_gone([number])


def test_a_loader_survives_its_fork_server_and_the_next_one_starts_another(records: RecordSource) -> None:
    with loader(records) as batches:
        iterator = iter(batches)
        next(iterator)
        killed = shared_fork_server().pid
        os.kill(killed, signal.SIGKILL)
        assert len(list(iterator)) == len(batches) - 1
        with loader(records) as others:
            assert len(list(others)) == len(batches)


def test_close_kills_a_stuck_process(records: RecordSource) -> None:
    batches = loader(records, threads=1)
    (number,) = pids(batches)
    os.kill(number, signal.SIGSTOP)
    batches.close()
    assert_gone([number])


def test_a_slow_process_is_reported_and_waited_for(
    records: RecordSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(decode_pool, "SLOW_S", 0.05)
    with loader(records, threads=1) as batches:
        (number,) = pids(batches)
        os.kill(number, signal.SIGSTOP)

        def let_go(record: logging.LogRecord) -> bool:
            os.kill(number, signal.SIGCONT)
            return True

        caplog.handler.addFilter(let_go)
        try:
            assert len(list(batches)) == len(batches)
        finally:
            caplog.handler.removeFilter(let_go)
    assert f"a decode process (pid {number}) has been decoding samples " in caplog.messages[0]


def test_relative_paths_are_resolved_where_the_source_was_opened(
    records: RecordSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("one", "other"):
        (tmp_path / folder / "class").mkdir(parents=True)
        (tmp_path / folder / "class" / "0.jpg").write_bytes(jpeg(picture(len(folder))))
    make_records(tmp_path / "one" / "some.rec", 3)
    with loader(records):  # keeps the fork server alive, which was started in this folder
        found = []
        for folder in ("one", "other"):
            monkeypatch.chdir(tmp_path / folder)
            source = FolderSource.from_classes(".")
            record = RecordSource("some.rec") if folder == "one" else None
            monkeypatch.chdir(tmp_path)
            found.append(take(source, sampling=Sampling(1, 1)))
            assert same(found[-1], take(source, sampling=Sampling(1, 1), processes=False))
            assert record is None or len(take(record, sampling=Sampling(3, 3))) == 2
    assert not same(*found)


def test_a_file_replaced_after_opening_is_an_error(tmp_path: Path) -> None:
    source = RecordSource(make_records(tmp_path / "some.rec", 3))
    make_records(tmp_path / "new.rec", 3).replace(tmp_path / "some.rec")
    with pytest.raises(DataError, match=r"some\.rec changed after it was opened"):
        loader(source, sampling=Sampling(3, 3))


def test_an_error_during_setup_is_raised_by_the_constructor(
    records: RecordSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(process: DecodeProcess, setup: bytes) -> bool:
        raise DataError("no")

    monkeypatch.setattr(DecodeProcess, "set_up", fail)
    parallel = torch.get_num_threads()
    with pytest.raises(DataError, match="no"):
        loader(records)
    assert torch.get_num_threads() == parallel


class Own(RecordSource):
    """A source in a module that another process cannot import."""


def test_only_builtin_sources_use_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MANY", 1)
    path = make_records(tmp_path / "some.rec", 3)
    assert sources.is_work_for_processes(RecordSource(path))
    assert not sources.is_work_for_processes(Own(path))


def test_kept_batches_do_not_keep_files_open(records: RecordSource) -> None:
    with loader(records, sampling=Sampling(NUM_RECORDS, 1)) as batches:
        kept = [images for _ in range(2) for images, _ in batches]
        few = len(os.listdir("/proc/self/fd"))
        kept += [images for _ in range(2) for images, _ in batches]
        assert len(os.listdir("/proc/self/fd")) <= few
    assert len({images.data_ptr() for images in kept}) == len(kept)


def test_a_fork_of_the_loader_neither_ends_nor_keeps_the_processes(records: RecordSource) -> None:
    batches = loader(records)
    numbers = pids(batches)
    next(iter(batches))
    hold, let_go = os.pipe()
    child = os.fork()
    if not child:
        os.close(let_go)
        os.read(hold, 1)  # until the parent closes its end
        for process in batches._decoders.processes:
            process.close()
        os._exit(0)
    assert len(list(batches)) == len(batches) - 1
    batches.close()
    assert not any(psutil.pid_exists(number) for number in numbers)
    os.close(let_go)
    assert os.waitpid(child, 0)[1] == 0
    os.close(hold)


def test_files_on_the_path_do_not_shadow_standard_modules(records: RecordSource, tmp_path: Path) -> None:
    for name in ("random", "encodings", "select"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')")
    program = (
        "import sys\n"
        "from echelon.data.images.config import AugmentConfig\n"
        "from echelon.data.loading.order import Sampling\n"
        "from echelon.data.loading.loader import Loader\n"
        "from echelon.data.loading.sources import RecordSource\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "source = RecordSource(sys.argv[1])\n"
        "options = {'threads': 1, 'processes': True}\n"
        "with Loader(source, AugmentConfig((3, 24, 32)), Sampling(len(source), 5), **options) as batches:\n"
        "    print(len(list(batches)), len(batches._decoders.processes))\n"
    )
    (tmp_path / "elsewhere").mkdir()
    command = [sys.executable, "-c", program, str(records._reader.files[0].path), str(tmp_path)]
    assert subprocess.check_output(command, cwd=tmp_path / "elsewhere", text=True).split() == ["5", "1"]
