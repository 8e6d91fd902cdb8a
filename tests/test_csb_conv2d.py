"""Convolutions with a filter in Compressed Sparse Blocks: laws of the operations of both tables, for all three passes.

Whole numbers have sums that float32 holds exactly: there the reference's bits are due."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.precision import bfloat16, float16, float32
from minidl.sparse import CSBConv2d
from tests.layouts import LAYOUTS, place
from tests.reference import conv2d as reference
from tests.tolerance import draw, draw_few, draw_integers

# images (N, H, W, C), filters (K, R, S), side of a block, stride, padding, dilation
CASES = [
    ((2, 7, 6, 5), (11, 3, 3), 8, (1, 1), (1, 1), (1, 1)),
    ((2, 9, 8, 16), (20, 3, 3), 16, (2, 2), (1, 1), (1, 1)),
    ((1, 9, 8, 3), (4, 3, 2), 2, (2, 3), (2, 0), (2, 1)),
    ((2, 12, 11, 70), (65, 3, 3), 64, (1, 1), (1, 1), (1, 1)),
    ((3, 8, 8, 64), (128, 3, 3), 64, (2, 1), (1, 2), (1, 1)),
    ((1, 6, 7, 40), (300, 5, 1), 256, (1, 1), (2, 0), (1, 1)),
    ((1, 12, 12, 8), (8, 3, 3), 8, (4, 4), (0, 0), (3, 3)),  # pixels that no window meets
    ((1, 3, 3, 9), (7, 3, 3), 4, (1, 1), (0, 0), (1, 1)),  # one window
    ((2, 5, 5, 6), (5, 1, 1), 4, (2, 1), (1, 2), (1, 1)),  # padding around a single tap
    ((1, 1, 1, 1), (1, 2, 2), 1, (1, 1), (1, 1), (1, 1)),
]


class Case:
    """A filter, and the arguments of the operations."""

    def __init__(self, ops, rng, case, dtype=float32, values=draw_integers, density=0.3):
        images, (k, r, s), side, *self.window = case
        self.ops, self.images, shape = ops, images, (k, r, s, images[3])
        self.mask = rng.random(shape) < density
        self.mask[k // 2] &= k == 1
        filters = values(rng, shape, dtype)
        self.filters = np.where(self.mask, filters, filters.dtype.type(0))
        self.layer = CSBConv2d.from_dense(np.ones(shape, float32), mask=self.mask, blocksize=side)
        pattern = self.layer.pattern
        self.pattern, self.place = pattern.on(ops), (pattern.shape, side)
        self.values = ops.from_host(self.layer.at_pattern(self.filters))
        names = ("stride", "padding", "dilation")
        self.geometry = dict(zip(names, self.window, strict=True)) | {"kernel": (r, s)}
        self.dense = dict(zip(names, self.window, strict=True)) | {"groups": 1}

    def forward(self, x, bias=None, **options):
        arrays = *self.pattern, self.values, x, *self.place
        options = {"order": self.layer.pattern.order(self.ops, False, True)} | options
        return self.ops.to_host(self.ops.csb_conv2d(*arrays, **self.geometry, bias=bias, **options))

    def backward_data(self, dy, **options):
        arrays = *self.pattern, self.values, dy, self.images, *self.place
        _, r, s, channels = self.filters.shape
        options = {"order": self.layer.pattern.order(self.ops, True, True, r * s, channels)} | options
        return self.ops.to_host(self.ops.csb_conv2d_backward_data(*arrays, **self.geometry, **options))

    def backward_weight(self, dy, x, out=None, **options):
        out = self.ops.from_host(np.full(self.values.shape, np.nan, float32)) if out is None else out
        arrays = *self.pattern, dy, x, *self.place
        self.ops.csb_conv2d_backward_weight(*arrays, **self.geometry, out=out, **options)
        return self.ops.to_host(out)

    def gradient(self, rng, dtype=float32, values=draw_integers):
        spatial = reference.output_size(self.images, self.filters.shape, *self.window)
        return values(rng, (self.images[0], *spatial, self.filters.shape[0]), dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_all_passes_are_exact_on_whole_numbers(ops, rng, case, layout):
    a = Case(ops, rng, case)
    x, bias, dy = draw_integers(rng, a.images, float32), draw_integers(rng, case[1][0], float32), a.gradient(rng)
    placed = place(ops, x, layout), place(ops, dy, layout)
    expected = reference.conv2d(x, a.filters, bias, **a.dense)
    np.testing.assert_array_equal(a.forward(placed[0], ops.from_host(bias)), expected)
    expected = reference.conv2d_backward_data(dy, a.filters, a.images, **a.dense)
    np.testing.assert_array_equal(a.backward_data(placed[1]), expected)
    expected = a.layer.at_pattern(reference.conv2d_backward_weight(dy, x, a.filters.shape, **a.dense))
    np.testing.assert_array_equal(a.backward_weight(*placed[::-1]), expected)
    ones = ops.from_host(np.ones(expected.shape, float32))
    np.testing.assert_array_equal(a.backward_weight(*placed[::-1], out=ones, accumulate=True), expected + 1)


@pytest.mark.parametrize("storage", [bfloat16, float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("case", CASES)
def test_16_bit_types_are_exact_on_whole_numbers(ops, rng, case, storage):
    a = Case(ops, rng, case, storage, draw_few)
    x, dy = draw_few(rng, a.images, storage), a.gradient(rng, storage, draw_few)
    wide = [v.astype(np.float64) for v in (x, dy, a.filters)]
    placed = ops.from_host(x), ops.from_host(dy)
    y = a.forward(placed[0])
    assert y.dtype == storage
    np.testing.assert_array_equal(y.astype(float), reference.conv2d(wide[0], wide[2], **a.dense))
    expected = reference.conv2d_backward_data(wide[1], wide[2], a.images, **a.dense)
    np.testing.assert_array_equal(a.backward_data(placed[1]).astype(float), expected)
    expected = a.layer.at_pattern(reference.conv2d_backward_weight(wide[1], wide[0], a.filters.shape, **a.dense))
    np.testing.assert_array_equal(a.backward_weight(*placed[::-1]), expected)


@pytest.mark.parametrize("case", CASES)
def test_random_numbers_stay_within_rounding(ops, rng, case):
    """Sums of n products in order are within n units of the sum of their magnitudes."""
    a = Case(ops, rng, case, values=draw)
    x, dy = draw(rng, a.images, float32), a.gradient(rng, values=draw)
    sizes = [np.abs(v) for v in (x, dy, a.filters)]
    unit = 2.0**-24 * (a.filters[0].size + a.filters.shape[0] + dy[..., 0].size)
    bounds = (
        reference.conv2d(sizes[0], sizes[2], **a.dense),
        reference.conv2d_backward_data(sizes[1], sizes[2], a.images, **a.dense),
        a.layer.at_pattern(reference.conv2d_backward_weight(sizes[1], sizes[0], a.filters.shape, **a.dense)),
    )
    expected = (
        reference.conv2d(x, a.filters, **a.dense),
        reference.conv2d_backward_data(dy, a.filters, a.images, **a.dense),
        a.layer.at_pattern(reference.conv2d_backward_weight(dy, x, a.filters.shape, **a.dense)),
    )
    placed = ops.from_host(x), ops.from_host(dy)
    found = a.forward(placed[0]), a.backward_data(placed[1]), a.backward_weight(*placed[::-1])
    for got, wanted, bound in zip(found, expected, bounds, strict=True):
        assert (np.abs(got - wanted) <= unit * bound).all()


@pytest.mark.parametrize("case", CASES[:4])
def test_images_of_a_batch_give_the_bits_they_give_alone(ops, rng, case):
    a = Case(ops, rng, case, values=draw)
    x, dy = draw(rng, a.images, float32), a.gradient(rng, values=draw)
    together = a.forward(ops.from_host(x)), a.backward_data(ops.from_host(dy))
    again = a.forward(ops.from_host(x)), a.backward_data(ops.from_host(dy))
    first = ops.from_host(x[:1]), ops.from_host(dy[:1])
    a.images = (1, *a.images[1:])
    for both, twice, alone in zip(together, again, (a.forward(first[0]), a.backward_data(first[1])), strict=True):
        np.testing.assert_array_equal(both, twice)
        np.testing.assert_array_equal(both[:1], alone)


def test_a_nan_reaches_only_outputs_with_an_element_for_it(ops, rng):
    a = Case(ops, rng, CASES[0])
    x, dy = draw_integers(rng, a.images, float32), a.gradient(rng)
    x[0, 3, 2, 1] = dy[0, 2, 4, 3] = np.nan
    with np.errstate(invalid="ignore"):
        spoilt = reference.conv2d(np.isnan(x), a.mask, **a.dense) > 0
        reached = reference.conv2d_backward_data(np.isnan(dy), a.mask, a.images, **a.dense) > 0
    assert spoilt.any() and reached.any() and not spoilt.all() and not reached.all()
    np.testing.assert_array_equal(np.isnan(a.forward(ops.from_host(x))), spoilt)
    np.testing.assert_array_equal(np.isnan(a.backward_data(ops.from_host(dy))), reached)


def test_a_filter_without_elements_gives_the_bias_and_no_gradient(ops, rng):
    a = Case(ops, rng, CASES[0], density=0.0)
    bias, dy = draw(rng, 11, float32), a.gradient(rng)
    x = ops.from_host(draw(rng, a.images, float32))
    np.testing.assert_array_equal(a.forward(x, ops.from_host(bias)), np.broadcast_to(bias, dy.shape))
    assert not a.backward_data(ops.from_host(dy)).any() and a.backward_weight(ops.from_host(dy), x).shape == (0,)


@pytest.mark.parametrize("storage,tf32", [(float32, 0), (float32, 1), (float32, 3), (bfloat16, 0)])
@pytest.mark.parametrize("case", CASES)
def test_every_route_is_exact_on_whole_numbers(cuda_ops, rng, case, storage, tf32):
    from minidl.cuda.device import current_device
    from minidl.cuda.sparse.csb_routes import conv_routes, route

    a = Case(cuda_ops, rng, case, storage, draw_few)
    x, dy = draw_few(rng, a.images, storage), a.gradient(rng, storage, draw_few)
    wide = [v.astype(float) for v in (x, dy, a.filters)]
    y = reference.conv2d(wide[0], wide[2], **a.dense)
    dx = reference.conv2d_backward_data(wide[1], wide[2], a.images, **a.dense)
    dw = a.layer.at_pattern(reference.conv2d_backward_weight(wide[1], wide[0], a.filters.shape, **a.dense))
    given = cuda_ops.from_host(x), cuda_ops.from_host(dy)
    for name in conv_routes(case[2], np.dtype(storage), tf32, current_device()):
        with route(name):
            np.testing.assert_array_equal(a.forward(given[0], tf32=tf32).astype(float), y, err_msg=name)
            np.testing.assert_array_equal(a.backward_data(given[1], tf32=tf32).astype(float), dx, err_msg=name)
            np.testing.assert_array_equal(a.backward_weight(*given[::-1], tf32=tf32), dw, err_msg=name)
            ones = cuda_ops.from_host(np.ones(dw.shape, float32))
            added = a.backward_weight(*given[::-1], out=ones, accumulate=True, tf32=tf32)
            np.testing.assert_array_equal(added, dw + 1, err_msg=name)


@pytest.mark.parametrize("stride", [1, 2])
def test_routes_of_float32_give_the_same_bits(cuda_ops, rng, stride):
    """Also where thread blocks take large tiles, and several, and with output features as they lie."""
    from minidl.cuda.device import current_device
    from minidl.cuda.sparse.csb_routes import conv_routes, route

    a = Case(cuda_ops, rng, ((96, 14, 14, 64), (256, 3, 3), 64, (stride, stride), (1, 1), (1, 1)), values=draw)
    x, dy = (cuda_ops.from_host(v) for v in (draw(rng, a.images, float32), a.gradient(rng, values=draw)))
    found = []
    for name in conv_routes(64, np.dtype(float32), 0, current_device()):
        with route(name):
            found += [(a.forward(x), a.backward_data(dy)), (a.forward(x, order=None), a.backward_data(dy, order=None))]
    for other in found[1:]:
        for got, expected in zip(found[0], other, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_a_convolution_cannot_take_any_route(rng):
    from minidl.cuda.device import BUILT_IN
    from minidl.cuda.sparse.csb_routes import choose_conv_route, conv_routes, route

    h200, single = BUILT_IN["H200"], np.dtype(float32)
    assert conv_routes(64, single, 0, h200) == ["rows", "generic"]
    assert conv_routes(8, single, 0, h200) == conv_routes(64, single, 0, BUILT_IN["A100"]) == ["generic"]
    assert conv_routes(64, single, 1, h200) == ["dense", "rows", "generic"]
    assert conv_routes(64, np.dtype(bfloat16), 0, h200) == ["dense", "generic"]
    assert choose_conv_route(64, single, 3, 0.1, h200) == choose_conv_route(64, single, 1, 0.01, h200) == "dense"
    assert choose_conv_route(64, single, 3, 0.02, h200) == "rows"
    with route("skinny"), pytest.raises(ValueError, match="csb_conv2d: route"):
        choose_conv_route(64, single, 0, 0.1, h200)


def test_tf32_is_refused_where_there_is_none(cpu_ops, rng):
    a = Case(cpu_ops, rng, CASES[0])
    x = draw(rng, a.images, float32)
    with pytest.raises(ValueError, match="csb_conv2d: tf32"):
        cpu_ops.csb_conv2d(*a.pattern, a.values, x, *a.place, **a.geometry, tf32=1)
