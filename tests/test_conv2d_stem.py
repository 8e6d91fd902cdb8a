"""The kernels for few input channels: their plans without a GPU; on a GPU the laws of convolution at their edges."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidl import cuda
from minidl.cuda.convolution import conv2d_stem, conv2d_stem_lines
from minidl.cuda.convolution.conv2d_family import Choice, family
from minidl.cuda.convolution.conv2d_family import kernel as forced
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float16, float32
from tests.convolutions import Case, cases, drawn, last_of_many_images, pitched, plan_of, poison, put, weight_gradient
from tests.reference import conv2d as reference
from tests.test_conv2d_statistics import check, operands
from tests.tolerance import assert_close, draw

DEVICES = pytest.mark.parametrize("device", BUILT_IN.values(), ids=list(BUILT_IN))


@pytest.fixture(params=[bfloat16, float16], ids=["bf16", "fp16"])
def dtype(request):
    return request.param


def _random(count: int) -> list[Case]:
    """Cases over all channels, strides and both parities of everything that decides where a window starts."""
    rng, found = np.random.default_rng(0), []
    while len(found) < count:
        channels, kernel = int(rng.integers(1, 5)), tuple(map(int, rng.choice([1, 2, 3, 3, 4, 5, 7, 7, 9, 11], 2)))
        stride = tuple(map(int, rng.integers(1, 5, 2)))
        padding = tuple(int(rng.integers(0, k)) for k in kernel)
        size = int(rng.integers(1, 24)), int(rng.integers(1, 60))
        fits = all(s + 2 * p >= k for s, p, k in zip(size, padding, kernel, strict=True))
        if fits and kernel != (1, 1):
            x = (int(rng.choice([1, 2, 3])), *size, channels)
            filters = int(rng.choice([1, 5, 8, 24, 32, 40, 64, 72])), *kernel
            found.append(Case(f"random-{len(found)}", x, filters, stride, padding))
    return found


EDGES = [
    Case("3x3-c3", (2, 17, 40, 3), (64, 3, 3), padding=(1, 1)),
    Case("3x3-c1", (2, 12, 33, 1), (16, 3, 3), padding=(1, 1)),
    Case("3x3-c2", (1, 12, 33, 2), (70, 3, 3), padding=(0, 1)),
    Case("3x3-c4-stride-2", (2, 13, 70, 4), (32, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("7x7-c3-stride-2", (2, 30, 64, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("7x7-c3-stride-2-even-padding", (2, 30, 64, 3), (64, 7, 7), stride=(2, 2), padding=(2, 2)),
    Case("3x3-c4-two-segments-of-80", (1, 9, 160, 4), (70, 3, 3), padding=(1, 1)),
    Case("5x6-c1-stride-3-2", (2, 20, 100, 1), (40, 5, 6), stride=(3, 2), padding=(4, 0)),
    Case("7x11-c2-stride-4", (2, 43, 127, 2), (72, 7, 11), stride=(4, 4), padding=(2, 4)),
    Case("1x3-c3-many-images", (70, 3, 32, 3), (64, 1, 3), stride=(2, 2), padding=(0, 1)),
    Case("7x7-c3", (1, 10, 35, 3), (64, 7, 7), padding=(3, 3)),
    Case("11x11-c3-stride-4", (1, 43, 75, 3), (96, 11, 11), stride=(4, 4), padding=(2, 2)),
    Case("11x11-c4-held-in-memory", (1, 15, 20, 4), (64, 11, 11), padding=(5, 5)),
    Case("11x11-c3-both-parities", (1, 14, 30, 3), (40, 11, 11), padding=(5, 5)),
    Case("5x5-c1-valid", (3, 28, 28, 1), (20, 5, 5)),
    Case("windows-of-eight", (2, 6, 40, 1), (8, 3, 8), padding=(0, 3)),
    Case("image-within-filter", (2, 2, 3, 3), (9, 7, 7), padding=(3, 3)),
    Case("one-pixel", (1, 1, 1, 1), (3, 3, 3), padding=(1, 1)),
    Case("two-segments", (1, 5, 530, 1), (8, 3, 3), padding=(1, 1)),
    Case("empty-batch", (0, 9, 9, 3), (8, 3, 3)),
]
CASES = EDGES + _random(12)
PLANNED = [case for case in CASES if case.x[0]]


# ------------------------------------------------------------------------------------------------- plans, without a GPU


def test_the_family_is_chosen_by_sizes_and_type():
    def kernels(case, dtype, tf32=0):
        with dry_run() as log:
            cuda.conv2d(cuda.empty(case.x, dtype), cuda.empty(case.w, dtype), **case.options, tf32=tf32)
        return {launch.stem for launch in log.launches}

    for case in PLANNED:
        with forced(Choice("stem", "registers")):
            assert kernels(case, bfloat16) == kernels(case, float16) == {"conv2d_stem"}
        lines = conv2d_stem_lines.applies(plan_of(case), 1, BUILT_IN["H200"])
        assert kernels(case, bfloat16) == kernels(case, float16) == {"conv2d_stem_lines" if lines else "conv2d_stem"}
        assert kernels(case, float32, tf32=1) == {"conv2d_stem"}
        assert "conv2d_stem" not in kernels(case, float32) | kernels(case, float32, tf32=3)
        with family("generic"):
            assert "conv2d_stem" not in kernels(case, bfloat16)


@pytest.mark.parametrize(
    "case",
    [
        Case("channels", (1, 9, 9, 5), (8, 3, 3)),
        Case("groups", (1, 9, 9, 4), (8, 3, 3), groups=2),
        Case("dilated", (1, 9, 9, 3), (8, 3, 3), dilation=(1, 2)),
        Case("1x1", (1, 9, 9, 3), (8, 1, 1)),
        Case("filter", (1, 19, 19, 3), (8, 3, 12)),
        Case("stride", (1, 19, 19, 3), (8, 3, 3), stride=(5, 1)),
    ],
    ids=lambda case: case.name,
)
def test_a_forced_family_refuses_what_it_cannot_do(case):
    with dry_run(), family("stem"):
        x, w = cuda.empty(case.x, bfloat16), cuda.empty(case.w, bfloat16)
        with pytest.raises(ValueError, match="stem"):
            cuda.conv2d(x, w, **case.options)
        with pytest.raises(ValueError, match="stem"):
            out = cuda.empty(case.w, np.float32)
            cuda.conv2d_backward_weight(cuda.empty(case.y, bfloat16), x, **case.options, out=out)
    assert not any(conv2d_stem.applies(plan_of(case), which, 1) for which in ("forward", "backward_weight"))


def test_the_family_has_no_data_gradient():
    case = CASES[0]
    with dry_run(), family("stem"), pytest.raises(ValueError, match="stem"):
        dy, w = cuda.empty(case.y, bfloat16), cuda.empty(case.w, bfloat16)
        cuda.conv2d_backward_data(dy, w, case.x, **case.options)


def _length(defines):
    """Values of a row in shared memory, as conv2d_stem.cuh works them out."""
    window, step = defines["KERNEL_W"] * defines["CHANNELS"], defines["STRIDE_W"] * defines["CHANNELS"]
    if "TILE_M" in defines and defines["WARPGROUP"]:
        window = -(-defines["KERNEL_W"] // defines["STRIDE_W"]) * step
    lead = 0 if "TILE_M" in defines or not defines["DTYPE"] else max(step % 2, defines["LEAD"])
    return -(-(7 + (defines["TILE_Q"] - 1) * step + -(-(window + lead) // 8) * 8) // 8) * 8


@DEVICES
@cases(PLANNED)
def test_blocks_cover_the_output_and_their_rows_hold_every_window(case, device):
    conv = plan_of(case)
    forwards = [conv2d_stem.plan_forward(conv, code, (1, 1), device) for code in (0, 1)]
    weight = conv2d_stem.plan_weight(conv, 1, conv.out_channels, (1, 1), device)
    for plan in (*forwards, weight):
        problem, defines = plan.problem[0], plan.defines
        assert problem["segments"] * defines["TILE_Q"] >= conv.out_width
        assert problem["first"] % 8 == 0 and 0 <= problem["shift"] < 8
        assert problem["first"] + problem["shift"] == -conv.padding[1] * conv.channels
        step = defines["TILE_Q"] * defines["STRIDE_W"] * defines["CHANNELS"]
        assert step % 8 == 0, "rows of every segment start at a multiple of eight, too"
        assert plan.shared + 1024 <= device.shared_per_block
    for forward, itemsize in zip(forwards, (4, 2), strict=True):
        problem, defines = forward.problem[0], forward.defines
        rows = (defines["TILE_P"] - 1) * conv.stride[0] + conv.kernel[0]
        assert problem["strips"] * problem["strip_tiles"] * defines["TILE_P"] >= conv.out_height
        assert forward.shared >= 2 * rows * _length(defines) * itemsize
    problem, defines = weight.problem[0], weight.defines
    assert problem["strips_p"] * problem["strip_rows"] >= conv.out_height
    assert problem["strips"] == conv.images * problem["segments"] * problem["strips_p"]
    assert weight.size * problem["chunk"] >= problem["strips"] > (weight.size - 1) * problem["chunk"]
    new = min(conv.stride[0], conv.kernel[0])
    stage = defines["TILE_Q"] * defines["TILE_M"] + new * _length(defines)
    row = defines["TILE_Q"] * 16 + 48 if defines["WARPGROUP"] else _length(defines) * 4
    assert weight.shared >= defines["STAGES"] * stage * 2 + (conv.kernel[0] + new) * row


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_every_size_fits_the_smallest_device(channels):
    device = min(BUILT_IN.values(), key=lambda device: device.shared_per_block)
    kernels = [kernel for kernel in itertools.product((1, 2, 7, 11), (1, 3, 8, 11)) if kernel != (1, 1)]
    for kernel, stride, width, filters in itertools.product(kernels, [(1, 1), (4, 2), (3, 4)], (12, 700), (32, 130)):
        x, padding = (2, 40, width, channels), tuple(size // 2 for size in kernel)
        conv = convolution("test", x, (filters, *kernel, channels), stride, padding, (1, 1), 1)
        for plan in (
            *(conv2d_stem.plan_forward(conv, code, (1, 1), device) for code in (0, 1)),
            conv2d_stem.plan_weight(conv, 1, filters, (1, 1), device),
        ):
            assert plan.shared + 1024 <= device.shared_per_block


@cases(PLANNED)
def test_the_order_of_every_sum_is_the_same_on_all_devices_and_alignments(case):
    """All that differs are how wide accesses are, and forward, where a sum goes by steps of the depth, the blocks.

    Weight gradients that wgmma multiplies are cut for that.
    """
    conv, free = plan_of(case), {"VEC_X", "VEC_Y", "VEC_DY"}
    blocks = {"TILE_P", "TILE_Q", "TILE_N", "RESIDENT", "FRAGMENTS", "BLOCKS", "WARPGROUP"}
    seen, together = set(), set()
    for device, vector in itertools.product(BUILT_IN.values(), (1, 2, 8)):
        forward = conv2d_stem.plan_forward(conv, 1, (vector, vector), device)
        weight = conv2d_stem.plan_weight(conv, 1, conv.out_channels, (vector, vector), device)
        fixed = [
            tuple((k, v) for k, v in plan.defines.items() if k not in left)
            for plan, left in ((forward, free | blocks), (weight, free))
        ]
        cut = fixed[1], weight.problem.tobytes(), weight.grid
        (together if weight.defines["WARPGROUP"] else seen).add((fixed[0], *cut))
    assert len(seen) == 1 and len(together) <= 1


def test_first_layers_of_common_networks_are_multiplied_by_wgmma():
    device = BUILT_IN["H200"]
    layers = (7, 2, 224, 1), (3, 1, 224, 1), (3, 2, 224, 1), (7, 2, 226, 0), (11, 4, 227, 0)
    for kernel, stride, width, expected in layers:
        sizes = (stride, stride), (kernel // 2,) * 2, (1, 1), 1
        conv = convolution("test", (8, width, width, 3), (64, kernel, kernel, 3), *sizes)
        plan = conv2d_stem.plan_weight(conv, 1, 64, (8, 8), device)
        assert plan.defines["WARPGROUP"] == expected, (kernel, stride, width)
        assert plan.defines["BLOCKS"] * (plan.shared + 1024) <= conv2d_stem.HOPPER_SHARED


@DEVICES
@cases(PLANNED)
def test_a_warp_sums_few_enough_values_of_a_channel(device, case):
    """As many squares of eight bits as float32 adds up without loss."""
    plan = conv2d_stem.plan_forward(plan_of(case), 1, (1, 1), device)
    fragments = plan.defines["TILE_P"] * plan.defines["TILE_Q"] // 16
    assert not plan.defines["WARPGROUP"] or -(-fragments // conv2d_stem.WARPS) * 16 <= 256


# ------------------------------------------------------------------------------------------------------------ on a GPU


@pytest.fixture
def stem(cuda_ops):
    """The table, with the family forced, of Hopper's kernels the one that has windows in registers."""
    with family("stem"), forced(Choice("stem", "registers")):
        yield cuda_ops


