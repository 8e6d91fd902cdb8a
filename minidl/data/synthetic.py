"""Images made on the fly: any number, any size, nothing stored, and something to learn in them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minidl import checks
from minidl.data import _pixels
from minidl.data.counter import below, random_words
from minidl.data.dataset import register

_COLOUR, _WAVE = 64, 32  # bytes: below 64, two waves below 32 each, noise below 128; at most 251
_CLASS_STREAM, _SHAPE_STREAM = 0xDA7A0100, 0xDA7A0101
_TEST_OFFSET = 1 << 40  # test samples draw other noise than any training sample
_MAX_BLOBS = 4


class Synthetic:
    """Coloured, wavy, noisy images whose classes differ in colour and in wave length.

    Sample ``i`` depends only on (seed, split, i). An image is uint8: the colour of its class, plus one cosine down the
    rows and one along the columns with the frequencies of its class, plus uniform noise louder than both. In the
    segmentation task the image shows up to four ellipses of classes 1, 2, ... on class 0, each pixel coloured by its
    class and just as noisy.

    Attributes:
        num_classes: number of classes.
        shape: (height, width, channels) of each image.
    """

    def __init__(self, n: int, shape: tuple[int, int, int], num_classes: int, seed: int, task: str, split: str):
        self.count = checks.at_least("synthetic", "n", n, 1)
        if not isinstance(shape, Sequence) or len(shape) != 3:
            raise checks.bad_value("synthetic", "shape", "(height, width, channels)", shape)
        self.shape = tuple(checks.at_least("synthetic", "shape", size, 1) for size in shape)
        if task not in ("classification", "segmentation"):
            raise checks.unknown("task", task, ("classification", "segmentation"))
        if split not in ("train", "test"):
            raise checks.unknown("split", split, ("train", "test"))
        self.num_classes = checks.at_least("synthetic", "num_classes", num_classes, 2)
        self.seed = checks.at_least("synthetic", "seed", seed, 0) & 0xFFFFFFFFFFFFFFFF
        self.task = task
        self._offset = _TEST_OFFSET if split == "test" else 0
        words = random_words(seed, 0, _CLASS_STREAM, np.arange(num_classes * self.shape[2]))
        words = words.reshape(num_classes, self.shape[2], 4)
        self._colours = below(words[..., 0], _COLOUR).astype(np.uint8)
        frequencies = 1 + below(words[..., 1:3], 8)  # whole waves down and across the image
        phases = words[..., 3] * (2 * np.pi / 2**32)
        height, width, _ = self.shape
        self._down = _waves(height, frequencies[..., 0], phases) + self._colours[:, None]
        self._across = _waves(width, frequencies[..., 1], phases).reshape(num_classes, -1)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> tuple[np.ndarray, int | np.ndarray]:
        if not -self.count <= index < self.count:
            raise IndexError(f"synthetic: sample {index} of {self.count}")
        images, labels = self.take(np.array([index % self.count]))
        return images[0], labels[0] if self.task == "segmentation" else int(labels[0])

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The images (n, H, W, C) and labels (n,) or (n, H, W) at ``indices``."""
        samples = np.asarray(indices, np.int64) + self._offset
        if self.task == "segmentation":
            labels = np.empty((len(samples), *self.shape[:2]), np.int32)
            for label, sample in zip(labels, samples, strict=True):
                label[...] = self._classes(int(sample))
            images = self._colours[labels]
            _pixels.noisy(_rows(images), samples, self.seed)
            return images, labels
        labels = samples % self.num_classes
        images = np.empty((len(samples), *self.shape), np.uint8)
        _pixels.classified(_rows(images), samples, labels, self.seed, self._down, self._across)
        return images, labels.astype(np.int32)

    def _classes(self, sample: int) -> np.ndarray:
        """Class of each pixel, int32 (H, W): ellipses, the later over the earlier."""
        height, width, _ = self.shape
        words = random_words(self.seed, 0, _SHAPE_STREAM, sample * 2 * _MAX_BLOBS + np.arange(2 * _MAX_BLOBS))
        unit = words[:_MAX_BLOBS] / 2.0**32
        kinds = 1 + below(words[_MAX_BLOBS:, 0], self.num_classes - 1)
        rows, columns = np.arange(height)[:, None] + 0.5, np.arange(width)[None, :] + 0.5
        labels = np.zeros((height, width), np.int32)
        for (y, x, tall, wide), kind in zip(unit, kinds, strict=True):
            vertical = (rows / height - y) / (0.08 + 0.2 * tall)
            across = (columns / width - x) / (0.08 + 0.2 * wide)
            labels[vertical**2 + across**2 < 1] = kind
        return labels


def _rows(images: np.ndarray) -> np.ndarray:
    """One row of bytes per image, also when there is none."""
    return images.reshape(len(images), int(np.prod(images.shape[1:])))


def _waves(length: int, frequencies: np.ndarray, phases: np.ndarray) -> np.ndarray:
    """Cosines as bytes below ``_WAVE``: uint8 (classes, length, channels)."""
    position = np.arange(length)[:, None] / length
    wave = np.cos(2 * np.pi * frequencies[:, None] * position + phases[:, None])
    return ((1 + wave) * (_WAVE - 1) / 2).astype(np.uint8)


@register("synthetic")
def synthetic(
    n: int = 50_000,
    shape: tuple[int, int, int] = (32, 32, 3),
    num_classes: int = 10,
    seed: int = 0,
    task: str = "classification",
    split: str = "train",
) -> Synthetic:
    """``n`` images of ``shape`` (height, width, channels), labelled as a whole or (``task="segmentation"``) by pixel.

    Raises:
        ValueError: a size below 1, fewer than two classes, an unknown task or split.
    """
    return Synthetic(n, shape, num_classes, seed, task, split)
