"""Both gradients of a 1x1 convolution to few filters under a batch norm, by the kernel for wide images: those of
separate passes, what comes down a shortcut added, masked for a ReLU and summed for a batch norm below it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_both, conv2d_both_wide
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float32
from tests import emulator
from tests.convolutions import SIXTEEN, Guarded, pitched, put
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
    "many-tiles": ((2, 27, 23, 192), 64),
}
EACH = pytest.mark.parametrize(("shape", "filters"), SHAPES.values(), ids=SHAPES)
NORMS = pytest.mark.parametrize("norms", [0, 1, 2], ids=["plain", "below", "pair"])
ADD = pytest.mark.parametrize("add", ["", "full", "spaced"], ids=["alone", "added", "spaced"])


@pytest.fixture(autouse=True)
def wherever_it_can(monkeypatch):
    """Also where other kernels should be faster."""
    monkeypatch.setattr(conv2d_both_wide, "MOST_COLUMNS", 1000)
    monkeypatch.setattr(conv2d_both, "applies", lambda *_: False)


def drawn(rng, shape, filters, storage, norms, add, whole=False):
    """What is above; w, x; (raw, moments) of each batch norm below; the addend or None."""
    above, w, x, _ = operands(rng, shape, filters, storage, False, whole)

    def image(*sizes):
        return draw_integers(rng, sizes, storage) if whole else draw(rng, sizes, storage)

    means = rng.integers(-1, 2, (norms, shape[3]))
    below = [(image(*shape), np.stack([mean, np.ones(shape[3])]).astype(np.float32)) for mean in means]
    n, h, w_, c = shape
    addend = {"": lambda: None, "full": lambda: image(*shape), "spaced": lambda: image(n, -(-h // 2), -(-w_ // 2), c)}
    return above, w, x, below, addend[add]()


def both(ops, above, w, x, below, add, **options):
    """(dx, dw, of each batch norm below sums of dx and of dx*xhat) on the host."""
    out = ops.from_host(np.full(w.shape, np.nan, np.float32))
    held = [tuple(put(ops, *norm)) for norm in below]
    named = dict(zip(("below", "other"), held, strict=False))
    addend = None if add is None else ops.from_host(add)
    dx, parts = ops.conv2d_backward_both(*put(ops, *above, w, x), **named, add=addend, out=out, **POINT, **options)
    each = [] if parts is None else [parts] if len(held) == 1 else list(parts)
    sums = [ops.to_host(ops.batch_norm_backward_sums(of, norm[1])) for of, norm in zip(each, held, strict=True)]
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
    gradient = np.where(x > 0, gradient, 0) if below else gradient
    for (raw, moments), found in zip(below, sums, strict=True):
        np.testing.assert_array_equal(found[0], gradient.sum((0, 1, 2)))
        np.testing.assert_array_equal(found[1], (gradient * (raw.astype(np.float64) - moments[0])).sum((0, 1, 2)))
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


def test_what_is_below_must_be_like_the_input():
    from minidl import cuda as ops

    with dry_run():
        wide, few, vector = (2, 4, 4, 256), (2, 4, 4, 64), ops.empty((2, 64), np.float64)
        dz, x, w = (ops.empty(shape, bfloat16) for shape in (few, wide, (64, 1, 1, 256)))
        rest = ops.empty((2, 64), float32), None, vector, ops.empty((1,), np.float64), w, x
        below, out = (x, ops.empty((2, 256), float32)), ops.empty(w.shape, float32)
        for error, what, named in (
            (ValueError, "raw", {"below": (x[:1], below[1])}),
            (TypeError, "raw", {"below": (ops.empty(wide, float32), below[1])}),
            (ValueError, "other", {"below": below, "other": (x[:1], below[1])}),
            (ValueError, "other", {"other": below}),
            (ValueError, "add", {"below": below, "add": x[:, :3]}),
        ):
            with pytest.raises(error, match=f"conv2d_backward_both: {what}"):
                ops.conv2d_backward_both(dz, dz, *rest, out=out, **named, **POINT)
        ops.conv2d_backward_both(dz, dz, *rest, out=out, below=below, other=below, add=x[:, ::2, ::2], **POINT)


def emulated(shape, filters, norms, add, seed):
    """`both`, of whole numbers in bfloat16, by the kernel's own source on this machine's processor; and its operands.

    As on two multiprocessors, so that a block has several tiles.
    """
    hosts = drawn(np.random.default_rng(seed), shape, filters, bfloat16, norms, add, whole=True)
    with pytest.MonkeyPatch.context() as patch, emulator.table(seed) as ops:
        patch.setattr(conv2d_both_wide, "WORKERS", 2)
        patch.setattr(conv2d_both_wide, "plan", conv2d_both_wide.plan.__wrapped__)
        found = both(ops, *hosts)
        assert ops.kernels[0] == "conv2d_both_wide_kernel"
    return found, hosts


@pytest.mark.parametrize(
    ("name", "norms", "add"),
    [
        (name, norms, add)
        for name in SHAPES
        for norms, add in itertools.product((0, 1, 2), ("", "full", "spaced"))
        if name == "one-block" or (norms, add) in ((0, ""), (1, "spaced"), (2, "full"))
    ],
)
def test_its_source_is_right_whatever_comes_late(name, norms, add):
    for seed in range(2):
        found, hosts = emulated(*SHAPES[name], norms, add, seed)
        check_whole(*found, *hosts)


# What would be wrong with the kernel, by luck seen seldom on a GPU or never: a line of it, and what is there instead.
WAIT = "                await_slot(at, slots);"
COME = "            barrier_wait(at.slot_come(slots.index), slots.parity);\n            const"
FREE = "                barrier_wait(at.slot_done(slots.index), slots.parity ^ 1);\n"
FAULTS = {
    "no-fence-for-the-products": ("fence_for_engine();\n        arrive(at.made", "arrive(at.made"),
    "no-fence-for-the-store": ("fence_for_engine();\n                arrive(at.finished", "arrive(at.finished"),
    "a-stage-is-given-up-early": ("at.filters_come(), 0);\n", "at.filters_come(), 0);\n    arrive(at.done(0));\n"),
    "a-slot-is-given-up-early": (
        "            commit_products();\n            await_products<0>();\n            if", "            if"
    ),
    "a-slot-is-stored-over": ("await_stores_read<0>();\n            barrier_arrive", "barrier_arrive"),
    "a-slot-is-not-waited-for": (COME, "            const"),
    "what-is-below-is-not-waited-for": (WAIT + "  // what", "                // what"),
    "what-is-spaced-is-not-waited-for": ("if constexpr (ADD == 2) barrier_wait", "if constexpr (false) barrier_wait"),
    "others-slots-are-not-waited-for": (WAIT + "\n                arrive", "                arrive"),
    "what-is-spaced-comes-too-soon": (FREE + "                addend", "                addend"),
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
            found, hosts = emulated(shape, filters, 2, "spaced", seed)
            check_whole(*found, *hosts)

    assert emulator.finds("conv2d_both_wide", *FAULTS[fault], check)


# -- the operation, and the kernel on a GPU ---------------------------------------------------------------------------


@ADD
@NORMS
@EACH
@SIXTEEN
def test_whole_numbers_give_the_bits_of_the_definition(hopper, shape, filters, storage, norms, add, rng):
    hosts = drawn(rng, shape, filters, storage, norms, add, whole=True)
    assert hopper.conv2d_makes_both(shape, hopper.from_host(hosts[1]), **POINT, below=norms, add=bool(add))
    found = both(hopper, *hosts)
    check_whole(*found, *hosts)


@NORMS
@pytest.mark.parametrize("add", ["", "full"], ids=["alone", "added"])
@pytest.mark.parametrize("storage", [float32, bfloat16], ids=["fp32", "bf16"])
def test_the_operation_is_its_parts(ops, storage, norms, add, rng, monkeypatch):
    """Also where no kernel makes both."""
    monkeypatch.setattr(conv2d_both_wide, "MOST_COLUMNS", 0)
    above, w, x, below, addend = drawn(rng, (2, 9, 7, 72), 64, storage, norms, add)
    dz, y, moments, gamma, sums, count, w_, x_ = put(ops, *above, w, x)
    outs = put(ops, *(draw(rng, w.shape, float32),) * 2)
    dy = ops.batch_norm_backward_apply(dz, y, moments, gamma, sums, count)
    ops.conv2d_backward_weight(dy, x_, **POINT, out=outs[0], accumulate=True)
    held, added = None, None if addend is None else ops.from_host(addend)
    if norms:
        held = tuple(put(ops, *below[0]))
        expected, _ = ops.conv2d_backward_data_masked(dy, w_, *held, y=x_, add=added, **POINT)
    else:
        expected = ops.conv2d_backward_data(dy, w_, x.shape, add=added, **POINT)
    found, _ = ops.conv2d_backward_both(
        dz, y, moments, gamma, sums, count, w_, x_, below=held, add=added, out=outs[1], accumulate=True, **POINT
    )
    for one, other in ((found, expected), outs):
        np.testing.assert_array_equal(*map(ops.to_host, (one, other)))


@ADD
@NORMS
@EACH
@SIXTEEN
def test_it_equals_the_definition_and_itself(hopper, shape, filters, storage, norms, add, rng):
    above, w, x, below, addend = hosts = drawn(rng, shape, filters, storage, norms, add)
    dx, dw, sums = both(hopper, *hosts)
    again = both(hopper, *hosts)
    for one, other in zip((dx, dw, *sums), (*again[:2], *again[2]), strict=True):
        assert one.tobytes() == other.tobytes()
    dy, z, gradient, weight = expected_of(above, w, x, None, passes=hopper)
    gradient = gradient + spread(addend, shape)
    gradient = np.where(x > 0, gradient, 0) if norms else gradient
    for (raw, moments), found in zip(below, sums, strict=True):
        g, centred = dx.astype(np.float64), raw.astype(np.float64) - moments[0]
        for row, terms in zip(found, (g, g * centred), strict=True):
            pixels = int(np.prod(shape[:3]))
            assert_close(row, terms.sum((0, 1, 2)), float32, terms=pixels, scale=np.abs(terms).max(initial=0.0))
    assert_close(dx, gradient, storage, terms=filters, scale=np.abs(dy).max() * 4)
    assert_close(dw, weight, float32, terms=dy[..., 0].size, scale=np.abs(dy).max() * np.abs(z).max())


@pytest.mark.parametrize("name", ["few-channels", "more-filters-ragged"])
def test_arrays_may_lie_at_a_pitch(hopper, name, rng):
    shape, filters = SHAPES[name]
    above, w, x, below, addend = drawn(rng, shape, filters, bfloat16, 2, "full")
    rest, moments = put(hopper, *above[2:], w), put(hopper, *(norm[1] for norm in below))
    found = []
    for before, after in ((0, 0), (8, 8), (1, 2)):
        arrays = *above[:2], x, addend, below[0][0], below[1][0]
        dz, y, x_, add, *raw = (pitched(hopper, array, before, after) for array in arrays)
        out = hopper.from_host(np.full(w.shape, np.nan, np.float32))
        named = dict(zip(("below", "other"), zip(raw, moments, strict=True), strict=True))
        dx, parts = hopper.conv2d_backward_both(dz, y, *rest, x_, **named, add=add, out=out, **POINT)
        found.append([hopper.to_host(array).tobytes() for array in (dx, out, parts)])
    assert found[0] == found[1] == found[2]


@NORMS
@EACH
def test_all_of_the_results_are_written_and_nothing_else(hopper, shape, filters, norms, rng, monkeypatch):
    hosts, guarded = drawn(rng, shape, filters, bfloat16, norms, "full", whole=True), Guarded(hopper)
    monkeypatch.setattr(conv2d_both_wide, "empty", guarded)
    check_whole(*both(hopper, *hosts), *hosts)
    guarded.check(3 if norms else 2)


@pytest.mark.parametrize("where", ["dz", "y", "x", "raw", "other", "add"])
@pytest.mark.parametrize("value", [np.inf, np.nan], ids=["inf", "nan"])
def test_what_is_not_finite_stays_where_it_belongs(hopper, where, value, rng):
    above, w, x, below, addend = drawn(rng, (2, 9, 11, 264), 64, bfloat16, 2, "full")
    w, place = np.ones_like(w), (1, 4, 5, 3)
    x[place] = 1
    positive = x > 0
    arrays = dict(
        zip(("dz", "y", "x", "raw", "other", "add"), (*above[:2], x, below[0][0], below[1][0], addend), strict=True)
    )
    arrays[where][place] = value
    masked = where == "x" and np.isnan(value)  # which is not positive
    dx, dw, sums = both(hopper, above, w, x, below, addend)
    sums = np.stack(sums)
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
        columns[..., ~expected.all((0, 1, 2))] = False
    elif where in ("raw", "other"):
        columns[int(where == "other"), 1, 3] = False
    if masked:
        assert dx[place] == 0
    np.testing.assert_array_equal(np.isfinite(sums), columns)
