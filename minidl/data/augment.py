"""Augmentations for small images: pure functions of the images and of the random words of their samples.

An augmentation is called as ``augment(images, labels, draw) -> (images, labels)``: images (n, H, W, C), labels (n,) or
(n, H, W), and ``draw(stream) -> uint32 (n, 4)``, whose words depend on the seed, the epoch and each sample's index in
the data set alone. The result is therefore the same on any number of ranks. A stream's words must be used by one
augmentation only; :class:`Compose` sees to that.

An augmentation that needs the photographs themselves, before they are scaled, has a method ``fetch(dataset, indices,
draw) -> (images, labels)`` as well, which a loader calls in place of fetching the items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from numbers import Real
from typing import Any

import numpy as np

from minidl import checks
from minidl.data.counter import below

Draw = Callable[[int], np.ndarray]
Augmentation = Callable[[np.ndarray, np.ndarray, Draw], tuple[np.ndarray, np.ndarray]]

_STREAMS_EACH = 16  # streams that one member of a Compose may draw from
_GREY = np.array([[0.299], [0.587], [0.114]], np.float32)  # of red, green and blue: ITU-R BT.601
_TRIES = 10  # boxes drawn, at most, until one fits into its photograph


@dataclass(frozen=True)
class RandomCrop:
    """Pad by ``padding`` pixels of value 0 on each side, then cut out a window of the old size at a random place.

    Label maps move with their images; pixels from outside get the label ``ignore_index``.
    """

    padding: int
    ignore_index: int = -100

    def __post_init__(self) -> None:
        checks.at_least("RandomCrop", "padding", self.padding, 0)

    def __call__(self, images: np.ndarray, labels: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        corners = below(draw(0)[:, :2], 2 * self.padding + 1)
        images = self._cut(images, corners, 0)
        return images, self._cut(labels, corners, self.ignore_index) if labels.ndim == 3 else labels

    def _cut(self, arrays: np.ndarray, corners: np.ndarray, fill: int) -> np.ndarray:
        _, height, width = arrays.shape[:3]
        edge = (self.padding, self.padding)
        padded = np.pad(arrays, [(0, 0), edge, edge, *[(0, 0)] * (arrays.ndim - 3)], constant_values=fill)
        out = np.empty_like(arrays)
        for sample, (top, left) in enumerate(corners):
            out[sample] = padded[sample, top : top + height, left : left + width]
        return out


@dataclass(frozen=True)
class RandomHorizontalFlip:
    """Mirror left and right with probability ``p``; label maps are mirrored with their images."""

    p: float = 0.5

    def __post_init__(self) -> None:
        checks.number("RandomHorizontalFlip", "p", self.p, "in [0, 1]", lambda value: 0 <= value <= 1)

    def __call__(self, images: np.ndarray, labels: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        chosen = draw(0)[:, 0] < self.p * 2.0**32
        images = np.where(chosen[:, None, None, None], images[:, :, ::-1], images)
        return images, np.where(chosen[:, None, None], labels[:, :, ::-1], labels) if labels.ndim == 3 else labels


@dataclass(frozen=True)
class ColorJitter:
    """Change brightness, contrast and saturation of colour images, in this order, each by a random factor.

    As torchvision's, which shuffles the order and rounds between the steps. A factor f comes uniformly from
    [max(0, 1 − strength), 1 + strength]; the image becomes ``f·image + (1 − f)·other``, where other is black, the mean
    of the image's grey values, or each pixel's grey value. Results are cut off at black and white.

    Args:
        brightness, contrast, saturation: strengths of at least 0.
    """

    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        for name in ("brightness", "contrast", "saturation"):
            checks.number("ColorJitter", name, getattr(self, name), "of at least 0", lambda value: 0 <= value < inf)

    def __call__(self, images: np.ndarray, labels: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        if images.shape[-1] != 3:
            raise checks.bad_shape("ColorJitter", "images", "(n, H, W, 3)", images.shape)
        white = np.float32(255 if images.dtype == np.uint8 else 1)
        x = images.astype(np.float32)
        unit = (draw(0)[:, :3] / 2.0**32).astype(np.float32)
        for step, strength in enumerate((self.brightness, self.contrast, self.saturation)):
            if strength:
                low = max(0.0, 1 - strength)
                factor = (low + unit[:, step] * (1 + strength - low)).reshape(-1, 1, 1, 1)
                x = np.clip(factor * x + (1 - factor) * self._other(x, step), 0, white)
        return (np.rint(x) if images.dtype == np.uint8 else x).astype(images.dtype), labels

    @staticmethod
    def _other(x: np.ndarray, step: int) -> np.ndarray | np.float32:
        if step == 0:
            return np.float32(0)
        grey = x @ _GREY
        return grey.mean(axis=(1, 2), dtype=np.float64).astype(np.float32).reshape(-1, 1, 1, 1) if step == 1 else grey


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random box of each photograph, scaled to the size of the data set's images.

    Szegedy et al., "Going deeper with convolutions", CVPR 2015, section 6. For data sets with a method
    ``view(index, box) -> (image, label)``, such as `minidl.data.ImageFolder`; the first of a `Compose`.

    Args:
        scale: least and largest share of the photograph's area.
        ratio: least and largest width over height.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for name, most, expected in (("scale", 1, "a range within (0, 1]"), ("ratio", inf, "a range above 0, finite")):
            value = getattr(self, name)
            pair = value if isinstance(value, Sequence) and len(value) == 2 else (None, None)
            if not all(isinstance(v, Real) for v in pair) or not 0 < pair[0] <= pair[1] <= most or pair[1] == inf:
                raise checks.bad_value("RandomResizedCrop", name, f"{expected}, (least, largest)", value)

    def __call__(self, images: np.ndarray, labels: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        raise checks.order("RandomResizedCrop", "it cuts photographs that are still files", "make it a Compose's first")

    def fetch(self, dataset: Any, indices: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        """A box of each photograph at ``indices``: images (n, H, W, C) and labels."""
        if not hasattr(dataset, "view"):
            expected = "with a method view(index, box), such as ImageFolder"
            raise checks.bad_dtype("RandomResizedCrop", "data set", expected, type(dataset).__name__)
        unit = np.stack([draw(attempt) for attempt in range(_TRIES)], axis=1) / 2.0**32
        items = [dataset.view(int(i), partial(self.box, unit[row])) for row, i in enumerate(indices)]
        images, labels = zip(*items, strict=True) if items else ((), ())
        return (np.stack(images) if items else np.empty((0, *dataset[0][0].shape), np.uint8)), np.array(
            labels, np.int32
        )

    def box(self, unit: np.ndarray, width: int, height: int) -> tuple[int, int, int, int]:
        """(left, top, right, bottom) by uniform numbers (tries, 4); the centre when no try fits."""
        low, high = np.log(self.ratio)
        for share, form, down, across in unit:
            area = width * height * (self.scale[0] + share * (self.scale[1] - self.scale[0]))
            ratio = np.exp(low + form * (high - low))
            w, h = round(np.sqrt(area * ratio)), round(np.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                left, top = int(across * (width - w + 1)), int(down * (height - h + 1))
                return left, top, left + w, top + h
        w, h = min(width, round(height * self.ratio[1])), min(height, round(width / self.ratio[0]))
        left, top = (width - w) // 2, (height - h) // 2
        return left, top, left + max(w, 1), top + max(h, 1)


@dataclass(frozen=True)
class Compose:
    """One augmentation after the other, each with random words of its own.

    Only the first may be one that fetches, such as `RandomResizedCrop`.
    """

    steps: tuple[Augmentation, ...]

    def __init__(self, *steps: Augmentation):
        # Within each other two would draw the same words: their members stand in one row.
        steps = tuple(inner for step in steps for inner in (step.steps if isinstance(step, Compose) else (step,)))
        for step in steps:
            checks.function("Compose", "steps", step, "augmentations")
        late = [step for step in steps[1:] if hasattr(step, "fetch")]
        if late:
            raise checks.bad_value(
                "Compose", "steps", f"with {type(late[0]).__name__} as the first", checks.wording(steps)
            )
        object.__setattr__(self, "steps", steps)
        if steps and hasattr(steps[0], "fetch"):
            object.__setattr__(self, "fetch", self._fetch)

    def __call__(self, images: np.ndarray, labels: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        return self._from(0, images, labels, draw)

    def _fetch(self, dataset: Any, indices: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        return self._from(1, *self.steps[0].fetch(dataset, indices, draw), draw)

    def _from(self, first: int, images: np.ndarray, labels: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        for position, step in enumerate(self.steps[first:], first):
            images, labels = step(images, labels, shifted(draw, position))
        return images, labels


def shifted(draw: Draw, position: int) -> Draw:
    """The words of the member at ``position`` of a `Compose`."""
    return lambda stream: draw(position * _STREAMS_EACH + stream)
