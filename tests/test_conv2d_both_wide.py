"""Both gradients of a 1x1 convolution to few filters under a batch norm, by the kernel for wide images: those of
separate passes, what comes down a shortcut added, masked by a residual sum's signs and summed for who is below it."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_both, conv2d_both_wide
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import BUILT_IN, current_device
from minidl.precision import bfloat16, float32
from tests import emulator
from tests.convolutions import SIXTEEN, Guarded, pitched, put
from tests.kernel_checks import check_report
from tests.test_conv2d_both import POINT, expected_of, operands
from tests.tolerance import assert_close, draw, draw_integers

H200 = BUILT_IN["H200"]
# Images, height, width, channels; filters. Pixels that fill no tile, channels that fill no piece or block, each room.
SHAPES = {
    "one-piece": ((1, 5, 7, 64), 64),
    "few-channels": ((2, 9, 11, 24), 40),
    "one-block": ((2, 15, 13, 256), 64),
    "further-blocks": ((1, 13, 31, 328), 64),
    "more-filters": ((3, 8, 8, 128), 128),
    "more-filters-ragged": ((2, 10, 13, 200), 96),
    "many-tiles": ((4, 29, 23, 192), 64),
}
EACH = pytest.mark.parametrize(("shape", "filters"), SHAPES.values(), ids=SHAPES)
JOIN = pytest.mark.parametrize("join", [False, True], ids=["plain", "join"])
ADD = pytest.mark.parametrize("add", ["", "full", "spaced"], ids=["alone", "added", "spaced"])


@pytest.fixture(autouse=True)
def wherever_it_can(monkeypatch):
    """Also where other kernels should be faster."""
    monkeypatch.setattr(conv2d_both_wide, "MOST_COLUMNS", 1000)
    monkeypatch.setattr(conv2d_both, "MOST_COLUMNS", -1)


def drawn(rng, shape, filters, storage, join, add, whole=False):
    """What is above; w, x; (raw, moments, where the sum was positive) or None; the addend or None."""
    above, w, x, _ = operands(rng, shape, filters, storage, False, whole)

    def image(*sizes):
        return draw_integers(rng, sizes, storage) if whole else draw(rng, sizes, storage)

    moments = np.stack([rng.integers(-1, 2, shape[3]), np.ones(shape[3])]).astype(np.float32)
    below = (image(*shape), moments, rng.random(shape) < 0.6) if join else None
    n, h, w_, c = shape
    addend = {"": lambda: None, "full": lambda: image(*shape), "spaced": lambda: image(n, -(-h // 2), -(-w_ // 2), c)}
    return above, w, x, below, addend[add]()


def bits(positive):
    """Signs, as signs.cuh has them."""
    packed = np.packbits(positive, axis=-1, bitorder="little")
    missing = -packed.shape[-1] % 16
    return np.concatenate([packed, np.full((*packed.shape[:-1], missing), 255, np.uint8)], -1)


def both(ops, above, w, x, below, add, **options):
    """(dx, dw, sums of dx and of dx*xhat, None without a join) on the host."""
    out = ops.from_host(np.full(w.shape, np.nan, np.float32))
    join = None if below is None else tuple(put(ops, below[0], below[1], bits(below[2])))
    addend = None if add is None else ops.from_host(add)
    dx, parts = ops.conv2d_backward_both(
        *put(ops, *above, w, x), join=join, add=addend, out=out, **POINT, **options
    )
    sums = None if parts is None else ops.to_host(ops.batch_norm_backward_sums(parts, join[1]))
    return ops.to_host(dx), ops.to_host(out), sums


def spread(add, shape):
    """An addend as large as the image."""
    if add is None or add.shape == shape:
        return 0.0 if add is None else add.astype(np.float64)
    whole = np.zeros(shape)
    whole[:, ::2, ::2] = add
    return whole


def check_whole(dx, dw, sums, above, w, x, below, add):
    """Every bit is the definition's."""
    _, _, gradient, weight = expected_of(above, w, x, None)
    gradient = (gradient + spread(add, x.shape)).astype(np.float32).astype(x.dtype).astype(np.float64)
    np.testing.assert_array_equal(dw, weight)
    if below is not None:
        raw, moments, positive = below
        gradient = np.where(positive, gradient, 0)
        if sums is not None:
            np.testing.assert_array_equal(sums[0], gradient.sum((0, 1, 2)))
            np.testing.assert_array_equal(sums[1], (gradient * (raw.astype(np.float64) - moments[0])).sum((0, 1, 2)))
    np.testing.assert_array_equal(dx.astype(np.float64), gradient)


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_the_kernel_takes_what_it_says():
    def taken(x, filters, kernel=1, code=1, device="H200", **options):
        options = {**POINT, **options}
        weights = (filters, kernel, kernel, x[3] // options["groups"])
        return conv2d_both_wide.applies(convolution("test", x, weights, **options), code, BUILT_IN[device])

    image = (2, 8, 8, 256)
    assert taken(image, 64) and taken(image, 128, code=2) and taken((2, 8, 8, 1000), 8)
    assert not taken(image, 64, code=0) and not taken(image, 64, device="A100")
    assert not taken(image, 136) and not taken(image, 60) and not taken((2, 8, 8, 60), 64)
    assert not taken(image, 64, kernel=3, padding=(1, 1)) and not taken(image, 64, stride=(2, 2))
    assert not taken(image, 64, groups=2) and not taken((0, 8, 8, 256), 64)


@JOIN
@pytest.mark.parametrize("filters", [64, 128])
def test_every_variant_compiles_and_fits(filters, join):
    pytest.importorskip("cuda.pathfinder", reason="needs NVRTC")
    conv = convolution("test", (2, 8, 8, 256), (filters, 1, 1, 256), *((1, 1), (0, 0), (1, 1), 1))
    plans = [conv2d_both_wide.plan(conv, code, (0,) * 5, add, join) for code in (1, 2) for add in (0, 1, 2)]
    variants = [("conv2d_both_wide", tuple(plan.defines.items())) for plan in plans]
    for plan, report in zip(plans, nvrtc.compile_all(variants, nvrtc.target(H200.arch), 2), strict=True):
        check_report("conv2d_both_wide", report, conv2d_both_wide.THREADS, plan.shared, H200)


def emulated(shape, filters, join, add, seed):
    """`both`, of whole numbers in bfloat16, by the kernel's own source on this machine's processor; and its operands.

    As on two multiprocessors, so that a block has several tiles.
    """
    hosts = drawn(np.random.default_rng(seed), shape, filters, bfloat16, join, add, whole=True)
    with pytest.MonkeyPatch.context() as patch, emulator.table(seed) as ops:
        patch.setattr(conv2d_both_wide, "WORKERS", 2)
        patch.setattr(conv2d_both_wide, "plan", conv2d_both_wide.plan.__wrapped__)
        found = both(ops, *hosts)
        assert ops.kernels[0] == "conv2d_both_wide_kernel"
    return found, hosts


@ADD
@JOIN
@EACH
def test_its_source_is_right_whatever_comes_late(shape, filters, join, add):
    for seed in range(2):
        found, hosts = emulated(shape, filters, join, add, seed)
        assert (found[2] is not None) == join
        check_whole(*found, *hosts)


# What would be wrong with the kernel, by luck seen seldom on a GPU or never: a line of it, and what is there instead.
FAULTS = {
    "no-fence-for-the-products": ("fence_for_engine();\n        arrive(at.made", "arrive(at.made"),
    "no-fence-for-the-store": ("fence_for_engine();\n                arrive(at.finished", "arrive(at.finished"),
    "a-stage-is-given-up-early": (
        "    barrier_wait(at.filters_come(), 0);\n", "    barrier_wait(at.filters_come(), 0);\n    arrive(at.done(0));\n"
    ),
    "a-slot-is-given-up-early": (
        "            commit_products();\n            await_products<0>();\n            if", "            if"
    ),
    "a-slot-is-stored-over": ("await_stores_read<0>();\n            barrier_arrive", "barrier_arrive"),
    "a-slot-is-not-waited-for": ("            barrier_wait(at.slot_come(slots.index), slots.parity);\n            const", "            const"),
    "what-is-below-is-not-waited-for": (
        "                barrier_wait(at.slot_come(slots.index), slots.parity);  //", "                //"
    ),
    "what-is-spaced-is-not-waited-for": ("if constexpr (ADD == 2) barrier_wait", "if constexpr (false) barrier_wait"),
    "what-is-spaced-comes-too-soon": (
        "            barrier_wait(at.slot_done(ring.index), ring.parity ^ 1);\n#pragma unroll 1", "#pragma unroll 1"
    ),
    "rows-are-not-waited-for": ("        barrier_wait(at.come(ring.index), ring.parity);\n", ""),
    "others-rows-are-not-waited-for": ("                warpgroup_sync(1 + DATA + own);\n", ""),
    "a-warp-is-not-waited-for": ("barrier_init(at.finished(i), 4)", "barrier_init(at.finished(i), 3)"),
    "one-arrival-too-many-is-expected": ("barrier_init(at.done(i), 12)", "barrier_init(at.done(i), 13)"),
    "parts-that-there-are-not": ("    for (; parts < p.parts; ++parts)  //", "    for (; false;)  //"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds_faults(fault):
    """So what it does not find is unlikely to be there."""

    def check(seed):
        for shape, filters in (((2, 12, 23, 256), 64), ((1, 23, 37, 192), 128)):
            found, hosts = emulated(shape, filters, True, "spaced", seed)
            check_whole(*found, *hosts)

    assert emulator.finds("conv2d_both_wide", *FAULTS[fault], check)


# -- the operation, and the kernel on a GPU ---------------------------------------------------------------------------


@ADD
@JOIN
@EACH
@SIXTEEN
def test_whole_numbers_give_the_bits_of_the_definition(hopper, shape, filters, storage, join, add, rng):
    hosts = drawn(rng, shape, filters, storage, join, add, whole=True)
    assert hopper.conv2d_makes_both(shape, hopper.from_host(hosts[1]), **POINT, join=join, add=bool(add))
    found = both(hopper, *hosts)
    assert (found[2] is not None) == join
    check_whole(*found, *hosts)


@JOIN
@pytest.mark.parametrize("add", ["", "full"], ids=["alone", "added"])
@pytest.mark.parametrize("storage", [float32, bfloat16], ids=["fp32", "bf16"])
def test_the_operation_is_its_parts(ops, storage, join, add, rng, monkeypatch):
    """Also where no kernel makes both."""
    monkeypatch.setattr(conv2d_both_wide, "MOST_COLUMNS", 0)
    above, w, x, below, addend = drawn(rng, (2, 9, 7, 72), 64, storage, join, add)
    dz, y, moments, gamma, sums, count, w_, x_ = put(ops, *above, w, x)
    outs = put(ops, *(draw(rng, w.shape, float32),) * 2)
    dy = ops.batch_norm_backward_apply(dz, y, moments, gamma, sums, count)
    ops.conv2d_backward_weight(dy, x_, **POINT, out=outs[0], accumulate=True)
    held, added = None, None if addend is None else ops.from_host(addend)
    if join:  # the array that is masked by: positive where the sum was
        x_ = ops.from_host(np.where(below[2], 1, 0).astype(x.dtype))
        signs = ops.from_host(bits(below[2])) if ops.name == "cuda" and storage == bfloat16 else None
        held = (*put(ops, *below[:2]), signs)
        expected, _ = ops.conv2d_backward_data_masked(dy, w_, *held[:2], y=x_, signs=signs, add=added, **POINT)
    else:
        expected = ops.conv2d_backward_data(dy, w_, x.shape, add=added, **POINT)
    if join and ops.name == "cuda" and signs is None:
        return  # sums of float32 have no signs
    ops.conv2d_backward_weight(dy, x_, **POINT, out=outs[0])
    found, _ = ops.conv2d_backward_both(
        dz, y, moments, gamma, sums, count, w_, x_, join=held, add=added, out=outs[1], **POINT
    )
    for one, other in ((found, expected), outs):
        np.testing.assert_array_equal(*map(ops.to_host, (one, other)))


@ADD
@JOIN
@EACH
@SIXTEEN
def test_it_equals_the_definition_and_itself(hopper, shape, filters, storage, join, add, rng):
    above, w, x, below, addend = hosts = drawn(rng, shape, filters, storage, join, add)
    dx, dw, sums = both(hopper, *hosts)
    again = both(hopper, *hosts)
    for one, other in zip((dx, dw, sums), again, strict=True):
        assert one is None or one.tobytes() == other.tobytes()
    dy, z, gradient, weight = expected_of(above, w, x, None, passes=hopper)
    gradient = gradient + spread(addend, shape)
    if join:
        gradient = np.where(below[2], gradient, 0)
        g, centred = dx.astype(np.float64), below[0].astype(np.float64) - below[1][0]
        for row, terms in zip(sums, (g, g * centred), strict=True):
            pixels = int(np.prod(shape[:3]))
            assert_close(row, terms.sum((0, 1, 2)), float32, terms=pixels, scale=np.abs(terms).max(initial=0.0))
    assert_close(dx, gradient, storage, terms=filters, scale=np.abs(dy).max() * 4)
    assert_close(dw, weight, float32, terms=dy[..., 0].size, scale=np.abs(dy).max() * np.abs(z).max())


@pytest.mark.parametrize("name", ["few-channels", "more-filters-ragged"])
def test_arrays_may_lie_at_a_pitch(hopper, name, rng):
    shape, filters = SHAPES[name]
    above, w, x, below, addend = drawn(rng, shape, filters, bfloat16, True, "full")
    rest, (moments, signs) = put(hopper, *above[2:], w), put(hopper, below[1], bits(below[2]))
    found = []
    for before, after in ((0, 0), (8, 8), (1, 2)):
        dz, y, x_, raw, add = (pitched(hopper, a, before, after) for a in (*above[:2], x, below[0], addend))
        out = hopper.from_host(np.full(w.shape, np.nan, np.float32))
        join = raw, moments, signs
        dx, parts = hopper.conv2d_backward_both(dz, y, *rest, x_, join=join, add=add, out=out, **POINT)
        found.append([hopper.to_host(array).tobytes() for array in (dx, out, parts)])
    assert found[0] == found[1] == found[2]


@JOIN
@EACH
def test_all_of_the_results_are_written_and_nothing_else(hopper, shape, filters, join, rng, monkeypatch):
    hosts, guarded = drawn(rng, shape, filters, bfloat16, join, "full", whole=True), Guarded(hopper)
    monkeypatch.setattr(conv2d_both_wide, "empty", guarded)
    check_whole(*both(hopper, *hosts), *hosts)
    guarded.check(3 if join else 2)


@pytest.mark.parametrize("where", ["dz", "y", "x", "raw", "add"])
@pytest.mark.parametrize("value", [np.inf, np.nan], ids=["inf", "nan"])
def test_what_is_not_finite_stays_where_it_belongs(hopper, where, value, rng):
    above, w, x, below, addend = drawn(rng, (2, 9, 11, 264), 64, bfloat16, True, "full")
    w, positive = np.ones_like(w), below[2]
    place = 1, 4, 5, 3  # whose sign does not count: a gradient that is not finite is masked, too
    positive[place] = True
    {"dz": above[0], "y": above[1], "x": x, "raw": below[0], "add": addend}[where][place] = value
    dx, dw, sums = both(hopper, above, w, x, below, addend)
    expected = np.ones_like(dx, bool)
    if where in ("dz", "y"):
        expected[place[:3]] = ~positive[place[:3]]
    elif where == "add":
        expected[place] = False
    np.testing.assert_array_equal(np.isfinite(dx.astype(np.float32)), expected)
    rows = np.ones_like(dw, bool)
    if where in ("dz", "y"):
        rows[3] = False
    elif where == "x":
        rows[..., 3] = False
    np.testing.assert_array_equal(np.isfinite(dw), rows)
    columns = np.ones_like(sums, bool)
    if where in ("dz", "y", "add"):
        columns[:, ~expected.all((0, 1, 2))] = False
    elif where == "raw":
        columns[1, 3] = False
    np.testing.assert_array_equal(np.isfinite(sums), columns)


def test_a_join_without_its_signs_is_refused(hopper, rng):
    above, w, x, below, _ = drawn(rng, (1, 5, 7, 64), 64, bfloat16, True, "")
    arrays, raw, moments = put(hopper, *above, w, x), *put(hopper, *below[:2])
    out = hopper.empty(w.shape, float32)
    for signs in (raw, hopper.empty((1, 5, 7, 8), np.uint8)):
        with pytest.raises(ValueError, match="signs"):
            hopper.conv2d_backward_both(*arrays, join=(raw, moments, signs), out=out, **POINT)
    with pytest.raises(ValueError, match="raw"):
        hopper.conv2d_backward_both(*arrays, join=(arrays[0][:, :4], moments, raw), out=out, **POINT)
