"""What a data set is, data sets that live in memory, and the data sets that have a name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from minidl import checks
from minidl.config import named
from minidl.data.augment import Augmentation


@runtime_checkable
class Dataset(Protocol):
    """Two methods make a data set; a list of (image, label) pairs is one.

    An image is (height, width, channels), float32 as it goes into the network or uint8, which the loader scales to
    [0, 1]. A label is an integer, or an integer array (height, width) with one class for each pixel. All images have
    one shape and dtype. ``dataset[i]`` is called from several threads at a time when the loader has several workers.

    Optional attributes: ``num_classes``; ``classes``, their names, for predictions; ``mean`` and ``std``, one number
    per channel, for images scaled to [0, 1]; ``augment``, the augmentation customary for training; ``take(indices) ->
    (images, labels)``, which fetches many items at once; ``fingerprint``, a text that is the same on ranks with the
    same items.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[np.ndarray, Any]: ...


def per_channel(who: str, argument: str, values: Any, channels: int) -> None:
    """ValueError when ``values`` are not a finite number for each channel."""
    found = np.asarray(values)
    if found.shape != (channels,) or found.dtype.kind not in "iuf" or not np.isfinite(found).all():
        raise checks.bad_value(who, argument, f"{channels} numbers, one per channel", values)


_LOOKED_AT = 64  # items


class ArrayDataset:
    """Images and labels that fit into memory.

    Args:
        images: (N, H, W, C), float32 or uint8.
        labels: (N,) or (N, H, W) integers.
        num_classes: how many classes the labels may name.
        mean, std: of each channel, for images scaled to [0, 1]; a `Loader` normalises by them.
        augment: the augmentation customary for training; applied by a loader that is given it.
        classes: names of the classes, for predictions.
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        num_classes: int,
        *,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        augment: Augmentation | None = None,
        classes: Sequence[str] | None = None,
    ):
        images, labels = np.asarray(images), np.asarray(labels)
        if images.ndim != 4:
            raise checks.bad_shape("ArrayDataset", "images", "(N, H, W, C)", images.shape)
        if images.dtype not in (np.float32, np.uint8):
            raise checks.bad_dtype("ArrayDataset", "images", "float32 or uint8", images.dtype)
        if labels.shape not in (images.shape[:1], images.shape[:3]):
            expected = f"{images.shape[:1]} or {images.shape[:3]}, like the images"
            raise checks.bad_shape("ArrayDataset", "labels", expected, labels.shape)
        if labels.dtype.kind not in "iu":
            raise checks.bad_dtype("ArrayDataset", "labels", "integers", labels.dtype)
        self.images, self.labels = images, labels
        self.num_classes = checks.at_least("ArrayDataset", "num_classes", num_classes, 1)
        if classes is not None and len(classes) != num_classes:
            raise checks.bad_value("ArrayDataset", "classes", f"{num_classes} names", classes)
        for name, values in (("mean", mean), ("std", std)):
            if values is not None:
                per_channel("ArrayDataset", name, values, images.shape[-1])
        self.mean, self.std, self.augment, self.classes = mean, std, augment, classes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int, /) -> tuple[np.ndarray, Any]:
        return self.images[index], self.labels[index]

    @property
    def fingerprint(self) -> str:
        """Of some items throughout: ranks with other items, or in another order, as of a random split, differ here."""
        some = np.linspace(0, max(len(self) - 1, 0), min(len(self), _LOOKED_AT)).astype(np.int64)
        digest = hashlib.sha256()
        for array in self.take(some):
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        return digest.hexdigest()[:16]

    def take(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the items at ``indices``."""
        return self.images[indices], self.labels[indices]


Factory = Callable[..., Dataset]
_FACTORIES: dict[str, tuple[Factory, str | None]] = {}


def register(name: str, files: str | None = None) -> Callable[[Factory], Factory]:
    """Decorator: make a function of ``split`` and options known to :func:`dataset` under ``name``.

    Args:
        files: what a path, its first argument, is to lead to; None: it takes none.
    """

    def add(factory: Factory) -> Factory:
        _FACTORIES[name] = factory, files
        return factory

    return add


def datasets() -> list[str]:
    """The names that :func:`dataset` knows."""
    return sorted(_FACTORIES)


def needs_path(name: str) -> bool:
    """Whether the data set of this name is read from files that have to be named."""
    return _FACTORIES.get(name, (None, None))[1] is not None


def dataset(name: str, path: str | Path | None = None, split: str = "train", **options: Any) -> Dataset:
    """The ``split`` ("train" or "test") of a data set by its name.

    Args:
        name: "digits", "cifar10", "coins", "folder", "mnist", "synthetic", what was registered, or "mydata:cells" for
            the function ``cells`` of the user's mydata.py, which takes ``split``, and the path where one is given.
        path: where the files are; only for data sets that have files.
        options: of the data set, such as ``shape=(224, 224, 3)`` of "synthetic".

    Raises:
        ValueError: unknown name or split, missing or superfluous path, damaged file.
        TypeError: an option that the data set does not have; a function that returns no data set.
        FileNotFoundError: a missing file.
        ImportError: the data set needs an extra that is not installed.
    """
    if split not in ("train", "test"):
        raise checks.unknown("split", split, ("train", "test"))
    first = () if path is None else (path,)
    if ":" in name:
        found = named("data", name)(*first, split=split, **options)
        if not isinstance(found, Dataset) or not hasattr(found, "num_classes"):
            remedy = "an ArrayDataset is one"
            raise checks.bad_dtype(name, "result", "a data set with num_classes", type(found).__name__, remedy)
        if not len(found):
            raise checks.bad_value(name, f"result for split={split!r}", "a data set with images", "none")
        return found
    if name not in _FACTORIES:
        error = checks.unknown("data set", name, _FACTORIES)
        error.add_note("mydata:cells names the function cells of your mydata.py")
        raise error
    factory, files = _FACTORIES[name]
    if (path is None) is (files is not None):
        expected = files or "left out, since it has no files"
        raise checks.bad_value(f"data set {name!r}", "path", expected, path and str(path))
    return factory(*first, split=split, **options)
