"""Dropout: laws of the operation of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32
from tests.layouts import LAYOUTS, place
from tests.reference import dropout as reference
from tests.tolerance import draw

# Known answers published with the Random123 library: counter, key, words.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 2, 2, 16), (5, 10), (2, 9, 9, 13), (0, 4, 4, 8), (3, 0)]


def make_key(ops, seed_low=0x12345678, seed_high=0x9ABCDEF0, step=7, first_sample=5):
    return ops.from_host(np.array([seed_low, seed_high, step, first_sample], np.uint32))


@pytest.mark.parametrize("counter, key, words", KNOWN)
def test_reference_gives_the_known_answers(counter, key, words):
    assert reference.philox4x32(counter, key) == words


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("shape", SHAPES)
def test_dropout_equals_the_reference_exactly(ops, rng, dtype, shape, p, layout, whole):
    x, key = draw(rng, shape, dtype), make_key(ops)
    y = ops.dropout(place(ops, x, layout), p, key, 11, whole=whole)
    assert y.dtype == dtype
    # The product in float32, rounded there once and at the store once.
    expected = reference.dropout(x, p, ops.to_host(key), 11, whole).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(ops.to_host(y), expected)


def test_dropout_of_long_samples(ops):
    """Counters of every task and vector line up: kept words of the reference at a few places of a long sample."""
    size, key = 100_003, make_key(ops)
    y = ops.to_host(ops.dropout(ops.from_host(np.ones((2, size), np.float32)), 0.5, key, 3))
    for e in [0, 63, 64, 8191, 8192, 32767, 32768, 65535, 65536, 99_999, size - 1]:
        for n in (0, 1):
            word = reference.philox4x32((e // 4, 5 + n, 7, 3), (0x12345678, 0x9ABCDEF0))[e % 4]
            assert y[n, e] == (2.0 if word >= 2**31 else 0.0)


def test_the_kept_share_is_one_minus_p(ops):
    n = 200_000
    x = ops.from_host(np.ones((4, n // 4), np.float32))
    for p in (0.1, 0.5, 0.75):
        kept = np.count_nonzero(ops.to_host(ops.dropout(x, p, make_key(ops), 0)))
        assert abs(kept - n * (1 - p)) <= 5 * (n * p * (1 - p)) ** 0.5


def test_dropping_everything(ops):
    x = ops.from_host(np.float32([[1.0, np.nan, np.inf, -2.0, 5.0]]))
    assert not ops.to_host(ops.dropout(x, 1.0, make_key(ops), 0)).any()


@pytest.mark.parametrize("whole", [False, True])
def test_dropped_values_are_zero_whatever_they_were(ops, whole):
    x = np.full((16, 64), np.nan, np.float32)
    y, key = ops.to_host(ops.dropout(ops.from_host(x), 0.5, make_key(ops), 0, whole=whole)), ops.to_host(make_key(ops))
    kept = reference.dropout(np.ones_like(x), 0.5, key, 0, whole) > 0
    assert 0 < kept.sum() < kept.size
    assert np.isnan(y[kept]).all() and not y[~kept].any()


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("first_sample", [0, 2**32 - 2])
def test_shards_join_to_the_whole(ops, rng, first_sample, whole):
    """The mask belongs to the global sample, however samples are spread over ranks; sample numbers wrap."""
    x = draw(rng, (5, 3, 3, 3), float32)
    joint = ops.dropout(ops.from_host(x), 0.5, make_key(ops, first_sample=first_sample), 1, whole=whole)
    parts = [
        ops.dropout(ops.from_host(x[a:b]), 0.5, make_key(ops, first_sample=(first_sample + a) % 2**32), 1, whole=whole)
        for a, b in ((0, 1), (1, 1), (1, 4), (4, 5))
    ]
    np.testing.assert_array_equal(np.concatenate([ops.to_host(part) for part in parts]), ops.to_host(joint))


@pytest.mark.parametrize("change", ["seed_low", "seed_high", "step", "first_sample", "stream"])
def test_every_number_changes_the_mask(ops, change):
    x = ops.from_host(np.ones((2, 200), np.float32))
    one = ops.to_host(ops.dropout(x, 0.5, make_key(ops), 1))
    key = make_key(ops) if change == "stream" else make_key(ops, **{change: 99})
    other = ops.to_host(ops.dropout(x, 0.5, key, 2 if change == "stream" else 1))
    assert 100 < np.count_nonzero(one != other) < 300
