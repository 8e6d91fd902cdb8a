"""Ten photographs in patches, in the files of CIFAR-10's binary version: real images for a recipe, without a download.

    python scripts/photograph_patches.py DIR
    minidl train --config scripts/resnet20_cifar10.toml --data-path DIR --epochs 10 --schedule cosine

The class of a patch is the photograph that it comes from, of those that scikit-image has in it. Training patches lie in
the left three quarters of each photograph, test patches in the rest, so no pixel is in both; each is 32 pixels wide, or
64 made into 32, mirrored or not. Like CIFAR-10: 5000 patches of each class to train and 1000 to test, shuffled.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

NAMES = ("astronaut", "brick", "chelsea", "coffee", "grass", "gravel", "hubble_deep_field", "immunohistochemistry",
         "retina", "rocket")  # fmt: skip
SIDE, RECORDS, FILES = 32, 10_000, 5


def photograph(name: str) -> np.ndarray:
    """(H, W, 3) uint8; grey ones three times the same."""
    try:
        from skimage import data
    except ImportError as error:
        raise SystemExit(f"photograph_patches: needs scikit-image ({error}); pip install 'minidl[data]'") from error
    image = getattr(data, name)()
    return np.repeat(image[..., None], 3, axis=2) if image.ndim == 2 else image[..., :3]


def patches(image: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """(count, 3, 32, 32) uint8: planes, as the files have them."""
    found = np.empty((count, SIDE, SIDE, 3), np.uint8)
    for i in range(count):
        scale, mirrored = 1 + i % 2, rng.integers(2)
        row, column = (rng.integers(extent - scale * SIDE + 1) for extent in image.shape[:2])
        part = image[row : row + scale * SIDE, column : column + scale * SIDE]
        part = part.reshape(SIDE, scale, SIDE, scale, 3).mean((1, 3)) if scale > 1 else part
        found[i] = part[:, ::-1] if mirrored else part
    return found.transpose(0, 3, 1, 2)


def write(folder: Path, images: list[np.ndarray], split: str, files: list[str]) -> None:
    rng = np.random.default_rng(len(files))
    each = RECORDS * len(files) // len(NAMES)
    borders = [image.shape[1] * 3 // 4 for image in images]
    parts = [slice(None, border) if split == "train" else slice(border, None) for border in borders]
    planes = [patches(image[:, part], each, rng) for image, part in zip(images, parts, strict=True)]
    labels = np.repeat(np.arange(len(NAMES), dtype=np.uint8), each)
    records = np.concatenate([labels[:, None], np.concatenate(planes).reshape(len(labels), -1)], axis=1)
    rng.shuffle(records)
    for name, rows in zip(files, np.split(records, len(files)), strict=True):
        rows.tofile(folder / name)


def main(arguments: list[str]) -> None:
    if len(arguments) != 1:
        raise SystemExit("usage: python scripts/photograph_patches.py DIR")
    folder = Path(arguments[0])
    folder.mkdir(parents=True, exist_ok=True)
    images = [photograph(name) for name in NAMES]
    write(folder, images, "train", [f"data_batch_{i + 1}.bin" for i in range(FILES)])
    write(folder, images, "test", ["test_batch.bin"])


if __name__ == "__main__":
    main(sys.argv[1:])
