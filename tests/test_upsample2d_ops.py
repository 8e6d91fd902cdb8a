"""Resizing: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from tests.layouts import LAYOUTS, place
from tests.reference import upsample2d as reference
from tests.tolerance import assert_close, draw, draw_integers

# (N, H, W, C), (P, Q)
SIZES = [
    ((1, 1, 1, 1), (1, 1)), ((2, 3, 5, 3), (6, 10)), ((2, 4, 3, 16), (12, 3)), ((1, 7, 5, 8), (11, 13)),
    ((2, 9, 8, 5), (4, 3)), ((1, 5, 6, 2), (1, 1)), ((1, 1, 1, 4), (5, 7)), ((1, 3, 2, 8), (6, 20)),
    ((0, 2, 2, 8), (4, 4)), ((1, 33, 29, 24), (66, 58)),
]  # fmt: skip
MODES = [("nearest", False), ("bilinear", False), ("bilinear", True)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode, corners", MODES)
@pytest.mark.parametrize("shape, size", SIZES)
def test_resizing_equals_the_reference(ops, rng, dtype, shape, size, mode, corners, layout):
    x, dy = draw(rng, shape, dtype), draw(rng, (shape[0], *size, shape[3]), dtype)
    y = ops.upsample2d(place(ops, x, layout), size, mode, corners)
    assert y.dtype == dtype
    assert_close(ops.to_host(y), reference.upsample2d(x, size, mode, corners), dtype)
    dx = ops.upsample2d_backward(place(ops, dy, layout), shape, mode, corners)
    assert dx.dtype == dtype
    assert_close(ops.to_host(dx), reference.upsample2d_backward(dy, shape, mode, corners), dtype, terms=8)


@pytest.mark.parametrize("mode, corners", MODES)
def test_the_gradient_is_the_transposed_map(ops, rng, mode, corners):
    """<resize(x), dy> = <x, backward(dy)>."""
    x, dy = draw(rng, (2, 5, 7, 4), np.float32), draw(rng, (2, 13, 6, 4), np.float32)
    y = ops.to_host(ops.upsample2d(ops.from_host(x), (13, 6), mode, corners)).astype(np.float64)
    dx = ops.to_host(ops.upsample2d_backward(ops.from_host(dy), x.shape, mode, corners)).astype(np.float64)
    np.testing.assert_allclose((y * dy).sum(), (x * dx).sum(), rtol=1e-5, atol=1e-4)


def test_doubling_whole_numbers_is_exact(ops, rng, dtype):
    """Doubling, weights are quarters: the tables must give the reference's bits."""
    x = draw_integers(rng, (2, 9, 11, 6), dtype)
    y = ops.to_host(ops.upsample2d(ops.from_host(x), (18, 22), "bilinear"))
    np.testing.assert_array_equal(y.astype(np.float64), reference.upsample2d(x, (18, 22), "bilinear"))


@pytest.mark.parametrize("mode, corners", MODES)
@pytest.mark.parametrize("size, out", [((41, 30), (83, 60)), ((83, 60), (41, 30)), ((50, 40), (200, 160))])
def test_many_images_have_the_bits_of_each(cuda_ops, rng, dtype, size, out, mode, corners):
    """Threads walk down strips of rows where there is enough to do, and over single rows elsewhere."""
    x, dy = (cuda_ops.from_host(draw(rng, (48, *shape, 24), dtype)) for shape in (size, out))

    def results(x, dy):
        y = cuda_ops.upsample2d(x, out, mode, corners)
        return cuda_ops.to_host(y), cuda_ops.to_host(cuda_ops.upsample2d_backward(dy, x.shape, mode, corners))

    whole = results(x, dy)
    for i in (0, 17, 47):
        for many, one in zip(whole, results(x[i : i + 1], dy[i : i + 1]), strict=True):
            np.testing.assert_array_equal(many[i : i + 1], one)


@pytest.mark.parametrize("mode, corners", MODES)
@pytest.mark.parametrize("size", [1, 2, 3, 17, 224])
@pytest.mark.parametrize("out", [1, 2, 5, 34, 223, 448])
def test_every_output_is_gathered_once(cpu_ops, size, out, mode, corners):
    """The gradient of ones sums the weights of an input: over all inputs they are the number of outputs."""
    dy = np.ones((1, out, 1, 1), np.float32)
    dx = cpu_ops.upsample2d_backward(dy, (1, size, 1, 1), mode, corners)
    expected = reference.matrix(size, out, mode, corners).sum(axis=0)
    np.testing.assert_allclose(dx[0, :, 0, 0], expected, rtol=1e-5, atol=1e-5)
