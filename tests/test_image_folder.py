"""Photographs in folders: what is decoded, which part, and that it follows from seed, epoch and sample alone."""

from __future__ import annotations

import errno
import os
import shutil

import numpy as np
import pytest

from minidl import cli, data
from minidl.data import Compose, ImageFolder, Loader, RandomHorizontalFlip, RandomResizedCrop, image_folder

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")


def smooth(rng, height, width):
    """A photograph without sharp edges: what scaling and JPEG do to it stays small."""
    small = Image.fromarray(rng.integers(0, 256, (4, 5, 3)).astype(np.uint8))
    return np.asarray(small.resize((width, height), Image.Resampling.BICUBIC))


@pytest.fixture
def root(tmp_path, rng):
    """Two classes, ten images to train and four to test on, of several sizes and formats."""
    for split, count in (("train", 5), ("val", 2)):
        for name in ("cat", "dog"):
            for i in range(count):
                folder = tmp_path / split / name / ("more" if i % 2 else "")
                folder.mkdir(parents=True, exist_ok=True)
                image = Image.fromarray(smooth(rng, 40 + 7 * i, 90 - 11 * i))
                image.save(folder / f"{i}{('.png', '.JPG', '.bmp')[i % 3]}", quality=95)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def test_classes_files_and_labels_come_in_order(root):
    train, test = (image_folder(root, split, 16) for split in ("train", "test"))
    assert train.classes == test.classes == ["cat", "dog"] and train.num_classes == 2
    assert (len(train), len(test)) == (10, 4)
    assert train.labels.tolist() == [0] * 5 + [1] * 5 and train.files == sorted(train.files)
    image, label = train[7]
    assert image.shape == (16, 16, 3) and image.dtype == np.uint8 and label == 1


def test_what_is_hidden_is_no_image(root):
    """Other programs leave copies and descriptions in the folders they have shown."""
    plain = image_folder(root, "train", 16).files
    (root / "train" / "cat" / "._0.png").write_bytes(b"Mac OS X")
    copies = root / "train" / "cat" / ".ipynb_checkpoints"
    copies.mkdir()
    shutil.copy(root / "train" / "cat" / "0.png", copies / "0-checkpoint.png")
    assert image_folder(root, "train", 16).files == plain


def test_a_folder_that_cannot_be_read_is_told_and_not_left_out(root, monkeypatch):
    """As root may read everything, the system's answer is played."""
    plain = os.scandir

    def scandir(path):
        if str(path).endswith("more"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError, match="Permission denied: '.*more'"):
        image_folder(root, "train", 16)


def test_a_link_to_a_folder_above_is_refused_as_its_images_would_come_many_times(root):
    (root / "train" / "cat" / "again").symlink_to("..", target_is_directory=True)
    with pytest.raises(ValueError, match="cat/again links to a folder above it, .*; remove the link"):
        image_folder(root, "train", 16)
    (root / "train" / "cat" / "again").unlink()
    (root / "elsewhere").mkdir()
    shutil.copy(root / "train" / "cat" / "0.png", root / "elsewhere")
    (root / "train" / "cat" / "beside").symlink_to(root / "elsewhere", target_is_directory=True)
    assert "cat/beside/0.png" in image_folder(root, "train", 16).files


def test_a_part_of_its_own_size_is_the_pixels_themselves(tmp_path, rng):
    pixels = rng.integers(0, 256, (30, 40, 3)).astype(np.uint8)
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    folder = ImageFolder(tmp_path, 8)
    image, _ = folder.view(0, lambda width, height: (5, 11, 13, 19) if (width, height) == (40, 30) else None)
    np.testing.assert_array_equal(image, pixels[11:19, 5:13])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1"])
def test_every_kind_of_image_becomes_three_channels(tmp_path, rng, mode):
    (tmp_path / "a").mkdir()
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.fromarray(smooth(rng, 20, 30)).convert(mode).save(tmp_path / "a" / f"0.{suffix}")
    assert ImageFolder(tmp_path, 8)[0][0].shape == (8, 8, 3)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_of_sixteen_bits_the_upper_eight_are_seen_and_of_32_none(suffix, tmp_path):
    (tmp_path / "a").mkdir()
    deep = np.arange(256, dtype=np.uint16).reshape(16, 16) * 256 + 7
    Image.fromarray(deep).save(tmp_path / "a" / f"0.{suffix}")
    image, _ = ImageFolder(tmp_path, 16).view(0, lambda width, height: (0, 0, width, height))
    np.testing.assert_array_equal(image, np.repeat(deep[..., None] >> 8, 3, axis=-1))
    Image.fromarray(deep.astype(np.float32)).save(tmp_path / "a" / "1.tif")
    with pytest.raises(
        ValueError, match=r"a/1.tif cannot be decoded: it has 32 bits a pixel, .*; save it with 8 or 16"
    ):
        ImageFolder(tmp_path, 16)[1]


def test_a_jpeg_decoded_at_a_fraction_shows_the_same(tmp_path, rng):
    pixels = smooth(rng, 720, 1000)
    for name, suffix in (("png", ".png"), ("jpg", ".jpg")):
        (tmp_path / name).mkdir()
        Image.fromarray(pixels).save(tmp_path / name / f"0{suffix}", quality=95)
    folder = ImageFolder(tmp_path, 32)
    for box in ((0, 0, 1000, 720), (100, 50, 611, 333), (7, 3, 71, 67)):
        jpeg, png = (folder.view(i, lambda *_: box)[0].astype(float) for i in (0, 1))  # noqa: B023
        assert np.abs(jpeg - png).mean() < 2 and np.abs(jpeg - png).max() < 12


