"""Augmentation: each setting has its effect, and does not change anything else."""

from __future__ import annotations

import colorsys
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from sample_images import encoded, jpeg, picture

from echelon.data.images.augment import Augmenter, Normaliser, resize, sample
from echelon.data.images.colour import recolour
from echelon.data.images.config import AugmentConfig
from echelon.data.images.decode import Region
from echelon.data.images.geometry import Draw, Geometry, num_draws, plan
from echelon.data.loading.order import uniforms
from echelon.errors import UsageError

pytestmark = pytest.mark.numeric

PICTURE = picture(3, 60, 80)
PLAIN = AugmentConfig(shape=(3, 24, 32))
MIDDLE = [0.5] * 80


def draws(**lanes: float) -> list[float]:
    """Return draws in the middle of every range, except the given ones."""
    numbers = list(MIDDLE)
    for name, value in lanes.items():
        numbers[Draw[name.upper()]] = value
    return numbers


def augmented(config: AugmentConfig, numbers: list[float]) -> NDArray[np.uint8]:
    return Augmenter(config).augment(PICTURE, numbers)


def test_the_default_is_a_centre_crop() -> None:
    assert np.array_equal(augmented(PLAIN, MIDDLE), PICTURE[18:42, 24:56])


def test_a_random_crop_reaches_every_position() -> None:
    config = replace(PLAIN, random_crop=True)
    assert np.array_equal(augmented(config, draws(crop_x=0, crop_y=0)), PICTURE[:24, :32])
    assert np.array_equal(augmented(config, draws(crop_x=0.9999, crop_y=0.9999)), PICTURE[-24:, -32:])


def test_mirroring_flips_left_and_right() -> None:
    config = replace(PLAIN, random_mirror=True)
    assert np.array_equal(augmented(config, draws(mirror=0.4)), PICTURE[18:42, 24:56][:, ::-1])
    assert np.array_equal(augmented(config, draws(mirror=0.6)), PICTURE[18:42, 24:56])


def test_padding_is_filled() -> None:
    config = AugmentConfig(shape=(3, 68, 88), pad_size=4, fill_value=9)
    pixels = augmented(config, MIDDLE)
    assert np.array_equal(pixels[4:-4, 4:-4], PICTURE)
    assert (pixels[:4] == 9).all()
    assert (pixels[:, -4:] == 9).all()


def test_resize_sets_the_shorter_edge() -> None:
    geometry = plan(60, 80, replace(PLAIN, resize=30), MIDDLE)
    assert geometry.box == (8, 6, 72, 54)  # the centre 32x24 of 40x30, in pixels of the source


def test_a_small_image_is_enlarged() -> None:
    geometry = plan(12, 80, PLAIN, MIDDLE)
    assert geometry.box == (32, 0, 48, 12)


def test_scale_shows_more_or_less() -> None:
    config = replace(PLAIN, min_random_scale=0.5, max_random_scale=1.0)
    assert plan(60, 80, config, draws(scale=0)).box == pytest.approx((8, 6, 72, 54))
    assert plan(60, 80, config, draws(scale=1)).box == pytest.approx((24, 18, 56, 42))


def test_crop_sizes_are_squares() -> None:
    config = replace(PLAIN, min_crop_size=10, max_crop_size=20)
    assert plan(60, 80, config, draws(crop_size=0)).box == (35, 25, 45, 35)
    assert plan(60, 80, config, draws(crop_size=0.9999)).box == (30, 20, 50, 40)


def test_aspect_ratio_changes_one_edge_against_the_other() -> None:
    left, top, right, bottom = plan(60, 80, replace(PLAIN, max_random_aspect_ratio=0.25), draws(ratio=1)).box
    assert (right - left) / (bottom - top) == pytest.approx(32 / 24 * 1.25)


def test_a_rotation_by_90_degrees_is_exact() -> None:
    square = np.ascontiguousarray(PICTURE[:60, :60])
    config = AugmentConfig(shape=(3, 60, 60), max_random_rotate_angle=90)
    turned = Augmenter(config).augment(square, draws(angle=0.9999))
    assert np.abs(turned - np.rot90(square).astype(int)).max() <= 1


