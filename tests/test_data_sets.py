"""Data sets: what their files hold, what is refused, and that samples depend on their index alone."""

from __future__ import annotations

import gzip
import sys

import numpy as np
import pytest

from minidl import data
from minidl.data import Loader, cifar10, dataset, digits, mnist, synthetic

# ---- data sets ---------------------------------------------------------------------------------------------------


def test_digits_split_is_fixed_stratified_and_disjoint():
    train, test = digits("train"), digits("test")
    assert (len(train), len(test)) == (1438, 359)
    assert train.images.shape[1:] == (8, 8, 1) and train.images.dtype == np.float32
    assert train.images.min() == 0 and train.images.max() == 1
    whole = np.bincount(train.labels) + np.bincount(test.labels)
    assert np.abs(np.bincount(test.labels) - whole / 5).max() <= 0.5
    np.testing.assert_allclose(train.images.mean(), train.mean[0], atol=5e-5)
    np.testing.assert_allclose(train.images.std(), train.std[0], atol=5e-5)
    from sklearn.datasets import load_digits

    joined = np.concatenate([train.images, test.images]).reshape(1797, -1) * 16
    everything = load_digits().data
    assert sorted(map(tuple, joined.astype(int))) == sorted(map(tuple, everything.astype(int)))


@pytest.fixture
def cifar_folder(tmp_path, monkeypatch, rng):
    """A small CIFAR-10: three records in each file instead of ten thousand."""
    monkeypatch.setattr(sys.modules["minidl.data.cifar10"], "_RECORDS", 3)  # the function hides its module
    for number, name in enumerate([*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]):
        records = rng.integers(0, 256, (3, 3073), dtype=np.uint8)
        records[:, 0] = [number, 9, 0]
        records.tofile(tmp_path / name)
    return tmp_path


def test_cifar10_reads_labels_and_planes(cifar_folder):
    train, test = cifar10(cifar_folder), dataset("cifar10", cifar_folder, "test")
    assert (len(train), len(test), train.num_classes) == (15, 3, 10)
    assert list(train.labels) == [0, 9, 0, 1, 9, 0, 2, 9, 0, 3, 9, 0, 4, 9, 0]
    record = np.fromfile(cifar_folder / "data_batch_2.bin", np.uint8)[:3073]
    image, label = train[3]
    assert label == record[0] and image.dtype == np.uint8
    for y, x, c in ((0, 0, 0), (0, 31, 1), (31, 0, 2), (17, 5, 1)):
        assert image[y, x, c] == record[1 + c * 1024 + y * 32 + x]


def test_cifar10_is_found_one_folder_above(cifar_folder):
    parent = cifar_folder / "archive"
    (parent / "cifar-10-batches-bin").mkdir(parents=True)
    for path in cifar_folder.glob("*.bin"):
        path.rename(parent / "cifar-10-batches-bin" / path.name)
    assert len(cifar10(parent)) == 15


def test_cifar10_says_what_is_wrong_with_which_file(cifar_folder):
    with pytest.raises(FileNotFoundError, match="no-such"):
        cifar10(cifar_folder / "no-such")
    damaged = cifar_folder / "data_batch_4.bin"
    records = np.fromfile(damaged, np.uint8)
    records[:-1].tofile(damaged)
    with pytest.raises(ValueError, match=r"data_batch_4.bin has 9218 bytes, expected 9219"):
        cifar10(cifar_folder)
    records[3073] = 10
    records.tofile(damaged)
    with pytest.raises(ValueError, match=r"data_batch_4.bin is damaged: record 1 has label 10"):
        cifar10(cifar_folder)
    damaged.unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_4.bin is missing"):
        cifar10(cifar_folder)
    with pytest.raises(ValueError, match="path"):
        dataset("cifar10")


