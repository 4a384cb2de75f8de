"""A predictor preprocesses images as validation did, whatever their type."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from echelon import models
from echelon.data.images.config import AugmentConfig
from echelon.data.loading.order import Sampling
from echelon.data.loading.sources import FolderSource
from echelon.data.sets.datasets import make_loader
from echelon.errors import DataError, UsageError
from echelon.train import predict as predict_module
from echelon.train.checkpoint.format import Checkpoint, load, save
from echelon.train.predict import Predictor, model_of

pytestmark = pytest.mark.numeric

CLASSES = 7


def picture(seed: int, height: int = 30, width: int = 41) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def write_checkpoint(path: Path, shape: tuple[int, int, int] = (3, 16, 20)) -> Path:
    torch.manual_seed(1)
    model = models.build("digits-cnn", num_classes=CLASSES, image_shape=shape)
    options = {"image_shape": None, "rgb_mean": (120, 110.5, 100)[: shape[0]], "rgb_std": (50, 60, 70)[: shape[0]]}
    metadata = {"network": "digits-cnn", "num_classes": CLASSES, "image_shape": shape, "options": options}
    save(path, Checkpoint(model.state_dict(), metadata=metadata))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "x-0001.safetensors")


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    paths = []
    for seed, suffix in enumerate(("png", "jpg", "bmp", "jpg")):
        paths.append(tmp_path / "photos" / f"class{seed % 2}" / f"{seed}.{suffix}")
        paths[-1].parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture(seed)).save(paths[-1])
    return sorted(paths)


def test_images_are_preprocessed_as_in_validation(checkpoint: Path, photos: list[Path]) -> None:
    predict = Predictor.load(checkpoint)
    config = AugmentConfig(
        (3, 16, 20), random_crop=True, pad_size=4, rgb_mean=(120, 110.5, 100), rgb_std=(50, 60, 70)
    ).for_validation()
    source = FolderSource.from_classes(photos[0].parents[1])
    sampling = Sampling(len(photos), len(photos), shuffle=False)
    with closing(make_loader(source, config, sampling, exact=True)) as loader:
        (batch,) = [images.clone() for images, _ in loader]
    assert torch.equal(predict.prepare(source.files), batch)
    assert predict(photos) == predict(batch)


def test_one_image_in_every_accepted_type(checkpoint: Path, photos: list[Path]) -> None:
    predict = Predictor.load(checkpoint)
    pixels = picture(0)
    path = next(path for path in photos if path.name == "0.png")
    ranking = predict(path)
    assert predict(str(path)) == predict(Image.fromarray(pixels)) == predict(pixels) == ranking
    assert predict(predict.prepare([pixels])) == [ranking]
    both = predict([str(path), pixels])  # another batch size has another order of summation
    assert [[number for number, _ in one] for one in both] == [[number for number, _ in ranking]] * 2
    assert predict.prepare([str(path), pixels]).unique(dim=0).shape[0] == 1
    assert predict([]) == []


def test_the_ranking(checkpoint: Path) -> None:
    predict = Predictor.load(checkpoint)
    every = predict(picture(3), top_k=100)
    assert sorted(number for number, _ in every) == list(range(CLASSES))
    shares = [share for _, share in every]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(1)
    assert predict(picture(3)) == every[:5]
    with torch.no_grad():
        logits = predict.model(predict.prepare([picture(3)]))[0]
    best, probability = every[0]
    assert best == int(logits.argmax())
    assert probability == pytest.approx(float(logits.softmax(0).max()))


def test_a_grey_network_accepts_any_image(tmp_path: Path) -> None:
    predict = Predictor.load(write_checkpoint(tmp_path / "x-0001.safetensors", (1, 16, 20)))
    image = Image.fromarray(picture(0))
    grey = np.asarray(image.convert("L"))
    image.save(tmp_path / "colour.png")
    assert predict(image) == predict(grey) == predict(grey[..., None]) == predict(tmp_path / "colour.png")


def test_a_16_bit_image_is_the_same_as_a_file_and_in_memory(tmp_path: Path) -> None:
    predict = Predictor.load(write_checkpoint(tmp_path / "x-0001.safetensors", (1, 16, 20)))
    path = tmp_path / "16.png"
    Image.fromarray(picture(0)[..., 0].astype(np.uint16) * 256).save(path)
    expected = predict.prepare([picture(0)[..., :1]])
    for image in (path, Image.open(path)):
        assert torch.equal(predict.prepare([image]), expected)


def test_weights_that_diverged_are_rejected(checkpoint: Path) -> None:
    found = load(checkpoint)
    name = next(name for name, weight in found.weights.items() if weight.is_floating_point())
    for value in ("nan", "inf"):
        found.weights[name].view(-1)[-1] = float(value)
        with pytest.raises(DataError, match=f"the weight {name!r} has NaN or infinity"):
            model_of(found, checkpoint)


def test_a_device_that_never_ends_is_not_an_image(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict_module, "_MAX_FILE_BYTES", 1 << 20)
    with pytest.raises(DataError, match="/dev/zero: has more than 1 MiB, so it is not an image"):
        Predictor.load(checkpoint)("/dev/zero")


def test_a_photograph_is_resized_on_request(checkpoint: Path) -> None:
    flat = np.zeros((160, 200, 3), np.uint8)
    flat[:50] = 255
    cropped = Predictor.load(checkpoint).prepare([flat])
    resized = Predictor.load(checkpoint, resize=16).prepare([flat])
    assert cropped[0, 0, 0, 0] == pytest.approx(-120 / 50)  # the centre is black
    assert resized[0, 0, 0, 0] == pytest.approx((255 - 120) / 50)


def test_the_options_of_the_network_are_restored(tmp_path: Path) -> None:
    shape = (1, 28, 28)
    model = models.build("lenet", num_classes=CLASSES, image_shape=shape, add_stn=True)
    options = {"rgb_mean": [0], "rgb_std": [255], "network_options": {"add_stn": True}}
    metadata = {"network": "lenet", "num_classes": CLASSES, "image_shape": shape, "options": options}
    save(tmp_path / "x-0001.safetensors", Checkpoint(model.state_dict(), metadata=metadata))
    predict = Predictor.load(tmp_path / "x-0001.safetensors")
    assert predict.model.state_dict().keys() == model.state_dict().keys()
    assert not predict.model.training


def test_loading_draws_no_random_numbers(checkpoint: Path) -> None:
    before = torch.get_rng_state()
    Predictor.load(checkpoint)
    assert torch.equal(torch.get_rng_state(), before)


def test_wrong_arrays_and_files_are_rejected(checkpoint: Path, tmp_path: Path) -> None:
    predict = Predictor.load(checkpoint)
    with pytest.raises(UsageError, match=r"expected a uint8 array \(height, width, 3\), got uint8 \(30, 41\)"):
        predict(picture(0)[..., 0])
    with pytest.raises(UsageError, match=r"got float64 \(30, 41, 3\)"):
        predict(picture(0) / 255)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"a float tensor \(N, 3, 16, 20\), got torch.float32 \(3, 16, 20\)"):
        predict(torch.zeros(3, 16, 20))
    with pytest.raises(UsageError, match=r"got torch.uint8 \(1, 3, 16, 20\)"):
        predict(torch.zeros(1, 3, 16, 20, dtype=torch.uint8))
    with pytest.raises(UsageError, match="top_k is 0"):
        predict(picture(0), top_k=0)
    with pytest.raises(DataError, match=r"nowhere\.jpg: cannot be read: No such file"):
        predict([picture(0), tmp_path / "nowhere.jpg"])
    (tmp_path / "text.jpg").write_text("a text")
    with pytest.raises(DataError, match=r"text\.jpg: "):
        predict(tmp_path / "text.jpg")


def test_a_checkpoint_with_incomplete_metadata_is_rejected(checkpoint: Path) -> None:
    loaded = load(checkpoint)
    with pytest.raises(DataError, match=r"(?s)x-0001.*the weights do not fit the network 'mlp'.*Missing key"):
        model_of(replace(loaded, metadata={**loaded.metadata, "network": "mlp"}), checkpoint)
    save(checkpoint, replace(loaded, metadata={**loaded.metadata, "options": {}}))
    with pytest.raises(DataError, match=r"x-0001.*missing required field `rgb_mean`; it has image_shape, network"):
        Predictor.load(checkpoint)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "an image is a path, a PIL image or a uint8 array, not NoneType"),
        (5, "not int"),
        (b"\xff\xd8", r"not bytes; open encoded bytes with PIL\.Image\.open"),
        ([None], "not NoneType"),
        ([picture(0), 5], "not int"),
        ([b"\xff\xd8"], "not bytes; open"),
    ],
)
def test_objects_of_other_types_are_rejected(checkpoint: Path, given: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Predictor.load(checkpoint)(given)


@pytest.mark.parametrize("device", ["cuda:99", "nosuch"])
def test_a_missing_device_is_rejected(checkpoint: Path, device: str) -> None:
    with pytest.raises(UsageError, match=f"^device '{device}' cannot be used here: [^\\n]+; use 'cpu'$"):
        Predictor.load(checkpoint, device)