def test_corners_of_a_rotated_image_are_filled() -> None:
    config = AugmentConfig(shape=(3, 60, 80), max_random_rotate_angle=20, fill_value=200)
    pixels = augmented(config, draws(angle=0))
    assert (pixels[0, -1] == 200).all()
    assert plan(60, 80, replace(config, max_random_rotate_angle=0, max_random_shear_ratio=0.5), draws(shear=1)).matrix


@pytest.mark.parametrize(
    ("warp", "numbers", "edge"),
    [
        ({"max_random_rotate_angle": 45}, {"angle": 0.9999}, 32),
        ({"max_random_aspect_ratio": 0.5}, {"ratio": 1}, 32),
        ({"max_random_shear_ratio": 0.5}, {"shear": 1}, 32),
        ({"max_random_scale": 2.0}, {"scale": 1}, 64),
    ],
)
def test_a_warped_image_is_padded_with_the_fill_value(
    warp: dict[str, Any], numbers: dict[str, float], edge: int
) -> None:
    white = np.full((32, 32, 3), 250, np.uint8)
    config = AugmentConfig(shape=(3, edge + 8, edge + 8), pad_size=4, fill_value=0, **warp)
    pixels = Augmenter(config).augment(white, draws(**numbers))
    assert pixels.sum() == pixels[4:-4, 4:-4].sum() > 0


def test_a_crop_contains_its_part_of_the_padding() -> None:
    white = np.full((32, 32, 3), 250, np.uint8)
    config = AugmentConfig(shape=(3, 20, 20), pad_size=4, fill_value=0, max_random_rotate_angle=45, random_crop=True)
    pixels = Augmenter(config).augment(white, draws(angle=0.9999, crop_x=0, crop_y=0.9999))
    assert pixels[:, :4].sum() == pixels[-4:].sum() == 0
    assert (pixels[-5, 4:] > 0).any()


def test_without_an_area_or_aspect_to_choose_the_centre_is_cropped() -> None:
    config = replace(PLAIN, random_resized_crop=True)
    numbers = [0.9] * num_draws(config)
    assert plan(60, 80, config, numbers).box == plan(60, 80, PLAIN, numbers).box


def test_if_no_area_fits_the_centre_is_cropped() -> None:
    config = replace(PLAIN, random_resized_crop=True, min_random_area=5.0, max_random_area=6.0)
    numbers = [0.9] * num_draws(config)
    assert plan(60, 80, config, numbers).box == plan(60, 80, PLAIN, numbers).box


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 10**6), st.floats(0.05, 1), st.floats(0.5, 1))
def test_a_random_resized_crop_is_inside_and_of_the_right_area(
    height: int, width: int, counter: int, least: float, aspect: float
) -> None:
    config = AugmentConfig(
        shape=(3, 24, 32), random_resized_crop=True, min_random_area=least,
        min_random_aspect_ratio=aspect, max_random_aspect_ratio=1 / aspect,
    )  # fmt: skip
    numbers = uniforms(0, 0, np.array([counter]), num_draws(config))[0].tolist()
    left, top, right, bottom = plan(height, width, config, numbers).box
    assert left >= -1e-9
    assert top >= -1e-9
    assert right <= width + 1e-9
    assert bottom <= height + 1e-9


def test_enabling_one_augmentation_does_not_change_the_others() -> None:
    crop = replace(PLAIN, random_crop=True)
    numbers = uniforms(5, 1, np.arange(1), num_draws(crop))[0].tolist()
    both = replace(crop, random_mirror=True, brightness=0.5)
    assert plan(60, 80, crop, numbers).box == plan(60, 80, both, numbers).box


