"""CIFAR-10 from the files of its binary version (Krizhevsky, "Learning multiple layers of features", 2009)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minidl import checks
from minidl.data.augment import Compose, RandomCrop, RandomHorizontalFlip
from minidl.data.dataset import ArrayDataset, register

_RECORDS = 10_000  # images in one file
_HEIGHT, _WIDTH, _CHANNELS = 32, 32, 3
_RECORD_BYTES = 1 + _CHANNELS * _HEIGHT * _WIDTH  # the label, then the red, the green and the blue plane
_FOLDER = "cifar-10-batches-bin"  # what the published archive unpacks to
_FILES = {"train": [f"data_batch_{i}.bin" for i in range(1, 6)], "test": ["test_batch.bin"]}
_AUGMENT = Compose(RandomCrop(4), RandomHorizontalFlip())  # He et al., "Deep residual learning", 2015, section 4.2
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)  # of the training images
_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Images (records, 32, 32, 3) uint8 and labels (records,) int32 of one file."""
    if not path.is_file():
        raise FileNotFoundError(
            f"CIFAR-10: {path} is missing; expected the binary version: {', '.join(sum(_FILES.values(), []))}"
        )
    expected, found = _RECORDS * _RECORD_BYTES, path.stat().st_size
    if found != expected:
        raise ValueError(
            f"CIFAR-10: {path} has {found} bytes, expected {expected} ({_RECORDS} records of {_RECORD_BYTES}); "
            "the file is truncated or not of the binary version"
        )
    records = np.fromfile(path, np.uint8).reshape(_RECORDS, _RECORD_BYTES)
    labels = records[:, 0].astype(np.int32)
    if labels.max() > 9:
        row = int(labels.argmax())
        raise ValueError(f"CIFAR-10: {path} is damaged: record {row} has label {labels[row]}, expected 0 to 9")
    planes = records[:, 1:].reshape(_RECORDS, _CHANNELS, _HEIGHT, _WIDTH)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels


@register("cifar10", "the folder of its binary version")
def cifar10(path: str | Path, split: str = "train") -> ArrayDataset:
    """Images (32, 32, 3) uint8 in ten classes: 50000 to train, 10000 to test.

    Args:
        path: the folder with ``data_batch_1.bin`` ... ``data_batch_5.bin`` and ``test_batch.bin``, or the one above it.
        split: ``"train"`` or ``"test"``.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: another split, a file has the wrong size or impossible labels.
    """
    if split not in _FILES:
        raise checks.unknown("split", split, _FILES)
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"CIFAR-10: there is no folder {folder}")
    if (folder / _FOLDER).is_dir():
        folder /= _FOLDER
    parts = [_read(folder / name) for name in _FILES[split]]
    images, labels = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return ArrayDataset(
        images, labels, num_classes=len(_CLASSES), mean=_MEAN, std=_STD, augment=_AUGMENT, classes=_CLASSES
    )
