"""The weight gradient of a first convolution whose output is normalised, rectified and pooled: that of passes."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import minidl as m
from minidl import fusion
from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_stem
from minidl.cuda.device import BUILT_IN, current_device
from minidl.cuda.launch import dry_run
from minidl.fusion import cost
from minidl.precision import bfloat16, float16, float32, precision
from tests import emulator
from tests.convolutions import SIXTEEN, Case, Guarded, cases, pitched, plan_of, put
from tests.kernel_checks import check_report
from tests.reference import conv2d as reference
from tests.test_fusion import close, fused, run
from tests.tolerance import assert_close, draw, draw_integers

H200 = BUILT_IN["H200"]
POOLING = conv2d_stem.POOLING
CASES = [
    Case("7x7-c3", (2, 20, 64, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("odd-rows-and-further-filters", (1, 13, 32, 3), (80, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("two-segments", (1, 6, 320, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("5x5-c2", (3, 12, 64, 2), (48, 5, 5), stride=(2, 2), padding=(2, 2)),
    Case("3x3-c3-low-images", (9, 5, 32, 3), (64, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("3x3-c4-strips", (1, 34, 32, 4), (96, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("7x7-c1-every-row", (1, 11, 64, 1), (64, 7, 7), stride=(1, 2), padding=(3, 3)),
]


def pooled_size(case):
    """Rows and columns of windows."""
    return tuple((size - 1) // 2 + 1 for size in case.y[1:3])


def operands(rng, case, storage, whole=False):
    """dz, index, y, moments, gamma, sums, count; x. With ``whole`` numbers no sum is rounded in float32."""
    filters, pixels = case.w[0], int(np.prod(case.y[:3]))

    def vector(least, most):
        found = rng.integers(least, most + 1, filters) if whole else rng.uniform(least, most, filters)
        return found.astype(np.float32)

    def image(shape):
        return draw_integers(rng, shape, storage) if whole else draw(rng, shape, storage)

    p, q = pooled_size(case)
    shape = case.x[0], p, q, filters
    # Any pixel of a window that is on the image may be its largest.
    a, b = np.arange(p)[:, None, None], np.arange(q)[:, None]
    h, w = rng.integers(0, 3, shape), rng.integers(0, 3, shape)
    h = np.clip(2 * a - 1 + h, 0, case.y[1] - 1) - (2 * a - 1)
    w = np.clip(2 * b - 1 + w, 0, case.y[2] - 1) - (2 * b - 1)
    moments = np.stack([vector(-1, 1), vector(1, 1 if whole else 2)])
    sums = np.stack([pixels * vector(-1, 1).astype(np.float64) for _ in range(2)])
    above = image(case.y), moments, vector(1, 2), sums, np.array([float(pixels)])
    return (image(shape), (3 * h + w).astype(np.uint8), *above), image(case.x)


def expected_of(case, above, x):
    """The weight gradient in float64, of the gradient as it is stored."""
    dz, index, y, (mean, rstd), gamma, sums, count = above
    g, at = np.zeros(case.y), np.indices(dz.shape)
    np.add.at(g, (at[0], 2 * at[1] - 1 + index // 3, 2 * at[2] - 1 + index % 3, at[3]), dz.astype(np.float64))
    centred = (y.astype(np.float64) - mean) * rstd
    dy = gamma.astype(np.float64) * rstd * (g - sums[0] / count - centred * sums[1] / count)
    return reference.conv2d_backward_weight(dy.astype(np.float32).astype(y.dtype), x, case.w, **case.options)


def gradient(ops, case, above, x):
    """By the operation, on the host."""
    out = ops.from_host(np.full(case.w, np.nan, np.float32))
    ops.conv2d_backward_weight_pooled(*put(ops, *above, x), pooling=POOLING, **case.options, out=out)
    return ops.to_host(out)


# -- without a GPU ----------------------------------------------------------------------------------------------------


def test_the_kernel_takes_what_it_says():
    def taken(case, code=1, pooling=POOLING, device="H200"):
        return conv2d_stem.makes_pooled(plan_of(case), code, pooling, BUILT_IN[device])

    first = Case("first", (2, 32, 64, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3))
    assert all(taken(case) for case in (first, *CASES)) and taken(first, code=2)
    assert not taken(first, code=0) and not taken(first, device="A100")
    for name, other in {"kernel": (2, 2), "stride": (1, 1), "padding": (0, 0), "dilation": (2, 2)}.items():
        assert not taken(first, pooling={**POOLING, name: other})
    ragged = Case("ragged", (2, 32, 66, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3))
    odd = Case("filters", (2, 32, 64, 3), (72, 7, 7), stride=(2, 2), padding=(3, 3))
    further = Case("stride", (2, 32, 96, 3), (64, 7, 7), stride=(3, 3), padding=(3, 3))
    empty = Case("empty", (0, 32, 64, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3))
    assert not any(taken(case) for case in (ragged, odd, further, empty))


def test_operands_that_do_not_fit_are_refused():
    from minidl import cuda as ops

    case = CASES[0]
    with dry_run():
        rest = ops.empty((2, 64), float32), None, ops.empty((2, 64), np.float64), ops.empty((1,), np.float64)
        dz, index, y = (
            ops.empty((2, 5, 16, 64), bfloat16),
            ops.empty((2, 5, 16, 64), np.uint8),
            ops.empty(case.y, bfloat16),
        )
        x, out = ops.empty(case.x, bfloat16), ops.empty(case.w, float32)
        options = {**case.options, "pooling": POOLING}
        who = "conv2d_backward_weight_pooled"
        few = dz[:, :3], ops.empty((2, 3, 16, 64), np.uint8), y
        for name, arrays in (
            ("y", (dz, index, dz)),
            ("dz", (y, index, y)),
            ("dz", (dz[:1], index[:1], y)),
            ("dz", few),
        ):
            with pytest.raises(ValueError, match=f"{who}: {name} "):
                ops.conv2d_backward_weight_pooled(*arrays, *rest, x, out=out, **options)
        with pytest.raises(TypeError, match=f"{who}: out"):
            ops.conv2d_backward_weight_pooled(dz, index, y, *rest, x, out=ops.empty(case.w, bfloat16), **options)


@SIXTEEN
@pytest.mark.parametrize("width", [32, 64, 96, 128, 160, 192, 224, 256, 320])
def test_every_variant_compiles_and_fits(storage, width):
    pytest.importorskip("cuda.pathfinder", reason="needs NVRTC")
    code = {bfloat16: 1, float16: 2}[storage]
    conv = plan_of(Case("first", (8, width, width, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)))
    plan, views = conv2d_stem.plan_pooled(conv, code, ((width // 4, width // 4), 64), 8, H200)
    assert views.legal
    (report,) = nvrtc.compile_all([("conv2d_stem_pooled", tuple(plan.defines.items()))], nvrtc.target(H200.arch), 1)
    check_report("conv2d_stem_pooled", report, conv2d_stem.POOLED_THREADS, plan.shared, H200)


def emulated(case, seed):
    """`gradient`, of whole numbers in bfloat16, by the kernel's own source on this machine's processor."""
    hosts = operands(np.random.default_rng(seed), case, bfloat16, whole=True)
    with emulator.table(seed) as ops:
        found = gradient(ops, case, *hosts)
    assert ops.kernels[0] == "conv2d_stem_pooled_kernel"
    return found, expected_of(case, *hosts)


@cases(CASES)
def test_its_source_is_right_whatever_comes_late(case):
    for seed in range(2):
        np.testing.assert_array_equal(*emulated(case, seed))


def test_windows_of_which_the_last_hang_over(monkeypatch):
    """As by `MaxPool2d` with ``ceil_mode``."""
    monkeypatch.setattr(sys.modules[__name__], "pooled_size", lambda case: tuple(n // 2 + 1 for n in case.y[1:3]))
    for case in CASES[:2]:
        assert pooled_size(case)[1] == case.y[2] // 2 + 1
        np.testing.assert_array_equal(*emulated(case, 0))


def test_blocks_go_from_strip_to_strip(monkeypatch):
    """As on less than one multiprocessor, so that a block has several strips."""
    monkeypatch.setattr(conv2d_stem, "PLACES", 1)
    for planner in ("plan_weight", "plan_pooled"):
        monkeypatch.setattr(conv2d_stem, planner, getattr(conv2d_stem, planner).__wrapped__)
    case = Case("strips", (4, 20, 64, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3))
    assert conv2d_stem.plan_pooled(plan_of(case), 1, ((5, 16), 64), 8, H200)[0].problem["chunk"] == 2
    for seed in range(2):
        np.testing.assert_array_equal(*emulated(case, seed))


# What would be wrong with the kernel, by luck seen seldom on a GPU or never: a line of it, and what is there instead.
FAULTS = {
    "a-row-is-not-waited-for": ("            barrier_wait(at.come(ring.index), ring.parity);  //", "            //"),
    "windows-that-came-with-rows-of-others-are-not-waited-for": (
        "            barrier_wait(at.come(ring.index), ring.parity);  // others' too, whose windows may be needed\n"
        "            if (step % MAKERS != role - MAKE) continue;\n",
        "            if (step % MAKERS != role - MAKE) continue;\n"
        "            barrier_wait(at.come(ring.index), ring.parity);\n",
    ),
    "what-is-made-is-not-waited-for": ("        barrier_wait(at.made(ring.index), ring.parity);\n", ""),
    "the-image-is-not-waited-for": ("        barrier_wait(at.rewritten(ring.index), ring.parity);\n", ""),
    "a-stage-is-filled-too-soon": ("        barrier_wait(at.done(ring.index), ring.parity ^ 1);\n", ""),
    "lines-are-rewritten-too-soon": ("            barrier_wait(at.done(last.index), last.parity);\n", ""),
    "a-stage-is-given-up-early": ("barrier_arrive(at.done(before))", "barrier_arrive(at.done(ring.index))"),
    "rows-of-the-image-are-not-shared": ("        warpgroups_sync<WRITERS>(1);  //", "        //"),
    "rows-of-the-image-are-not-waited-for": ("        await_copies<AHEAD - 2>();\n        warp", "        warp"),
    "too-few-rows-of-windows": ("SLOTS = STAGES / 2 + 3;", "SLOTS = 2;"),
    "a-warp-is-not-waited-for": ("barrier_init(at.made(threadIdx.x), WARPS)", "barrier_init(at.made(threadIdx.x), 3)"),
    "fewer-bytes-are-expected": ("(BESIDE * TILE_M * 3));", "(BESIDE * TILE_M * 2));"),
    "windows-of-the-row-above-are-left-out": ("(newest + (two ? SLOTS - 1 : 0))", "(newest + 0)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds_faults(fault):
    """So what it does not find is unlikely to be there."""

    def check(seed):
        for case in CASES[:2]:
            np.testing.assert_array_equal(*emulated(case, seed))

    assert emulator.finds("conv2d_stem_pooled", *FAULTS[fault], check)


def first_block(filters=64):
    """As residual networks begin."""
    graph = m.Graph()
    x = m.Conv2d(3, filters, 7, stride=2, padding=3, bias=False, name="conv")(graph.input((16, 32, 3)))
    x = m.MaxPool2d(3, stride=2, padding=1)(m.ReLU(name="relu")(m.BatchNorm2d(filters, name="bn")(x)))
    x = m.ReLU()(m.BatchNorm2d(64)(m.Conv2d(filters, 64, 1, bias=False, name="above")(x)))
    return graph.output(m.Linear(4 * 8 * 64, 5)(m.Flatten()(x)))


def test_a_first_batch_norm_that_is_pooled_may_be_lazy():
    """Whoever needs a gradient of the convolution's input, or of its bias, needs that of its output."""

    def site(before=lambda x: x, bias=False, pooling=True):
        graph = m.Graph()
        x = m.Conv2d(3, 64, 7, stride=2, padding=3, bias=bias, name="conv")(before(graph.input((16, 32, 3))))
        x = m.ReLU()(m.BatchNorm2d(64, name="bn")(x))
        graph.output(m.Conv2d(64, 8, 1, name="above")(m.MaxPool2d(3, stride=2, padding=1)(x) if pooling else x))
        return {found.name: found for found in fusion.find_sites(graph)}["bn"]

    assert site().lazy == "bn" and "lazy" in fusion.choose([site()], "bnff").sites["bn"]
    for other in ({"bias": True}, {"pooling": False}, {"before": lambda x: m.Conv2d(3, 3, 1, name="first")(x)}):
        assert site(**other).lazy is None, other