@pytest.mark.parametrize("task", ["classification", "segmentation"])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 3), (32, 48, 4)])
def test_synthetic_samples_depend_on_seed_split_and_index_only(task, shape):
    options = {"n": 12, "shape": shape, "num_classes": 3, "task": task}
    one, again = synthetic(**options), synthetic(**{**options, "n": 5})
    for index in (0, 4):
        np.testing.assert_array_equal(one[index][0], again[index][0])
        np.testing.assert_array_equal(one[index][1], again[index][1])
    image, label = one[3]
    assert image.shape == shape and image.dtype == np.uint8
    assert np.shape(label) == (shape[:2] if task == "segmentation" else ())
    assert 0 <= np.min(label) and np.max(label) < 3
    if shape != (1, 1, 1):
        for other in (synthetic(**options, seed=1), synthetic(**options, split="test")):
            assert not np.array_equal(image, other[3][0])


@pytest.mark.parametrize("shape", [(4, 4, 3), (5, 7, 3), (2, 3, 1), (8, 8, 4)])
@pytest.mark.parametrize("task", ["classification", "segmentation"])
def test_synthetic_noise_is_that_of_numpys_philox(shape, task):
    """Two samples of one class differ by their noise alone: seven of eight bits of the generator's bytes."""
    source = synthetic(40, shape, 2, seed=5, task=task)
    noise = [np.random.Generator(np.random.Philox(key=[5, i])).bytes(int(np.prod(shape))) for i in (0, 2, 38)]
    noise = np.stack([np.frombuffer(bytes_, np.uint8).reshape(shape) >> 1 for bytes_ in noise]).astype(int)
    images, labels = source.take(np.array([0, 2, 38]))
    assert source.take(np.array([], int))[0].shape == (0, *shape), "a rank without samples"
    rest = images - noise
    assert rest.min() >= 0 and rest.max() < 128
    if task == "classification":
        assert (rest == rest[0]).all() and (labels == 0).all()
    else:
        colours = {tuple(colour) for colour in rest.reshape(-1, shape[2])}
        assert len(colours) == len(np.unique(labels))
    for row, index in enumerate((0, 2, 38)):
        np.testing.assert_array_equal(source[index][0], images[row])
        np.testing.assert_array_equal(source[index][1], labels[row])


def test_synthetic_can_be_endless_and_refuses_samples_beyond():
    source = synthetic(n=10**12, shape=(4, 4, 3))
    assert source[10**12 - 1][0].shape == (4, 4, 3)
    np.testing.assert_array_equal(source[-1][0], source[10**12 - 1][0])
    with pytest.raises(IndexError):
        source[10**12]


