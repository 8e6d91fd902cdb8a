"""Products with matrices in Compressed Sparse Blocks: laws of the operations of both tables."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cpu import _csb
from minidl.precision import float32
from tests.conftest import CUDA
from tests.layouts import LAYOUTS, place
from tests.reference import csb as reference
from tests.tolerance import assert_close, draw

# (M, K), side of a block, density
MATRICES = [
    ((1, 1), 64, 1.0),
    ((1, 70), 64, 0.3),
    ((70, 1), 64, 0.3),
    ((6, 6), 2, 0.3),
    ((37, 53), 8, 0.2),
    ((37, 53), 1, 0.2),
    ((64, 64), 64, 1.0),
    ((65, 129), 64, 0.1),
    ((130, 257), 64, 0.02),
    ((300, 140), 128, 0.1),
    ((257, 300), 256, 0.1),
    ((256, 256), 256, 1.0),  # 65536 elements in one block: more than 16 bits count
    ((40, 90), 64, 0.0),
    ((0, 5), 64, 0.0),
    ((5, 0), 64, 0.0),
]
SAMPLES = [0, 1, 3, 8, 9, 16, 31, 64, 133]


class Matrix:
    """A random matrix with whole rows, columns and blocks left empty where it is large enough for that."""

    def __init__(self, ops, rng, shape, side, density, dtype=float32):
        self.shape, self.side, self.ops = shape, side, ops
        self.mask = rng.random(shape) < density
        if density < 1 and min(shape) > 8:
            self.mask[shape[0] // 2] = False
            self.mask[:, shape[1] // 3] = False
            self.mask[:side, :side] = False
        self.indptr, self.indices = reference.from_mask(self.mask, side)
        self.values = draw(rng, self.indices.size, dtype)
        self.dense = reference.expand(self.indptr, self.indices, self.values.astype(float), shape, side)
        self.pattern = ops.from_host(self.indptr), ops.from_host(self.indices)
        self.arrays = (*self.pattern, ops.from_host(self.values))
        self.place = shape, side

    def matmul(self, x, **options):
        return self.ops.to_host(self.ops.csb_matmul(*self.arrays, x, *self.place, **options))

    def sampled(self, dy, x, **options):
        out = self.ops.empty(self.indices.size, float32)
        self.ops.csb_sampled(*self.pattern, dy, x, *self.place, out=out, **options)
        return self.ops.to_host(out)

    def operand(self, rng, samples, transposed, features_last, dtype=float32):
        features = self.shape[0] if transposed else self.shape[1]
        return draw(rng, (samples, features) if features_last else (features, samples), dtype)


def close(actual, expected, magnitude, terms, dtype=float32):
    """Within sqrt(n) u sum |a b|, which rounding errors of a sum of n products keep to with high probability.

    N. Higham, T. Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41 (2019).
    ``magnitude``: the products of absolute values; the largest of their sums stands for all.
    """
    terms = max(terms, 1)
    assert_close(actual, expected, dtype, terms=terms, scale=float(np.max(magnitude, initial=0.0)) / 8)


def close_product(actual, a, x, dtype=float32, **options):
    bounds = {name: option for name, option in options.items() if name in ("transposed", "features_last")}
    magnitude = reference.matmul(np.abs(a.dense), np.abs(x.astype(float)), **bounds)
    close(actual, reference.matmul(a.dense, x, **options), magnitude, max(a.shape), dtype)


def close_sampled(actual, a, dy, x, **options):
    magnitude = reference.sampled(a.mask, *(np.abs(v.astype(float)) for v in (dy, x)), a.side, **options)
    samples = dy.shape[0 if options.get("features_last") else 1]
    close(actual, reference.sampled(a.mask, dy, x, a.side, **options), magnitude, samples)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("shape,side,density", MATRICES)
def test_products_equal_dense_ones(ops, rng, shape, side, density, transposed, features_last):
    a = Matrix(ops, rng, shape, side, density)
    for samples in SAMPLES:
        x = a.operand(rng, samples, transposed, features_last)
        y = a.matmul(ops.from_host(x), transposed=transposed, features_last=features_last)
        assert y.dtype == float32
        close_product(y, a, x, transposed=transposed, features_last=features_last)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape,side,density", MATRICES)
def test_sampled_products_equal_dense_ones_at_the_pattern(ops, rng, shape, side, density, features_last):
    a = Matrix(ops, rng, shape, side, density)
    for samples in SAMPLES:
        dy, x = (a.operand(rng, samples, transposed, features_last) for transposed in (True, False))
        got = a.sampled(ops.from_host(dy), ops.from_host(x), features_last=features_last)
        close_sampled(got, a, dy, x, features_last=features_last)


def test_sampled_products_are_added_where_asked(ops, rng):
    a = Matrix(ops, rng, (70, 90), 64, 0.2)
    dy, x = (ops.from_host(a.operand(rng, 200, transposed, True)) for transposed in (True, False))
    once = a.sampled(dy, x, features_last=True)
    out = ops.from_host(once)
    ops.csb_sampled(*a.pattern, dy, x, *a.place, features_last=True, out=out, accumulate=True)
    np.testing.assert_allclose(ops.to_host(out), 2 * once, rtol=1e-6)
    empty = ops.zeros((0, 70), float32), ops.zeros((0, 90), float32)
    ops.csb_sampled(*a.pattern, *empty, *a.place, features_last=True, out=out, accumulate=True)
    np.testing.assert_allclose(ops.to_host(out), 2 * once, rtol=1e-6)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
def test_storage_types(ops, rng, dtype, transposed, features_last):
    a = Matrix(ops, rng, (70, 150), 64, 0.2, dtype)
    x = a.operand(rng, 45, transposed, features_last, dtype)
    y = a.matmul(ops.from_host(x), transposed=transposed, features_last=features_last)
    assert y.dtype == dtype
    close_product(y, a, x, dtype, transposed=transposed, features_last=features_last)
    dy = a.operand(rng, 45, not transposed, features_last, dtype)
    left, right = (x, dy) if transposed else (dy, x)
    got = a.sampled(ops.from_host(left), ops.from_host(right), features_last=features_last)
    assert got.dtype == float32
    close_sampled(got, a, left, right, features_last=features_last)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
def test_any_layout_of_the_operands(ops, rng, layout, features_last):
    a = Matrix(ops, rng, (70, 150), 64, 0.2)
    dy, x = (a.operand(rng, 45, transposed, features_last) for transposed in (True, False))
    plain = a.matmul(ops.from_host(x), features_last=features_last)
    np.testing.assert_array_equal(a.matmul(place(ops, x, layout), features_last=features_last), plain)
    plain = a.sampled(ops.from_host(dy), ops.from_host(x), features_last=features_last)
    got = a.sampled(place(ops, dy, layout), place(ops, x, layout), features_last=features_last)
    np.testing.assert_array_equal(got, plain)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
def test_bias_and_relu(ops, rng, transposed, features_last):
    a = Matrix(ops, rng, (70, 150), 64, 0.2)
    x = a.operand(rng, 45, transposed, features_last)
    bias = draw(rng, a.shape[1 if transposed else 0], float32)
    where = {"transposed": transposed, "features_last": features_last}
    for relu in (False, True):
        y = a.matmul(ops.from_host(x), bias=ops.from_host(bias), relu=relu, **where)
        close_product(y, a, x, bias=bias, relu=relu, **where)
    close_product(a.matmul(ops.from_host(x), relu=True, **where), a, x, relu=True, **where)


def test_bias_reaches_outputs_without_elements(ops, rng):
    a = Matrix(ops, rng, (40, 90), 64, 0.0)
    bias = draw(rng, 40, float32)
    y = a.matmul(ops.zeros((90, 3), float32), bias=ops.from_host(bias))
    np.testing.assert_array_equal(y, np.repeat(bias[:, None], 3, axis=1))
    thin = Matrix(ops, rng, (5, 0), 64, 0.0)
    y = thin.matmul(ops.zeros((4, 0), float32), features_last=True, bias=ops.from_host(bias[:5]), relu=True)
    np.testing.assert_array_equal(y, np.tile(np.maximum(bias[:5], 0), (4, 1)))


@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
def test_the_bits_depend_on_no_block_side(cpu_ops, rng, transposed):
    """Every output is the sum over its elements in the order of the summed index, however the matrix is cut."""
    mask = rng.random((150, 300)) < 0.3
    dense = np.where(mask, draw(rng, mask.shape, float32), 0)
    x = draw(rng, (150 if transposed else 300, 50), float32)
    results = []
    for side in (8, 64, 256):
        indptr, indices = reference.from_mask(mask, side)
        values = cpu_ops.csb_pick(indptr, indices, dense, mask.shape, side)
        results.append(cpu_ops.csb_matmul(indptr, indices, values, x, mask.shape, side, transposed=transposed))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@pytest.mark.parametrize("ops", ["cpu", CUDA], indirect=True)  # minutes on the emulator
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
def test_the_bits_depend_on_neither_orientation_nor_company(ops, rng, transposed):
    """The same sample gives the same bits first or last, alone or among others, and on every call."""
    a = Matrix(ops, rng, (300, 500), 64, 0.3)
    x = a.operand(rng, 133, transposed, False)
    whole = a.matmul(ops.from_host(x), transposed=transposed)
    np.testing.assert_array_equal(a.matmul(ops.from_host(x), transposed=transposed), whole)
    last = a.matmul(ops.from_host(np.ascontiguousarray(x.T)), transposed=transposed, features_last=True)
    np.testing.assert_array_equal(last.T, whole)
    for first, end in ((0, 1), (5, 12), (40, 56), (60, 133)):
        part = a.matmul(ops.from_host(np.ascontiguousarray(x[:, first:end])), transposed=transposed)
        np.testing.assert_array_equal(part, whole[:, first:end])


@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("rows", ["even", "one full", "one short", "growing", "last only"])
@pytest.mark.parametrize("avx512", [False, True], ids=["any processor", "AVX-512"])
def test_few_samples_have_the_bits_of_many(cpu_ops, rng, request, rows, transposed, avx512):
    """Runs of a block's elements go side by side; a row may be longer than several of them, or end at a cut."""
    request.addfinalizer(lambda: _csb.take_avx512(True))
    if _csb.take_avx512(avx512) != avx512:
        pytest.skip("this processor has no AVX-512")
    share = {
        "even": np.full(200, 0.1),
        "one full": np.where(np.arange(200) == 70, 1.0, 0.01),
        "one short": np.where(np.arange(200) == 70, 0.06, 0.0),
        "growing": np.linspace(0, 1, 200) ** 4,
        "last only": np.where(np.arange(200) == 199, 0.9, 0.0),
    }[rows]
    mask = rng.random((200, 300)) < share[:, None]
    x = draw(rng, (200 if transposed else 300, 40), float32)
    for side in (64, 256):
        indptr, indices = reference.from_mask(mask, side)
        arrays = indptr, indices, draw(rng, indices.size, float32)
        whole = cpu_ops.csb_matmul(*arrays, x, mask.shape, side, transposed=transposed)
        for samples in (1, 7, 8, 16):
            few = np.ascontiguousarray(x[:, :samples])
            got = cpu_ops.csb_matmul(*arrays, few, mask.shape, side, transposed=transposed)
            np.testing.assert_array_equal(got, whole[:, :samples])


