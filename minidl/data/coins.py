"""The photograph of coins that comes with scikit-image, in windows: a small real segmentation task, no download."""

from __future__ import annotations

from functools import cache

import numpy as np

from minidl import checks
from minidl.data.augment import Compose, RandomCrop, RandomHorizontalFlip
from minidl.data.dataset import ArrayDataset, register

_BORDER = 240  # training windows lie left of this column, test windows right of it
_STEP = 12  # pixels from one training window to the next
_DARK, _BRIGHT = 30, 150  # surely the ground, surely a coin
_LEAST_AREA = 300  # pixels of the smallest coin; what is smaller is dust
_MEAN, _STD = (0.3967,), (0.2176,)  # of the training part


@cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    """Grey values (303, 384) uint8 and the class of each pixel: 0 ground, 1 coin.

    The outlines are those of scikit-image's own example, a watershed on the slopes of the image; on this photograph
    they follow the 24 coins to a pixel or so.
    """
    with checks.needs("the coins data set", "data"):
        from scipy.ndimage import binary_fill_holes
        from skimage import data, filters, measure, segmentation
    image = data.coins()
    markers = np.where(image < _DARK, 1, np.where(image > _BRIGHT, 2, 0))
    filled = binary_fill_holes(segmentation.watershed(filters.sobel(image), markers) == 2)
    objects = measure.label(filled)
    large = [region.label for region in measure.regionprops(objects) if region.area >= _LEAST_AREA]
    return image, np.isin(objects, large).astype(np.int32)


def _windows(array: np.ndarray, size: int, step: int) -> np.ndarray:
    rows, columns = (range(0, extent - size + 1, step) for extent in array.shape)
    return np.stack([array[r : r + size, c : c + size] for r in rows for c in columns])


@register("coins")
def coins(split: str = "train", size: int = 72) -> ArrayDataset:
    """Windows (size, size, 1) uint8 of the photograph and the class of each pixel: 0 ground, 1 coin.

    Training windows overlap and lie in the left five eighths; test windows tile the rest, so no pixel is in both.

    Raises:
        ValueError: an unknown split, or windows that do not fit.
        ImportError: scikit-image is not installed.
    """
    if split not in ("train", "test"):
        raise checks.unknown("split", split, ("train", "test"))
    image, labels = _load()
    part = slice(None, _BORDER) if split == "train" else slice(_BORDER, None)
    least = min(image.shape[0], image.shape[1] - _BORDER)
    if checks.at_least("coins", "size", size, 1) > least:
        raise checks.bad_value("coins", "size", f"at most {least}", size)
    step = _STEP if split == "train" else size
    cut = (_windows(array[:, part], size, step) for array in (image, labels))
    augment = Compose(RandomCrop(size // 8), RandomHorizontalFlip())
    return ArrayDataset(next(cut)[..., None], next(cut), num_classes=2, mean=_MEAN, std=_STD, augment=augment)
