"""`echelon predict` as a user runs it: what it prints, its errors and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from echelon.cli.main import main
from echelon.train.checkpoint.format import Checkpoint, save
from echelon.train.predict import Predictor

pytestmark = pytest.mark.numeric

COLOURS = ("red", "green", "blue")


class Channels(nn.Module):
    """The logit of class k is the mean of channel k."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3)) * self.scale


def channels(*, num_classes: int, image_shape: tuple[int, int, int]) -> nn.Module:
    assert num_classes == image_shape[0]
    return Channels()


def write_model(path: Path, classes: tuple[str, ...] | None = COLOURS) -> Path:
    """Write a checkpoint; without classes, as older versions wrote it."""
    metadata = {
        "network": f"{__name__}:channels",
        "num_classes": 3,
        "image_shape": (3, 7, 7),
        "options": {"rgb_mean": (0, 0, 0), "rgb_std": (100, 100, 100)},
    } | ({} if classes is None else {"classes": classes})
    save(path, Checkpoint({"scale": torch.ones(())}, metadata=metadata))
    return path


def flat(path: Path, *levels: int, size: int = 8) -> Path:
    """Write an image of one colour."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((size, size, len(levels)), levels, np.uint8).squeeze()).save(path)
    return path


def predict(*words: str | Path) -> int:
    return main(["predict", *map(str, words)])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with the result of a run, and return that of the run."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "runs" / "first" / "checkpoint.safetensors")
    (tmp_path / "runs" / "latest").symlink_to("first")
    return tmp_path / "runs" / "first"


def test_the_table(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat(Path("a.png"), 0, 200, 100)
    flat(Path("more/b.jpg"), 0, 0, 200)
    assert predict("a.png", "more", "--top", "2") == 0
    shares = torch.tensor([0.0, 2.0, 1.0]).softmax(0)
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == ["a.png", f"  {shares[1]:8.2%}  green", f"  {shares[2]:8.2%}  blue"]
    assert [out[3], out[4].split()[-1]] == ["more/b.jpg", "blue"]
    assert len(out) == 6


def test_json_has_one_object_per_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat(Path("a.png"), 0, 200, 100)
    assert predict("--json", "a.png", "nowhere.png", "--model", "runs/first", "--top", "1") == 1
    good, bad = map(json.loads, capsys.readouterr().out.splitlines())
    probability = float(torch.tensor([0.0, 2.0, 1.0]).softmax(0)[1])
    named = {"class": 1, "name": "green", "probability": pytest.approx(probability)}
    assert good == {"file": "a.png", "predictions": [named]}
    assert bad == {"file": "nowhere.png", "error": "nowhere.png: cannot be read: No such file or directory"}


def test_bad_files_get_one_line_each_and_the_others_are_predicted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flat(Path("photos/1.png"), 200, 0, 0)
    Path("photos/2.png").write_text("a text")
    Path("photos/3.jpg").write_bytes(b"")
    flat(Path("photos/4.png"), 0, 0, 200)
    Path("empty").mkdir()
    assert predict("photos", "empty", "nowhere.png", "photos/4.png", "--top", "1", "--batch-size", "2") == 1
    printed = capsys.readouterr()
    classes = [line.split()[-1] for line in printed.out.splitlines()]
    assert classes == ["photos/1.png", "red", "photos/4.png", "blue", "photos/4.png", "blue"]
    lines = [line.split(": ", 2) for line in printed.err.splitlines()]
    assert [(name, reason.split(";")[0]) for _, name, reason in lines] == [
        ("photos/2.png", "6 bytes that begin with 61 20 74 65 78 74 are not an image in a known format"),
        ("photos/3.jpg", "it is empty, not an image"),
        ("empty", "the folder has no images"),
        ("nowhere.png", "cannot be read: No such file or directory"),
    ]


def test_images_with_other_channels_are_converted_as_in_training(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat(Path("rgba.png"), 0, 200, 0, 128)
    flat(Path("grey.png"), 90)
    assert predict("rgba.png", "grey.png", "--json") == 0
    colour, grey = (json.loads(line)["predictions"] for line in capsys.readouterr().out.splitlines())
    assert colour[0]["name"] == "green"
    assert [one["probability"] for one in grey] == pytest.approx([1 / 3] * 3)


def test_a_checkpoint_without_names_shows_class_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = flat(tmp_path / "a.png", 0, 200, 100)
    for classes, expected in ((None, ["1", "2", "0"]), (("red", ""), ["1", "2", "red"])):
        model = write_model(tmp_path / "old.safetensors", classes)
        assert predict("--model", model, image) == 0
        assert [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]] == expected


def test_large_images_are_scaled_down_unless_the_size_is_given(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The centre of the image is green, but most of it is red."""
    pixels = np.full((64, 64, 3), (200, 0, 0), np.uint8)
    pixels[26:38, 26:38] = (0, 200, 0)
    Image.fromarray(pixels).save("big.png")
    Image.fromarray(pixels[24:32, 24:32]).save("small.png")
    found = {}
    for words in ((), ("--resize", "0"), ("--resize", "16")):
        assert predict("big.png", "small.png", "--top", "1", *words) == 0
        found[words] = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1::2]]
    assert found == {(): ["red", "green"], ("--resize", "0"): ["green", "green"], ("--resize", "16"): ["red", "green"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "nowhere"], "there is no file nowhere, and no valid checkpoint nowhere-0001.safetensors"),
        (["--top", "0"], "--top must be 1 or more, not 0"),
        (["--resize", "-1"], "--resize must be 0 or more, not -1"),
        (["--batch-size", "0"], "--batch-size must be 1 or more, not 0"),
        (["--gpus", "0,1"], "--gpus 0,1: this command uses one GPU"),
    ],
)
def test_wrong_flags_are_rejected(
    run: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert predict("a.png", *words) == 2
    assert message in capsys.readouterr().err


def test_the_predictor_has_the_names(run: Path) -> None:
    predictor = Predictor.load(run)
    best, _ = predictor(flat(run / "a.png", 0, 0, 50), top_k=1)[0]
    assert (predictor.name(best), predictor.classes) == ("blue", COLOURS)