def test_plans_are_lazy_where_there_is_a_kernel():
    for how, device, filters, there in (
        ("bf16", "H200", 64, True), ("fp16", "H200", 64, True), ("fp32", "H200", 64, False),
        ("bf16", "A100", 64, False), ("bf16", "H200", 40, False), ("bf16", "H200", 32, False),
    ):  # fmt: skip
        machine, mode = cost.Machine.of(BUILT_IN[device]), precision(how)
        graph = first_block(filters)
        assert machine.does(graph["conv"].layer, "lazy", mode) == there, (how, device, filters)
        way = cost.heuristic(graph, fusion.find_sites(graph), mode, machine).sites["bn"]
        assert ("lazy" in way) == there, (how, device, filters)


# -- the operation, and the kernel on a GPU ---------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["bf16", "fp32"])
@pytest.mark.parametrize("frozen", [(), ("conv.*",), ("bn.*",)], ids=["all", "without-weight", "without-affine"])
def test_a_network_gives_the_same_bits(ops, how, frozen, monkeypatch):
    taken, own = [], ops.conv2d_backward_weight_pooled
    monkeypatch.setattr(
        ops, "conv2d_backward_weight_pooled", lambda *args, **named: taken.append(1) or own(*args, **named)
    )
    steps = []
    for lazy in (False, True):
        model = fused(first_block, "gradients", ops, precision=how, frozen=frozen)
        model.graph["bn"].layer.lazy = lazy
        steps.append(run(model))
    close(*steps, 0.0)
    assert len(taken) == (0 if "conv.*" in frozen else 2)


