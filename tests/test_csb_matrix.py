"""CSBMatrix: its arrays, conversions, products by operators, and what it refuses."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from minidl.precision import bfloat16, float32
from minidl.sparse import CSBMatrix, CSBPattern
from minidl.sparse.pattern import choose_side
from tests.tolerance import draw

f32 = np.float32


def random_dense(rng, shape, density, dtype=f32):
    dense = draw(rng, shape, dtype)
    dense[rng.random(shape) >= density] = 0
    return dense


# -- the format ------------------------------------------------------------------------------------------------------


def letters(rows):
    """A dense matrix and the letters behind its values: {(row, column): letter} -> values 1, 2, ... for a, b, ..."""
    dense = np.zeros((6, 6), f32)
    for (row, column), letter in rows.items():
        dense[row, column] = ord(letter) - ord("a") + 1
    return dense


def test_the_first_worked_example():
    """Ten nonzeros of a 6x6 matrix in 2x2 blocks."""
    a = CSBMatrix.from_dense(
        letters({(0, 0): "a", (1, 0): "b", (1, 4): "c", (2, 3): "d", (2, 5): "e", (4, 3): "f", (4, 4): "g",
                 (5, 2): "h", (5, 4): "i", (5, 5): "j"}), blocksize=2)  # fmt: skip
    assert "".join(chr(int(v) + ord("a") - 1) for v in a.data) == "abcdefhgij"
    assert a.pattern.rows.tolist() == [0, 1, 1, 0, 0, 0, 1, 0, 1, 1]
    assert a.pattern.columns.tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 1]
    assert a.indptr.tolist() == [0, 2, 2, 3, 3, 4, 5, 5, 7, 10]


def test_the_second_worked_example():
    """Seven nonzeros: rows, columns and pointers of the blocks."""
    rows, columns = [0, 1, 0, 0, 0, 0, 1], [0, 0, 1, 1, 1, 0, 1]
    pointers = [0, 2, 2, 2, 2, 3, 4, 4, 5, 7]
    pattern = CSBPattern(pointers, np.array(rows) * 256 + columns, (6, 6), 2)
    assert (pattern.rows.tolist(), pattern.columns.tolist()) == (rows, columns)
    a = CSBMatrix(pattern, np.arange(1, 8, dtype=f32))
    expected = np.zeros((6, 6), f32)
    expected[[0, 1, 2, 2, 4, 4, 5], [0, 0, 3, 5, 3, 4, 5]] = np.arange(1, 8)
    np.testing.assert_array_equal(a.toarray(), expected)
    again = CSBMatrix.from_dense(expected, blocksize=2)
    assert again.indptr.tolist() == pointers and again.pattern == pattern
    np.testing.assert_array_equal(again.data, a.data)


def test_attributes_have_scipys_names(rng):
    dense = random_dense(rng, (70, 150), 0.2)
    a = CSBMatrix.from_dense(dense, 64)
    assert (a.shape, a.T.shape, a.ndim, a.dtype, a.nnz) == ((70, 150), (150, 70), 2, f32, np.count_nonzero(dense))
    assert a.blocksize == (64, 64) and a.format == "csb"
    assert CSBMatrix.from_dense(dense, a.blocksize).pattern == a.pattern
    assert CSBMatrix.from_scipy(a.tocoo(), a.blocksize).pattern == a.pattern
    with pytest.raises(ValueError, match="block side must be an integer"):
        CSBMatrix.from_dense(dense, (64, 32))
    assert a.indptr.dtype == np.int32 and a.indptr.shape == (2 * 3 + 1,) and a.indices.dtype == np.uint16
    assert a.nbytes == 4 * 7 + 2 * a.nnz + 4 * a.nnz
    assert repr(a) == f"<CSBMatrix 70x150 float32, {a.nnz} elements ({100 * a.nnz / 10500:.3g} %), blocks of 64, cpu>"


def test_transposing_shares_everything_and_products_add_no_bytes(rng):
    a = CSBMatrix.from_dense(random_dense(rng, (70, 150), 0.2))
    before = a.nbytes, {name: id(value) for name, value in vars(a).items()}
    t = a.T
    assert t.data is a.data and t.pattern is a.pattern and t.T.shape == a.shape
    x = draw(rng, (70, 9), f32)
    _ = t @ x, x.T @ a, a.sampled(x, draw(rng, (150, 9), f32))
    assert (a.nbytes, {name: id(value) for name, value in vars(a).items()}) == before
    assert not a.pattern._on, "no arrays beside the pattern's own"
    a.data[:] = 0
    assert not t.toarray().any()


def test_the_pattern_is_immutable_and_compares_by_content(rng):
    mask = rng.random((70, 150)) < 0.2
    a = CSBMatrix.from_dense(np.ones((70, 150), f32), 64, mask=mask)
    b = CSBMatrix.from_dense(np.zeros((70, 150), f32), 64, mask=mask)
    with pytest.raises(ValueError, match="read-only"):
        a.indices[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        a.indptr[0] = 1
    assert a.pattern == b.pattern and hash(a.pattern) == hash(b.pattern) and a.pattern is not b.pattern
    mask[3, 5] ^= True
    c = CSBMatrix.from_dense(np.ones((70, 150), f32), 64, mask=mask)
    assert c.pattern != a.pattern and c.pattern.fingerprint != a.pattern.fingerprint
    assert CSBMatrix.from_dense(np.ones((70, 150), f32), 128, mask=mask).pattern != c.pattern


def test_a_mask_keeps_zeros_and_dense_keeps_nan(rng):
    dense = np.zeros((5, 4), f32)
    dense[1, 2] = np.nan
    assert CSBMatrix.from_dense(dense).nnz == 1
    a = CSBMatrix.from_dense(dense, mask=np.ones((5, 4), bool))
    assert a.nnz == 20
    np.testing.assert_array_equal(a.toarray(), dense)


def test_values_at_one_place_are_summed_in_any_order(rng):
    row, column = rng.integers(0, 9, 200), rng.integers(0, 30, 200)
    data = draw(rng, 200, f32)
    expected = np.zeros((9, 30))
    np.add.at(expected, (row, column), data.astype(float))
    for blocksize in (None, 4):
        a = CSBMatrix.from_coo(data, (row, column), (9, 30), blocksize)
        np.testing.assert_array_equal(a.toarray(), expected.astype(f32))
    zeros = CSBMatrix.from_coo(np.zeros(3, f32), ([0, 1, 2], [2, 1, 0]), (3, 3))
    assert zeros.nnz == 3 and not zeros.toarray().any()


@pytest.mark.parametrize("shape", [(70, 150), (1, 9), (9, 1), (0, 4), (4, 0)])
def test_conversions_from_and_to_scipy(rng, shape):
    sparse = pytest.importorskip("scipy.sparse")
    dense = random_dense(rng, shape, 0.3)
    for make in (sparse.coo_matrix, sparse.csr_matrix, sparse.csc_matrix, sparse.coo_array, sparse.csr_array):
        a = CSBMatrix.from_scipy(make(dense))
        np.testing.assert_array_equal(a.toarray(), dense)
    for matrix, expected in ((a, dense), (a.T, dense.T)):
        for verb, name in (("tocoo", "coo"), ("tocsr", "csr"), ("tocsc", "csc")):
            other = getattr(matrix, verb)()
            assert other.format == name and other.shape == matrix.shape and other.nnz == matrix.nnz
            np.testing.assert_array_equal(other.toarray(), expected)
    kept = sparse.csr_matrix((np.array([0.0, 1.0], f32), np.array([1, 0]), np.array([0, 2])), shape=(1, 2))
    assert CSBMatrix.from_scipy(kept).nnz == 2, "a stored zero is an element, unsorted columns are sorted"
    doubles = sparse.csr_matrix(dense.astype(np.float64))
    assert CSBMatrix.from_scipy(doubles, dtype=f32).dtype == f32
    with pytest.raises(TypeError, match="got float64; convert it to float32"):
        CSBMatrix.from_scipy(doubles)


def test_conversions_from_and_to_cupy(cuda_ops, rng):
    sparse = pytest.importorskip("cupyx.scipy.sparse")
    dense = random_dense(rng, (70, 150), 0.3)
    on = cuda_ops.from_host(dense)
    for make in (sparse.coo_matrix, sparse.csr_matrix, sparse.csc_matrix):
        a = CSBMatrix.from_scipy(make(on))
        assert type(a.data) is cuda_ops.Array
        np.testing.assert_array_equal(cuda_ops.to_host(a.toarray()), dense)
    for matrix, expected in ((a, dense), (a.T, dense.T)):
        for verb, name in (("tocoo", "coo"), ("tocsr", "csr"), ("tocsc", "csc")):
            other = getattr(matrix, verb)()
            assert other.format == name and other.shape == matrix.shape and other.nnz == matrix.nnz
            np.testing.assert_array_equal(other.toarray().get(), expected)


@pytest.mark.parametrize("shape,density,side", [
    ((512, 512), 0.3, 64), ((512, 512), 0.1, 128), ((2048, 2048), 0.05, 256), ((2048, 2048), 0.001, 256),
    ((60, 60), 0.01, 64), ((100, 90), 0.01, 128), ((10, 1000), 0.01, 256), ((0, 0), 0, 64),
])  # fmt: skip
def test_the_block_side_rises_with_sparsity_and_fits_the_matrix(shape, density, side):
    assert choose_side(shape, int(density * shape[0] * shape[1])) == side


def test_occupancy_and_picture():
    dense = np.zeros((4, 8), f32)
    dense[0, 0] = dense[0, 1] = dense[3, 7] = 1
    a = CSBMatrix.from_dense(dense, 2)
    o = a.occupancy()
    assert (o.density, o.blocks, o.empty_blocks, o.block_min, o.block_max, o.block_mean) == (3 / 32, 8, 6, 0, 2, 3 / 8)
    assert (o.empty_rows, o.empty_columns) == (2, 5)
    assert o.row_variation == pytest.approx(np.std([2, 0, 0, 1]) / 0.75)
    assert o.index_bits == 8 * (9 * 4 + 3 * 2) / 3
    assert a.picture() == "@@      \n        \n        \n       @"
    assert a.picture(width=4) == "@  +"
    empty = CSBMatrix.from_dense(np.zeros((0, 3), f32))
    assert empty.picture() == "" and empty.occupancy().density == 0


# -- products ---------------------------------------------------------------------------------------------------------


def test_operators_in_all_four_directions(ops, rng):
    dense = random_dense(rng, (70, 150), 0.2)
    a = CSBMatrix.from_dense(ops.from_host(dense))
    x, dy = draw(rng, (150, 33), f32), draw(rng, (70, 33), f32)
    on = ops.from_host
    cases = [
        (a @ on(x), dense @ x), (a.T @ on(dy), dense.T @ dy),
        (on(np.ascontiguousarray(x.T)) @ a.T, x.T @ dense.T), (on(np.ascontiguousarray(dy.T)) @ a, dy.T @ dense),
        (a @ on(x)[:, 0], dense @ x[:, 0]), (a.T @ on(dy)[:, 0], dense.T @ dy[:, 0]),
        (a @ on(np.ascontiguousarray(x.T)).T, dense @ x),  # column-major
    ]  # fmt: skip
    for got, expected in cases:
        np.testing.assert_allclose(ops.to_host(got), expected, rtol=1e-4, atol=1e-4)
    assert type(a @ on(x)) is ops.Array


def test_the_gradient_of_the_values_in_all_directions(ops, rng):
    dense = random_dense(rng, (70, 150), 0.2)
    a = CSBMatrix.from_dense(ops.from_host(dense))
    x, dy = draw(rng, (150, 33), f32), draw(rng, (70, 33), f32)
    expected = np.where(dense != 0, dy @ x.T, 0)
    on = [ops.from_host(v) for v in (dy, x)]
    turned = [ops.from_host(np.ascontiguousarray(v.T)) for v in (dy, x)]
    for g in (a.sampled(*on), a.sampled(*turned, features_last=True), a.T.sampled(*on[::-1])):
        np.testing.assert_allclose(ops.to_host(a.with_data(g).toarray()), expected, rtol=1e-4, atol=1e-4)
    out = ops.from_host(np.ones(a.nnz, f32))
    assert a.sampled(*on, out=out, accumulate=True) is out
    np.testing.assert_allclose(ops.to_host(out), ops.to_host(g) + 1, rtol=1e-4, atol=1e-4)


def test_the_gradient_is_the_derivative(rng):
    """<g, v> = d/dh <dY, (A + h V) X>, which is linear in h: exact up to rounding."""
    a = CSBMatrix.from_dense(random_dense(rng, (40, 60), 0.2))
    x, dy, v = draw(rng, (60, 21), f32), draw(rng, (40, 21), f32), draw(rng, a.nnz, f32)
    along = float(np.sum((a.with_data(v) @ x).astype(float) * dy))
    assert float(np.sum(a.sampled(dy, x).astype(float) * v)) == pytest.approx(along, rel=1e-4)


def test_the_gradient_of_one_sample_may_be_vectors(rng):
    a = CSBMatrix.from_dense(random_dense(rng, (40, 60), 0.2))
    x, dy = draw(rng, 60, f32), draw(rng, 40, f32)
    for matrix, left, right in ((a, dy, x), (a.T, x, dy)):
        expected = matrix.sampled(left[:, None], right[:, None])
        np.testing.assert_array_equal(matrix.sampled(left, right), expected)


def test_bfloat16(rng):
    dense = random_dense(rng, (70, 150), 0.2, bfloat16)
    a = CSBMatrix.from_dense(dense)
    x = draw(rng, (150, 20), bfloat16)
    y = a @ x
    assert y.dtype == bfloat16 and a.sampled(draw(rng, (70, 20), bfloat16), x).dtype == float32
    np.testing.assert_array_equal(a.astype(f32).astype(bfloat16).data, a.data)
    np.testing.assert_allclose(y.astype(f32), dense.astype(f32) @ x.astype(f32), rtol=2**-8, atol=1e-5)


def test_copies_have_values_of_their_own(rng):
    a = CSBMatrix.from_dense(random_dense(rng, (7, 9), 0.5))
    b = a.copy()
    b.data[:] = 0
    assert a.data.any() and b.pattern is a.pattern
    assert np.array_equal(a.to("cpu").data, a.data) and a.to("cpu").data is not a.data
    for c in (copy.deepcopy(a.T), pickle.loads(pickle.dumps(a.T))):
        assert np.array_equal(c.toarray(), a.toarray().T) and c.data is not a.data


# -- doors ------------------------------------------------------------------------------------------------------------

ONE, TWO = np.ones(1, f32), np.ones(2, f32)
EYE = CSBMatrix.from_dense(np.eye(4, 6, dtype=f32), 2)
DOORS = {
    "list": (lambda: CSBMatrix.from_dense([[1.0]]), TypeError, "dense must be a NumPy or CuPy array, got list"),
    "double": (lambda: CSBMatrix.from_dense(np.eye(3)), TypeError, "float64; convert it to float32"),
    "rank": (lambda: CSBMatrix.from_dense(np.ones(3, f32)), ValueError, r"\(M, K\), got \(3,\)"),
    "side of three": (lambda: CSBMatrix.from_dense(np.eye(3, dtype=f32), 3), ValueError, "power of two up to 256"),
    "side of 512": (lambda: CSBMatrix.from_dense(np.eye(3, dtype=f32), 512), ValueError, "power of two up to 256"),
    "no side": (lambda: CSBMatrix.from_dense(np.eye(3, dtype=f32), 0), ValueError, "at least 1"),
    "mask of numbers": (
        lambda: CSBMatrix.from_dense(np.eye(3, dtype=f32), mask=np.eye(3)), TypeError, "mask must be booleans",
    ),
    "mask of another shape": (
        lambda: CSBMatrix.from_dense(np.eye(3, dtype=f32), mask=np.ones((2, 3), bool)), ValueError, "mask must have",
    ),
    "row out of range": (
        lambda: CSBMatrix.from_coo(ONE, ([4], [0]), (4, 4)), ValueError, r"row must be in \[0, 4\), got 4",
    ),
    "negative column": (
        lambda: CSBMatrix.from_coo(ONE, ([0], [-1]), (4, 4)), ValueError, r"column must be in .* got -1",
    ),
    "ragged": (
        lambda: CSBMatrix.from_coo(TWO, ([[0], [1, 2]], [0, 1]), (4, 4)), ValueError, "row must be a vector",
    ),
    "lengths": (
        lambda: CSBMatrix.from_coo(TWO, ([0, 1], [0]), (4, 4)), ValueError, r"column must have shape \(2,\)",
    ),
    "values": (
        lambda: CSBMatrix.from_coo(np.ones(3, f32), ([0, 1], [0, 1]), (4, 4)), ValueError, r"data must have .*\(2,\)",
    ),
    "indices of floats": (
        lambda: CSBMatrix.from_coo(ONE, ([0.0], [0]), (4, 4)), TypeError, "row must be a vector of integers",
    ),
    "shape of three": (
        lambda: CSBMatrix.from_coo(ONE, ([0], [0]), (4, 4, 4)), ValueError, r"shape must be \(rows, col",
    ),
    "not sparse": (lambda: CSBMatrix.from_scipy(np.eye(3)), TypeError, "sparse matrix of SciPy or CuPy"),
    "pointers": (lambda: CSBPattern([0, 1], [0], (4, 4), 2), ValueError, r"indptr must have shape \(5,\)"),
    "pointers that fall": (lambda: CSBPattern([0, 1, 0, 1, 1], [0], (4, 4), 2), ValueError, "indptr must be rising"),
    "pointers past the end": (lambda: CSBPattern([0, 1, 1, 1, 2], [0], (4, 4), 2), ValueError, "rising from 0 to 1"),
    "index beyond two bytes": (
        lambda: CSBPattern([0, 1, 1, 1, 1], np.array([65536]), (4, 4), 2), ValueError, r"indices must be in \[0, 65536",
    ),
    "pointers of floats": (lambda: CSBPattern([0.0, 1.0], [0], (1, 1), 2), TypeError, "indptr must be a vector of int"),
    "outside its block": (lambda: CSBPattern([0, 1, 1, 1, 1], [2], (4, 4), 2), ValueError, "within the blocks"),
    "past the last column": (lambda: CSBPattern([0, 0, 1, 1, 1], [1], (4, 3), 2), ValueError, "within the blocks"),
    "twice": (lambda: CSBPattern([0, 2, 2, 2, 2], [0, 0], (4, 4), 2), ValueError, "rising within each block"),
    "data": (lambda: CSBMatrix(EYE.pattern, np.ones(3, f32)), ValueError, r"data must have shape \(4,\)"),
    "no pattern": (lambda: CSBMatrix(np.eye(3), np.ones(3, f32)), TypeError, "from_dense, from_coo and from_scipy"),
    "operand": (lambda: EYE @ np.ones((5, 2), f32), ValueError, r"x must have shape \(6, N\), got \(5, 2\)"),
    "operand on the left": (lambda: np.ones((2, 5), f32) @ EYE, ValueError, r"x must have shape \(N, 4\)"),
    "vector": (lambda: EYE @ np.ones(5, f32), ValueError, r"x must have shape \(6,\)"),
    "cube": (lambda: EYE @ np.ones((6, 2, 2), f32), ValueError, r"x must have shape \(6, N\)"),
    "dtype of the operand": (lambda: EYE @ np.ones((6, 2)), TypeError, r"float32 like the values, got float64"),
    "list as operand": (lambda: EYE @ [1.0], TypeError, "NumPy or CuPy array"),
    "bias": (lambda: EYE.matmul(np.ones((6, 2), f32), bias=TWO), ValueError, r"bias must have shape \(4,\), got \(2,"),
    "gradient": (lambda: EYE.sampled(np.ones((4, 3), f32), np.ones((6, 2), f32)), ValueError, r"dy must have"),
    "gradient to nowhere": (
        lambda: EYE.sampled(np.ones((4, 3), f32), np.ones((6, 3), f32), accumulate=True), ValueError, "out must be",
    ),
    "gradient of half": (
        lambda: EYE.sampled(np.ones((4, 3), f32), np.ones((6, 3), f32), out=np.ones(4, np.float16)),
        TypeError, "out must be a dense float32",
    ),
    "gradient of a vector and a matrix": (
        lambda: EYE.sampled(np.ones(4, f32), np.ones((6, 1), f32)), ValueError, r"dy must have shape \(4, 1\)",
    ),
    "profile": (lambda: EYE.profile(4), TypeError, "x must be a NumPy or CuPy array, got int 4"),
    "astype": (lambda: EYE.astype(np.int8), TypeError, "dtype must be float32, bfloat16 or float16, got int8"),
    "picture": (lambda: EYE.picture(0), ValueError, "width must be an integer of at least 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", DOORS)
def test_doors_say_what_is_wrong(case):
    act, error, text = DOORS[case]
    with pytest.raises(error, match=text):
        act()


def test_a_matrix_says_what_it_runs_on(ops, rng):
    a = CSBMatrix.from_dense(ops.from_host(draw(rng, (300, 200), float32)))
    if ops.name == "cpu":
        assert a.route(100) == "cpu"
    else:
        assert a.blocksize == (64, 64)
        assert {a.route(100, features_last=last) for last in (False, True)} <= {"rows", "generic"}


def test_split_products_exist_on_a_gpu_only(cpu_ops, rng):
    a = CSBMatrix.from_dense(draw(rng, (30, 20), float32))
    with pytest.raises(ValueError, match="split must be None on the CPU"):
        a.matmul(draw(rng, (20, 3), float32), split="bf16x3")
