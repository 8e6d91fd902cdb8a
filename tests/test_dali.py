"""Photographs through NVIDIA DALI: the samples, boxes and mirrors of a Loader; pixels but for rounding."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from minidl import data
from minidl.backend import get_ops
from minidl.data import ColorJitter, Compose, Loader, MixUp, RandomHorizontalFlip, RandomResizedCrop
from tests.conftest import CUDA

SIZE, COUNT = 32, 13


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Smooth photographs of many sizes: decoders and scaling differ little on them."""
    image = pytest.importorskip("PIL.Image", reason="needs Pillow")
    root, rng = tmp_path_factory.mktemp("photographs"), np.random.default_rng(1)
    for i in range(COUNT):
        place = root / f"class{i % 3}" / f"{i}.{'png' if i % 4 == 0 else 'jpg'}"
        place.parent.mkdir(exist_ok=True)
        coarse = image.fromarray(rng.integers(0, 256, (4, 5, 3)).astype(np.uint8))
        size = int(rng.integers(40, 60)), int(rng.integers(40, 60))
        coarse.resize(size, image.Resampling.BICUBIC).save(place, **({} if place.suffix == ".png" else {"quality": 98}))
    return data.ImageFolder(root, SIZE)


AUGMENTS = {
    "centre": None,
    "crop": RandomResizedCrop((0.3, 1.0)),
    "crop and flip": Compose(RandomResizedCrop((0.3, 1.0)), RandomHorizontalFlip()),
}


def dali(folder, device="cpu", **options):
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
    return data.DaliLoader(folder, 5, device=device, seed=2, mean=folder.mean, std=folder.std, **options)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("augment", AUGMENTS)
def test_batches_are_those_of_a_loader(folder, augment, device):
    options = {"augment": AUGMENTS[augment], "workers": 2}
    expected = Loader(folder, 5, seed=2, mean=folder.mean, std=folder.std, **options)
    found, to_host = dali(folder, device, **options), get_ops(device).to_host
    for _ in range(2):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(to_host(one.labels), other.labels)
            assert one.images.shape == other.images.shape and one.images.dtype == other.images.dtype
            assert (one.first_sample, one.global_size) == (other.first_sample, other.global_size)
            difference = np.abs(to_host(one.images) - other.images) * np.array(folder.std) * 255  # in grey levels
            assert difference.mean() < 1 and difference.max() < 12


@pytest.mark.parametrize("size", [2, 3, 7])
def test_shards_join_to_the_batch_of_one(folder, size):
    augment = AUGMENTS["crop and flip"]
    ranks = [list(dali(folder, augment=augment, rank=rank, size=size)) for rank in range(size)]
    for number, whole in enumerate(dali(folder, augment=augment)):
        parts = [batches[number] for batches in ranks]
        np.testing.assert_array_equal(np.concatenate([part.images for part in parts]), whole.images)
        np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), whole.labels)


def test_resuming_goes_on_where_it_stopped(folder):
    loader = dali(folder, augment=AUGMENTS["crop and flip"])
    taken = next(iter(loader))
    again = dali(folder, augment=AUGMENTS["crop and flip"])
    again.restore(loader.state())
    for one, other in zip([taken, *again], dali(folder, augment=AUGMENTS["crop and flip"]), strict=True):
        np.testing.assert_array_equal(one.images, other.images)


def test_a_damaged_photograph_is_an_error(folder, tmp_path):
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "one").mkdir()
    image.fromarray(np.zeros((40, 40, 3), np.uint8)).save(tmp_path / "one" / "whole.png")
    content = (tmp_path / "one" / "whole.png").read_bytes()
    (tmp_path / "one" / "half.png").write_bytes(content[: len(content) // 2])
    damaged = data.ImageFolder(tmp_path, SIZE)
    damaged.mean, damaged.std = folder.mean, folder.std
    pytest.importorskip("nvidia.dali", reason="needs NVIDIA DALI")
    with pytest.raises(ValueError, match="cannot be decoded|cannot decode"):
        list(data.DaliLoader(damaged, 2, device="cpu"))


def test_what_dali_cannot_do_is_refused(folder, monkeypatch):
    with pytest.raises(TypeError, match="dataset must be an ImageFolder, got ArrayDataset"):
        data.DaliLoader(data.ArrayDataset(np.zeros((2, 4, 4, 3), np.uint8), np.zeros(2, int), 2), 2)
    with pytest.raises(ValueError, match="augment must be None, or RandomResizedCrop .*take a Loader"):
        data.DaliLoader(folder, 2, augment=Compose(RandomResizedCrop(), ColorJitter(0.1)))
    with pytest.raises(ValueError, match="mix must be None.*take a Loader to mix images"):
        data.DaliLoader(folder, 2, mix=MixUp(3))
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with pytest.raises(ImportError, match=r"NVIDIA DALI is not available.*pip install 'minidl\[dali\]'"):
        data.DaliLoader(folder, 2, device="cpu")
