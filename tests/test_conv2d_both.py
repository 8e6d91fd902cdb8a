"""Both gradients of a convolution under a batch norm, by one kernel where there is one: those of separate passes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import minidl as m
from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_both, conv2d_both_wide, conv2d_join
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import BUILT_IN, current_device
from minidl.cuda.launch import dry_run
from minidl.fusion import cost
from minidl.precision import bfloat16, float16, float32, precision
from tests import emulator
from tests.convolutions import SIXTEEN, Guarded, pitched, put
from tests.kernel_checks import check_report
from tests.test_conv2d_families import CUT
from tests.test_fusion import close, fused, run
from tests.tolerance import assert_close, draw, draw_integers

H200 = BUILT_IN["H200"]
POINT = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}
# Images, height, width, channels; filters. Pixels that fill no tile, channels that fill no columns, each depth.
SHAPES = {
    "one-tile": ((1, 5, 7, 64), 128),
    "few-channels": ((2, 9, 11, 8), 256),
    "further-columns": ((1, 13, 31, 136), 128),
    "deep": ((3, 8, 8, 72), 384),
    "deepest": ((2, 10, 13, 128), 512),
    "many-tiles": ((4, 29, 23, 64), 256),
}
BELOW = pytest.mark.parametrize("below", [False, True], ids=["plain", "below"])
EACH = pytest.mark.parametrize(("shape", "filters"), SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def wherever_it_can(monkeypatch):
    """Also where other kernels should be faster."""
    monkeypatch.setattr(conv2d_both, "MOST_COLUMNS", 1000)


def operands(rng, shape, filters, storage, below, whole=False):
    """dz, y, moments, gamma, sums, count; w, x; norm. With ``whole`` numbers no sum is rounded in float32."""
    pixels = int(np.prod(shape[:3]))

    def vector(size, least, most):
        found = rng.integers(least, most + 1, size) if whole else rng.uniform(least, most, size)
        return found.astype(np.float32)

    def image(*sizes):
        return draw_integers(rng, sizes, storage) if whole else draw(rng, sizes, storage)

    def moments(size):
        return np.stack([vector(size, -1, 1), vector(size, 1, 1 if whole else 2)])

    out = (*shape[:3], filters)
    sums = np.stack([pixels * vector(filters, -1, 1).astype(np.float64) for _ in range(2)])
    above = image(*out), image(*out), moments(filters), vector(filters, 1, 2), sums, np.array([float(pixels)])
    norm = (moments(shape[3]), vector(shape[3], 1, 2), vector(shape[3], -1, 2)) if below else None
    return above, image(filters, 1, 1, shape[3]), image(*shape), norm


def expected_of(above, w, x, norm, passes=None):
    """dy as it is stored, the convolution's input, dx before rounding, dw: in float64.

    Args:
        passes: an operation table whose passes make dy and the input, with their roundings. (What float64 makes of them
            may lie on the other side of a tie; of whole numbers everybody makes the same.)
    """
    if passes is not None:
        dy = passes.to_host(passes.batch_norm_backward_apply(*put(passes, *above))).astype(np.float64)
        z = x if norm is None else passes.to_host(passes.batch_norm_apply(*put(passes, x, *norm), relu=True))
        return dy, z.astype(np.float64), *_products(dy, w, z.astype(np.float64))
    dz, y, (mean, rstd), gamma, sums, count = (np.asarray(array, np.float64) for array in above)
    dy = gamma * rstd * (dz - sums[0] / count - (y - mean) * rstd * sums[1] / count)
    dy = dy.astype(np.float32).astype(above[0].dtype).astype(np.float64)
    z = x.astype(np.float64)
    if norm is not None:
        (mean, rstd), gamma, beta = (np.asarray(vector, np.float64) for vector in norm)
        z = np.maximum(((z - mean) * rstd * gamma + beta).astype(np.float32).astype(x.dtype).astype(np.float64), 0)
    return dy, z, *_products(dy, w, z)


def _products(dy, w, z):
    """dx and dw."""
    pixels = dy.reshape(-1, dy.shape[-1])
    dw = pixels.T @ z.reshape(-1, z.shape[-1])
    return dy @ w.reshape(w.shape[0], -1).astype(np.float64), dw.reshape(w.shape)


def both(ops, above, w, x, norm, **options):
    """(dx, dw, sums of dx and of dx*xhat, None where no kernel masks dx and takes them) on the host."""
    out = ops.from_host(np.full(w.shape, np.nan, np.float32))
    norm = None if norm is None else tuple(put(ops, *norm))
    dx, parts = ops.conv2d_backward_both(*put(ops, *above, w, x), norm=norm, out=out, **POINT, **options)
    sums = None if parts is None else ops.to_host(ops.batch_norm_backward_sums(parts, norm[0]))
    return ops.to_host(dx), ops.to_host(out), sums


def check_whole(dx, dw, sums, above, w, x, norm):
    """Every bit is the definition's."""
    _, z, gradient, weight = expected_of(above, w, x, norm)
    gradient = gradient.astype(np.float32).astype(x.dtype).astype(np.float64)
    np.testing.assert_array_equal(dw, weight)
    if sums is not None:
        gradient = np.where(z > 0, gradient, 0)
        centred = x.astype(np.float64) - norm[0][0]
        np.testing.assert_array_equal(sums[0], gradient.sum((0, 1, 2)))
        np.testing.assert_array_equal(sums[1], (gradient * centred).sum((0, 1, 2)))
    np.testing.assert_array_equal(dx.astype(np.float64), gradient)


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_the_kernel_takes_what_it_says():
    def taken(x, filters, kernel=1, code=1, device="H200", **options):
        options = {**POINT, **options}
        weights = (filters, kernel, kernel, x[3] // options["groups"])
        return conv2d_both.applies(convolution("test", x, weights, **options), code, BUILT_IN[device])

    image = (2, 8, 8, 64)
    assert taken(image, 256) and taken(image, 512, code=2) and taken((2, 8, 8, 1000), 128)
    assert not taken(image, 256, code=0) and not taken(image, 256, device="A100")
    assert not taken(image, 192) and not taken(image, 640) and not taken((2, 8, 8, 60), 256)
    assert not taken(image, 256, kernel=3, padding=(1, 1)) and not taken(image, 256, stride=(2, 2))
    assert not taken(image, 256, groups=2) and not taken((0, 8, 8, 64), 256)


def test_plans_are_lazy_where_there_is_a_kernel_that_should_be_faster(monkeypatch):
    monkeypatch.undo()  # as it is chosen
    machine, device = cost.Machine.of(H200), BUILT_IN["A100"]
    assert [conv2d_both.pays(channels, 512) for channels in (8, 192, 200)] == [True, True, False]
    assert [conv2d_both.pays(channels, 128) for channels in (8, 256, 264)] == [True, True, False]
    for storage, channels, filters in itertools.product(
        ("bf16", "fp16", "fp32"), (8, 60, 64, 192, 256), (64, 128, 192, 512, 640)
    ):
        mode = precision(storage)
        conv = convolution("test", (2, 8, 8, channels), (filters, 1, 1, channels), **POINT)
        code = {"bf16": 1, "fp16": 2, "fp32": 0}[storage]
        there = conv2d_both.applies(conv, code, H200) and conv2d_both.pays(channels, filters)
        there = there or conv2d_join.applies(conv, code, H200, True)
        layer = m.Conv2d(channels, filters, 1, bias=False, name="conv")
        assert machine.does(layer, "lazy", mode, activated=True) == there, (storage, channels, filters)
        wide = conv2d_both_wide.applies(conv, code, H200) and conv2d_both_wide.pays(channels, filters)
        assert machine.does(layer, "lazy", mode) == (there or wide)
        assert machine.does(layer, "lazy", mode, adds=True) == wide
        assert not machine.does(layer, "lazy", mode, activated=True, adds=True)
        assert not cost.Machine.of(device).does(layer, "lazy", mode)


def test_operands_that_do_not_fit_are_refused():
    from minidl import cuda as ops

    with dry_run():
        rest = ops.empty((2, 16), float32), None, ops.empty((2, 16), np.float64), ops.empty((1,), np.float64)
        dz, w, x = (ops.empty(shape, float32) for shape in ((2, 4, 4, 16), (16, 1, 1, 8), (2, 4, 4, 8)))
        wide, short = ops.empty((2, 4, 5, 16), float32), ops.empty((2, 4, 4, 8), float32)
        for name, arrays, out in (
            ("dz", (wide, wide), w.shape), ("y", (dz, short), w.shape), ("out", (dz, dz), (16, 1, 1, 16)),
        ):  # fmt: skip
            with pytest.raises(ValueError, match=f"conv2d_backward_both: {name} "):
                ops.conv2d_backward_both(*arrays, *rest, w, x, out=ops.empty(out, float32), **POINT)
        with pytest.raises(TypeError, match="conv2d_backward_both: out"):
            ops.conv2d_backward_both(dz, dz, *rest, w, x, out=ops.empty(w.shape, bfloat16), **POINT)


@BELOW
@pytest.mark.parametrize("filters", [128, 256, 384, 512])
def test_every_variant_compiles_and_fits(filters, below):
    pytest.importorskip("cuda.pathfinder", reason="needs NVRTC")
    conv = convolution("test", (2, 8, 8, 64), (filters, 1, 1, 64), *((1, 1), (0, 0), (1, 1), 1))
    plans = [conv2d_both.plan(conv, code, (filters, filters, 64), below) for code in (1, 2)]
    variants = [("conv2d_both", tuple(plan.defines.items())) for plan in plans]
    for plan, report in zip(plans, nvrtc.compile_all(variants, nvrtc.target(H200.arch), 2), strict=True):
        check_report("conv2d_both", report, conv2d_both.THREADS, plan.shared, H200)


def emulated(shape, filters, below, seed):
    """`both`, of whole numbers in bfloat16, by the kernel's own source on this machine's processor; and its operands.

    As on two multiprocessors, so that a block has several tiles.
    """
    hosts = operands(np.random.default_rng(seed), shape, filters, bfloat16, below, whole=True)
    with pytest.MonkeyPatch.context() as patch, emulator.table(seed) as ops:
        patch.setattr(conv2d_both, "WORKERS", 2)
        patch.setattr(conv2d_both, "plan", conv2d_both.plan.__wrapped__)
        found = both(ops, *hosts)
        assert ops.kernels[0] == "conv2d_both_kernel"
    return found, hosts


@BELOW
@EACH
def test_its_source_is_right_whatever_comes_late(shape, filters, below):
    for seed in range(3):
        found, hosts = emulated(shape, filters, below, seed)
        check_whole(*found, *hosts)


GIVEN_UP = """        for (int k = 0; k < PIXELS; k += 16)
            masking.take<128>(to + columns_across() + k * 128, at.source(tiles.index) + columns_across() + k * 128, 0);
        if (threadIdx.x % 32 == 0) barrier_arrive(at.input_done(tiles.index));"""
# What would be wrong with the kernel, by luck seen seldom on a GPU or never: a line of it, and what is there instead.
FAULTS = {
    "no-fence-for-the-engine": ("fence_for_engine();\n            __syncwarp();", "__syncwarp();"),
    "a-stage-is-given-up-early": ("    commit_products();\n    await_products<0>();", "    commit_products();"),
    "an-input-is-given-up-early": (GIVEN_UP, "\n".join([GIVEN_UP.split("\n")[-1], *GIVEN_UP.split("\n")[:-1]])),
    "an-input-is-not-waited-for": ("    barrier_wait(at.input_come(inputs.index), inputs.parity);\n", ""),
    "an-output-is-written-too-soon": ("await_stores_read<RINGS - 1>()", "await_stores_read<RINGS>()"),
    "rows-are-not-waited-for": ("            barrier_wait(at.come(ring.index), ring.parity);\n", ""),
    "a-warp-is-not-waited-for": ("barrier_init(at.made(i), 4)", "barrier_init(at.made(i), 3)"),
    "one-arrival-too-many-is-expected": ("barrier_init(at.done(i), 12)", "barrier_init(at.done(i), 13)"),
    "what-is-behind-the-last-pixel-counts": ("factors, p.pixels - tile * PIXELS", "factors, PIXELS"),
    "an-end-without-a-wait": ("    if (threadIdx.x == 0) await_stores_read<0>();\n", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds_faults(fault):
    """So what it does not find is unlikely to be there."""

    def check(seed):
        for filters in (128, 384):  # with more stages than a tile has some do no harm, with as many others
            found, hosts = emulated((2, 15, 27, 64), filters, True, seed)
            check_whole(*found, *hosts)

    assert emulator.finds("conv2d_both", *FAULTS[fault], check)


def bottleneck():
    """The end of a residual block with a projection: its last convolution reads a ReLU over a batch norm alone."""
    graph = m.Graph()

    def norm(x, width, name, kernel=1):
        x = m.Conv2d(x.shape[-1], width, kernel, padding=kernel // 2, bias=False, name=f"{name}.conv")(x)
        return m.BatchNorm2d(width, name=f"{name}.bn")(x)

    x = m.ReLU(name="relu0")(norm(graph.input((6, 5, 3)), 16, "stem", 3))
    y = m.ReLU(name="relu1")(norm(x, 16, "main1", 3))
    x = m.ReLU(name="relu2")(m.Add(name="add")(norm(y, 128, "main2"), norm(x, 128, "side")))
    return graph.output(m.Linear(30 * 128, 5, name="fc")(m.Flatten()(x)))


@pytest.mark.parametrize("how", ["none", "elementwise", "gradients", "bnff"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_batch_norms_may_leave_their_last_pass_to_a_convolution(ops, how, precision, monkeypatch):
    """On a CPU, where a convolution makes its gradients of it by the same passes, with the same bits."""
    left, own = [], ops.conv2d_backward_both
    if ops.name == "cpu":
        monkeypatch.setattr(ops, "conv2d_makes_both", lambda shape, w, **geometry: w.shape[1:3] == (1, 1))
    monkeypatch.setattr(ops, "conv2d_backward_both", lambda *args, **named: left.append(1) or own(*args, **named))
    steps = []
    for lazy in (False, True):
        model = fused(bottleneck, how, ops, precision=precision)
        for name in ("main2.bn", "side.bn"):
            model.graph[name].layer.lazy = lazy
        steps.append(run(model))
    exact = ops.name == "cpu" or precision == "fp32"
    close(*steps, 0.0 if exact else 2.0**-6)
    # The projection's input is read by two; whose turn comes first has both gradients made.
    if ops.name == "cpu" or (precision == "bf16" and current_device().arch == (9, 0)):
        assert len(left) == 4


# -- the operation, and the kernel on a GPU ---------------------------------------------------------------------------


@BELOW
@EACH
@SIXTEEN
def test_whole_numbers_give_the_bits_of_the_definition(ops, shape, filters, storage, below, rng):
    hosts = operands(rng, shape, filters, storage, below, whole=True)
    if ops.name == "cuda" and current_device().arch == (9, 0):
        assert ops.conv2d_makes_both(shape, ops.from_host(hosts[1]), **POINT)
        assert (both(ops, *hosts)[2] is not None) == below
    check_whole(*both(ops, *hosts), *hosts)


@BELOW
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("storage", [float32, bfloat16, float16], ids=["fp32", "bf16", "fp16"])
def test_the_operation_is_its_parts(ops, storage, kernel, below, rng):
    """Also of convolutions that no kernel takes; of those it does within the rounding of sums."""
    above, w, x, norm = operands(rng, (2, 9, 7, 24), 128, storage, below)
    w = draw(rng, (128, kernel, kernel, 24), storage)
    geometry = {**POINT, "padding": (kernel // 2,) * 2}
    start = draw(rng, w.shape, float32)
    dz, y, moments, gamma, sums, count, w_, x_ = put(ops, *above, w, x)
    norm_ = None if norm is None else tuple(put(ops, *norm))
    outs = put(ops, start, start)
    dy = ops.batch_norm_backward_apply(dz, y, moments, gamma, sums, count)
    ops.conv2d_backward_weight(dy, x_, **geometry, out=outs[0], accumulate=True, norm=norm_)
    if below:
        expected, _ = ops.conv2d_backward_data_masked(dy, w_, x_, *norm_, **geometry)
    else:
        expected = ops.conv2d_backward_data(dy, w_, x.shape, **geometry)
    found, _ = ops.conv2d_backward_both(
        dz, y, moments, gamma, sums, count, w_, x_, norm=norm_, out=outs[1], accumulate=True, **geometry
    )
    if below:  # what no kernel masks is masked by whoever takes it
        z = ops.batch_norm_apply(x_, *norm_, relu=True)
        found, expected = ops.relu_backward(found, z), ops.relu_backward(expected, z)
    largest = [np.abs(ops.to_host(array)).astype(np.float64).max() for array in (dy, z if below else x_)]
    found, expected, *outs = map(ops.to_host, (found, expected, *outs))
    assert_close(found, expected, storage, terms=128 * kernel**2, scale=largest[0] * 4)
    assert_close(outs[1], outs[0], float32, terms=126, scale=np.prod(largest))


@BELOW
@EACH
@SIXTEEN
def test_it_equals_the_definition_and_itself(hopper, shape, filters, storage, below, rng):
    above, w, x, norm = hosts = operands(rng, shape, filters, storage, below)
    dx, dw, sums = both(hopper, *hosts)
    again = both(hopper, *hosts)
    for one, other in zip((dx, dw, sums), again, strict=True):
        assert one is None or one.tobytes() == other.tobytes()
    dy, z, gradient, weight = expected_of(*hosts, passes=hopper)
    if below:
        gradient = np.where(z > 0, gradient, 0)
        g, centred = dx.astype(np.float64), (x.astype(np.float64) - norm[0][0]) * norm[0][1]
        for row, terms in zip(sums, (g, g * centred), strict=True):
            pixels = int(np.prod(shape[:3]))
            assert_close(row, terms.sum((0, 1, 2)), float32, terms=pixels, scale=np.abs(terms).max(initial=0.0))
    assert_close(dx, gradient, storage, terms=filters, scale=np.abs(dy).max() * 4)
    assert_close(dw, weight, float32, terms=dy[..., 0].size, scale=np.abs(dy).max() * np.abs(z).max())


@BELOW
@pytest.mark.parametrize("name", ["few-channels", "deepest"])
def test_arrays_may_lie_at_a_pitch(hopper, name, below, rng):
    shape, filters = SHAPES[name]
    above, w, x, norm = operands(rng, shape, filters, bfloat16, below)
    rest, norm_ = put(hopper, *above[2:], w), None if norm is None else tuple(put(hopper, *norm))
    found = []
    for before, after in ((0, 0), (8, 8), (1, 2)):
        dz, y, x_ = (pitched(hopper, array, before, after) for array in (*above[:2], x))
        out = hopper.from_host(np.full(w.shape, np.nan, np.float32))
        dx, parts = hopper.conv2d_backward_both(dz, y, *rest, x_, norm=norm_, out=out, **POINT)
        found.append([hopper.to_host(array).tobytes() for array in (dx, out, parts) if array is not None])
    assert found[0] == found[1] == found[2]


@BELOW
@EACH
def test_all_of_the_results_are_written_and_nothing_else(hopper, shape, filters, below, rng, monkeypatch):
    hosts, guarded = operands(rng, shape, filters, bfloat16, below, whole=True), Guarded(hopper)
    monkeypatch.setattr(conv2d_both, "empty", guarded)
    dx, dw, _ = both(hopper, *hosts)
    gradient, weight = expected_of(*hosts)[2:]
    np.testing.assert_array_equal(dw, weight)
    assert np.isfinite(dx.astype(np.float32)).all()
    guarded.check(3 if below else 2)


@pytest.mark.parametrize("where", ["dz", "y", "x", "moments"])
def test_what_is_not_finite_stays_where_it_belongs(hopper, where, rng):
    above, w, x, norm = operands(rng, (2, 9, 11, 64), 256, bfloat16, True)
    w = np.ones_like(w)
    if where == "moments":
        norm[0][1, 3] = np.nan
    elif where == "x":
        x[0, 1, 2, 3] = np.nan
    else:
        above[where == "y"][1, 2, 3, 4] = np.nan
    dx, dw, sums = both(hopper, above, w, x, norm)
    with np.errstate(invalid="ignore"):
        _, z, gradient, weight = expected_of(above, w, x, norm)
    gradient = np.where(z > 0, gradient, 0)  # behind a ReLU that was not positive, or was not a number, nothing counts
    np.testing.assert_array_equal(np.isnan(dw), np.isnan(weight))
    np.testing.assert_array_equal(np.isnan(dx.astype(np.float32)), np.isnan(gradient))


def test_a_large_batch_is_summed_as_precisely(hopper, rng):
    """More tiles than any block has in a network, and each block several of them.

    Moments and sums are those of y and dz, as a batch norm takes them, so dy adds up to zero: nothing grows that matrix
    units could cut much off (`CUT`).
    """
    above, w, x, norm = hosts = operands(rng, (64, 56, 56, 64), 256, bfloat16, True)
    dz, y = (np.asarray(array, np.float64) for array in above[:2])
    mean, rstd = above[2][:] = y.mean((0, 1, 2)), 1 / y.std((0, 1, 2))
    above[4][:] = dz.sum((0, 1, 2)), (dz * (y - mean) * rstd).sum((0, 1, 2))
    dx, dw, sums = both(hopper, *hosts)
    dy, z, gradient, weight = expected_of(*hosts, passes=hopper)
    assert_close(dx, np.where(z > 0, gradient, 0), bfloat16, terms=256, scale=np.abs(dy).max() * 4)
    assert_close(dw, weight, float32, terms=dy[..., 0].size, scale=CUT * dy.std() * z.std())