def test_sampled_bits_depend_on_neither_orientation_nor_run(ops, rng):
    a = Matrix(ops, rng, (150, 200), 64, 0.3)
    dy, x = (a.operand(rng, 700, transposed, False) for transposed in (True, False))
    first = a.sampled(ops.from_host(dy), ops.from_host(x))
    np.testing.assert_array_equal(a.sampled(ops.from_host(dy), ops.from_host(x)), first)
    turned = (ops.from_host(np.ascontiguousarray(v.T)) for v in (dy, x))
    np.testing.assert_array_equal(a.sampled(*turned, features_last=True), first)


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_the_bits_depend_on_no_number_of_threads(cpu_ops, rng, monkeypatch, threads):
    from minidl.cpu import csb

    monkeypatch.setattr(csb, "_PACKED_FLOATS", 1 << 15)  # several chunks of samples
    a = Matrix(cpu_ops, rng, (300, 260), 64, 0.3)
    dy, x = (a.operand(rng, 333, transposed, True) for transposed in (True, False))

    def everything():
        forward, back = a.matmul(x, features_last=True), a.matmul(dy, transposed=True, features_last=True)
        return forward, back, a.sampled(dy, x, features_last=True)

    monkeypatch.setattr(csb, "threads_for", lambda products: 1)
    alone = everything()
    monkeypatch.setattr(csb, "threads_for", lambda products: threads)
    for got, expected in zip(everything(), alone, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_stored_is_not_multiplied(ops, rng, bad):
    """A NaN or infinity reaches the outputs that have an element for it and no other; stored zeros are elements."""
    a = Matrix(ops, rng, (70, 150), 64, 0.1)
    a.values[:3] = 0
    a.arrays = (*a.pattern, ops.from_host(a.values))
    x = a.operand(rng, 40, False, False)
    x[100] = bad
    y = a.matmul(ops.from_host(x))
    assert np.isfinite(y[~a.mask[:, 100]]).all() and not np.isfinite(y[a.mask[:, 100]]).any()
    dy = a.operand(rng, 40, True, False)
    dy[7] = bad
    back = a.matmul(ops.from_host(dy), transposed=True)
    assert np.isfinite(back[~a.mask[7]]).all() and not np.isfinite(back[a.mask[7]]).any()
    gradient = ops.to_host(ops.csb_expand(*a.pattern, ops.from_host(a.sampled(ops.from_host(dy), ops.from_host(x))),
                                          *a.place))  # fmt: skip
    touched = a.mask & ((np.arange(70) == 7)[:, None] | (np.arange(150) == 100))
    np.testing.assert_array_equal(~np.isfinite(gradient), touched)


@pytest.mark.parametrize("shape,side,density", MATRICES)
def test_expand_and_pick_are_inverse(ops, rng, dtype, shape, side, density):
    a = Matrix(ops, rng, shape, side, density, dtype)
    dense = ops.csb_expand(*a.arrays, *a.place)
    assert dense.dtype == dtype and dense.shape == shape
    np.testing.assert_array_equal(ops.to_host(dense).astype(float), a.dense)
    np.testing.assert_array_equal(ops.to_host(ops.csb_pick(*a.pattern, dense, *a.place)), a.values)


def test_operands_are_left_alone(ops, rng):
    a = Matrix(ops, rng, (70, 150), 64, 0.2)
    dy, x = (a.operand(rng, 45, transposed, True) for transposed in (True, False))
    arrays = [ops.from_host(v) for v in (dy, x)]
    a.matmul(arrays[1], features_last=True)
    a.matmul(arrays[0], features_last=True, transposed=True)
    a.sampled(*arrays, features_last=True)
    for array, host in zip([*arrays, *a.arrays], [dy, x, a.indptr, a.indices, a.values], strict=True):
        np.testing.assert_array_equal(ops.to_host(array), host)
