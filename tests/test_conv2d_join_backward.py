"""The gradient of a batch norm's input that is made on its way into a 1x1 data gradient, by one kernel."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_join
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.precision import bfloat16, float16, float32
from tests import emulator
from tests import test_conv2d_both as both
from tests.convolutions import SIXTEEN, Guarded, pitched, put
from tests.kernel_checks import check_report
from tests.test_conv2d_both import BELOW
from tests.test_conv2d_join import H200, LARGE, POINT

# Images, height, width, channels; filters, more than conv2d_both.cu takes where it is forced.
SHAPES = {
    "one-tile": ((1, 5, 7, 256), 640),
    "half-a-tile": ((2, 9, 9, 256), 640),
    "many-tiles": ((3, 14, 15, 256), 768),
    "deep": ((2, 11, 13, 256), 1024),
    "tiles-cut-in-two": ((2, 15, 20, 256), 640),
}
EACH = pytest.mark.parametrize(("shape", "filters"), SHAPES.values(), ids=SHAPES)


@pytest.fixture(autouse=True)
def wherever_it_can(monkeypatch):
    """Also where two kernels should be faster."""
    monkeypatch.setattr(conv2d_join, "LEAST_TILES", 0)


@BELOW
@pytest.mark.parametrize("filters", [256, 1024])
def test_every_variant_compiles_and_fits(filters, below):
    pytest.importorskip("cuda.pathfinder", reason="needs NVRTC")
    conv = convolution("test", (2, 8, 8, 256), (filters, 1, 1, 256), *((1, 1), (0, 0), (1, 1), 1))
    plans = [conv2d_join.plan_backward(conv, code, (filters,) * 2, 256, below, H200) for code in (1, 2)]
    variants = [("conv2d_join", tuple(plan.defines.items())) for plan in plans]
    for plan, report in zip(plans, nvrtc.compile_all(variants, nvrtc.target(H200.arch), 2), strict=True):
        check_report("conv2d_join", report, plan.threads, plan.shared, H200)


def gradients(ops, above, w, x, norm):
    """(dy, dx, sums of dx and of dx times the centred input, or None) on the host."""
    conv = convolution("test", x.shape, w.shape, *POINT.values())
    arrays, norm = put(ops, *above, w, x), None if norm is None else tuple(put(ops, *norm))
    *above, w, x = arrays
    dy, dx, parts = conv2d_join.backward(conv, conv2d_join.dtype_code(x, "test"), *above[:2], above[2:], w, x, norm)
    return *(ops.to_host(array) for array in (dy, dx)), None if parts is None else ops.to_host(parts)


def check_gradients(dy, dx, parts, hosts):
    """Every bit is the definition's."""
    expected, z, gradient, _ = both.expected_of(*hosts)
    np.testing.assert_array_equal(dy.astype(np.float64), expected)
    gradient = gradient.astype(np.float32).astype(dx.dtype).astype(np.float64)
    if parts is not None:
        _, _, x, norm = hosts
        gradient = np.where(z > 0, gradient, 0)
        sums = gradient.sum((0, 1, 2)), (gradient * (x.astype(np.float64) - norm[0][0])).sum((0, 1, 2))
        np.testing.assert_array_equal(parts.astype(np.float64).sum(0), sums)
    np.testing.assert_array_equal(dx.astype(np.float64), gradient)


def emulated(shape, filters, below, seed):
    """`gradients`, of whole numbers in bfloat16, by the kernel's own source, as on two multiprocessors."""
    hosts = both.operands(np.random.default_rng(seed), shape, filters, bfloat16, below, whole=True)
    with pytest.MonkeyPatch.context() as patch, emulator.table(seed) as ops:
        own = conv2d_join.plan_backward.__wrapped__
        few = dataclasses.replace(H200, multiprocessors=2)
        patch.setattr(conv2d_join, "plan_backward", lambda *facts: own(*facts[:-1], few))
        found = gradients(ops, *hosts)
        assert ops.kernels == ["conv2d_join_backward_kernel"]
    return found, hosts


@BELOW
@EACH
def test_its_source_is_right_whatever_comes_late(shape, filters, below):
    for seed in range(3):
        found, hosts = emulated(shape, filters, below, seed)
        check_gradients(*found, hosts)


