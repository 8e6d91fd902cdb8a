"""Laws of the kernels that a product with a matrix in Compressed Sparse Blocks may run on: whichever it is, the result
is the same but for what each says of itself. Whole numbers have sums that float32 holds exactly, so there every route
must give the reference's bits."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidl import cuda as ops
from minidl.cuda.device import BUILT_IN, HOPPER
from minidl.cuda.launch import dry_run
from minidl.cuda.sparse import csb_dots, csb_rows, csb_sampled_hopper, csb_skinny, csb_skinny_hopper
from minidl.cuda.sparse.csb_order import deal, line
from minidl.cuda.sparse.csb_routes import ROUTES, Product, choose_route, route
from minidl.cuda.sparse.csb_tensor import SPLITS
from minidl.precision import bfloat16, float16, float32, precision
from minidl.sparse import layers
from tests.reference import csb as reference
from tests.tolerance import draw, draw_few, draw_integers

H200, A100 = BUILT_IN["H200"], BUILT_IN["A100"]

# (M, K), side of a block, density
MATRICES = [
    ((300, 140), 64, 0.1),
    ((257, 300), 256, 0.1),
    ((256, 256), 256, 1.0),  # lists that take several stages
    ((1, 72), 64, 0.5),
    ((72, 1), 64, 0.5),
    ((513, 1032), 128, 0.05),
    ((130, 256), 64, 0.02),
    ((40, 96), 64, 0.0),
]
SAMPLES = [1, 8, 33, 64, 133, 260]


class Matrix:
    """A matrix of whole numbers."""

    def __init__(self, ops, rng, shape, side, density, dtype=float32, values=draw_integers):
        mask = rng.random(shape) < density
        if density < 1 and min(shape) > 8:
            mask[shape[0] // 2] = mask[:, shape[1] // 3] = False
        self.ops, self.mask, self.place = ops, mask, (shape, side)
        indptr, indices = reference.from_mask(mask, side)
        host = values(rng, indices.size, dtype)
        self.dense = reference.expand(indptr, indices, host.astype(float), shape, side)
        self.pattern = ops.from_host(indptr), ops.from_host(indices)
        self.values = ops.from_host(host)

    def product(self, samples, dtype, transposed, features_last, split=None) -> Product:
        shape, side = self.place
        return Product(shape, side, self.values.size, dtype, samples, transposed, features_last, split)

    def matmul(self, x, **options):
        return self.ops.to_host(self.ops.csb_matmul(*self.pattern, self.values, x, *self.place, **options))


def _skip_without_rows(side):
    from minidl.cuda.device import current_device

    if not csb_rows.applies(side, np.dtype(float32), current_device()):
        pytest.skip("needs a Hopper GPU")


def _operand(rng, a, samples, transposed, features_last, dtype, values=draw_integers):
    features = a.dense.shape[0 if transposed else 1]
    return values(rng, (samples, features) if features_last else (features, samples), dtype)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("shape,side,density", MATRICES)
def test_every_route_of_float32_is_exact_on_whole_numbers(
    cuda_ops, rng, shape, side, density, transposed, features_last
):
    from minidl.cuda.device import current_device

    a = Matrix(cuda_ops, rng, shape, side, density)
    where = {"transposed": transposed, "features_last": features_last}
    for samples in SAMPLES:
        x = _operand(rng, a, samples, transposed, features_last, float32)
        bias = draw_integers(rng, shape[1 if transposed else 0], float32)
        expected = reference.matmul(a.dense, x, bias=bias, relu=True, **where)
        for split in (None, *SPLITS):
            fits = a.product(samples, np.dtype(float32), transposed, features_last, split).fits(current_device())
            for name in (name for name in ROUTES if fits[name]):
                with route(name):
                    y = a.matmul(cuda_ops.from_host(x), bias=cuda_ops.from_host(bias), relu=True, split=split, **where)
                np.testing.assert_array_equal(y, expected, err_msg=f"{name}, {split}, {samples} samples")


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("storage", [bfloat16, float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape,density", [((304, 136), 0.1), ((64, 64), 1.0), ((600, 2048), 0.7), ((8, 1032), 0.5), ((4096, 1040), 0.1)]
)
def test_every_route_of_16_bit_types_is_exact_on_whole_numbers(
    cuda_ops, rng, shape, density, storage, transposed, features_last
):
    from minidl.cuda.device import current_device

    a = Matrix(cuda_ops, rng, shape, 64, density, storage)
    where = {"transposed": transposed, "features_last": features_last}
    for samples in (1, 11, 16, 27, 32, 64, 133):
        x = _operand(rng, a, samples, transposed, features_last, storage, draw_few)
        bias = draw_integers(rng, shape[1 if transposed else 0], float32)
        product = a.product(samples, storage, transposed, features_last)
        for shift in (None, bias):
            fits = product._replace(bias=shift is not None).fits(current_device())
            expected = reference.matmul(a.dense, x.astype(float), bias=shift, relu=True, **where).astype(storage)
            given = None if shift is None else cuda_ops.from_host(shift)
            for name in (name for name in ROUTES if fits[name]):
                with route(name):
                    y = a.matmul(cuda_ops.from_host(x), bias=given, relu=True, **where)
                message = f"{name}, {samples} samples"
                np.testing.assert_array_equal(y.astype(float), expected.astype(float), err_msg=message)


@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("storage", [bfloat16, float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "shape,density", [((536, 600), 0.1), ((1032, 528), 0.3), ((600, 2048), 0.02), ((64, 72), 1.0), ((1304, 777), 0.1)]
)
def test_both_kernels_of_few_samples_are_exact_on_whole_numbers(cuda_ops, rng, shape, density, storage, transposed):
    """However many thread blocks share the sums; groups of output features that are partly or mostly empty; blocks of
    more elements than are known to be cleared, and of none.
    """
    from minidl.cuda.device import current_device

    shape = shape[:: 1 if transposed else -1] if shape[1] % 8 else shape
    a = Matrix(cuda_ops, rng, shape, 64, density, storage)
    features, depth = shape[::-1] if transposed else shape
    ways = [(csb_skinny, None)]
    if current_device().arch == HOPPER:
        units = -(-features // 256) * -(-depth // 64)
        ways += [(csb_skinny_hopper, blocks) for blocks in sorted({1, min(5, units), units})]
    for samples, (kernels, cut) in itertools.product((1, 27, 64), ways):
        x = _operand(rng, a, samples, transposed, True, storage, draw_few)
        bias = draw_integers(rng, features, float32)
        expected = reference.matmul(
            a.dense, x.astype(float), bias=bias, relu=True, transposed=transposed, features_last=True
        )
        y = cuda_ops.empty((samples, features), storage)
        arrays = *a.pattern, a.values, cuda_ops.from_host(x), y
        kernels.matmul(*arrays, shape, transposed, cuda_ops.from_host(bias), True, cut)
        got = cuda_ops.to_host(y).astype(float)
        np.testing.assert_array_equal(
            got, expected.astype(storage).astype(float), err_msg=f"{kernels}, {samples}, {cut}"
        )


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("storage", [float32, bfloat16], ids=["fp32", "bf16"])
def test_every_route_gives_its_bits_again_and_keeps_samples_apart(cuda_ops, rng, storage, transposed, features_last):
    """A NaN of one sample is seen in no other, not even in the last bits."""
    from minidl.cuda.device import current_device

    a = Matrix(cuda_ops, rng, (2048, 1544), 64, 0.1, storage, values=draw)
    where = {"transposed": transposed, "features_last": features_last}
    for samples in (24, 64, 300):
        x = _operand(rng, a, samples, transposed, features_last, storage, draw)
        other = x.copy()
        other[(5, 7) if features_last else (7, 5)] = np.nan
        on = cuda_ops.from_host(x), cuda_ops.from_host(other)
        for split in (None, *(SPLITS if storage == float32 else ())):
            fits = a.product(samples, np.dtype(storage), transposed, features_last, split).fits(current_device())
            for name in (name for name in ROUTES if fits[name]):
                with route(name):
                    first, again, nan = (a.matmul(v, split=split, **where) for v in (on[0], on[0], on[1]))
                message = f"{name}, {split}, {samples} samples"
                assert first.tobytes() == again.tobytes(), message
                apart = [np.delete(y, 5, 0 if features_last else 1).tobytes() for y in (first, nan)]
                assert apart[0] == apart[1] and np.isnan(nan.astype(float)).any(), message


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("side", [64, 128, 256])
def test_rows_give_the_bits_of_the_generic_kernel(cuda_ops, rng, side, transposed, features_last):
    _skip_without_rows(side)
    a = Matrix(cuda_ops, rng, (302, 501), side, 0.3, values=draw)
    where = {"transposed": transposed, "features_last": features_last}
    for samples in (5, 64, 133, 256):
        x = cuda_ops.from_host(_operand(rng, a, samples, transposed, features_last, float32, draw))
        results = []
        for name in ("rows", "generic"):
            with route(name):
                results.append(a.matmul(x, **where))
        np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("before,behind", [(0, 4), (4, 0), (1, 3), (0, 1), (2, 4)])
def test_rows_read_operands_at_any_pitch(cuda_ops, rng, before, behind, features_last):
    """Copies take as many bytes as rows and their pitch allow, and nothing of what lies between."""
    _skip_without_rows(64)
    a = Matrix(cuda_ops, rng, (130, 200), 64, 0.2, values=draw)
    x = _operand(rng, a, 136, False, features_last, float32, draw)
    wide = np.pad(x, ((0, 0), (before, behind)), constant_values=np.nan)
    with route("rows"):
        given = cuda_ops.from_host(x), cuda_ops.from_host(wide)[:, before : before + x.shape[1]]
        expected, got = (a.matmul(v, features_last=features_last) for v in given)
    np.testing.assert_array_equal(got, expected)


TILES = [(16, 4), (16, 3), (8, 2), (4, 3), (8, 1)]  # units, vec


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("part,density,shape", [(64, 0.3, (300, 332)), (128, 0.03, (1101, 332))])
def test_every_tile_gives_the_same_bits(cuda_ops, rng, part, density, shape, transposed, features_last):
    """Whichever tile sizes choose, also where each thread block takes several, with output features as they lie and in
    another order.
    """
    _skip_without_rows(64)
    a = Matrix(cuda_ops, rng, shape, 64, density, values=draw)
    where = {"transposed": transposed, "features_last": features_last}
    elements = (a.dense != 0).sum(0 if transposed else 1) * rng.integers(1, 9, shape[1 if transposed else 0])
    dealt = cuda_ops.from_host(deal(elements, line(features_last)))
    for samples in (133, 12000):
        x = cuda_ops.from_host(_operand(rng, a, samples, transposed, features_last, float32, draw))
        with route("generic"):
            expected = a.matmul(x, **where)
        for (units, vec), order in itertools.product(TILES, (None, dealt)):
            tile = csb_rows.RowsTile(units, vec, part, 3072, 2)
            y = cuda_ops.from_host(np.full(expected.shape, np.nan, float32))
            arrays = *a.pattern, a.values, x, y
            csb_rows.matmul(*arrays, *a.place, transposed, features_last, None, False, order, tile)
            np.testing.assert_array_equal(cuda_ops.to_host(y), expected, err_msg=f"{tile}, {order is None}")


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("split,left_out", [("tf32x3", 2.0**-20), ("bf16x3", 3.02 * 2.0**-16)])
def test_split_products_keep_their_bound(cuda_ops, rng, split, left_out, features_last):
    """Heads and rests leave out so much of a product; each of three sums of eight cuts what it adds to off at 2^-23."""
    from minidl.cuda.device import current_device

    a = Matrix(cuda_ops, rng, (256, 1030), 64, 0.5, values=draw)
    if not a.product(300, np.dtype(float32), False, features_last, split).fits(current_device())["split"]:
        pytest.skip("needs a Hopper GPU")
    x = _operand(rng, a, 300, False, features_last, float32, draw)
    with route("split"):
        y = a.matmul(cuda_ops.from_host(x), features_last=features_last, split=split)
    expected = reference.matmul(a.dense, x, features_last=features_last)
    magnitude = reference.matmul(np.abs(a.dense), np.abs(x), features_last=features_last)
    bound = (left_out + 3 * 1030 / 8 * 2.0**-23) * magnitude
    assert (np.abs(y - expected) <= bound).all()
    assert np.abs(y - expected).max() > 0, "float32 would not be tested"


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
@pytest.mark.parametrize("split", SPLITS)
def test_split_products_multiply_rests(cuda_ops, rng, split, transposed, features_last):
    """Numbers of 13 bits need a rest; where only one operand has them nothing is left out."""
    from minidl.cuda.device import current_device

    def wide(rng, shape, dtype):
        return draw_integers(rng, shape, dtype, limit=4095)

    where = {"transposed": transposed, "features_last": features_last}
    for values, samples in itertools.product(((wide, draw_integers), (draw_integers, wide)), (130, 300)):
        a = Matrix(cuda_ops, rng, (200, 330), 64, 0.3, values=values[0])
        if not a.product(samples, np.dtype(float32), **where, split=split).fits(current_device())["split"]:
            pytest.skip("needs a Hopper GPU")
        x = _operand(rng, a, samples, transposed, features_last, float32, values[1])
        with route("split"):
            y = a.matmul(cuda_ops.from_host(x), split=split, **where)
        np.testing.assert_array_equal(y, reference.matmul(a.dense, x, **where))


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape,side,density,samples", [
    ((304, 136), 64, 0.1, 200), ((64, 64), 64, 1.0, 8), ((256, 520), 256, 0.3, 1000), ((8, 1032), 64, 0.5, 64),
    ((600, 2048), 128, 0.1, 5000), ((264, 64), 64, 0.2, 3000), ((136, 40), 16, 0.5, 520), ((200, 128), 128, 0.1, 1000),
])  # fmt: skip
def test_sampled_products_of_16_bit_types_are_exact_on_whole_numbers(
    cuda_ops, rng, shape, side, density, samples, features_last
):
    a = Matrix(cuda_ops, rng, shape, side, density, bfloat16)
    dy, x = (draw_integers(rng, (f, samples), float32).astype(bfloat16) for f in shape)
    if features_last:
        dy, x = (np.ascontiguousarray(v.T) for v in (dy, x))
    out = cuda_ops.from_host(np.ones(a.values.size, float32))
    given = cuda_ops.from_host(dy), cuda_ops.from_host(x)
    cuda_ops.csb_sampled(*a.pattern, *given, *a.place, features_last=features_last, out=out, accumulate=True)
    wide = dy.astype(float), x.astype(float)
    expected = 1 + reference.sampled(a.mask, *wide, side, features_last=features_last)
    np.testing.assert_array_equal(cuda_ops.to_host(out), expected)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape,side,density,samples", [
    ((300, 260), 64, 0.02, 133), ((257, 300), 256, 0.1, 1000), ((1, 72), 64, 0.2, 64), ((72, 1), 64, 0.2, 5000),
    ((513, 1032), 128, 0.05, 700), ((64, 1032), 16, 0.2, 63),
])  # fmt: skip
def test_sampled_products_of_float32_are_exact_on_whole_numbers(
    cuda_ops, rng, shape, side, density, samples, features_last
):
    a = Matrix(cuda_ops, rng, shape, side, density)
    _check_dots(cuda_ops, rng, a, samples, features_last)


SPLIT_SAMPLED = [
    ((300, 262), 64, 0.3, 133), ((257, 300), 256, 0.1, 1001), ((1, 72), 64, 0.5, 64), ((513, 1032), 128, 0.05, 5000),
]  # fmt: skip


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape,side,density,samples", SPLIT_SAMPLED)
def test_split_sampled_products_multiply_rests(cuda_ops, rng, shape, side, density, samples, features_last):
    """Numbers of 13 bits need a rest; where only one operand has them nothing is left out."""
    a = Matrix(cuda_ops, rng, shape, side, density)
    for limits in ((4095, 3), (3, 4095)):
        dy, x = (
            draw_integers(rng, (samples, f) if features_last else (f, samples), float32, limit=limit)
            for f, limit in zip(shape, limits, strict=True)
        )
        out = cuda_ops.from_host(np.ones(a.values.size, float32))
        _split_sampled(cuda_ops, a, dy, x, features_last, out, True)
        expected = 1 + reference.sampled(a.mask, dy.astype(float), x.astype(float), side, features_last=features_last)
        np.testing.assert_array_equal(cuda_ops.to_host(out), expected)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("shape,side,density,samples", SPLIT_SAMPLED)
def test_split_sampled_products_keep_their_bound(cuda_ops, rng, shape, side, density, samples, features_last):
    a = Matrix(cuda_ops, rng, shape, side, density)
    dy, x = (draw(rng, (samples, f) if features_last else (f, samples), float32) for f in shape)
    out = cuda_ops.empty(a.values.size, float32)
    _split_sampled(cuda_ops, a, dy, x, features_last, out, False)
    first = cuda_ops.to_host(out)
    _split_sampled(cuda_ops, a, dy, x, features_last, out, False)
    np.testing.assert_array_equal(cuda_ops.to_host(out), first, err_msg="other bits on another run")
    wide = dy.astype(float), x.astype(float)
    expected = reference.sampled(a.mask, *wide, side, features_last=features_last)
    magnitude = reference.sampled(a.mask, *map(np.abs, wide), side, features_last=features_last)
    bound = (3.02 * 2.0**-16 + 3 * samples / 8 * 2.0**-23) * magnitude
    assert (np.abs(first - expected) <= bound).all()
    assert np.abs(first - expected).max() > 0, "float32 would not be tested"


def _split_sampled(cuda_ops, a, dy, x, features_last, out, accumulate):
    from minidl.cuda.device import current_device

    shape, side = a.place
    samples = dy.shape[0 if features_last else 1]
    if not csb_sampled_hopper.splits("bf16x3", side, shape, a.values.size, samples, features_last, current_device()):
        pytest.skip("needs a Hopper GPU")
    given = cuda_ops.from_host(dy), cuda_ops.from_host(x)
    options = {"features_last": features_last, "out": out, "accumulate": accumulate}
    cuda_ops.csb_sampled(*a.pattern, *given, shape, side, split="bf16x3", **options)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
def test_sampled_products_of_float32_do_full_blocks_of_a_sparse_matrix(cuda_ops, rng, features_last):
    """Blocks with more elements than a thread block holds at a time, beside empty ones."""
    a = Matrix(cuda_ops, rng, (512, 384), 64, 0.0)
    a.mask[64:160, 30:130] = a.mask[511, :] = True
    indptr, indices = reference.from_mask(a.mask, 64)
    a.pattern, a.values = (
        (cuda_ops.from_host(indptr), cuda_ops.from_host(indices)),
        cuda_ops.empty(indices.size, float32),
    )
    _check_dots(cuda_ops, rng, a, 1500, features_last)


def _check_dots(cuda_ops, rng, a, samples, features_last):
    shape, side = a.place
    _skip_without_rows(side)
    dy, x = (draw_integers(rng, (samples, f) if features_last else (f, samples), float32) for f in shape)
    out = cuda_ops.from_host(np.ones(a.values.size, float32))
    given = cuda_ops.from_host(dy), cuda_ops.from_host(x)
    csb_dots.sampled(*a.pattern, *given, *a.place, features_last, out, True)
    expected = 1 + reference.sampled(a.mask, dy.astype(float), x.astype(float), side, features_last=features_last)
    np.testing.assert_array_equal(cuda_ops.to_host(out), expected)


@pytest.mark.parametrize("storage,split", [(float32, None), (float32, "bf16x3"), (bfloat16, None)])
@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
def test_more_than_two_to_the_31_elements(cuda_ops, rng, features_last, storage, split):
    """Offsets are 64 bits wide: the last samples of many equal the same samples alone, and give the whole gradient."""
    a = Matrix(cuda_ops, rng, (8, 64), 64, 0.3, storage)
    few, samples = 64, 2**25 + 64
    last = draw_integers(rng, (few, 64), storage)
    x = cuda_ops.zeros((samples, 64) if features_last else (64, samples), storage)
    assert x.size > 2**31
    where = (slice(-few, None), slice(None))[:: 1 if features_last else -1]
    x[where] = cuda_ops.from_host(np.ascontiguousarray(last if features_last else last.T))
    y = cuda_ops.csb_matmul(*a.pattern, a.values, x, *a.place, features_last=features_last, split=split)
    expected = reference.matmul(a.dense, last.astype(float), features_last=True).astype(storage)
    got = cuda_ops.to_host(cuda_ops.contiguous(y[where]))
    np.testing.assert_array_equal((got if features_last else got.T).astype(float), expected.astype(float))
    assert not (y[:1000] if features_last else y[:, :1000]).any()
    out = cuda_ops.empty(a.values.size, float32)
    cuda_ops.csb_sampled(*a.pattern, y, x, *a.place, features_last=features_last, out=out, split=split)
    sampled = reference.sampled(a.mask, expected.astype(float), last.astype(float), 64, features_last=True)
    np.testing.assert_array_equal(cuda_ops.to_host(out), sampled)


# -- which route ------------------------------------------------------------------------------------------------------


def _product(dtype=float32, samples=4096, density=0.1, features_last=True, split=None, side=64, shape=(2048, 1024)):
    nnz = round(density * shape[0] * shape[1])
    return Product(shape, side, nnz, np.dtype(dtype), samples, False, features_last, split)


def test_a_route_is_chosen_for_every_product_and_can_do_it():
    for device, dtype, samples, density, last, split, side in itertools.product(
        (H200, A100), (float32, bfloat16), (1, 64, 65, 4096), (0.01, 0.5), (False, True), (None, *SPLITS), (8, 64, 256)
    ):
        product = _product(dtype, samples, density, last, split, side)
        assert product.fits(device)[choose_route(product, device)], product


def test_float32_is_multiplied_strictly_unless_allowed_otherwise():
    for density in (0.01, 0.2, 0.9):
        assert choose_route(_product(density=density), H200) == "rows"
    assert choose_route(_product(density=0.2, split="tf32x3"), H200) == "split"
    assert choose_route(_product(density=0.02, split="tf32x3"), H200) == "rows"
    assert choose_route(_product(density=0.2, split="tf32x3"), A100) == "generic"


def test_layers_split_products_as_their_precision_permits():
    """By none that is less exact than the precision itself."""
    for name, allowed in (("fp32", None), ("tf32", "bf16x3"), ("tf32x3", "tf32x3")):
        assert layers.SPLITS[precision(name).tf32] == allowed
        assert allowed is None or choose_route(_product(density=0.2, split=allowed), H200) == "split"
    assert choose_route(_product(density=0.05, split="bf16x3"), H200) == "split"
    assert choose_route(_product(density=0.02, split="bf16x3"), H200) == "rows"


def test_split_products_of_16_bit_arrays_are_refused():
    with dry_run(), pytest.raises(ValueError, match="csb_matmul: split must be None unless"):
        pattern = ops.empty(2, np.int32), ops.empty(9, np.uint16)
        ops.csb_matmul(*pattern, ops.empty(9, bfloat16), ops.empty((8, 8), bfloat16), (8, 8), 64, split="tf32x3")
    with dry_run(), pytest.raises(ValueError, match="csb_matmul: split must be None or tf32x3 or bf16x3, got 'bf16'"):
        ops.csb_matmul(*pattern, ops.empty(9, float32), ops.empty((8, 8), float32), (8, 8), 64, split="bf16")


def test_a_route_that_cannot_be_taken_is_refused():
    with route("skinny"), pytest.raises(ValueError, match="csb_matmul: route"):
        choose_route(_product(), H200)
    with pytest.raises(ValueError, match="route: name must be"), route("quickest"):
        pass


def test_tiles_fit_the_device():
    for features, samples, density, last in itertools.product(
        (1, 64, 100, 2048), (1, 33, 100, 4096, 10**6), (0.0, 0.02, 0.2, 1.0), (False, True)
    ):
        tile = csb_rows.choose_tile(features, 2048, samples, density, last, H200)
        assert tile.stages >= 2 and tile.capacity >= tile.unit_slots
        assert tile.shared_bytes(tile.ahead(last, H200)) <= H200.shared_per_block
    for samples in (1, 16, 17, 64):
        tile = csb_skinny.choose_tile(samples, 8192, 8192)
        assert tile.samples >= samples and tile.shared_bytes <= H200.shared_per_block


def test_tiles_fill_the_device_in_few_rounds():
    """256 output features of 12544 samples: one round of 131 thread blocks instead of two of smaller ones."""
    for last in (False, True):
        assert csb_rows.choose_tile(256, 2304, 12544, 0.02, last, H200)[:2] == (16, 3)
    assert csb_rows.choose_tile(2048, 2048, 4096, 0.05, True, H200)[:2] == (16, 4)
    assert csb_rows.choose_tile(40, 64, 8, 0.1, True, H200)[:2] == (4, 1)


def test_regions_of_sampled_products_fit_the_device_and_what_they_hold():
    for shape, density in itertools.product(
        ((1, 1), (64, 64), (64, 2304), (2048, 64), (4096, 4096)), (0.0, 0.02, 0.25)
    ):
        tile = csb_dots.choose_tile(shape, round(density * shape[0] * shape[1]))
        assert tile.shared_bytes <= H200.shared_per_block
        assert tile.rows * tile.columns * density <= csb_dots.CAPACITY
    assert csb_dots.choose_tile((2048, 2048), 83886) == (256, 128)
    assert csb_dots.choose_tile((64, 64), 82) == (64, 64)


def test_chunks_of_sampled_products_are_never_empty():
    for shape, samples in itertools.product(((64, 64), (128, 256), (4096, 4096)), (1, 63, 64, 5000, 10**6)):
        for products in (1, csb_sampled_hopper.PRODUCTS):
            steps = products * -(-samples // csb_sampled_hopper.DEPTH)
            assert 1 <= csb_sampled_hopper.chunks_of(shape, steps) <= steps
