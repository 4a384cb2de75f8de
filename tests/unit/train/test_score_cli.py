"""`echelon score` as a user runs it: its counts, its output and its errors."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from digits import load_float_digits
from echelon import models
from echelon.cli.main import main
from echelon.data.records import Header, IndexedWriter, pack
from echelon.data.records.class_file import write_class_names
from echelon.train.checkpoint.format import Checkpoint, save
from echelon.train.checkpoint.names import path_for

pytestmark = pytest.mark.numeric

COUNT = 23


class Brightest(nn.Module):
    """Predicts class k if channel k is the brightest; has one weight, so that checkpoints can differ."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) * (0 if self.training else self.scale)


def brightest(*, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    assert num_classes == image_shape[0]
    return Brightest()


def write_model(
    path: Path, scale: float = 1.0, mean: tuple[float, ...] = (0, 0, 0), classes: tuple[str, ...] = ()
) -> Path:
    metadata = {
        "network": f"{__name__}:brightest",
        "num_classes": 3,
        "classes": classes,
        "image_shape": (3, 8, 8),
        "options": {"rgb_mean": mean, "rgb_std": (1, 1, 1)},
    }
    save(path, Checkpoint({"scale": torch.tensor(scale)}, metadata=metadata))
    return path


def pixels(number: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return an image whose channel number % 3 is the brightest."""
    image = np.zeros((10, 12, 3), np.uint8)
    image[..., number % 3] = 100 + number
    return image


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_model(path_for(tmp_path / "x", 0, 1), -1.0)
    write_model(path_for(tmp_path / "x", 0, 2), 1.0)
    return tmp_path / "x"


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Write records whose label is the brightest channel, except for the first five images."""
    with IndexedWriter(tmp_path / "val.rec") as writer:
        for number in range(COUNT):
            Image.fromarray(pixels(number)).save(tmp_path / "one.png")
            label = (number + (number < 5)) % 3
            writer.write(number, pack(Header(float(label), number), (tmp_path / "one.png").read_bytes()))
    return tmp_path / "val.rec"


def score(*words: str | Path) -> int:
    return main(["score", *map(str, words)])


def test_the_printed_lines(prefix: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With batches of 4 the last one has 3 images, and counts as 3."""
    assert score("--model", prefix, "--data-val", record, "--batch-size", "4", "--top-k", "2") == 0
    speed, accuracy, top, *rest = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"Finished with \d+\.\d{6} images per second", speed)
    assert accuracy == f"('accuracy', {18 / 23})"
    assert top.startswith("('top_k_accuracy_2', ")
    assert rest == []


def test_more_metrics(prefix: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score("--model", prefix, "--data-val", record, "--top-k", "0", "--metrics", "perplexity,RMSE") == 0
    names = [line.split("'")[1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names == ["accuracy", "perplexity", "rmse"]
    assert score("--model", prefix, "--data-val", record, "--metrics", "f1") == 2
    assert "f1: only for two classes, as in MXNet, but there are 3" in capsys.readouterr().err
    assert score("--model", prefix, "--data-val", record, "--metrics", "f2") == 2
    assert "unknown metric 'f2'; did you mean 'f1'?" in capsys.readouterr().err


def test_a_file_an_epoch_or_the_newest(prefix: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = path_for(prefix, 0, 1), path_for(prefix, 0, 2)
    accuracies = []
    ways: list[list[str | Path]] = [["--model", first], ["--model", prefix, "--load-epoch", "1"], ["--model", prefix]]
    for words in ways:
        assert score(*words, "--data-val", record, "--top-k", "0") == 0
        accuracies.append(capsys.readouterr().out.splitlines()[1:])
    assert accuracies[0] == accuracies[1] != accuracies[2]
    second.write_bytes(second.read_bytes()[:-1])
    assert score("--model", prefix, "--data-val", record, "--top-k", "0") == 0
    assert capsys.readouterr().out.splitlines()[1:] == accuracies[0]


def test_a_run_folder(tmp_path: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A prefix beside the folder, with the same name, is not meant."""
    write_model(tmp_path / "run" / "checkpoint.safetensors")
    write_model(path_for(tmp_path / "run", 0, 1), -1.0)
    (tmp_path / "latest").symlink_to("run")
    for name in ("run", "latest"):
        assert score("--model", tmp_path / name, "--data-val", record, "--top-k", "0") == 0
        assert capsys.readouterr().out.splitlines()[1:] == [f"('accuracy', {18 / 23})"]


def test_class_folders(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(6):
        folder = tmp_path / "val" / "abc"[number % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(number)).save(folder / f"{number}.png")
    assert score("--model", prefix, "--data-val", tmp_path / "val") == 0
    assert "('accuracy', 1.0)" in capsys.readouterr().out
    (tmp_path / "val" / "d").mkdir()
    assert score("--model", prefix, "--data-val", tmp_path / "val") == 2
    assert "has folders for 4 classes, but the network has 3" in capsys.readouterr().err


def test_class_folders_get_the_numbers_of_their_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The names are not in alphabetical order, and one class has no folder."""
    model = write_model(tmp_path / "y-0001.safetensors", classes=("red", "green", "blue"))
    for number in (0, 1):
        folder = tmp_path / "val" / ("red", "green")[number]
        folder.mkdir(parents=True)
        Image.fromarray(pixels(number)).save(folder / "0.png")
    assert score("--model", model, "--data-val", tmp_path / "val") == 0
    assert "('accuracy', 1.0)" in capsys.readouterr().out
    (tmp_path / "val" / "yellow").mkdir()
    assert score("--model", model, "--data-val", tmp_path / "val") == 2
    assert "has the class 'yellow', which the training images do not have" in capsys.readouterr().err


def test_records_with_other_class_names_are_rejected(
    tmp_path: Path, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_model(tmp_path / "y-0001.safetensors", classes=("red", "green", "blue"))
    write_class_names(record, ("red", "blue", "green"))
    assert score("--model", model, "--data-val", record) == 2
    assert f"class 1 is 'green' in {model}, but 'blue' in {record}" in capsys.readouterr().err


def test_the_mean_comes_from_the_checkpoint_unless_given(
    tmp_path: Path, record: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mean of 1000 makes channel 0 always the darkest."""
    model = write_model(tmp_path / "y-0001.safetensors", mean=(1000, 0, 0))
    right = sum(number % 3 > 0 for number in range(5, COUNT)) + 2  # images 0 and 3 have label 1 and are classified as 1
    found = []
    for words in ([], ["--rgb-mean", "0,0,0", "--rgb-std", "2,2,2", "--image-shape", "3,4,4"]):
        assert score("--model", model, "--data-val", record, *words) == 0
        found.append(capsys.readouterr().out.splitlines()[1])
    assert found == [f"('accuracy', {right / COUNT})", f"('accuracy', {18 / COUNT})"]


def test_large_images_are_scaled_on_request(prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The centre of every image has another colour than the rest."""
    for number in range(3):
        folder = tmp_path / "val" / "abc"[number]
        folder.mkdir(parents=True)
        large = np.tile(pixels(number)[:8, :8], (8, 8, 1))
        large[26:38, 26:38] = pixels(number + 1)[:1, :1]
        Image.fromarray(large).save(folder / "0.png")
    for words, accuracy in (([], 0.0), (["--resize", "8"], 1.0)):
        assert score("--model", prefix, "--data-val", tmp_path / "val", "--top-k", "0", *words) == 0
        assert capsys.readouterr().out.splitlines()[1:] == [f"('accuracy', {accuracy})"]


def test_a_dataset_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(3)
    model = models.build("digits-cnn", num_classes=10, image_shape=(1, 8, 8))
    options = {"rgb_mean": (4.8,), "rgb_std": (8.0,)}
    metadata = {"network": "digits-cnn", "num_classes": 10, "image_shape": (1, 8, 8), "options": options}
    save(tmp_path / "d-0001.safetensors", Checkpoint(model.state_dict(), metadata=metadata))
    assert score("--model", tmp_path / "d", "--data", "digits", "--top-k", "3") == 0
    _, (images, labels) = load_float_digits()
    with torch.no_grad():
        best = model.eval()(images).topk(3).indices
    accuracy = float((best[:, 0] == labels).double().mean())
    top = float((best == labels[:, None]).any(1).double().mean())
    printed = capsys.readouterr().out.splitlines()[1:]
    assert printed == [f"('accuracy', {accuracy})", f"('top_k_accuracy_3', {top})"]
    assert score("--model", tmp_path / "d", "--data", "digits", "--image-shape", "1,12,12") == 2
    assert "the network does not accept images of 1,12,12: mat1 and mat2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--load-epoch", "9"], r"no checkpoint .*x-0009\.safetensors; the newest ones .*: x-0002\.safetensors"),
        (["--gpus", "0,1"], "this command uses one GPU"),
        (["--gpus", "99"], "--gpus 99 asks for GPU 99, but this machine has"),
        (["--image-shape", "3,8"], "--image-shape '3,8' is not a list of channels,height,width, for example 3,224,224"),
        (["--rgb-mean", "red"], "--rgb-mean 'red' is not a list of numbers, for example 123.68"),
        (["--top-k", "1"], "--top-k 1"),
        (["--batch-size", "0"], "--batch-size must be 1 or more, not 0"),
        (["--resize", "-1"], "--resize must be 0 or more, not -1"),
        (["--data-nthreads", "0"], "--data-nthreads must be between 1 and 1024, not 0"),
        (["--load-epoch", "-1"], "--load-epoch must be 0 or more, not -1"),
    ],
)
def test_wrong_flags_are_rejected(
    prefix: Path, record: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert score("--model", prefix, "--data-val", record, *words) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_missing_checkpoint_is_rejected(prefix: Path, record: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert score("--model", f"{prefix}y", "--data-val", record) == 2
    assert f"there is no file {prefix}y, and no valid checkpoint xy-0001.safetensors" in capsys.readouterr().err
    assert score("--model", prefix.parent, "--data-val", record) == 2
    assert f"the folder {prefix.parent} has no checkpoint.safetensors" in capsys.readouterr().err
    assert score("--model", path_for(prefix, 0, 1), "--load-epoch", "1", "--data-val", record) == 2
    assert "is one checkpoint; epoch 1 can be chosen only from those of a prefix" in capsys.readouterr().err


def test_bad_records_are_skipped_on_request(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """One is not an image, one has an invalid label, and without an index one that is not a record is skipped."""
    Image.fromarray(pixels(1)).save(tmp_path / "one.png")
    good = (tmp_path / "one.png").read_bytes()
    with IndexedWriter(tmp_path / "bad.rec") as writer:
        for number, (label, payload) in enumerate([(1.0, good), (1.0, b"no image"), (7.0, good), (0.0, good)] * 2):
            writer.write(number, pack(Header(label, number), payload))
    words: list[str | Path] = ["--model", prefix, "--data-val", tmp_path / "bad.rec", "--top-k", "0"]
    assert score(*words) == 2
    assert "bad.rec: record 1" in capsys.readouterr().err
    assert score(*words, "--skip-bad-records") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["('accuracy', 0.5)"]
    assert "bad records skipped in this epoch: 4" in caplog.text
    content = bytearray((tmp_path / "bad.rec").read_bytes())
    with IndexedWriter(tmp_path / "first.rec") as writer:
        writer.write(0, pack(Header(1.0, 0), good))
    first = (tmp_path / "first.rec").stat().st_size
    content[first : first + 4] = b"lost"
    (tmp_path / "bad.rec").write_bytes(content)
    (tmp_path / "bad.idx").unlink()
    assert score(*words) == 2
    assert score(*words, "--skip-bad-records") == 0
    assert capsys.readouterr().out.splitlines()[1:] == ["('accuracy', 0.5)"]
    assert "bad records skipped while opening: 1, the first: " in caplog.text


def test_labels_beyond_the_classes_are_rejected(
    prefix: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with IndexedWriter(tmp_path / "other.rec") as writer:
        Image.fromarray(pixels(0)).save(tmp_path / "one.png")
        writer.write(0, pack(Header(7.0, 0), (tmp_path / "one.png").read_bytes()))
    assert score("--model", prefix, "--data-val", tmp_path / "other.rec") == 2
    assert "an image has the label 7, but the network has the classes 0 to 2" in capsys.readouterr().err
