"""The augmentation settings, with the names and defaults of the flags of MXNet's training scripts.

Checks which settings contradict each other. Does nothing to images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from echelon.errors import UsageError

_LARGEST_CHANGES = (
    "max_random_aspect_ratio", "max_random_rotate_angle", "max_random_shear_ratio", "max_random_h", "max_random_s",
    "max_random_l", "brightness", "contrast", "saturation", "pca_noise",
)  # fmt: skip
IMAGENET_MEAN = (123.68, 116.779, 103.939)


@dataclass(frozen=True, slots=True)
class AugmentConfig:
    """How an image is augmented, in this order: resize, warp, pad, crop, colour, mirror, normalise.

    `shape` is (channels, height, width) of the result. `max_random_h`, `_l` and `_s` are the largest changes of hue (of
    180), lightness and saturation (of 255). `fill_value` is the colour outside the image. With one channel, only the
    first numbers of `rgb_mean` and `rgb_std` are used.
    """

    shape: tuple[int, int, int] = (3, 224, 224)
    resize: int = -1
    random_crop: bool = False
    random_mirror: bool = False
    random_resized_crop: bool = False
    min_random_area: float = 1.0
    max_random_area: float = 1.0
    min_random_aspect_ratio: float | None = None
    max_random_aspect_ratio: float = 0.0
    min_random_scale: float = 1.0
    max_random_scale: float = 1.0
    max_random_rotate_angle: int = 0
    max_random_shear_ratio: float = 0.0
    min_crop_size: int = -1
    max_crop_size: int = -1
    pad_size: int = 0
    fill_value: int = 127
    max_random_h: int = 0
    max_random_s: int = 0
    max_random_l: int = 0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    pca_noise: float = 0.0
    rgb_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    rgb_std: tuple[float, ...] = (1.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        self._check_numbers()
        channels, height, width = self.shape
        if channels not in (1, 3, 4) or height < 1 or width < 1:
            raise UsageError(f"image shape must be channels (1, 3 or 4), height, width; got {self.shape}")
        if not 0 <= self.fill_value <= 255 or self.pad_size < 0:
            raise UsageError(
                f"fill value must be in 0 ... 255 and pad size not negative; got {self.fill_value} and {self.pad_size}"
            )
        if self.min_random_scale > self.max_random_scale or self.min_random_scale <= 0:
            raise UsageError(
                f"random scale from {self.min_random_scale} to {self.max_random_scale} is not a range above 0"
            )
        self._check_crop()
        self._check_pixels()

    def _check_numbers(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if number is not None and not math.isfinite(number):
                    raise UsageError(f"{field.name} must be a finite number, got {number}")
            if field.name in _LARGEST_CHANGES and value < 0:
                raise UsageError(
                    f"{field.name} is the largest change in either direction and cannot be negative, got {value}"
                )

    def _check_crop(self) -> None:
        if (self.min_crop_size > 0) != (self.max_crop_size > 0) or self.min_crop_size > self.max_crop_size:
            raise UsageError(
                f"min_crop_size and max_crop_size must both be set, in order; "
                f"got {self.min_crop_size} and {self.max_crop_size}"
            )
        if not 0 < self.min_random_area <= self.max_random_area:
            raise UsageError(f"random areas {self.min_random_area} to {self.max_random_area} are not a range above 0")
        if self.aspect_range[0] <= 0 or self.aspect_range[0] > self.aspect_range[1]:
            low, high = self.aspect_range
            raise UsageError(
                f"aspect ratios from {low:g} to {high:g} are not a range above 0; give min_random_aspect_ratio and a "
                "larger max_random_aspect_ratio, or only max_random_aspect_ratio, below 1, as the largest change of 1"
            )
        if self.random_resized_crop:
            for names, is_set, undo in self._clashes():
                if is_set:
                    raise UsageError(f"random_resized_crop cannot be combined with {names}; use {undo}")

    def _clashes(self) -> list[tuple[str, bool, str]]:
        scales = self.min_random_scale != 1 or self.max_random_scale != 1
        return [
            ("random_crop", self.random_crop, "--random-crop 0"),
            ("min_crop_size, max_crop_size", self.max_crop_size > 0, "--min-crop-size -1 --max-crop-size -1"),
            ("min_random_scale, max_random_scale", scales, "--min-random-scale 1 --max-random-scale 1"),
        ]

    def _check_pixels(self) -> None:
        needed = min(self.shape[0], 3)
        if len(self.rgb_mean) < needed or len(self.rgb_std) < needed or 0 in self.rgb_std:
            raise UsageError(
                f"image shape {self.shape} needs {needed} means and {needed} nonzero stds, got {self.rgb_mean} "
                f"and {self.rgb_std}; change --image-shape, or give --rgb-mean and --rgb-std"
            )
        if self.changes_colour and self.shape[0] != 3:
            raise UsageError(f"colour augmentation needs 3 channels, but the image shape is {self.shape}")

    @property
    def aspect_range(self) -> tuple[float, float]:
        """The range of random aspect ratios; around 1 if only the largest difference from 1 is given."""
        if self.min_random_aspect_ratio is None:
            return 1 - self.max_random_aspect_ratio, 1 + self.max_random_aspect_ratio
        return self.min_random_aspect_ratio, self.max_random_aspect_ratio

    @property
    def resizes_at_random(self) -> bool:
        """Whether random_resized_crop has something to choose. If not, the centre is cropped, as in MXNet."""
        free = (self.min_random_area, self.max_random_area, *self.aspect_range) != (1, 1, 1, 1)
        return self.random_resized_crop and free

    @property
    def warps(self) -> bool:
        """Whether images may be warped by an affine map before the crop."""
        turned = self.max_random_rotate_angle != 0 or self.max_random_shear_ratio != 0
        scaled = (self.min_random_scale, self.max_random_scale, *self.aspect_range) != (1, 1, 1, 1)
        return turned or (scaled and not self.random_resized_crop)

    @property
    def jitters(self) -> bool:
        """Whether brightness, contrast or saturation may change."""
        return bool(self.brightness or self.contrast or self.saturation)

    @property
    def shifts_hls(self) -> bool:
        """Whether hue, lightness or saturation may be shifted."""
        return bool(self.max_random_h or self.max_random_l or self.max_random_s)

    @property
    def changes_colour(self) -> bool:
        """Whether colours may change at all."""
        return self.jitters or self.shifts_hls or bool(self.pca_noise)

    def for_validation(self) -> AugmentConfig:
        """Return the same shape and normalisation with a centre crop. Pad and resize are dropped too, as in MXNet."""
        return AugmentConfig(shape=self.shape, fill_value=self.fill_value, rgb_mean=self.rgb_mean, rgb_std=self.rgb_std)