FAULTS = {
    "an-input-is-fetched-too-soon": (
        "            warpgroup_sync(1 + consumer);\n            if (s + BUFFERS < SLABS) load_below(s + BUFFERS);\n",
        "            if (s + BUFFERS < SLABS) load_below(s + BUFFERS);\n            warpgroup_sync(1 + consumer);\n",
    ),
    "a-slab-is-not-there-for-all": (
        "#if MASKED\n            warpgroup_sync(1 + consumer);\n", "#if MASKED\n"
    ),
    "what-is-behind-the-last-pixel-counts": ("int(row) + j * 16 >= left", "0"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds_faults(fault):
    """Beside those that it finds forward."""

    def check(seed):
        found, hosts = emulated((2, 15, 27, 256), 512, True, seed)
        check_gradients(*found, hosts)

    assert emulator.finds("conv2d_join", *FAULTS[fault], check)


@BELOW
@EACH
@SIXTEEN
def test_whole_numbers_give_the_bits_of_the_definition(hopper, shape, filters, storage, below, rng):
    hosts = both.operands(rng, shape, filters, storage, below, whole=True)
    assert hopper.conv2d_makes_both(shape, hopper.from_host(hosts[1]), **POINT)
    check_gradients(*gradients(hopper, *hosts), hosts)
    check_gradients(*gradients(hopper, *hosts), hosts)


@LARGE
def test_tiles_are_whole_where_there_are_enough(hopper, shape, rng):
    hosts = both.operands(rng, (*shape, 256), 512, bfloat16, True, whole=True)
    for _ in range(3):
        check_gradients(*gradients(hopper, *hosts), hosts)


@BELOW
@EACH
@SIXTEEN
def test_both_gradients_are_those_of_passes(hopper, shape, filters, storage, below, rng):
    """The weight's to the bit: what it is made of is."""
    above, w, x, norm = both.operands(rng, shape, filters, storage, below)
    dx, dw, sums = both.both(hopper, above, w, x, norm)
    above, (w_, x_) = put(hopper, *above), put(hopper, w, x)
    norm_ = None if norm is None else tuple(put(hopper, *norm))
    dy, out = hopper.batch_norm_backward_apply(*above), hopper.empty(w.shape, float32)
    hopper.conv2d_backward_weight(dy, x_, **POINT, out=out, norm=norm_)
    np.testing.assert_array_equal(dw, hopper.to_host(out))
    if below:
        expected, parts = hopper.conv2d_backward_data_masked(dy, w_, x_, *norm_, **POINT)
        if parts is not None:
            expected_sums = hopper.to_host(hopper.batch_norm_backward_sums(parts, norm_[0]))
            size = np.abs(hopper.to_host(expected).astype(np.float64)).sum((0, 1, 2)).max()
            np.testing.assert_allclose(sums, expected_sums, rtol=2e-3, atol=2e-3 * size)
    else:
        expected = hopper.conv2d_backward_data(dy, w_, x.shape, **POINT)
    expected = hopper.to_host(expected).astype(np.float64)
    unit = {bfloat16: 2.0**-7, float16: 2.0**-10}[np.dtype(storage)]
    np.testing.assert_allclose(dx.astype(np.float64), expected, rtol=unit, atol=unit / 8 * np.abs(expected).max())


@BELOW
def test_gradients_are_the_same_of_arrays_at_a_pitch_and_again(hopper, below, rng):
    above, w, x, norm = both.operands(rng, (2, 11, 13, 256), 1024, bfloat16, below)
    *above, w = put(hopper, *above, w)
    conv, found = convolution("test", x.shape, w.shape, *POINT.values()), []
    norm = None if norm is None else tuple(put(hopper, *norm))
    hosts = [hopper.to_host(array) for array in above[:2]]
    for before, after in ((0, 0), (0, 0), (8, 8), (1, 2)):
        dz, y, x_ = (pitched(hopper, array, before, after) for array in (*hosts, x))
        results = conv2d_join.backward(conv, 1, dz, y, tuple(above[2:]), w, x_, norm)
        found.append([None if array is None else hopper.to_host(array).tobytes() for array in results])
    assert all(other == found[0] for other in found[1:])


@BELOW
@EACH
def test_all_of_both_gradients_is_written_and_nothing_else(hopper, shape, filters, below, rng, monkeypatch):
    hosts, guarded = both.operands(rng, shape, filters, bfloat16, below, whole=True), Guarded(hopper)
    monkeypatch.setattr(conv2d_join, "empty", guarded)
    check_gradients(*gradients(hopper, *hosts), hosts)
    guarded.check(3 if below else 2)