@pytest.mark.parametrize("ratio", [0.0, 1e3])
@cases(CASES)
def test_statistics_are_those_of_what_is_stored(stem, case, ratio, rng):
    check(stem, case, *operands(rng, case, bfloat16, ratio))


def test_constant_channels_have_no_variance(stem, rng):
    case = next(case for case in EDGES if case.name == "7x7-c3-stride-2")
    x, w = stem.zeros(case.x, bfloat16), stem.from_host(draw(rng, case.w, bfloat16))
    for bias in (1e-3, 1.3, 7e4):
        every = stem.from_host(np.full(case.w[0], bias, np.float32))
        y, stats = (stem.to_host(array) for array in stem.conv2d_stats(x, w, every, **case.options))
        assert (y == y[0, 0, 0, 0]).all() and (stats[1 + case.w[0] :] == 0).all()


@cases(CASES)
def test_both_passes_equal_the_definition(stem, case, dtype, rng):
    x, w, dy = drawn(rng, case, dtype)
    bias = draw(rng, case.w[0], np.float32)
    y = stem.to_host(stem.conv2d(*put(stem, x, w, bias), **case.options))
    assert_close(y, reference.conv2d(x, w, bias, **case.options), dtype, terms=case.terms[0] + 1, scale=4)
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    assert_close(weight_gradient(stem, case, *put(stem, dy, x)), expected, terms=max(case.terms[2], 1), scale=4)
    start = draw(rng, case.w, np.float32)
    added = weight_gradient(stem, case, *put(stem, dy, x), start=start)
    assert_close(added, start + expected, terms=case.terms[2] + 1, scale=4)


