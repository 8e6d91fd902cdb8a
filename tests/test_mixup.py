"""MixUp and ColorJitter: what a sample becomes depends on seed, epoch and sample alone, and follows its formula."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.data import ArrayDataset, ColorJitter, Compose, Loader, MixUp, RandomCrop, RandomHorizontalFlip
from minidl.data.counter import random_words

CLASSES = 5
AUGMENT = Compose(RandomCrop(2), RandomHorizontalFlip())


def drawn(count, dtype=np.float32):
    rng = np.random.default_rng(count)
    images = rng.integers(0, 256, (count, 6, 5, 3)).astype(np.uint8)
    images = images if dtype == np.uint8 else (images / 255).astype(np.float32)
    return ArrayDataset(images, rng.integers(0, CLASSES, count), CLASSES)


def epoch(source, batch, alpha=0.4, **options):
    return list(Loader(source, batch, seed=3, augment=AUGMENT, mix=MixUp(CLASSES, alpha), **options))


@pytest.mark.parametrize("batch", [1, 7, 8, 23])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 9])
def test_shards_of_mixed_images_join_to_the_batch_of_one(size, batch):
    source = drawn(23)
    ranks = [epoch(source, batch, rank=rank, size=size, workers=rank % 3) for rank in range(size)]
    for number, whole in enumerate(epoch(source, batch)):
        parts = [batches[number] for batches in ranks]
        np.testing.assert_array_equal(np.concatenate([part.images for part in parts]), whole.images)
        np.testing.assert_array_equal(np.concatenate([part.labels for part in parts]), whole.labels)


def test_the_cut_into_batches_changes_nothing():
    source = drawn(23)
    expected, found = epoch(source, 23), epoch(source, 4)
    np.testing.assert_array_equal(np.concatenate([b.images for b in found]), expected[0].images)
    np.testing.assert_array_equal(np.concatenate([b.labels for b in found]), expected[0].labels)


@pytest.mark.parametrize("count", [8, 9])
def test_every_image_is_its_share_and_its_neighbours(count):
    source = drawn(count)
    (plain,) = Loader(source, count, seed=3, augment=AUGMENT)
    (mixed,) = epoch(source, count)
    for i in range(count):
        j = i ^ 1 if i ^ 1 < count else i
        share = mixed.labels[i, plain.labels[i]] if plain.labels[i] != plain.labels[j] else None
        if share is None:
            assert mixed.labels[i, plain.labels[i]] == pytest.approx(1)
            continue
        np.testing.assert_allclose(
            mixed.images[i], share * plain.images[i] + (1 - share) * plain.images[j], rtol=1e-5, atol=1e-6
        )
        assert mixed.labels[i, plain.labels[j]] == pytest.approx(1 - share)
    np.testing.assert_allclose(mixed.labels.sum(axis=1), 1, rtol=1e-6)
    assert mixed.labels.dtype == np.float32 and mixed.labels.shape == (count, CLASSES)


def test_bytes_stay_bytes_and_round_to_the_nearest():
    floats, source = [], drawn(30, np.uint8)
    keep = lambda images, scale, shift, dtype: floats.append(images) or images.astype(np.float32)  # noqa: E731
    options = {"seed": 3, "mix": MixUp(CLASSES, 1.0)}
    (mixed,) = Loader(source, 30, normalise=keep, **options)
    assert floats[0].dtype == np.uint8
    exact = ArrayDataset(source.images.astype(np.float32), source.labels, CLASSES)
    (expected,) = Loader(exact, 30, **options)
    np.testing.assert_array_equal(mixed.images, np.rint(expected.images))
    np.testing.assert_array_equal(mixed.labels, expected.labels)


@pytest.mark.parametrize("alpha", [0.05, 0.2, 0.7, 1.0])
def test_shares_are_of_the_beta_distribution(alpha):
    stats = pytest.importorskip("scipy.stats")
    shares = MixUp(2, alpha).shares(7, 1, np.arange(4000)).astype(np.float64)
    assert (shares >= 0).all() and (shares <= 1).all()
    # float32 cannot tell shares next to 1 from 1: look at those that it can.
    inner = shares[(shares > 1e-6) & (shares < 1 - 1e-6)]
    beta = stats.beta(alpha, alpha)
    low, high = beta.cdf([1e-6, 1 - 1e-6])
    assert abs(len(inner) / 4000 - (high - low)) < 0.03
    assert stats.kstest(inner, lambda x: (beta.cdf(x) - low) / (high - low)).pvalue > 1e-3


def test_shares_change_with_seed_epoch_and_sample_only():
    mix = MixUp(2, 0.4)
    whole = mix.shares(1, 2, np.arange(50))
    np.testing.assert_array_equal(mix.shares(1, 2, np.array([17, 49, 0])), whole[[17, 49, 0]])
    assert len({tuple(mix.shares(*key, np.arange(50))) for key in ((1, 2), (1, 3), (2, 2))}) == 3
    assert mix.shares(0, 0, np.arange(0)).shape == (0,)


def test_resuming_goes_on_with_the_same_mixtures():
    source = drawn(23)
    loader = Loader(source, 5, seed=3, mix=MixUp(CLASSES))
    taken = next(iter(loader))
    again = Loader(source, 5, seed=3, mix=MixUp(CLASSES))
    again.restore(loader.state())
    whole = list(Loader(source, 5, seed=3, mix=MixUp(CLASSES)))
    for batch, expected in zip([taken, *again], whole, strict=True):
        np.testing.assert_array_equal(batch.images, expected.images)


def test_what_cannot_be_mixed_is_refused():
    for alpha in (0, 1.5, "1"):
        with pytest.raises(ValueError, match=r"MixUp: alpha must be a number in \(0, 1\]"):
            MixUp(3, alpha)
    with pytest.raises(ValueError, match=r"labels must be in 0\.\.2, got \[0, 4\]"):
        list(Loader(list(drawn(23)), 23, mix=MixUp(3)))
    with pytest.raises(ValueError, match=r"mix must be of 5 classes, like the data set, got MixUp\(num_classes=3"):
        Loader(drawn(4), 2, mix=MixUp(3))
    maps = ArrayDataset(np.zeros((2, 4, 4, 3), np.uint8), np.zeros((2, 4, 4), int), 2)
    with pytest.raises(ValueError, match="mix must be None for a data set of label maps"):
        Loader(maps, 2, mix=MixUp(2))
    assert f"mix MixUp(num_classes={CLASSES}, alpha=0.5)" in Loader(drawn(4), 2, mix=MixUp(CLASSES, 0.5)).plan()


# -- colour -----------------------------------------------------------------------------------------------------------


def words_of(samples):
    return lambda stream: random_words(5, 0, stream, np.asarray(samples))


@pytest.mark.parametrize("which", ["brightness", "contrast", "saturation"])
def test_colours_change_as_pillow_changes_them(which, rng):
    image = pytest.importorskip("PIL.Image")
    from PIL import ImageEnhance

    enhance = {"brightness": "Brightness", "contrast": "Contrast", "saturation": "Color"}[which]
    images = rng.integers(0, 256, (20, 9, 8, 3)).astype(np.uint8)
    draw = words_of(np.arange(20))
    found, _ = ColorJitter(**{which: 0.6})(images, np.zeros(20), draw)
    assert found.dtype == np.uint8
    step = ("brightness", "contrast", "saturation").index(which)
    for one, result, unit in zip(images, found, draw(0)[:, step] / 2.0**32, strict=True):
        expected = np.asarray(getattr(ImageEnhance, enhance)(image.fromarray(one)).enhance(0.4 + 1.2 * unit))
        assert np.abs(result.astype(int) - expected).max() <= 2  # Pillow rounds greys first, cuts off decimals


def test_a_samples_colours_do_not_depend_on_its_neighbours(rng):
    jitter = ColorJitter(0.4, 0.3, 2.0)
    images = rng.uniform(0, 1, (6, 4, 3, 3)).astype(np.float32)
    whole, _ = jitter(images, np.zeros(6), words_of(np.arange(6)))
    alone, _ = jitter(images[4:5], np.zeros(1), words_of([4]))
    np.testing.assert_array_equal(alone[0], whole[4])
    assert whole.dtype == np.float32 and whole.min() >= 0 and whole.max() <= 1
    same, _ = ColorJitter()(images, np.zeros(6), words_of(np.arange(6)))
    np.testing.assert_array_equal(same, images)


def test_colours_of_grey_images_and_strengths_below_0_are_refused():
    with pytest.raises(ValueError, match=r"ColorJitter: images must have shape \(n, H, W, 3\)"):
        ColorJitter(0.1)(np.zeros((1, 2, 2, 1), np.uint8), np.zeros(1), words_of([0]))
    with pytest.raises(ValueError, match="contrast must be a number of at least 0"):
        ColorJitter(contrast=-0.1)


def test_members_of_nested_composes_draw_words_of_their_own():
    inner = Compose(RandomCrop(1), RandomHorizontalFlip())
    assert Compose(inner, ColorJitter(0.1)).steps == (*inner.steps, ColorJitter(0.1))
