"""MNIST, and every data set in its format, such as Fashion-MNIST, from IDX files (LeCun, Cortes, Burges, 1998)."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from minidl import checks
from minidl.data.dataset import ArrayDataset, register

_FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_BYTES = 0x08  # the type code of unsigned bytes
_MEAN, _STD = (0.1307,), (0.3081,)  # of MNIST's training images


def _content(folder: Path, name: str) -> tuple[Path, bytes]:
    """A file of that name, or of the same with a dot before its format as some archives have it, or compressed."""
    for stem in (name, name.replace("-idx", ".idx")):
        for path in (folder / stem, folder / f"{stem}.gz"):
            if not path.is_file():
                continue
            if path.suffix != ".gz":
                return path, path.read_bytes()
            try:
                return path, gzip.decompress(path.read_bytes())
            except (OSError, EOFError, zlib.error) as error:
                raise ValueError(f"MNIST: {path} is damaged: {error}") from error
    raise FileNotFoundError(f"MNIST: {folder / name} is missing, with or without .gz")


def _read(folder: Path, name: str, dimensions: int) -> np.ndarray:
    """The array of an IDX file of bytes."""
    path, content = _content(folder, name)
    head = 4 + 4 * dimensions
    if len(content) < head or content[:4] != bytes((0, 0, _BYTES, dimensions)):
        raise ValueError(f"MNIST: {path} is no IDX file of bytes in {dimensions} dimensions")
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, 4))
    if len(content) != head + int(np.prod(shape, dtype=np.int64)):
        raise ValueError(f"MNIST: {path} has {len(content)} bytes, expected {head} and those of {shape}")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


@register("mnist", "the folder of its IDX files")
def mnist(path: str | Path, split: str = "train") -> ArrayDataset:
    """Grey images (height, width, 1) uint8 and their classes; of MNIST 60000 of 28 x 28 to train, 10000 to test.

    Args:
        path: the folder with ``train-images-idx3-ubyte`` and its three companions, compressed by gzip or not.
        split: ``"train"`` or ``"test"``.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: another split, a damaged file, or images and labels that do not belong together.
    """
    if split not in _FILES:
        raise checks.unknown("split", split, _FILES)
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"MNIST: there is no folder {folder}")
    images, labels = (_read(folder, name, dims) for name, dims in zip(_FILES[split], (3, 1), strict=True))
    if len(images) != len(labels):
        raise ValueError(f"MNIST: {folder} has {len(images)} images and {len(labels)} labels to {split}")
    classes = max(int(labels.max(initial=0)) + 1, 10)
    return ArrayDataset(images[..., None], labels.astype(np.int32), num_classes=classes, mean=_MEAN, std=_STD)
