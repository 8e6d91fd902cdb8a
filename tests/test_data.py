"""Laws of the loader: what a rank sees follows from seed, epoch and sample, never from the ranks."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minidl import data
from minidl.data import (
    ArrayDataset,
    Compose,
    Loader,
    MixUp,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    counter,
    dataset,
    shard,
    synthetic,
)
from minidl.precision import bfloat16, float16, float32, precision
from tests.tolerance import STORE

AUGMENT = Compose(RandomCrop(2), RandomHorizontalFlip())


def numbered(count: int, *, maps: bool = False) -> ArrayDataset:
    """Image ``i`` is filled with ``i`` in its first pixel and with other values elsewhere; its label is ``i``."""
    images = np.random.default_rng(7).standard_normal((count, 5, 4, 2)).astype(np.float32)
    images[:, 0, 0, 0] = np.arange(count)
    labels = np.arange(count)
    return ArrayDataset(images, np.broadcast_to(labels[:, None, None], (count, 5, 4)) if maps else labels, count)


def photographs(num_classes: int = 2, **options) -> ArrayDataset:
    return ArrayDataset(np.zeros((4, 3, 3, 3), np.uint8), np.zeros(4, int), num_classes, **options)


def epoch_of(loader: Loader) -> list[data.Batch]:
    return list(loader)


def assert_same_batches(actual, expected):
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a.images, e.images)
        np.testing.assert_array_equal(a.labels, e.labels)
        assert (a.first_sample, a.global_size) == (e.first_sample, e.global_size)


# ---- counters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seed, epoch, stream, index, words",
    [  # known answers published with the generator
        (0, 0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        (2**64 - 1, 2**32 - 1, 2**32 - 1, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            0x13198A2E,
            0x03707344,
            0x85A308D3243F6A88,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_counter_gives_the_published_words(seed, epoch, stream, index, words):
    found = counter.random_words(seed, epoch, stream, np.array([index], np.uint64))
    assert tuple(int(word) for word in found[0]) == words


def test_words_of_a_sample_do_not_depend_on_its_neighbours():
    together = counter.random_words(3, 1, 2, np.arange(50))
    for index in (0, 17, 49):
        np.testing.assert_array_equal(counter.random_words(3, 1, 2, np.array([index]))[0], together[index])


@given(count=st.integers(0, 200), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_shuffled_is_a_permutation(count, seed, epoch):
    assert sorted(counter.shuffled(count, seed, epoch)) == list(range(count))


def test_shuffling_differs_between_epochs_and_seeds():
    orders = [tuple(counter.shuffled(100, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert len(set(orders)) == 4


def test_below_is_uniform_and_in_range():
    values = counter.below(counter.random_words(0, 0, 0, np.arange(40_000))[:, 0], 7)
    counts = np.bincount(values, minlength=7)
    assert counts.size == 7 and np.abs(counts - 40_000 / 7).max() < 5 * (40_000 / 7) ** 0.5


# ---- shards ------------------------------------------------------------------------------------------------------


@given(count=st.integers(0, 300), size=st.integers(1, 17))
@settings(deadline=None)
def test_shards_are_contiguous_complete_and_balanced(count, size):
    cuts = [shard(count, rank, size) for rank in range(size)]
    assert cuts[0][0] == 0 and cuts[-1][1] == count
    assert all(left[1] == right[0] for left, right in itertools.pairwise(cuts))
    lengths = [stop - start for start, stop in cuts]
    assert max(lengths) - min(lengths) <= 1 and lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("maps", [False, True])
def test_shards_of_all_ranks_join_to_the_batch_of_one(size, drop_last, maps):
    """Three samples in the last batch and up to eight ranks: some ranks get none and still take part."""
    common = {"batch": 7, "seed": 5, "augment": AUGMENT, "drop_last": drop_last}
    source = numbered(24, maps=maps)
    alone = epoch_of(Loader(source, **common))
    ranks = [epoch_of(Loader(source, rank=rank, size=size, **common)) for rank in range(size)]
    assert [len(batches) for batches in ranks] == [3 if drop_last else 4] * size
    for number, whole in enumerate(alone):
        parts = [batches[number] for batches in ranks]
        np.testing.assert_array_equal(np.concatenate([part.images for part in parts]), whole.images)
        np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), whole.labels)
        position = whole.first_sample
        for part in parts:
            assert part.first_sample == position and part.global_size == len(whole.images)
            assert len(part.images) == len(part.labels)
            position += len(part.images)


def test_empty_shard_has_the_shape_and_dtype_of_a_full_one():
    (batch,) = Loader(numbered(2), 2, rank=2, size=3, dtype=bfloat16, augment=AUGMENT)
    assert batch.images.shape == (0, 5, 4, 2) and batch.images.dtype == bfloat16
    assert batch.labels.shape == (0,) and batch.labels.dtype == np.int32


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_has_every_sample_once(shuffle):
    loader = Loader(numbered(23), 4, shuffle=shuffle)
    for _ in range(2):
        seen = np.concatenate([batch.labels for batch in loader])
        assert sorted(seen) == list(range(23))
        assert shuffle or list(seen) == list(range(23))
    assert loader.epoch == 2


def test_images_stay_with_their_labels():
    for batch in Loader(numbered(23), 4):
        np.testing.assert_array_equal(batch.images[:, 0, 0, 0], batch.labels)


# ---- determinism and resuming ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": 1, "prefetch": 1}, {"workers": 3, "prefetch": 5}])
def test_results_do_not_depend_on_the_workers(options):
    source = numbered(40)
    assert_same_batches(
        epoch_of(Loader(source, 6, augment=AUGMENT, **options)), epoch_of(Loader(source, 6, augment=AUGMENT))
    )


def test_seed_and_epoch_change_order_and_augmentation():
    def first(seed, epochs=0, shuffle=True):
        loader = Loader(numbered(40), 40, seed=seed, augment=AUGMENT, shuffle=shuffle)
        for _ in range(epochs):
            epoch_of(loader)
        return epoch_of(loader)[0]

    np.testing.assert_array_equal(first(0).images, first(0).images)
    assert not np.array_equal(first(0).labels, first(1).labels)
    assert not np.array_equal(first(0).labels, first(0, epochs=1).labels)
    assert not np.array_equal(first(0, shuffle=False).images, first(1, shuffle=False).images)
    assert not np.array_equal(first(0, shuffle=False).images, first(0, epochs=1, shuffle=False).images)


@pytest.mark.parametrize("stop", range(11))
def test_resuming_continues_exactly(stop):
    """Two epochs of five batches, interrupted after ``stop`` batches, even by another number of ranks."""
    options = {"batch": 5, "seed": 3, "augment": AUGMENT}
    whole = Loader(numbered(24), **options)
    expected = [*whole, *whole]
    first = Loader(numbered(24), rank=0, size=1, **options)
    both_epochs = itertools.chain(first, first)
    taken = list(itertools.islice(both_epochs, stop))
    second = Loader(numbered(24), **options)
    second.restore(json.loads(json.dumps(first.state())))
    rest = []
    while second.epoch < 2:
        rest += list(second)
    assert_same_batches(taken + rest, expected)


def test_state_counts_what_was_handed_out_not_what_was_prepared():
    loader = Loader(numbered(24), 5, workers=2, prefetch=4)
    iteration = iter(loader)
    next(iteration), next(iteration)
    assert (loader.state()["epoch"], loader.state()["next_batch"]) == (0, 2)


def test_a_loop_left_early_goes_on_where_it_stopped():
    expected = epoch_of(Loader(numbered(24), 5))
    loader = Loader(numbered(24), 5)
    taken = []
    for batch in loader:
        taken.append(batch)
        if len(taken) == 2:
            break
    assert_same_batches(taken + list(loader), expected)


@pytest.mark.parametrize("change", [{"seed": 9}, {"batch": 6}, {"shuffle": False}, {"drop_last": True}])
def test_state_of_another_order_is_refused(change):
    state = Loader(numbered(24), **{"batch": 5, "seed": 3}).state()
    name = next(iter(change))
    with pytest.raises(ValueError, match=name):
        Loader(numbered(24), **{"batch": 5, "seed": 3, **change}).restore(state)


def test_state_of_another_data_set_or_out_of_range_is_refused():
    loader = Loader(numbered(24), 5)
    with pytest.raises(ValueError, match="samples"):
        loader.restore(Loader(numbered(25), 5).state())
    with pytest.raises(ValueError, match="next_batch"):
        loader.restore({**loader.state(), "next_batch": 6})
    with pytest.raises(ValueError, match="epoch"):
        loader.restore({key: value for key, value in loader.state().items() if key != "epoch"})


# ---- values ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [float32, bfloat16, float16], ids=str)
@pytest.mark.parametrize("pixels", [np.uint8, np.float32])
def test_images_are_scaled_and_normalised_in_float32_and_rounded_once(dtype, pixels, rng):
    images = rng.integers(0, 256, (6, 3, 4, 2)).astype(pixels)
    mean, std = (0.2, 0.7), (0.5, 0.25)
    (batch,) = Loader(ArrayDataset(images, np.zeros(6, int), 2), 6, shuffle=False, mean=mean, std=std, dtype=dtype)
    unit = 255 if pixels == np.uint8 else 1
    expected = (images.astype(np.float64) / unit - mean) / std
    bound = STORE[dtype] * np.abs(expected) + 2.0**-22 * (np.abs(images / unit / std) + np.abs(np.divide(mean, std)))
    assert batch.images.dtype == dtype and batch.images.flags.c_contiguous
    assert (np.abs(batch.images.astype(np.float64) - expected) <= bound).all()
    known = ArrayDataset(images, np.zeros(6, int), 2, mean=mean, std=std)
    for options in ({}, {"mean": mean}, {"std": std}):
        (same,) = Loader(known, 6, shuffle=False, dtype=dtype, **options)
        np.testing.assert_array_equal(same.images, batch.images)
    (raw,) = Loader(known, 6, shuffle=False, dtype=dtype, mean=(0, 0), std=(1, 1))
    (plain,) = Loader(ArrayDataset(images, np.zeros(6, int), 2), 6, shuffle=False, dtype=dtype)
    np.testing.assert_array_equal(raw.images, plain.images)


def test_the_data_set_is_not_changed():
    source = numbered(10)
    before = source.images.copy()
    epoch_of(Loader(source, 4, mean=(1, 2), std=(3, 4), augment=AUGMENT))
    np.testing.assert_array_equal(source.images, before)


def test_a_list_of_pairs_is_a_data_set_and_equals_the_bulk_path():
    source = numbered(11)
    pairs = [source[i] for i in range(11)]
    assert isinstance(pairs, data.Dataset)
    assert_same_batches(epoch_of(Loader(pairs, 4, seed=2)), epoch_of(Loader(source, 4, seed=2)))


def test_crop_cuts_a_window_out_of_the_padded_image(rng):
    images = rng.standard_normal((9, 6, 5, 2)).astype(np.float32)
    labels = rng.integers(0, 4, (9, 6, 5))
    words = counter.random_words(1, 0, 0, np.arange(9))
    cropped, moved = RandomCrop(2, ignore_index=7)(images, labels, lambda stream: words)
    corners = set()
    for n in range(9):
        top, left = (int(word) * 5 >> 32 for word in words[n, :2])
        corners.add((top, left))
        for y, x in itertools.product(range(6), range(5)):
            row, column = y + top - 2, x + left - 2
            inside = 0 <= row < 6 and 0 <= column < 5
            np.testing.assert_array_equal(cropped[n, y, x], images[n, row, column] if inside else 0)
            assert moved[n, y, x] == (labels[n, row, column] if inside else 7)
    assert len(corners) > 1


def test_flip_mirrors_image_and_map_with_probability_p(rng):
    images, labels = rng.standard_normal((400, 2, 3, 1)), rng.integers(0, 4, (400, 2, 3))
    words = counter.random_words(1, 0, 0, np.arange(400))
    flipped, moved = RandomHorizontalFlip(0.25)(images, labels, lambda stream: words)
    mirrored = np.array([np.array_equal(f, i[:, ::-1]) for f, i in zip(flipped, images, strict=True)])
    kept = np.array([np.array_equal(f, i) for f, i in zip(flipped, images, strict=True)])
    assert (mirrored ^ kept).all() and 60 < mirrored.sum() < 140
    np.testing.assert_array_equal(moved[mirrored], labels[mirrored][:, :, ::-1])
    np.testing.assert_array_equal(moved[kept], labels[kept])


def test_compose_gives_each_step_words_of_its_own():
    streams = []

    def step(images, labels, draw):
        streams.append(draw(0))
        return images, labels

    Compose(step, step)(np.zeros((1, 1, 1, 1)), np.zeros(1), lambda stream: stream)
    assert len(set(streams)) == 2


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16", "bfloat16"])
def test_images_are_stored_as_a_precision_of_this_name_stores_them(name):
    assert next(iter(Loader(numbered(4), 2, dtype=name))).images.dtype == precision(name).storage


# ---- errors ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: dataset("cifar11"), ValueError, "did you mean 'cifar10'"),
        (lambda: dataset("digits", split="valid"), ValueError, "unknown split 'valid'"),
        (lambda: dataset("digits", path="somewhere"), ValueError, "path"),
        (lambda: dataset("digits", shape=(1, 2, 3)), TypeError, "shape"),
        (lambda: synthetic(0), ValueError, "n must be"),
        (lambda: synthetic(5, (4, 4)), ValueError, "shape"),
        (lambda: synthetic(5, num_classes=1), ValueError, "num_classes"),
        (lambda: synthetic(5, task="detection"), ValueError, "task"),
        (lambda: ArrayDataset(np.zeros((2, 3, 3)), np.zeros(2, int), 2), ValueError, "images"),
        (lambda: ArrayDataset(np.zeros((2, 3, 3, 1)), np.zeros(2, int), 2), TypeError, "images"),
        (lambda: ArrayDataset(np.zeros((2, 3, 3, 1), np.uint8), np.zeros(3, int), 2), ValueError, "labels"),
        (lambda: ArrayDataset(np.zeros((2, 3, 3, 1), np.uint8), np.zeros(2), 2), TypeError, "labels"),
        (lambda: Loader([], 4), ValueError, "len"),
        (lambda: Loader(numbered(4), 0), ValueError, "batch"),
        (lambda: Loader(numbered(4), 2, rank=2, size=2), ValueError, "rank"),
        (lambda: Loader(numbered(4), 2, rank=-1), ValueError, "rank"),
        (lambda: Loader(numbered(4), 5, drop_last=True), ValueError, "batch must be at most 4"),
        (lambda: Loader(numbered(4), 2, dtype=np.float64), TypeError, "dtype"),
        (lambda: Loader(numbered(4), 2, mean=(1.0,)), ValueError, "mean must be 2 numbers"),
        (lambda: Loader(numbered(4), 2, std=(1.0, 0.0)), ValueError, "std"),
        (lambda: Loader(numbered(4), 2, workers=-1), ValueError, "workers"),
        (lambda: Loader(numbered(4), 2, prefetch=0), ValueError, "prefetch"),
        (lambda: Loader([3], 1), TypeError, "pair"),
        (lambda: Loader(numbered(4), 2, augment="flip"), TypeError, r"augment must be a function .* Compose\(...\)"),
        (lambda: Loader([(np.zeros((2, 2, 1)), 0)], 1), TypeError, "float32 or uint8, got float64"),
        (lambda: Loader([(np.zeros((2, 2), np.uint8), 0)], 1), ValueError, "height, width, channels"),
        (lambda: Loader([(np.zeros((2, 2, 1), np.uint8), 0.5)], 1), TypeError, "integer"),
        (lambda: Loader([(np.zeros((2, 2, 1), np.uint8), [1, 2])], 1), ValueError, "label"),
        (lambda: RandomCrop(-1), ValueError, "padding"),
        (lambda: RandomHorizontalFlip(1.5), ValueError, "p must be"),
        (lambda: RandomHorizontalFlip("a"), ValueError, "p must be a number"),
        (lambda: RandomResizedCrop(0.5), ValueError, "scale must be a range within"),
        (lambda: RandomResizedCrop((0.5, "1")), ValueError, "scale must be a range within"),
        (lambda: RandomResizedCrop((0.9, 0.5)), ValueError, "scale must be a range within"),
        (lambda: RandomResizedCrop(ratio=(1.0, np.inf)), ValueError, "ratio must be a range above 0, finite"),
        (lambda: Compose(RandomCrop), TypeError, "steps must be augmentations"),
        (lambda: Loader(numbered(4), 2, augment=RandomCrop), TypeError, "augment must be a function"),
        (lambda: Loader(numbered(4), 2, mix=0.2), TypeError, r"mix must be a MixUp, got float 0.2; MixUp\("),
        (lambda: Loader(numbered(4), 2, mix=MixUp), TypeError, "mix must be a MixUp"),
        (lambda: Loader(numbered(4), 2, transfer="cuda"), TypeError, r"transfer must .*'cuda'; model.ops.uploader\(\)"),
        (lambda: Loader(numbered(4), 2, normalise=True), TypeError, "normalise must be a function"),
        (lambda: Loader(numbered(4), 2, dtype="int8"), ValueError, "unknown precision 'int8'"),
        (lambda: Loader(numbered(4), 2, mean=0.5), ValueError, "mean must be 2 numbers"),
        (lambda: photographs(num_classes="2"), ValueError, "num_classes must be an integer"),
        (lambda: photographs(mean=0.5), ValueError, "mean must be 3 numbers, one per channel"),
        (lambda: photographs(std=("a", "b", "c")), ValueError, "std must be 3 numbers, one per channel"),
        (lambda: synthetic(shape=32), ValueError, r"shape must be \(height, width, channels\), got 32"),
    ],
)
def test_errors_name_the_argument(call, error, words):
    with pytest.raises(error, match=words):
        call()


@pytest.mark.parametrize(
    "odd, error",
    [
        ((np.zeros((2, 3, 1), np.uint8), 1), ValueError),
        ((np.zeros((2, 2, 1), np.float32), 1), TypeError),
        ((np.zeros((2, 2, 1), np.uint8), np.zeros((2, 2), int)), ValueError),
        ((np.zeros((2, 2, 1), np.uint8), 0.5), TypeError),
    ],
)
def test_an_item_unlike_the_first_is_named(odd, error):
    pairs = [(np.zeros((2, 2, 1), np.uint8), 0)] * 5 + [odd]
    with pytest.raises(error, match="item 5"):
        list(Loader(pairs, 3))
