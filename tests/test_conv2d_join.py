"""A residual sum that is made on its way into a 1x1 convolution, by one kernel where there is one: separate passes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import minidl as m
from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_join
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import BUILT_IN, current_device
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float16, float32
from tests import emulator
from tests.convolutions import SIXTEEN, Guarded, pitched, put
from tests.kernel_checks import check_report
from tests.test_fusion import close, fused, run
from tests.tolerance import draw, draw_integers

H200 = BUILT_IN["H200"]
POINT = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
# Images, height, width, channels; filters. Pixels that fill no tile, each number of filters, two stages and eight.
SHAPES = {
    "one-tile": ((1, 5, 7, 128), 64),
    "few-stages": ((2, 9, 11, 128), 256),
    "further-filters": ((1, 13, 17, 256), 128),
    "deepest": ((2, 10, 13, 512), 128),
    "many-tiles": ((3, 14, 15, 256), 64),
    "filters-that-come-along": ((2, 11, 13, 512), 256),
    "filters-that-come-along-deep": ((3, 9, 15, 1024), 256),
    "tiles-cut-in-two": ((2, 15, 20, 512), 256),
}
TWO = pytest.mark.parametrize("two", [False, True], ids=["one", "two"])
EACH = pytest.mark.parametrize(("shape", "filters"), SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def wherever_it_can(monkeypatch):
    """Also where two kernels should be faster."""
    monkeypatch.setattr(conv2d_join, "LEAST_TILES", 0)


def operands(rng, shape, filters, storage, two, whole=False):
    """x, moments, gamma, beta, add, w; and of the shortcut moments, gamma, beta, or three times None."""

    def vector(least, most):
        found = rng.integers(least, most + 1, shape[3]) if whole else rng.uniform(least, most, shape[3])
        return found.astype(np.float32)

    def image(*sizes):
        return draw_integers(rng, sizes, storage, limit=2) if whole else draw(rng, sizes, storage)

    def norm():
        return np.stack([vector(-1, 1), vector(1, 1 if whole else 2)]), vector(1, 2), vector(-1, 1)

    return image(*shape), *norm(), image(*shape), image(filters, 1, 1, shape[3]), *(norm() if two else (None,) * 3)


def put_other(ops, *other):
    """The shortcut's batch norm, as the operations take it."""
    names = ("add_moments", "add_gamma", "add_beta")
    arrays = (None if array is None else ops.from_host(array) for array in other)
    return dict(zip(names, arrays, strict=True))


def joined(ops, x, moments, gamma, beta, add, w, *other, **options):
    """(z, signs, y, statistics) on the host; signs are None where nobody keeps them. Of unfinished statistics their
    parts."""
    arrays, named = put(ops, x, moments, gamma, beta, add, w), put_other(ops, *other)
    *found, stats = ops.conv2d_join(*arrays, **named, **POINT, statistics=True, **options)
    found.append(getattr(stats, "first", stats))
    return [None if array is None else ops.to_host(array) for array in found]


def expected_of(x, moments, gamma, beta, add, w, *other):
    """z as it is stored, and y before rounding, in float64."""

    def normalized(x, moments, gamma, beta):
        mean, rstd = (row.astype(np.float64) for row in moments)
        return (x.astype(np.float64) - mean) * rstd * gamma + beta

    z = normalized(x, moments, gamma, beta)
    z = z + (add.astype(np.float64) if other[0] is None else normalized(add, *other))
    z = np.maximum(z, 0).astype(np.float32).astype(x.dtype)
    return z, z.astype(np.float64) @ w.reshape(w.shape[0], -1).T.astype(np.float64)


