"""Photographs in one folder per class, as ImageNet is commonly unpacked; decoded and cut while training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from minidl import checks
from minidl.data.augment import Augmentation, Compose, RandomHorizontalFlip, RandomResizedCrop
from minidl.data.dataset import register

Box = Callable[[int, int], tuple[float, float, float, float]]  # (width, height) -> left, top, right, bottom

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")
_FOLDERS = {"train": ("train",), "test": ("val", "valid", "validation", "test")}
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's training images
_MARGIN = 256 / 224  # shorter side before the centre is cut out, over the side that is: as in the papers on ImageNet


def pillow() -> Any:
    """The module that decodes.

    Raises:
        ImportError: Pillow is not installed.
    """
    with checks.needs("reading image files", "data"):
        from PIL import Image
    return Image


class ImageFolder:
    """The images under ``root/<class>/``, at any depth, as uint8 (size, size, 3); of 16 bits the upper eight.

    An item is the centre of its image, scaled; `view` cuts out any other part. Classes are numbered in the order of
    their names. Decoding runs outside the interpreter lock, so a loader's workers share it.

    Args:
        root: the folder with one folder per class.
        size: side of the images that come out.
        classes: names of the classes, in their order; default: those of the folders.
        augment: the augmentation customary for training.

    Attributes:
        classes: names of the classes.
        files: paths of the images, relative to ``root``, by class and name.
        labels: int32, the class of each.

    Raises:
        FileNotFoundError: no such folder.
        ValueError: a folder of no class; a folder, or without ``classes`` one of a class, that has no images.
        ImportError: Pillow is not installed.
    """

    mean, std, margin = _MEAN, _STD, _MARGIN

    def __init__(
        self,
        root: str | Path,
        size: int = 224,
        *,
        classes: list[str] | None = None,
        augment: Augmentation | None = None,
    ):
        self._pillow = pillow()
        self.root, self.size, self.augment = Path(root), checks.at_least("ImageFolder", "size", size, 1), augment
        if not self.root.is_dir():
            raise FileNotFoundError(f"image folder: there is no folder {root}")
        found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        self.classes = found if classes is None else list(classes)
        strange = sorted(set(found) - set(self.classes))
        if strange:
            raise ValueError(f"image folder: {self.root} has {checks.wording(strange[0])}, which is no class")
        self.files, numbers = [], []
        for number, name in enumerate(self.classes):
            files = images_under(self.root, name) if name in found else []
            if not files and classes is None and len(found) > 1:
                empty = checks.wording(str(self.root / name))
                raise ValueError(f"image folder: {empty} has no images; remove the folder, which would be a class")
            self.files += files
            numbers += [number] * len(files)
        if not self.files:
            raise ValueError(
                f"image folder: no images under {self.root}; expected {self.root / 'CLASS' / 'NAME'}{SUFFIXES[2]} "
                f"or another of {', '.join(SUFFIXES)}"
            )
        self.labels = np.array(numbers, np.int32)
        self.num_classes = len(self.classes)

    @property
    def fingerprint(self) -> str:
        """Of the file names and classes: ranks that read different folders differ here."""
        names = "\n".join([*self.classes, "", *self.files])
        return hashlib.sha256(names.encode(errors="surrogateescape")).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int, /) -> tuple[np.ndarray, int]:
        return self.view(index, self.centre)

    def extent(self, index: int) -> tuple[int, int]:
        """Width and height of a photograph; reads the head of its file.

        Raises:
            ValueError: naming the file, when it is none.
        """
        path = self.root / self.files[index]
        try:
            with self._pillow.open(path) as image:
                return image.size
        except (OSError, SyntaxError, self._pillow.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be decoded: {error}") from error

    def view(self, index: int, box: Box) -> tuple[np.ndarray, int]:
        """The part of an image that ``box`` names, scaled to (size, size, 3) uint8, and its label.

        Raises:
            ValueError: naming the file, when it cannot be decoded.
        """
        cut = cut_out(self._pillow, self.root / self.files[index], box, (self.size, self.size))
        return cut, int(self.labels[index])

    def centre(self, width: int, height: int) -> tuple[float, float, float, float]:
        """The box of an image in evaluation: the middle of a photograph of this size."""
        return centre(width, height, 1, 1, self.margin)


def centre(width: int, height: int, rows: int, columns: int, margin: float = 1.0) -> tuple[float, float, float, float]:
    """The middle of a photograph of ``width`` x ``height`` as a box of ``rows`` : ``columns``.

    Args:
        margin: the largest such box over the one that is taken.
    """
    unit = min(width / columns, height / rows) / margin
    left, top = (width - columns * unit) / 2, (height - rows * unit) / 2
    return left, top, left + columns * unit, top + rows * unit


def cut_out(image_module: Any, path: Path, box: Box, size: tuple[int, int], mode: str = "RGB") -> np.ndarray:
    """The part of a photograph that ``box`` names, scaled to ``size`` (height, width): uint8 (height, width, channels).

    Args:
        image_module: as `pillow` returns it.
        mode: Pillow's name of what comes out: "RGB", or "L" of grey values.

    Raises:
        ValueError: naming the file, when it cannot be decoded.
    """
    rows, columns = size
    try:
        with image_module.open(path) as image:
            width, height = image.size
            left, top, right, bottom = box(width, height)
            # A JPEG is decoded at a half, a quarter or an eighth as long as the part keeps at least `size` pixels.
            shrink = max(min((right - left) / columns, (bottom - top) / rows), 1.0)
            image.draft(mode, (max(int(width / shrink), 1), max(int(height / shrink), 1)))
            x, y = image.size[0] / width, image.size[1] / height
            part = (left * x, top * y, right * x, bottom * y)
            pixels = _in_eight_bits(image).convert(mode)
            cut = pixels.resize((columns, rows), image_module.Resampling.BILINEAR, box=part)
    except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
        raise ValueError(f"{path} cannot be decoded: {error}") from error
    return np.asarray(cut).reshape(rows, columns, -1)


def _in_eight_bits(image: Any) -> Any:
    """An image of 16 bits a pixel in 8: `convert` would cut values off at 255, and leave white.

    Raises:
        ValueError: for 32 bits a pixel.
    """
    if image.mode.startswith("I;16") or (image.mode, image.format) == ("I", "PNG"):
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode in ("I", "F"):
        raise ValueError("it has 32 bits a pixel, whose range is not known; save it with 8 or 16")
    return image


def images_under(root: Path, name: str = ".") -> list[str]:
    """Paths, relative to ``root``, of the images in its folder ``name``, at any depth, in order.

    What is hidden, such as ``._1.jpg`` and ``.ipynb_checkpoints`` of other programs, is left out.

    Raises:
        OSError: a folder that cannot be read, whose images would be missing.
        ValueError: a link to a folder above it, whose images would come many times.
    """
    found = []
    for folder, folders, files in os.walk(root / name, onerror=_refuse, followlinks=True):
        folders[:] = [inner for inner in folders if not inner.startswith(".")]
        for inner in folders:
            _refuse_round(Path(folder, inner))
        inside = os.path.relpath(folder, root)
        images = [file for file in files if file.lower().endswith(SUFFIXES) and not file.startswith(".")]
        found += [os.path.join(inside, file) for file in images]
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise error


def _refuse_round(folder: Path) -> None:
    if folder.is_symlink() and folder.parent.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{folder} links to a folder above it, whose images would come many times; remove the link")


@register("folder", "the folder with train/ and val/ in it")
def image_folder(path: str | Path, split: str = "train", size: int = 224) -> ImageFolder:
    """The photographs under ``path/train/<class>/`` or, for "test", ``path/val/<class>/``.

    The test folder may also be called valid, validation or test; its classes are numbered as those of the training
    folder. Training images are cut at random and mirrored, see `RandomResizedCrop`.

    Raises:
        FileNotFoundError: a folder is missing.
        ValueError: an unknown split, a folder without images, a test class that is not trained.
        ImportError: Pillow is not installed.
    """
    if split not in _FOLDERS:
        raise checks.unknown("split", split, _FOLDERS)
    root = Path(path)
    folder = next((root / name for name in _FOLDERS[split] if (root / name).is_dir()), None)
    if folder is None or not (root / "train").is_dir():
        names = _FOLDERS["train" if not (root / "train").is_dir() else split]
        expected = f"expected {root}/{names[0]}/CLASS/*.jpg"
        raise FileNotFoundError(f"image folder: {root} has no folder {' or '.join(names)}; {expected}")
    if split == "train":
        return ImageFolder(folder, size, augment=Compose(RandomResizedCrop(), RandomHorizontalFlip()))
    names = (entry for entry in os.scandir(root / "train") if entry.is_dir() and not entry.name.startswith("."))
    return ImageFolder(folder, size, classes=sorted(entry.name for entry in names))