@cases(CASES)
@pytest.mark.parametrize("storage", [float32, bfloat16, float16], ids=["fp32", "bf16", "fp16"])
def test_the_operation_is_its_passes(ops, case, storage, rng):
    """To the bit; added to what is there, too; and of windows and convolutions that no kernel takes."""
    above, x = operands(rng, case, storage)
    start = draw(rng, case.w, float32)
    held, image, *outs = *(put(ops, *above),), *put(ops, x), *put(ops, start, start)
    dy = ops.batch_norm_max_pool2d_backward(*held, **POOLING)
    ops.conv2d_backward_weight(dy, image, **case.options, out=outs[0], accumulate=True)
    ops.conv2d_backward_weight_pooled(*held, image, pooling=POOLING, **case.options, out=outs[1], accumulate=True)
    expected, found = (ops.to_host(out) for out in outs)
    if storage == float32 or ops.name == "cpu" or current_device().arch == (9, 0):
        np.testing.assert_array_equal(found, expected)
    dy = ops.to_host(dy)
    reference_of = start + reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    scale = np.abs(dy).astype(np.float64).max() * 4
    assert_close(found, reference_of, float32, terms=dy.size // case.w[0], scale=scale)


@pytest.fixture
def stem(cuda_ops):
    """The CUDA table where the kernel is."""
    if current_device().arch != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return cuda_ops


@cases(CASES)
@SIXTEEN
def test_whole_numbers_give_the_bits_of_the_definition(stem, case, storage, rng):
    above, x = operands(rng, case, storage, whole=True)
    found = gradient(stem, case, above, x)
    np.testing.assert_array_equal(found, expected_of(case, above, x))
    np.testing.assert_array_equal(found, gradient(stem, case, above, x))


@cases(CASES)
def test_nothing_is_written_beside_the_result(stem, case, rng, monkeypatch):
    above, x = operands(rng, case, bfloat16, whole=True)
    guarded = Guarded(stem)
    monkeypatch.setattr(conv2d_stem, "empty", guarded)
    np.testing.assert_array_equal(gradient(stem, case, above, x), expected_of(case, above, x))
    guarded.check(1)


def test_arrays_may_lie_at_a_pitch(stem, rng):
    case = CASES[1]
    (dz, index, y, *rest), x = operands(rng, case, bfloat16)
    found, others = [], put(stem, index, y, *rest, x)
    for before, after in ((0, 0), (8, 8), (1, 2)):
        out = stem.from_host(np.full(case.w, np.nan, np.float32))
        place = pitched(stem, dz, before, after)
        stem.conv2d_backward_weight_pooled(place, *others, pooling=POOLING, **case.options, out=out)
        found.append(stem.to_host(out))
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["dz", "y", "x"])
def test_what_is_not_finite_stays_where_it_belongs(stem, where, value, rng):
    case = CASES[0]
    above, x = operands(rng, case, bfloat16)
    if where == "x":
        x[0, 3, 5, 1] = value
    else:
        above[0 if where == "dz" else 2][1, 2, 3, 4] = value
    with np.errstate(invalid="ignore"):
        found, expected = gradient(stem, case, above, x), expected_of(case, above, x)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))


@pytest.mark.parametrize("size", [(64, 64), (32, 224)])
def test_a_large_batch_gives_the_bits_of_passes(stem, size, rng):
    """Each block several strips, and more blocks than multiprocessors."""
    case = Case("large", (300, *size, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3))
    above, x = operands(rng, case, bfloat16)
    held, image = put(stem, *above), put(stem, x)[0]
    out = stem.zeros(case.w, np.float32)
    stem.conv2d_backward_weight(stem.batch_norm_max_pool2d_backward(*held, **POOLING), image, **case.options, out=out)
    for _ in range(3):
        np.testing.assert_array_equal(gradient(stem, case, above, x), stem.to_host(out))
