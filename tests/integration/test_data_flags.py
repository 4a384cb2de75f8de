"""The data and augmentation flags reach training: real processes on tiny files; every flag changes the result.

The same images exist as a .rec with an index, a .rec without one, and class folders, as JPEG, PNG and WebP. Equal
cross-entropies of an epoch, to six digits, show that the network received the same pixels in the same order.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from echelon.cli.main import main
from echelon.data.loading.order import Sampling
from echelon.data.records import read_index

pytestmark = pytest.mark.numeric

CLASSES = {"ape": ".jpg", "bee": ".png", "cat": ".webp"}
SMALL = "--network mlp --batch-size 6 --num-epochs 1 --lr 0.01 --rgb-std 60,60,60 --loss ce --disp-batches 1"
SHAPE = "--image-shape 3,32,32 --num-classes 3"
TRAIN = f"train_imagenet.py {SMALL} {SHAPE} --num-examples 24"
INDEXED = "--data-train train.rec --data-train-idx train.idx"

AUGMENTATIONS = {  # the command to which flags are added, and the flags; each must give another result
    "random-crop": ("", "--random-crop 1"),
    "random-mirror": ("", "--random-mirror 1"),
    "hue": ("", "--max-random-h 40"),
    "saturation-of-hls": ("", "--max-random-s 50"),
    "lightness": ("", "--max-random-l 50"),
    "aspect-ratio": ("", "--max-random-aspect-ratio 0.3"),
    "aspect-ratios": ("", "--min-random-aspect-ratio 0.5 --max-random-aspect-ratio 2"),
    "rotate": ("", "--max-random-rotate-angle 20"),
    "shear": ("", "--max-random-shear-ratio 0.3"),
    "larger": ("", "--max-random-scale 1.5"),
    "smaller": ("", "--min-random-scale 0.8"),
    "crop-size": ("", "--min-crop-size 20 --max-crop-size 30"),
    "brightness": ("", "--brightness 0.4"),
    "contrast": ("", "--contrast 0.4"),
    "saturation": ("", "--saturation 0.4"),
    "pca-noise": ("", "--pca-noise 5"),
    "random-resized-crop": ("", "--random-resized-crop 1 --min-random-area 0.3 --max-random-area 0.9"),
    "pad": ("", "--pad-size 12 --random-crop 1"),
    "fill": ("--pad-size 12 --random-crop 1", "--fill-value 0"),
    "mean": ("", "--rgb-mean 100,110,120"),
    "std": ("", "--rgb-std 50,60,70"),
    "resize": ("", "--resize 33"),
}
IMAGENET = {
    "indexed": f"{TRAIN} {INDEXED} --data-val val.rec --data-val-idx val.idx",
    "scanned": f"{TRAIN} --data-train scanned.rec --data-val val.rec",
    "folders": f"{TRAIN} --data-train classes",
    "one thread": f"{TRAIN} {INDEXED} --data-val classes/val --data-nthreads 1",
    "half": f"{TRAIN} {INDEXED} --num-examples 12",
    "shape": f"{TRAIN} {INDEXED} --image-shape 3,24,28",
    "benchmark": f"train_imagenet.py {SMALL} {SHAPE} --benchmark 1 --num-examples 18",
    "test-io": f"{TRAIN} {INDEXED} --test-io 1 --disp-batches 2",
    "bad": f"{TRAIN} --data-train bad.rec",
    "bad, skipped": f"{TRAIN} --data-train bad.rec --data-val bad.rec --skip-bad-records --num-epochs 2",
    "bad, scanned": f"{TRAIN} --data-train bad-scanned.rec --skip-bad-records",
    "contradiction": f"{TRAIN} {INDEXED} --random-resized-crop 1 --random-crop 1",
    "no range": f"{TRAIN} {INDEXED} --min-random-scale 2",
    "grey": f"{TRAIN} {INDEXED} --image-shape 1,32,32 --brightness 0.1",
    "no shape": f"{TRAIN} {INDEXED} --image-shape 3,32",
    "few classes": f"{TRAIN} {INDEXED} --num-classes 2",
    "wrong index": f"{TRAIN} --data-train classes --data-train-idx train.idx",
    "no data": f"{TRAIN} --data-train none.rec",
    "no target": f"{TRAIN} {INDEXED} --target-accuracy 0.5",
    "no target, made": f"train_imagenet.py {SMALL} {SHAPE} --benchmark 1 --num-examples 18 --target-accuracy 0.5",
    "in vain": f"{TRAIN} {INDEXED} --gc-threshold 0.5 --macrobatch-size 64 --lr-schedule cosine",
    **{f"{name}, before": f"{TRAIN} {INDEXED} {base}" for name, (base, _) in AUGMENTATIONS.items() if base},
    **{name: f"{TRAIN} {INDEXED} {base} {flags}" for name, (base, flags) in AUGMENTATIONS.items()},
}
OTHERS = {
    "cifar": f"train_cifar10.py {SMALL} --data-train train.rec --data-val val.rec --num-examples 24",
    "cifar, bad": f"train_cifar10.py {SMALL} --data-train bad.rec",
    "cifar, bad, skipped": f"train_cifar10.py {SMALL} --data-train bad.rec --skip-bad-records",
    "cifar, contradiction": f"train_cifar10.py {SMALL} --data-train train.rec --random-resized-crop 1",
    "cifar, resized": (
        f"train_cifar10.py {SMALL} --data-train train.rec --random-resized-crop 1 --min-random-area 0.3 --random-crop 0"
    ),
    "cifar, missing": f"train_cifar10.py {SMALL} --data-dir nowhere",
    "cifar, grey": f"train_cifar10.py {SMALL} --data-train train.rec --image-shape 1,28,28",
    "mnist, colour": "train_mnist.py --image_shape 3,28,28",
    "own files": "echelon train --data digits --data-train train.rec",
    "command, test-io": f"echelon train {SMALL} {SHAPE} --data folder --data-train classes --test-io 1 --disp 2",
    "command, skipped": (
        f"echelon train {SMALL} {SHAPE} -n 2 -s 1 --kv-store dist_sync --data imagenet --data-train bad.rec "
        "--data-val classes/val --skip-bad-records"
    ),
    "command, lost batch": (
        f"echelon train {SMALL} {SHAPE} -n 2 -s 1 --kv-store dist_sync --data imagenet --data-train lost.rec "
        "--data-val classes/val --skip-bad-records --batch-size 4"
    ),
}
BAD = (5, 9)


@dataclass(frozen=True)
class Case:
    """The outcome of a command."""

    status: int
    text: str

    @property
    def loss(self) -> str:
        """The training cross-entropy of the first epoch."""
        assert self.status == 0, self.text
        found = re.search(r"Epoch\[0\] Train-cross-entropy=([\d.]+)", self.text)
        assert found is not None, self.text
        return found[1]

    @property
    def lines(self) -> list[str]:
        """The lines, without those at the start of every run."""
        message = re.compile(r"INFO:root:(start with arguments|engine|precision)")
        return [line for line in self.text.splitlines() if not message.match(line)]


def write_images(root: Path, part: str, count: int) -> None:
    random = np.random.default_rng(len(part))
    for label, (name, suffix) in enumerate(CLASSES.items()):
        folder = root / part / name
        folder.mkdir(parents=True)
        for number in range(count):
            pixels = random.integers(0, 80, (40, 48, 3))
            pixels[:, :, label] += 120
            pixels[: 10 + number] //= 2
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}{suffix}", quality=90)


def damage(rec: Path, images: Sequence[int] = BAD[:1], frames: Sequence[int] = BAD[1:]) -> None:
    """Replace some records by invalid images, and others by invalid records."""
    data = bytearray(rec.read_bytes())
    offsets = read_index(rec.with_suffix(".idx"))[1]
    for start in (int(offsets[number]) for number in images):
        data[start + 32 : start + 64] = bytes(32)
    for start in (int(offsets[number]) for number in frames):
        data[start : start + 4] = b"XXXX"
    rec.write_bytes(data)


def second_batch() -> list[int]:
    """Return the records that the first of two lock-step workers reads in its second step of four samples."""
    return [int(record) for record in Sampling(24, 4).order(0)[8:12]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("flags")
    for part, count in (("train", 8), ("val", 2)):
        write_images(root / "classes", part, count)
        images = ["--exts", *CLASSES.values(), "--pass-through", "--no-shuffle"]
        assert main(["data", "im2rec", str(root / part), str(root / "classes" / part), *images]) == 0
    shutil.copy(root / "train.rec", root / "scanned.rec")
    for name, suffix in product(("bad", "lost"), (".rec", ".idx")):
        shutil.copy(root / f"train{suffix}", root / f"{name}{suffix}")
    damage(root / "bad.rec")
    damage(root / "lost.rec", second_batch(), ())
    shutil.copy(root / "bad.rec", root / "bad-scanned.rec")
    return root


def run(folder: Path, name: str, cases: dict[str, str]) -> dict[str, Case]:
    (folder / f"{name}.json").write_text(json.dumps(cases))
    command = [sys.executable, str(Path(__file__).parent / "flag_cases.py"), f"{name}.json"]
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=110,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    found = re.findall(r"^case (.*)\n((?:.*\n)*?)ends \1 (\d+)$", done.stdout, re.MULTILINE)
    assert [case for case, _, _ in found] == list(cases), done.stdout
    return {case: Case(int(status), text) for case, text, status in found}


@pytest.fixture(scope="module")
def cases(folder: Path) -> dict[str, Case]:
    with ThreadPoolExecutor(2) as side_by_side:
        ran = side_by_side.map(run, [folder] * 2, ["imagenet", "others"], [IMAGENET, OTHERS])
        return {name: case for some in ran for name, case in some.items()}


@pytest.mark.long
def test_the_format_of_the_images_does_not_change_the_training(cases: dict[str, Case]) -> None:
    for name in ("scanned", "folders", "one thread"):
        assert cases[name].loss == cases["indexed"].loss, name
    for name in ("indexed", "scanned", "folders", "one thread"):
        assert "Epoch[0] Validation-accuracy=" in cases[name].text, name
    assert "Validation" not in cases["half"].text


def test_num_examples_sets_the_length_of_an_epoch(cases: dict[str, Case]) -> None:
    batches = {name: re.findall(r"Epoch\[0\] Batch \[(.*)\]\t", cases[name].text)[-1] for name in ("indexed", "half")}
    assert {name: int(last.split("-")[-1]) for name, last in batches.items()} == {"indexed": 3, "half": 1}


def test_a_shape_and_synthetic_data(cases: dict[str, Case]) -> None:
    assert cases["shape"].loss != cases["indexed"].loss
    assert float(cases["benchmark"].loss) > 0


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_an_augmentation_has_an_effect_on_training(cases: dict[str, Case], name: str) -> None:
    before = cases[f"{name}, before"] if AUGMENTATIONS[name][0] else cases["indexed"]
    assert cases[name].loss != before.loss
    assert np.isfinite(float(cases[name].loss))


@pytest.mark.parametrize("name", ["test-io", "command, test-io"])
def test_test_io_prints_the_speed(cases: dict[str, Case], name: str) -> None:
    assert cases[name].status == 0
    speed = re.compile(r"INFO:root:Batch \[(\d+)\]\tSpeed: \d+\.\d\d samples/sec")
    message = [speed.fullmatch(line) for line in cases[name].lines]
    assert [line and line[1] for line in message] == ["1", "3"]


def test_a_bad_record_ends_training_and_is_named(cases: dict[str, Case]) -> None:
    assert cases["bad"].status == 1
    assert re.search(r"train_imagenet\.py: error: bad\.rec: record [59] at byte \d+: ", cases["bad"].lines[-1])
    assert cases["cifar, bad"].status == 1
    assert "train_cifar10.py: error: bad.rec: record 5 at byte " in cases["cifar, bad"].lines[-1]


def test_bad_records_are_skipped_and_counted_every_epoch(cases: dict[str, Case]) -> None:
    case = cases["bad, skipped"]
    assert case.status == 0, case.text
    counts = [line for line in case.lines if "in this epoch" in line]
    assert (
        counts == ["WARNING:root:bad records skipped in this epoch: 2"] * 3
    )  # training reads twice; validation data is kept in memory
    for number in BAD:
        assert re.search(rf"skipped bad record \d: bad\.rec: record {number} at byte", case.text)
    assert "Epoch[1] Validation-accuracy" in case.text


def test_damage_found_while_opening_is_counted(cases: dict[str, Case]) -> None:
    for name, count in (("bad, scanned", 1), ("cifar, bad, skipped", 2)):
        assert cases[name].status == 0, cases[name].text
        assert f"WARNING:root:bad records skipped while opening: {count}, the first: bad" in cases[name].text
    assert "bad records skipped in this epoch: 1" in cases["bad, scanned"].text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "contradiction",
            "random_resized_crop cannot be combined with random_crop; use --random-crop 0",
        ),
        ("no range", "random scale from 2.0 to 1.0 is not a range above 0"),
        ("grey", "colour augmentation needs 3 channels, but the image shape is (1, 32, 32)"),
        ("no shape", "--image-shape '3,32' is not a list of channels,height,width, for example 3,224,224"),
        (
            "wrong index",
            "the index train.idx is for a .rec, but classes/train is a folder of class folders; leave it out",
        ),
        ("cifar, contradiction", "random_resized_crop cannot be combined with random_crop; use --random-crop 0"),
        ("cifar, missing", "download the set: echelon data get cifar10 --data-dir nowhere"),
        ("cifar, grey", "cifar10 has images of 3 channels, but the image shape 1,28,28 has 1; use 3,28,28"),
        ("mnist, colour", "mnist has images of 1 channel, but the image shape 3,28,28 has 3; use 1,28,28"),
        ("no data", "no record file none.rec"),
        ("no target", "--target-accuracy 0.5 needs validation data, but imagenet has none here: give --data-val"),
        ("no target, made", "--target-accuracy 0.5 needs validation data, but --benchmark 1 has none: leave it out"),
        ("own files", "echelon: --data-train train.rec cannot be used with digits"),
    ],
)
def test_contradictory_flags_cause_one_line(cases: dict[str, Case], name: str, message: str) -> None:
    assert cases[name].status in (1, 2)
    assert len(cases[name].lines) == 1, cases[name].text
    assert message in cases[name].lines[0]


def test_mxnet_flags_without_effect_cause_warnings_only(cases: dict[str, Case]) -> None:
    assert cases["in vain"].loss
    assert [line for line in cases["in vain"].lines if "has no effect" in line] == [
        "WARNING:root:--macrobatch-size 64 has no effect: only --optimizer lbsgd uses it, not sgd",
        "WARNING:root:--gc-threshold 0.5 has no effect: gradient compression is not implemented yet",
    ]
    assert "has no effect" not in cases["indexed"].text


def test_a_label_beyond_the_classes_is_named(cases: dict[str, Case]) -> None:
    assert cases["few classes"].status == 1
    message = r"error: train\.rec: record \d+ at byte \d+: its label is 2, but --num-classes 2 allows 0 \.\.\. 1"
    assert re.search(message, cases["few classes"].lines[-1])


def test_cifar_reads_records_and_its_augmentation_can_be_changed(cases: dict[str, Case]) -> None:
    assert "Epoch[0] Validation-accuracy=" in cases["cifar"].text
    assert cases["cifar, resized"].loss != cases["cifar"].loss


def test_the_command_shows_what_its_workers_skipped(cases: dict[str, Case]) -> None:
    case = cases["command, skipped"]
    assert case.status == 0, case.text
    assert re.search(r"^accuracy +[01]\.\d{4}  validation of the final weights", case.text, re.MULTILINE)
    counts = re.findall(r"\[worker \d\] bad records skipped in this epoch: (\d)", case.text)
    assert sum(map(int, counts)) == 2


def test_lock_step_workers_run_equal_steps_even_if_one_loses_a_batch(cases: dict[str, Case]) -> None:
    case = cases["command, lost batch"]
    assert case.status == 0, case.text
    assert re.findall(r"\[worker (\d)\] bad records skipped in this epoch: (\d)", case.text) == [("0", "4")]
    assert re.findall(r"^ +(\d) +\d+\.\d +(\d+) +(\d+) ", case.text, re.MULTILINE) == [
        ("0", "3", "8"),
        ("1", "3", "12"),
    ], "worker, steps, samples: the step without a good sample is made, and nobody waits for it"