def check_whole(z, signs, y, stats, hosts):
    """Every bit is the definition's."""
    expected, product = expected_of(*hosts)
    np.testing.assert_array_equal(z, expected)
    product = product.astype(np.float32).astype(z.dtype)
    np.testing.assert_array_equal(y, product)
    if signs is not None:
        np.testing.assert_array_equal(signs, np.packbits(expected.astype(np.float32) > 0, -1, bitorder="little"))
    rows = product.astype(np.float64).reshape(-1, product.shape[-1])
    if stats.ndim == 3:  # parts of sums and of sums of squares, as the kernel leaves them
        np.testing.assert_array_equal(stats.astype(np.float64).sum(0), [rows.sum(0), (rows**2).sum(0)])
    else:
        squares = ((rows - rows.mean(0)) ** 2).sum(0)
        np.testing.assert_allclose(stats, [len(rows), *rows.mean(0), *squares], rtol=1e-6, atol=1e-6 * squares.max())


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_the_kernel_takes_what_it_says():
    def taken(x, filters, kernel=1, code=1, device="H200", **options):
        options = {**POINT, **options}
        weights = (filters, kernel, kernel, x[3] // options["groups"])
        return conv2d_join.applies(convolution("test", x, weights, **options), code, BUILT_IN[device])

    image = (2, 8, 8, 256)
    assert taken(image, 64) and taken(image, 128, code=2) and taken((2, 8, 8, 512), 128) and taken((2, 8, 8, 128), 256)
    assert not taken(image, 64, code=0) and not taken(image, 64, device="A100")
    assert not taken(image, 192) and not taken((2, 8, 8, 192), 64) and not taken((2, 8, 8, 1024), 128)
    assert taken((2, 8, 8, 512), 256) and taken((2, 8, 8, 1024), 256) and not taken((2, 8, 8, 8192), 256)
    assert not taken(image, 64, kernel=3, padding=(1, 1)) and not taken(image, 64, stride=(2, 2))
    assert not taken(image, 64, groups=2) and not taken((0, 8, 8, 256), 64)


def test_filters_that_come_along_want_a_tile_for_each_multiprocessor(monkeypatch):
    from minidl import cuda as ops

    monkeypatch.undo()  # as it is chosen
    with dry_run():
        for images, channels, filters, there in ((32, 1024, 256, False), (128, 1024, 256, True), (4, 512, 128, True)):
            x, w = (images, 14, 14, channels), ops.empty((filters, 1, 1, channels), bfloat16)
            assert ops.conv2d_makes_join(x, w, **POINT) == there
            back = ops.empty((channels, 1, 1, filters), bfloat16)
            assert ops.conv2d_makes_both((*x[:3], filters), back, **POINT) == there


def test_operands_that_do_not_fit_are_refused():
    from minidl import cuda as ops

    with dry_run():
        x, w = ops.empty((2, 4, 4, 128), bfloat16), ops.empty((64, 1, 1, 128), bfloat16)
        norm = ops.empty((2, 128), float32), None, None
        for add in (ops.empty((2, 4, 5, 128), bfloat16), ops.empty((2, 4, 4, 64), bfloat16)):
            with pytest.raises(ValueError, match="conv2d_join: add "):
                ops.conv2d_join(x, *norm, add, w, **POINT)
        with pytest.raises(TypeError, match="conv2d_join: add "):
            ops.conv2d_join(x, *norm, ops.empty(x.shape, float16), w, **POINT)


@SIXTEEN
def test_statistics_are_those_of_any_convolution(storage):
    """Finished, or as the batch norm above takes them."""
    from minidl import cuda as ops

    with dry_run():
        x, w = ops.empty((2, 9, 11, 128), storage), ops.empty((64, 1, 1, 128), storage)
        norm = ops.empty((2, 128), float32), None, None
        assert ops.conv2d_makes_join(x.shape, w, **POINT)
        for finish in (True, False):
            stats = ops.conv2d_join(x, *norm, x, w, **POINT, statistics=True, finish=finish)[3]
            own = ops.conv2d_stats(x, w, None, **POINT, finish=finish)[1]
            assert type(stats) is type(own) and getattr(stats, "shape", None) == getattr(own, "shape", None)
            assert finish or stats.rows == own.rows == 198
            moments, count = ops.batch_norm_finalize(stats, 1e-5)
            assert moments.shape == (2, 64) and count.shape == (1,)


@pytest.mark.parametrize("how", ["elementwise", "gradients", "bnff"])
def test_a_step_launches_the_kernel(how):
    """With nothing behind it that would not take its results."""
    from minidl import cuda as ops

    with dry_run() as log:
        model, loss = fused(blocks, how, ops, precision="bf16"), m.SoftmaxCrossEntropy()
        for name in ("relu1", "relu3", "relu5"):
            model.graph[name].layer.ahead = model.graph[name].layer.ahead or how != "bnff"
        loss.forward(model.forward(ops.empty((4, 6, 5, 3), bfloat16)), ops.empty((4,), np.int32))
        model.backward(loss.backward())
    # The third sum is read by no convolution.
    assert sum(launch.name == "conv2d_join_kernel" for launch in log.launches) == 2


@TWO
@EACH
def test_every_variant_compiles_and_fits(shape, filters, two):
    pytest.importorskip("cuda.pathfinder", reason="needs NVRTC")
    conv = convolution("test", shape, (filters, 1, 1, shape[3]), *((1, 1), (0, 0), (1, 1), 1))
    kinds = ((1, False), (1, True), (2, False))
    plans = [conv2d_join.plan(conv, code, (shape[3],) * 2, two, statistics, H200) for code, statistics in kinds]
    variants = [("conv2d_join", tuple(plan.defines.items())) for plan in plans]
    for plan, report in zip(plans, nvrtc.compile_all(variants, nvrtc.target(H200.arch), 2), strict=True):
        check_report("conv2d_join", report, plan.threads, plan.shared, H200)


def emulated(shape, filters, two, seed):
    """`joined`, of whole numbers in bfloat16, by the kernel's own source on this machine's processor; and its operands.

    As on two multiprocessors, so that a block has several tiles.
    """
    hosts = operands(np.random.default_rng(seed), shape, filters, bfloat16, two, whole=True)
    with pytest.MonkeyPatch.context() as patch, emulator.table(seed) as ops:
        own = conv2d_join.plan.__wrapped__
        few = dataclasses.replace(H200, multiprocessors=2)
        patch.setattr(conv2d_join, "plan", lambda *facts: own(*facts[:-1], few))
        found = joined(ops, *hosts, finish=False)
        assert ops.kernels == ["conv2d_join_kernel"]
    return found, hosts


@TWO
@EACH
def test_its_source_is_right_whatever_comes_late(shape, filters, two):
    for seed in range(3):
        found, hosts = emulated(shape, filters, two, seed)
        check_whole(*found, hosts)


# What would be wrong with the kernel, by luck seen seldom on a GPU or never: a line of it, and what is there instead.
FAULTS = {
    "no-fence-for-the-engine": ("fence_for_engine();\n            __syncwarp();", "__syncwarp();"),
    "a-stage-is-given-up-early": ("                else await_products<0>();\n", ""),
    "a-piece-is-given-up-early": ("if (part < PARTS - 1) await_products<1>();\n                else", "if (part)"),
    "a-piece-is-not-waited-for": ("if (!RESIDENT) barrier_wait(at.piece_come(next.index), next.parity);", ""),
    "a-piece-is-filled-again-early": ("barrier_wait(at.piece_done(pieces.index), pieces.parity ^ 1);", ""),
    "a-sum-is-given-up-before-it-is-stored": ("                await_stores_read<0>();\n", ""),
    "a-strip-is-not-waited-for": (
        "            if (!BACKWARD && i % STRIP == 0) barrier_wait(at.stored(strips.index), strips.parity ^ 1);\n", ""
    ),
    "rows-are-not-waited-for": ("            if (i) barrier_wait(at.come(ring.index), ring.parity);\n", ""),
    "a-warp-is-not-waited-for": ("barrier_init(at.made(i), 4)", "barrier_init(at.made(i), 3)"),
    "one-arrival-too-many-is-expected": ("4 * CONSUMERS + 1)", "4 * CONSUMERS + 2)"),
    "what-is-behind-the-last-pixel-counts": ("return row < rows;", "return true;"),
    "an-output-is-written-too-soon": ("            if (speaks) await_stores_read<0>();  // of", "            // of"),
    "bytes-of-a-whole-tile-are-expected": ("2 * SLAB * tile.second", "STAGE"),
    "a-piece-goes-by-before-it-comes": (
        "            barrier_wait(at.piece_come(pieces.index), pieces.parity);\n            if", "            if"
    ),
    "nobody-hears-of-the-end": ("    if (lane == 0) barrier_arrive(at.made(ring.index));  // the others", "    // the"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds_faults(fault):
    """So what it does not find is unlikely to be there."""

    def check(seed):
        for width, channels, filters in ((27, 128, 64), (27, 128, 256), (20, 512, 256)):
            found, hosts = emulated((2, 15, width, channels), filters, True, seed)
            check_whole(*found, hosts)

    assert emulator.finds("conv2d_join", *FAULTS[fault], check)


@pytest.mark.parametrize(
    ("pixels", "whole", "single"),
    [(64, 0, 1), (49 * 128, 0, 98), (66 * 128, 0, 132), (67 * 128 - 64, 66, 1), (67 * 128, 67, 0), (132 * 128, 132, 0),
     (132 * 128 + 1, 132, 1), (196 * 128, 132, 128), (198 * 128, 132, 132), (199 * 128, 199, 0), (392 * 128, 392, 0)],
)  # fmt: skip
def test_tiles_that_would_leave_half_of_the_multiprocessors_idle_are_cut_in_two(pixels, whole, single):
    conv = convolution("test", (1, 1, pixels, 512), (256, 1, 1, 512), *POINT.values())
    plan = conv2d_join.plan(conv, 1, (512, 512), False, True, H200)
    assert plan.problem["whole"] == whole and plan.problem["tiles"] == whole + single
    assert plan.parts == 2 * whole + single == -(-pixels // 64) and plan.grid == min(whole + single, 132)


def blocks():
    """The ends of two residual blocks, with a projection and without, each read by a convolution and a sum."""
    graph = m.Graph()

    def norm(x, width, name, kernel=1):
        x = m.Conv2d(x.shape[-1], width, kernel, padding=kernel // 2, bias=False, name=f"{name}.conv")(x)
        return m.BatchNorm2d(width, name=f"{name}.bn")(x)

    x = m.ReLU(name="relu0")(norm(graph.input((6, 5, 3)), 16, "stem", 3))
    x = m.ReLU(name="relu1")(m.Add(name="add1")(norm(x, 128, "main1"), norm(x, 128, "side1")))
    y = m.ReLU(name="relu2")(norm(x, 64, "main2"))
    x = m.ReLU(name="relu3")(m.Add(name="add2")(norm(y, 128, "main3"), x))
    y = m.ReLU(name="relu4")(norm(x, 64, "main4"))
    x = m.ReLU(name="relu5")(m.Add(name="add3")(norm(y, 128, "main5"), x))
    return graph.output(m.Linear(30 * 128, 5, name="fc")(m.Flatten()(x)))


@pytest.mark.parametrize("how", ["none", "elementwise", "statistics", "gradients", "bnff"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sums_may_be_left_to_the_convolution_that_reads_them_first(ops, how, precision, monkeypatch):
    """On a CPU by the same passes, with the same bits; by a ReLU whose reader has no kernel for it, too."""
    made, own = [], ops.conv2d_join
    if ops.name == "cpu":
        monkeypatch.setattr(ops, "conv2d_makes_join", lambda shape, w, **geometry: w.shape[1:3] == (1, 1))
    monkeypatch.setattr(ops, "conv2d_join", lambda *args, **named: made.append(1) or own(*args, **named))
    steps = []
    for ahead in (False, True):
        model = fused(blocks, how, ops, precision=precision)
        for name in ("relu1", "relu3", "relu5"):
            model.graph[name].layer.ahead = ahead
        steps.append(run(model))
        assert ahead or not made
    close(*steps, 0.0 if ops.name == "cpu" or precision == "fp32" else 2.0**-6)
    kernels = ops.name == "cpu" or (precision == "bf16" and current_device().arch == (9, 0))
    assert len(made) == (4 if kernels and how != "none" else 0)  # two of them in two steps; no convolution's the third


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_what_is_left_to_it_is_made_once_for_all_who_read_it(cpu_ops, training, monkeypatch):
    """Also where it takes no statistics, as in evaluation."""
    sums, own = [], cpu_ops.batch_norm_join
    monkeypatch.setattr(cpu_ops, "batch_norm_join", lambda *args, **named: sums.append(1) or own(*args, **named))
    model = fused(blocks, "gradients", cpu_ops)
    model.train(training)
    for name in ("relu1", "relu3", "relu5"):
        model.graph[name].layer.ahead = True
    model.forward(np.ones((3, 6, 5, 3), np.float32), grad=False)
    assert len(sums) == 3


# -- the operation, and the kernel on a GPU ---------------------------------------------------------------------------


@TWO
@EACH
@SIXTEEN
def test_whole_numbers_give_the_bits_of_the_definition(ops, shape, filters, storage, two, rng):
    hosts = operands(rng, shape, filters, storage, two, whole=True)
    if ops.name == "cuda" and current_device().arch == (9, 0):
        assert ops.conv2d_makes_join(shape, ops.from_host(hosts[5]), **POINT)
    check_whole(*joined(ops, *hosts), hosts)


@TWO
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("storage", [float32, bfloat16, float16], ids=["fp32", "bf16", "fp16"])
def test_the_operation_is_its_parts(ops, storage, kernel, two, rng):
    """Also of convolutions that no kernel takes; the sum to the bit."""
    x, moments, gamma, beta, add, w, *other = operands(rng, (2, 9, 7, 128), 64, storage, two)
    w = draw(rng, (64, kernel, kernel, 128), storage)
    geometry = {**POINT, "padding": (kernel // 2,) * 2}
    norm, (x_, add_, w_) = put(ops, moments, gamma, beta), put(ops, x, add, w)
    named = put_other(ops, *other)
    z, signs = ops.batch_norm_join(x_, *norm, add_, **named)
    y, stats = ops.conv2d_stats(z, w_, None, **geometry)
    found = ops.conv2d_join(x_, *norm, add_, w_, **named, **geometry, statistics=True)
    for one, same in zip(found[:2], (z, signs), strict=True):
        assert (one is None) == (same is None)
        if one is not None:
            np.testing.assert_array_equal(ops.to_host(one), ops.to_host(same))
    # A kernel that shares the depth of a tile adds up in another order.
    unit = 0.0 if ops.name == "cpu" else {float32: 1e-5, bfloat16: 2.0**-7, float16: 2.0**-10}[np.dtype(storage)]
    found_y, y = (ops.to_host(array).astype(np.float64) for array in (found[2], y))
    np.testing.assert_allclose(found_y, y, rtol=unit, atol=unit / 8)
    np.testing.assert_allclose(ops.to_host(found[3]), ops.to_host(stats), rtol=2e-5, atol=1e-3)
    *same, none = ops.conv2d_join(x_, *norm, add_, w_, **named, **geometry)
    assert none is None
    for one, other in zip(found[:3], same, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(ops.to_host(one), ops.to_host(other), "without statistics")


@TWO
@pytest.mark.parametrize("name", ["further-filters", "deepest"])
def test_arrays_may_lie_at_a_pitch(hopper, name, two, rng):
    shape, filters = SHAPES[name]
    x, moments, gamma, beta, add, w, *other = operands(rng, shape, filters, bfloat16, two)
    norm, w, named, found = put(hopper, moments, gamma, beta), hopper.from_host(w), put_other(hopper, *other), []
    for before, after in ((0, 0), (8, 8), (1, 2)):
        x_, add_ = (pitched(hopper, array, before, after) for array in (x, add))
        results = hopper.conv2d_join(x_, *norm, add_, w, **named, **POINT, statistics=True)
        found.append([hopper.to_host(array).tobytes() for array in results])
    assert found[0] == found[1] == found[2]


@TWO
@EACH
def test_all_of_the_results_are_written_and_nothing_else(hopper, shape, filters, two, rng, monkeypatch):
    hosts, guarded = operands(rng, shape, filters, bfloat16, two, whole=True), Guarded(hopper)
    monkeypatch.setattr(conv2d_join, "empty", guarded)
    check_whole(*joined(hopper, *hosts, finish=False), hosts)
    guarded.check(4)


# Pixels of whole tiles, and one that is not full; of a round of them, and tiles that are cut in two. (Of either number
# the kernels' inverse is exact.)
LARGE = pytest.mark.parametrize("shape", [(9, 31, 33), (20, 29, 32)], ids=["whole", "a-round-and-a-part"])


@LARGE
def test_tiles_are_whole_where_there_are_enough(hopper, shape, rng):
    hosts = operands(rng, (*shape, 512), 256, bfloat16, False, whole=True)
    for _ in range(3):
        check_whole(*joined(hopper, *hosts, finish=False), hosts)


def test_what_is_not_finite_stays_where_it_belongs(hopper, rng):
    hosts = operands(rng, (2, 9, 11, 256), 64, bfloat16, False)
    hosts[0][0, 1, 2, 3], hosts[4][1, 2, 3, 4], hosts[5][...] = np.nan, np.inf, 1
    z, _, y, _ = joined(hopper, *hosts)
    expected, product = expected_of(*hosts)
    np.testing.assert_array_equal(np.isfinite(z.astype(np.float32)), np.isfinite(expected.astype(np.float32)))
    np.testing.assert_array_equal(np.isfinite(y.astype(np.float32)), np.isfinite(product))