def test_evaluation_sees_the_centre(tmp_path):
    """A white square of 224 / 256 of the shorter side fills the view."""
    pixels = np.zeros((256, 400, 3), np.uint8)
    pixels[16:240, 88:312] = 255
    (tmp_path / "a").mkdir()
    Image.fromarray(pixels).save(tmp_path / "a" / "0.png")
    assert (ImageFolder(tmp_path, 224)[0][0] == 255).all()
    quarter = ImageFolder(tmp_path, 56)[0][0]
    assert (quarter[1:-1, 1:-1] == 255).all() and quarter.min() < 255  # scaling down, edges take in a neighbour


# -- random parts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("width", "height"), [(500, 375), (31, 1000), (1000, 20), (1, 1), (3, 2)])
def test_boxes_lie_inside_and_keep_share_and_form(width, height, rng):
    crop = RandomResizedCrop()
    boxes = [crop.box(rng.random((10, 4)), width, height) for _ in range(300)]
    for left, top, right, bottom in boxes:
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
    if min(width, height) > 100:
        sizes = np.array([(right - left, bottom - top) for left, top, right, bottom in boxes])
        share, ratio = sizes.prod(1) / (width * height), sizes[:, 0] / sizes[:, 1]
        assert 0.079 < share.min() < 0.2 and 0.9 < share.max() <= 1
        assert 0.74 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.35


def test_a_box_that_never_fits_is_the_widest_at_the_centre():
    narrow = RandomResizedCrop(scale=(1, 1))
    assert narrow.box(np.full((10, 4), 0.5), 300, 30) == (130, 0, 170, 30)
    assert narrow.box(np.full((10, 4), 0.5), 30, 300) == (0, 130, 30, 170)


def batches(folder, **options):
    return [(b.images, b.labels) for b in Loader(folder, 4, mean=folder.mean, std=folder.std, **options)]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_a_sample_shows_does_not_depend_on_ranks_or_workers(root, ranks):
    folder = image_folder(root, size=12)
    expected = batches(folder, augment=folder.augment, workers=0)
    parts = [batches(folder, augment=folder.augment, rank=r, size=ranks, workers=r) for r in range(ranks)]
    for (images, labels), *shards in zip(expected, *parts, strict=True):
        np.testing.assert_array_equal(np.concatenate([part[0] for part in shards]), images)
        np.testing.assert_array_equal(np.concatenate([part[1] for part in shards]), labels)


def test_each_epoch_cuts_other_parts(root):
    folder = image_folder(root, size=12)
    loader = Loader(folder, 10, shuffle=False, augment=folder.augment)
    (first,), (second,) = list(loader), list(loader)
    assert (first.images != second.images).any(axis=(1, 2, 3)).all()
    np.testing.assert_array_equal(first.labels, second.labels)


def test_cutting_comes_first(root):
    with pytest.raises(ValueError, match="RandomResizedCrop as the first"):
        Compose(RandomHorizontalFlip(), RandomResizedCrop())
    with pytest.raises(TypeError, match="view"):
        list(Loader(data.synthetic(8), 4, augment=RandomResizedCrop()))
    for bad in ({"scale": (0, 1)}, {"scale": (0.5, 0.4)}, {"ratio": (0, 1)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            RandomResizedCrop(**bad)


# -- what is wrong ----------------------------------------------------------------------------------------------------


def test_a_damaged_file_is_named(root):
    broken = root / "train" / "dog" / "0.png"
    broken.write_bytes(broken.read_bytes()[:200])
    folder = image_folder(root, size=8)
    with pytest.raises(ValueError, match=r"dog/0\.png cannot be decoded"):
        batches(folder, augment=folder.augment, workers=2)


def test_missing_folders_and_strange_classes_are_refused(root, tmp_path_factory):
    empty = tmp_path_factory.mktemp("empty")
    with pytest.raises(FileNotFoundError, match="no folder train"):
        image_folder(empty)
    (empty / "train").mkdir()
    with pytest.raises(ValueError, match=r"no images under .*train; expected"):
        image_folder(empty)
    with pytest.raises(FileNotFoundError, match=r"val or valid .*empty\d+/val/CLASS"):
        image_folder(empty, "test")
    (root / "val" / "bird").mkdir()
    with pytest.raises(ValueError, match="'bird', which is no class"):
        image_folder(root, "test")
    with pytest.raises(FileNotFoundError, match="no folder"):
        ImageFolder(empty / "none")
    with pytest.raises(ValueError, match="path"):
        data.dataset("folder")


def test_a_class_without_images_is_refused_in_training_only(root):
    classes = image_folder(root).classes
    shutil.rmtree(root / "val" / classes[0])
    (root / "val" / classes[0]).mkdir()
    assert image_folder(root, "test").num_classes == len(classes)
    (root / "train" / "eel").mkdir()
    with pytest.raises(ValueError, match=r"train/eel' has no images; remove the folder"):
        image_folder(root)


def test_ranks_with_other_files_differ_in_their_plan(root):
    plans = [Loader(image_folder(root, size=8), 4).plan()]
    (root / "train" / "dog" / "0.png").rename(root / "train" / "dog" / "00.png")
    assert Loader(image_folder(root, size=8), 4).plan() != plans[0]


def test_a_network_trains_on_a_folder(root, tmp_path_factory, capsys):
    out = tmp_path_factory.mktemp("run")
    options = ["--model", "resnet18", "--data", "folder", "--data-path", str(root), "--image-size", "32"]
    options += ["--epochs", "1", "--batch", "5", "--device", "cpu", "--output", str(out)]
    assert cli.main(["train", *options]) == 0
    assert "folder: 10 images" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["train", *options, "--classes", "3"])
    assert "--classes is for --data synthetic, not for folder" in capsys.readouterr().err
