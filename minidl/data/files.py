"""Images in files and folders that a user names, cut and scaled as in evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from minidl import checks
from minidl.data.folder import SUFFIXES, centre, cut_out, images_under, pillow

_MODES = {1: "L", 3: "RGB"}


class ImageFiles:
    """The images of some files and folders, uint8 (height, width, channels), to predict on.

    An item is the centre of its image, scaled. Its label is the class that its folder is named after, or one above, up
    to the folder that was given; -1 where there is none. A damaged file becomes a black image and is noted in
    `damaged`, because one of them should not cost the predictions for thousands.

    Args:
        paths: files, and folders whose images are taken, at any depth, in the order of their names.
        shape: (height, width, channels) of the images that come out; three channels or, for grey values, one.
        margin: the largest box of that shape in an image over the one that is taken; 256 / 224 for photographs cut as
            on ImageNet.
        classes: names of the classes, for labels.

    Attributes:
        files: the images' paths, as the user named them.
        labels: int32, -1 where it is not known.
        damaged: what is wrong with files that could not be decoded, by position; filled in as they are read.

    Raises:
        FileNotFoundError: no such file or folder.
        TypeError: one path in the place of a list.
        ValueError: no paths, a folder without images, a file of a suffix that is no image's, a shape of other channels.
        ImportError: Pillow is not installed.
    """

    def __init__(
        self,
        paths: Sequence[str | Path],
        shape: tuple[int, int, int],
        *,
        margin: float = 1.0,
        classes: Sequence[str] = (),
    ):
        if isinstance(paths, str | os.PathLike):  # whose letters would be paths, "/" among them
            raise checks.bad_dtype("ImageFiles", "paths", "a list of paths", repr(str(paths)), "pass [path]")
        self._pillow = pillow()
        *size, channels = shape
        if channels not in _MODES:
            remedy = "pass a data set of your own instead of files"
            raise checks.bad_shape("ImageFiles", "shape", "(height, width, 1 or 3)", shape, remedy)
        self._size, self._mode, self._margin = tuple(size), _MODES[channels], margin
        numbers = {name: number for number, name in enumerate(classes)}
        self.files: list[str] = []
        labels: list[int] = []
        for path in paths:
            for file, folders in _found(path):
                self.files.append(file)
                labels.append(next((numbers[name] for name in reversed(folders) if name in numbers), -1))
        if not self.files:
            raise checks.bad_value("ImageFiles", "paths", "at least one image", list(map(str, paths)))
        self.labels = np.array(labels, np.int32)
        self.damaged: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int, /) -> tuple[np.ndarray, int]:
        def box(width: int, height: int) -> tuple[float, float, float, float]:
            return centre(width, height, *self._size, self._margin)

        try:
            image = cut_out(self._pillow, Path(self.files[index]), box, self._size, self._mode)
        except ValueError as error:
            self.damaged[index] = str(error)
            image = np.zeros((*self._size, len(self._mode)), np.uint8)
        return image, int(self.labels[index])


def _found(path: str | Path) -> list[tuple[str, tuple[str, ...]]]:
    """The images at ``path``, and the names of the folders that each of them lies in, from the given one inwards."""
    path = Path(path)
    if path.is_dir():
        inside = [Path(os.path.normpath(file)) for file in images_under(path)]
        if not inside:
            raise ValueError(f"no images under {path}; expected files of {', '.join(SUFFIXES)}")
        return sorted((str(path / file), (path.name, *file.parts[:-1])) for file in inside)
    if not path.exists():
        raise FileNotFoundError(f"there is no image or folder {path}")
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path} is not an image; expected a folder or a file of {', '.join(SUFFIXES)}")
    return [(str(path), (path.parent.name,))]
