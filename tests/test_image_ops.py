"""Images normalised for a network: both tables give the bits of the definition."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import float32

SHAPES = [
    (2, 4, 8, 3),
    (3, 5, 7, 3),
    (1, 1, 1, 1),
    (2, 3, 5, 4),
    (4, 16, 16, 1),
    (5, 9, 3, 13),
    (3, 70, 71, 3),
    (2, 9, 7, 300),
    (0, 4, 4, 3),
]
SOURCES = [np.uint8, np.float32]


def definition(images, scale, shift, dtype):
    """Product and sum are each rounded to float32, the result once more to the storage type."""
    with np.errstate(over="ignore"):
        return (images.astype(np.float32) * scale + shift).astype(dtype)


def drawn(rng, shape, source):
    pixels = rng.integers(0, 256, shape).astype(source)
    scale, shift = rng.uniform(0.5, 2, (2, shape[-1])).astype(np.float32)
    return pixels, scale / np.float32(255 if source == np.uint8 else 1), -shift


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_normalise_gives_the_bits_of_its_definition(ops, dtype, shape, source, rng):
    pixels, scale, shift = drawn(rng, shape, source)
    found = ops.normalise(*map(ops.from_host, (pixels, scale, shift)), dtype)
    assert found.dtype == dtype and found.flags.c_contiguous
    np.testing.assert_array_equal(ops.to_host(found), definition(pixels, scale, shift, dtype))


@pytest.mark.parametrize("start", [1, 2, 3])
def test_slices_of_a_batch_and_parts_of_its_channels(ops, dtype, start, rng):
    pixels, scale, shift = drawn(rng, (7, 3, 5, 4), np.uint8)
    batch = ops.from_host(pixels)
    for part, channels in ((np.s_[start:], np.s_[:]), (np.s_[..., start:], np.s_[start:])):
        placed = ops.from_host(scale[channels]), ops.from_host(shift[channels])
        expected = definition(pixels[part], scale[channels], shift[channels], dtype)
        np.testing.assert_array_equal(ops.to_host(ops.normalise(batch[part], *placed, dtype)), expected)


def test_images_beyond_the_range_of_float16_become_infinite(ops):
    images = ops.from_host(np.full((1, 2, 2, 1), 1e30, np.float32))
    one, zero = (ops.from_host(np.full(1, value, np.float32)) for value in (1, 0))
    assert np.isposinf(ops.to_host(ops.normalise(images, one, zero, np.dtype(np.float16))).astype(float32)).all()