def test_synthetic_classes_can_be_learned():
    """The nearest class mean of 200 training images names more than nine of ten test images."""
    shape, classes = (12, 12, 3), 8
    train = Loader(synthetic(200, shape, classes), 200, workers=0)
    test = Loader(synthetic(200, shape, classes, split="test"), 200, workers=0)
    (seen,), (fresh,) = train, test
    means = np.stack([seen.images[seen.labels == k].mean(axis=0) for k in range(classes)])
    distance = ((fresh.images[:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert (distance.argmin(axis=1) == fresh.labels).mean() > 0.9


def test_synthetic_segmentation_colours_each_class():
    source = synthetic(50, (16, 16, 3), 3, task="segmentation")
    images, labels = (np.stack(items) for items in zip(*(source[i] for i in range(50)), strict=True))
    assert set(np.unique(labels)) == {0, 1, 2}
    for k in range(3):
        spread = images[labels == k].astype(float)
        np.testing.assert_allclose(spread.mean(axis=0), source._colours[k] + 63.5, atol=4)


# ---- MNIST -------------------------------------------------------------------------------------------------------


def idx(array) -> bytes:
    head = bytes((0, 0, 8, array.ndim)) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return head + array.tobytes()


@pytest.fixture
def mnist_folder(tmp_path, rng):
    for name, count in (("train", 12), ("t10k", 5)):
        (tmp_path / f"{name}-images-idx3-ubyte").write_bytes(idx(rng.integers(0, 256, (count, 6, 7)).astype(np.uint8)))
        labels = idx(np.arange(count, dtype=np.uint8) % 10)
        (tmp_path / f"{name}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    return tmp_path


def test_mnist_reads_plain_and_compressed_files(mnist_folder):
    train, test = (dataset("mnist", mnist_folder, split) for split in ("train", "test"))
    assert (len(train), len(test), train.num_classes) == (12, 5, 10)
    pixels = np.frombuffer((mnist_folder / "train-images-idx3-ubyte").read_bytes()[16:], np.uint8).reshape(12, 6, 7, 1)
    np.testing.assert_array_equal(train.images, pixels)
    assert train.labels.tolist() == [*range(10), 0, 1] and train[3][0].shape == (6, 7, 1)
    (mnist_folder / "train-images-idx3-ubyte").rename(mnist_folder / "train-images.idx3-ubyte")
    np.testing.assert_array_equal(mnist(mnist_folder).images, pixels)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("train-images-idx3-ubyte", b"", "no IDX file"),
        ("train-images-idx3-ubyte", bytes((0, 0, 13, 3)) + bytes(12), "no IDX file"),
        ("train-images-idx3-ubyte", idx(np.zeros((12, 6, 7), np.uint8))[:-1], "has 519 bytes"),
        ("train-images-idx3-ubyte", idx(np.zeros((11, 6, 7), np.uint8)), "11 images and 12 labels"),
        ("train-labels-idx1-ubyte.gz", gzip.compress(b"words", mtime=0)[:-3], "damaged"),
        ("train-labels-idx1-ubyte.gz", None, "missing"),
    ],
)
def test_damaged_files_of_mnist_are_named(mnist_folder, name, content, words):
    if content is None:
        (mnist_folder / name).unlink()
    else:
        (mnist_folder / name).write_bytes(content)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        mnist(mnist_folder)


# ---- coins ---------------------------------------------------------------------------------------------------------


def test_coins_are_a_photograph_of_24_coins_in_windows():
    pytest.importorskip("skimage", reason="needs scikit-image")
    from skimage.measure import label

    from minidl.data.coins import _load

    image, labels = _load()
    assert image.shape == labels.shape == (303, 384) and set(np.unique(labels)) == {0, 1}
    assert label(labels).max() == 24
    assert image[labels == 1].mean() > image[labels == 0].mean() + 50
    train, test = data.coins("train"), data.coins("test")
    assert train.images.shape == (300, 72, 72, 1) and test.images.shape == (8, 72, 72, 1)
    assert train.images.dtype == np.uint8 and train.labels.shape == train.images.shape[:3]
    np.testing.assert_array_equal(train.images[0, ..., 0], image[:72, :72])
    np.testing.assert_array_equal(train.labels[-1], labels[228:300, 168:240])
    np.testing.assert_array_equal(test.labels[3], labels[72:144, 312:384])
    scaled = train.images / 255
    assert abs(scaled.mean() - train.mean[0]) < 1e-3 and abs(scaled.std() - train.std[0]) < 1e-3


def test_coins_refuses_what_it_does_not_have(monkeypatch):
    pytest.importorskip("skimage", reason="needs scikit-image")
    with pytest.raises(ValueError, match="size must be at most 144, got 200"):
        data.coins(size=200)
    with pytest.raises(ValueError, match="unknown split"):
        data.coins("val")
    with pytest.raises(ValueError, match="path must be left out"):
        data.dataset("coins", "somewhere")


def test_coins_without_scikit_image_name_their_extra(monkeypatch):
    import sys

    from minidl.data.coins import _load

    _load.cache_clear()
    monkeypatch.setitem(sys.modules, "skimage", None)
    with pytest.raises(ImportError, match=r"the coins data set is not available.*pip install 'minidl\[data\]'"):
        data.coins()
