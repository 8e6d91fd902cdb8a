"""The handwritten digits that come with scikit-learn: 1797 grey images of 8 x 8 pixels, no download."""

from __future__ import annotations

from functools import cache

import numpy as np

from minidl import checks
from minidl.data.augment import RandomCrop
from minidl.data.counter import shuffled
from minidl.data.dataset import ArrayDataset, register

_TEST_SHARE = 5  # every fifth image of each class
_SPLIT_SEED = 1797
_MEAN, _STD = (0.3052,), (0.3759,)  # of the training images


@cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    with checks.needs("the digits data set", "data"):
        from sklearn.datasets import load_digits
    bunch = load_digits()
    images = (bunch.images[..., None] / 16).astype(np.float32)
    return images, bunch.target.astype(np.int32)


def _test_positions(labels: np.ndarray) -> np.ndarray:
    """True for a fifth of each class, rounded, the same fifth always."""
    order = shuffled(len(labels), _SPLIT_SEED, 0)
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        chosen[members[: round(len(members) / _TEST_SHARE)]] = True
    return chosen


@register("digits")
def digits(split: str = "train") -> ArrayDataset:
    """Images (8, 8, 1) float32 in [0, 1] of the digits 0 to 9 (Alpaydin and Kaynak, UCI, 1998).

    The split is fixed and stratified: a fifth of each class is the test set (359 images), the others train (1438).

    Raises:
        ImportError: scikit-learn is not installed.
    """
    if split not in ("train", "test"):
        raise checks.unknown("split", split, ("train", "test"))
    images, labels = _load()
    chosen = _test_positions(labels) == (split == "test")
    return ArrayDataset(images[chosen], labels[chosen], num_classes=10, mean=_MEAN, std=_STD, augment=RandomCrop(1))