@cases(CASES)
def test_pitched_and_misaligned_arrays_give_the_bits_of_dense_ones(stem, case, dtype, rng):
    x, w, dy = drawn(rng, case, dtype)
    dense = put(stem, x, w, dy)

    def moved(host):
        """Dense, at an address that no vector fits."""
        flat = stem.from_host(np.concatenate([np.full(1, np.nan, dtype), host.reshape(-1)]))
        return flat[1:].reshape(host.shape)

    y, dw = stem.to_host(stem.conv2d(*dense[:2], **case.options)), weight_gradient(stem, case, dense[2], dense[0])
    for place in (lambda host: pitched(stem, host), moved):
        other = stem.to_host(stem.conv2d(place(x), moved(w), **case.options))
        assert np.array_equal(other.view(np.uint16), y.view(np.uint16))
        assert np.array_equal(weight_gradient(stem, case, place(dy), place(x)), dw)


@cases(EDGES)
def test_every_output_is_written_and_every_run_gives_the_same_bits(stem, case, dtype, rng, monkeypatch):
    x, w, dy = put(stem, *drawn(rng, case, dtype))

    def run():
        y = stem.to_host(stem.conv2d(x, w, **case.options))
        return y.view(np.uint16), weight_gradient(stem, case, dy, x).view(np.uint32)

    expected = run()
    for a, b in zip(expected, run(), strict=True):
        assert np.array_equal(a, b)
    poison(monkeypatch, "conv2d", "conv2d_stem", "channel_sum")
    for a, b in zip(expected, run(), strict=True):
        assert np.array_equal(a, b)


