"""Augmentations for small images: pure functions of the images and of the random words of their samples.

An augmentation is called as ``augment(images, labels, draw) -> (images, labels)``: images (n, H, W, C), labels (n,) or
(n, H, W), and ``draw(stream) -> uint32 (n, 4)``, whose words depend on the seed, the epoch and each sample's index in
the data set alone. The result is therefore the same on any number of ranks. A stream's words must be used by one
augmentation only; :class:`Compose` sees to that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from minidl import checks
from minidl.data.counter import below

__all__ = ["Augmentation", "Compose", "Draw", "RandomCrop", "RandomHorizontalFlip"]

Draw = Callable[[int], np.ndarray]
Augmentation = Callable[[np.ndarray, np.ndarray, Draw], tuple[np.ndarray, np.ndarray]]

_STREAMS_EACH = 16  # streams that one member of a Compose may draw from


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
        if not 0 <= self.p <= 1:
            raise checks.bad_value("RandomHorizontalFlip", "p", "in [0, 1]", self.p)

    def __call__(self, images: np.ndarray, labels: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        chosen = draw(0)[:, 0] < self.p * 2.0**32
        images = np.where(chosen[:, None, None, None], images[:, :, ::-1], images)
        return images, np.where(chosen[:, None, None], labels[:, :, ::-1], labels) if labels.ndim == 3 else labels


@dataclass(frozen=True)
class Compose:
    """One augmentation after the other, each with random words of its own."""

    steps: tuple[Augmentation, ...]

    def __init__(self, *steps: Augmentation):
        object.__setattr__(self, "steps", steps)

    def __call__(self, images: np.ndarray, labels: np.ndarray, draw: Draw) -> tuple[np.ndarray, np.ndarray]:
        for position, step in enumerate(self.steps):
            images, labels = step(images, labels, _shifted(draw, position))
        return images, labels


def _shifted(draw: Draw, position: int) -> Draw:
    return lambda stream: draw(position * _STREAMS_EACH + stream)