@pytest.mark.parametrize(
    ("box", "expected"), [((0, 0, 32, 24), 1), ((0, 0, 63, 48), 1), ((0, 0, 64, 48), 2), ((0, 0, 640, 480), 8)]
)
def test_a_source_is_never_shrunk_below_the_output_size(box: tuple[float, float, float, float], expected: int) -> None:
    assert Geometry(box).shrink(24, 32) == expected


def test_a_shrunk_jpeg_gives_nearly_the_same_image() -> None:
    large = np.asarray(Image.fromarray(PICTURE).resize((640, 480), Image.Resampling.BICUBIC))
    config = AugmentConfig(shape=(3, 60, 80), resize=60)
    shrunk = Augmenter(config).augment(jpeg(large), MIDDLE).astype(int)
    whole = Augmenter(config).augment(encoded(large, "PNG"), MIDDLE)
    assert np.abs(shrunk - whole).mean() < 2


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize(("resize_to", "pad"), [(47, 0), (47, 5), (90, 0), (90, 9)])
def test_a_crop_of_a_resized_image_is_where_mxnet_cuts_it(resize_to: int, pad: int, channels: int) -> None:
    """MXNet resizes and pads the whole image, then cuts whole pixels, which are not whole pixels of the source."""
    source = np.concatenate([PICTURE, PICTURE[..., :1]], axis=2)[..., :channels]
    size = (80 * resize_to // 60, resize_to)
    planes = [Image.fromarray(source[..., k]).resize(size, Image.Resampling.BILINEAR) for k in range(channels)]
    padded = np.pad(np.stack([np.asarray(plane) for plane in planes], 2), ((pad, pad), (pad, pad), (0, 0)))
    config = AugmentConfig((channels, 24, 32), resize=resize_to, pad_size=pad, fill_value=0, random_crop=True)
    for x, y in ((0.0, 0.0), (0.3, 0.6), (0.9, 0.1), (0.999, 0.999)):
        found = Augmenter(config).augment(source, draws(crop_x=x, crop_y=y)).astype(int)
        height, width = padded.shape[:2]
        left, top = int(x * (width - 32 + 1)), int(y * (height - 24 + 1))
        difference = np.abs(found - padded[top : top + 24, left : left + 32])
        assert difference.max() <= 2  # of rounding; half a pixel away it is 10 to 30
        assert difference.mean() < 0.3


@pytest.mark.parametrize("left", range(4))
def test_a_box_may_begin_between_the_pixels_of_a_shrunk_jpeg(left: int) -> None:
    """At 1/4 of its size, a box that begins at source pixel 1 begins at 0.25."""
    smooth = np.asarray(Image.fromarray(PICTURE).resize((640, 480), Image.Resampling.BICUBIC))
    geometry = Geometry((left, 2 * left, left + 320, 2 * left + 240))
    assert geometry.shrink(60, 80) == 4
    wanted = resize(np.ascontiguousarray(smooth[2 * left :][:240, left:][:, :320]), (60, 80)).astype(int)
    quarter = resize(smooth, (120, 160))
    assert np.abs(sample(Region(quarter, 4), geometry, (60, 80), 0) - wanted).mean() < 0.5


def test_resizing_agrees_with_pillow() -> None:
    for size in ((24, 32), (100, 90), (60, 40)):
        reference = np.asarray(Image.fromarray(PICTURE).resize(size[::-1], Image.Resampling.BILINEAR)).astype(int)
        assert np.abs(resize(PICTURE, size) - reference).max() <= 1
        strided = resize(np.ascontiguousarray(np.pad(PICTURE, ((3, 5), (7, 2), (0, 0))))[3:-5, 7:-2], size)
        assert np.array_equal(strided, resize(PICTURE, size))
        assert resize(PICTURE[..., :1], size).shape == (*size, 1)


def test_normalising_subtracts_mean_and_divides_by_std() -> None:
    config = AugmentConfig(shape=(3, 60, 80), rgb_mean=(1, 2, 3), rgb_std=(4, 5, 6))
    out = np.empty((3, 60, 80), np.float32)
    Normaliser(config).into(out, PICTURE[:, ::-1])
    expected = (PICTURE[:, ::-1].astype(np.float64) - (1, 2, 3)) / (4, 5, 6)
    assert np.allclose(out, expected.transpose(2, 0, 1), atol=1e-5)


def test_brightness_contrast_saturation() -> None:
    half = recolour(PICTURE, replace(PLAIN, brightness=0.5), draws(brightness=0)).astype(int)
    assert np.abs(half - PICTURE / 2).max() <= 0.51
    grey = recolour(PICTURE, replace(PLAIN, saturation=1.0), draws(saturation=0)).astype(int)
    assert np.ptp(grey, axis=2).max() <= 1
    flat = recolour(PICTURE, replace(PLAIN, contrast=1.0), draws(contrast=0))
    assert np.ptp(flat) == 0
    assert flat[0, 0, 0] == pytest.approx((PICTURE @ (0.299, 0.587, 0.114)).mean(), abs=1)


def test_combined_jitters_equal_the_single_ones_in_sequence() -> None:
    config = replace(PLAIN, brightness=0.4, contrast=0.4, saturation=0.4)
    numbers = draws(brightness=0.3, contrast=0.2, saturation=0.1)
    one_by_one = np.clip(PICTURE, 60, 190)  # far enough from 0 and 255 that nothing is clamped in between
    together = recolour(one_by_one, config, numbers).astype(int)
    for single in (replace(PLAIN, saturation=0.4), replace(PLAIN, contrast=0.4), replace(PLAIN, brightness=0.4)):
        one_by_one = recolour(one_by_one, single, numbers)
    assert np.abs(together - one_by_one).max() <= 2


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(
    "settings_",
    [
        {"random_crop": True},
        {"random_crop": True, "pad_size": 30},
        {"random_crop": True, "resize": 150},
        {"resize": 60},
        {"random_resized_crop": True, "min_random_area": 0.05, "max_random_area": 0.9},
        {"random_crop": True, "max_random_rotate_angle": 30, "max_random_shear_ratio": 0.2},
        {"random_crop": True, "min_random_scale": 0.3, "max_random_scale": 0.5, "max_random_rotate_angle": 30},
    ],
    ids=lambda settings_: " ".join(settings_),
)
def test_a_cut_jpeg_gives_the_same_image(settings_: dict[str, object], fast: bool) -> None:
    config = replace(PLAIN, **settings_)  # type: ignore[arg-type]
    pixels = picture(5, 300, 400)
    plain, marked = (encoded(pixels, "JPEG", quality=90, restart_marker_blocks=interval) for interval in (0, 5))
    for numbers in uniforms(1, 1, np.arange(20), num_draws(config)).tolist():
        expected = Augmenter(config, fast).augment(plain, numbers).astype(int)
        got = Augmenter(config, fast).augment(marked, numbers)
        # The coordinates of a rotation are rounded differently when they are relative to the region.
        assert np.abs(got - expected).max() <= (1 if "max_random_rotate_angle" in settings_ else 0)


def test_hue_lightness_saturation() -> None:
    config = replace(PLAIN, max_random_h=60, max_random_l=50, max_random_s=50)
    same = recolour(PICTURE, config, MIDDLE).astype(int)
    assert np.abs(same - PICTURE).max() <= 1  # in the middle of the range nothing is shifted, only converted and back
    numbers = list(MIDDLE)
    numbers[Draw.HLS] = numbers[Draw.HLS + 1] = 1.0
    red = np.full((1, 1, 3), (200, 40, 40), np.uint8)
    assert recolour(red, replace(PLAIN, max_random_h=60), numbers)[0, 0].tolist() == [40, 200, 40]
    numbers[Draw.HLS + 2] = numbers[Draw.HLS + 3] = 1.0
    lighter = recolour(PICTURE, replace(PLAIN, max_random_l=50), numbers)
    assert lighter.mean() > PICTURE.mean() + 30


def test_hues_are_those_of_the_standard_library() -> None:
    config = replace(PLAIN, max_random_h=30, max_random_l=40, max_random_s=60)
    numbers = list(MIDDLE)
    numbers[Draw.HLS : Draw.HLS + 6] = [0.75, 0.75, 0.25, 0.25, 0.75, 0.75]  # by 15 of 180, -20 and 30 of 255
    pixels = np.random.default_rng(0).integers(0, 256, (40, 1, 3), np.uint8)
    shifted = recolour(pixels, config, numbers)
    for before, after in zip(pixels[:, 0] / 255, shifted[:, 0], strict=True):
        hue, light, saturation = colorsys.rgb_to_hls(*before)
        held = min(hue + 15 / 180, 1), max(light - 20 / 255, 0), min(saturation + 30 / 255, 1)
        assert after.tolist() == pytest.approx([255 * one for one in colorsys.hls_to_rgb(*held)], abs=0.51)


def test_hues_are_shifted_after_the_jitters() -> None:
    # A rounding error of a grey would create a hue.
    grey = np.repeat(np.arange(256, dtype=np.uint8), 3).reshape(16, 16, 3)
    jitter = replace(PLAIN, brightness=0.4, contrast=0.4, saturation=0.4)
    shift = replace(PLAIN, max_random_h=60, max_random_l=60, max_random_s=200)
    both = replace(shift, brightness=0.4, contrast=0.4, saturation=0.4)
    numbers = uniforms(1, 1, np.arange(1), Draw.TRIES)[0].tolist()
    for pixels in (grey, PICTURE):
        together = recolour(pixels, both, numbers)
        assert np.array_equal(together, recolour(recolour(pixels, jitter, numbers), shift, numbers))


def test_pca_noise_shifts_all_pixels_equally() -> None:
    numbers = uniforms(1, 1, np.arange(1), Draw.TRIES)[0].tolist()
    middling = np.clip(PICTURE, 60, 190)
    moved = recolour(middling, replace(PLAIN, pca_noise=1.0), numbers).astype(int) - middling
    assert np.ptp(moved.reshape(-1, 3), axis=0).max() <= 1
    assert moved.any()


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"random_resized_crop": True, "random_crop": True}, "cannot be combined with random_crop"),
        ({"random_resized_crop": True, "min_random_scale": 0.5}, "cannot be combined with min_random_scale"),
        (
            {"random_resized_crop": True, "min_crop_size": 5, "max_crop_size": 9},
            "cannot be combined with min_crop_size",
        ),
        ({"min_crop_size": 9}, "9 and -1"),
        ({"min_random_scale": 2.0}, "2.0 to 1.0"),
        ({"min_random_area": 0.0}, "0.0 to 1.0"),
        ({"max_random_aspect_ratio": 1.0}, "from 0 to 2 are not a range above 0; give min_random_aspect_ratio"),
        ({"min_random_aspect_ratio": 0.75}, "from 0.75 to 0 are not a range above 0; .* max_random_aspect_ratio"),
        ({"max_random_rotate_angle": -5}, "max_random_rotate_angle .* cannot be negative, got -5"),
        ({"pca_noise": math.nan}, "pca_noise must be a finite number, got nan"),
        ({"rgb_mean": (1.0, math.inf, 1.0)}, "rgb_mean must be a finite number, got inf"),
        ({"shape": (2, 8, 8)}, "channels"),
        ({"shape": (1, 8, 8), "brightness": 0.1}, "3 channels"),
        ({"rgb_std": (1.0, 0.0, 1.0)}, "nonzero stds"),
        ({"fill_value": 256}, "256"),
    ],
)
def test_settings_that_contradict_each_other(settings_: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AugmentConfig(**settings_)  # type: ignore[arg-type]


def test_validation_is_not_random() -> None:
    config = AugmentConfig(shape=(3, 8, 8), random_crop=True, pad_size=4, resize=9, rgb_mean=(1, 2, 3))
    assert config.for_validation() == AugmentConfig(shape=(3, 8, 8), rgb_mean=(1, 2, 3))
