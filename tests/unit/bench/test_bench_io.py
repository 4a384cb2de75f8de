"""`echelon bench io`: the generated record file, the figures and the result file; MXNet if it is installed."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from echelon.bench.commands import add_io
from echelon.bench.io import run as io
from echelon.bench.io.device import device_figures
from echelon.bench.io.images import write_photographs
from echelon.bench.io.worker_echelon import make_loader
from echelon.data.images.decode import inspect
from echelon.data.images.jpeg_cut import cut
from echelon.data.loading.sources import RecordSource
from echelon.errors import UsageError

TINY = ["--images", "12", "--batch-size", "4", "--step-batches", "2", "--rounds", "2", "--steps", "2", "--warmup", "1"]


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_io(parser.add_subparsers())
    return parser.parse_args(["io", *arguments])


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photographs(tmp_path_factory.mktemp("photographs") / "some.rec", 12)


def test_the_images_have_the_size_of_photographs(photographs: Path) -> None:
    source = RecordSource(photographs)
    infos = [inspect(bytes(source.read(number).payload)) for number in range(len(source))]
    assert {(info.height, info.width) for info in infos} == {(360, 480)}
    assert 40_000 < photographs.stat().st_size / len(source) < 90_000


def test_the_images_have_restart_markers_by_default(photographs: Path, tmp_path: Path) -> None:
    for rec, is_cut in ((photographs, True), (Path(io.make_file(tmp_path, 1, 0)), False)):
        assert (cut(bytes(RecordSource(rec).read(0).payload), (100, 100, 324, 324)) is not None) == is_cut


@pytest.mark.long
def test_the_result_file_contains_the_figures(tmp_path: Path) -> None:
    assert io.run(parse(*TINY, "--device", "cpu", "--json", str(tmp_path / "io.json"))) == 0
    result = json.loads((tmp_path / "io.json").read_text())
    (case,) = result["cases"]
    assert (case["name"], case["samples"]) == ("echelon", 4)
    per_s = result["settings"]["echelon_images_per_s"]
    assert per_s == pytest.approx(8 / case["median_ms"] * 1e3, rel=0.01)
    assert result["ratios"] == {}
    assert result["settings"]["device_max_abs_difference"] == 0


def test_batches_are_floats_of_the_measured_size(photographs: Path) -> None:
    with make_loader(str(photographs), 4, 2) as loader:
        assert [tuple(images.shape) for images, _ in loader] == [(4, 3, 224, 224)] * 3


def test_cached_speed_and_memory_growth(photographs: Path) -> None:
    assert io.cached_images_per_s(images=512, epochs=1) > 0
    assert io.memory_growth_mb(str(photographs), 4, 2, batches=3) < 30


def test_batches_on_a_device_are_compared_and_timed(photographs: Path) -> None:
    figures = device_figures(str(photographs), "cpu", 4, 2, batches=2)
    assert figures.pop("device_max_abs_difference") == 0
    copies = [f"copy_{memory}_{what}" for memory in ("batch", "pageable") for what in ("ms", "call_ms")]
    assert list(figures) == ["device_images_per_s", *copies]
    assert all(value > 0 for value in figures.values())


@pytest.mark.parametrize("argument", ["--images", "--batch-size", "--threads", "--step-batches"])
def test_zero_is_rejected(argument: str) -> None:
    with pytest.raises(UsageError, match=f"{argument} is 0; it must be 1 or more"):
        io.run(parse(argument, "0"))


@pytest.mark.peer
def test_mxnet_takes_turns_with_echelon(tmp_path: Path) -> None:
    io.run(parse(*TINY, "--peer", "mxnet", "--json", str(tmp_path / "io.json")))
    result = json.loads((tmp_path / "io.json").read_text())
    assert [case["name"] for case in result["cases"]] == ["echelon", "mxnet"]
    assert result["ratios"]["echelon_vs_mxnet"] > 0