@cases(CASES)
def test_the_output_in_tf32_equals_the_definition_wherever_arrays_lie(stem, case, rng, monkeypatch):
    x, w, _ = drawn(rng, case, float32)
    bias, options = draw(rng, case.w[0], np.float32), case.options | {"tf32": 1}
    y = stem.to_host(stem.conv2d(*put(stem, x, w, bias), **options))
    expected = reference.conv2d(x, w, bias, **case.options)
    assert_close(y, expected, float32, terms=case.terms[0] + 1, scale=4, tf32=True)
    rectified = stem.to_host(stem.conv2d(*put(stem, x, w, bias), **options, relu=True))
    assert np.array_equal(rectified, np.maximum(y, 0))
    flat = stem.from_host(np.concatenate([np.full(1, np.nan, float32), x.reshape(-1)]))
    poison(monkeypatch)
    for place in (pitched(stem, x), flat[1:].reshape(x.shape)):
        assert np.array_equal(stem.to_host(stem.conv2d(place, *put(stem, w, bias), **options)), y)


@cases(PLANNED)
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("storage", [bfloat16, float32], ids=["bf16", "tf32"])
def test_what_is_not_finite_stays_in_its_neighbourhood(stem, case, rng, value, storage):
    """Fragments read beyond windows and behind the last pixel of a row: none of that may reach a result."""
    (x, w, dy), tf32 = drawn(rng, case, storage), int(storage == float32)
    for place in ((0, 0, 0, 0), (-1, -1, -1, -1), (0, x.shape[1] // 2, x.shape[2] // 2, x.shape[3] // 2)):
        hurt = x.copy()
        hurt[place] = value
        y = stem.to_host(stem.conv2d(*put(stem, hurt, w), **case.options, tf32=tf32)).astype(np.float32)
        with np.errstate(invalid="ignore"):
            assert (np.isfinite(y) == np.isfinite(reference.conv2d(hurt, w, **case.options))).all()
            expected = reference.conv2d_backward_weight(dy, hurt, case.w, **case.options)
        if not tf32:
            assert (np.isfinite(weight_gradient(stem, case, *put(stem, dy, hurt))) == np.isfinite(expected)).all()


def test_a_large_batch_equals_its_parts(stem, rng):
    last_of_many_images(stem, Case("large", (40000, 30, 30, 3), (64, 3, 3), padding=(1, 1)), rng)
