"""What is particular to convolution on the GPU: its tiles, parity classes and chunks, exactness, repeatability.

The definition of the operations is tested on both tables in test_conv2d_ops.py, compilation in test_cuda_compile.py.
"""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.convolution.conv2d_plan import (
    EXACT_TILES,
    HALF_TILES,
    NARROW_TILES,
    TENSOR_TILES,
    WEIGHT_BLOCKS,
    axis_classes,
    choose_tile,
    convolution,
    lanes_along,
    parity_classes,
    pixel_chunk,
)
from minidl.cuda.convolution.widen import wide_channels
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float32
from minidl.shapes import ceil_div, conv_output_size
from tests.convolutions import (
    SIXTEEN,
    Case,
    cases,
    drawn,
    last_of_many_images,
    poison,
    put,
    same_bits,
    three,
    three_expected,
)
from tests.reference import conv2d as reference
from tests.tolerance import assert_close, draw, rounded

DEVICES = pytest.mark.parametrize("device", BUILT_IN.values(), ids=list(BUILT_IN))
PLAIN = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1}


# ------------------------------------------------------------------------------------------------- plans, without a GPU


@DEVICES
@pytest.mark.parametrize(
    "tiles", [TENSOR_TILES, EXACT_TILES, HALF_TILES, NARROW_TILES], ids=["tensor", "exact", "half", "narrow"]
)
def test_every_chosen_tile_fits_the_device(tiles, device):
    for rows, columns, repeats in itertools.product((1, 49, 6272, 802816, 2**33), (1, 64, 65, 512, 4608), (1, 32)):
        tile = choose_tile(tiles, (rows, rows // 2 + 1), columns, repeats, device)
        assert tile in tiles
        stages, resident = tile.pipeline(device)
        assert resident >= 1 and stages >= 2
        assert tile.shared_bytes(stages) <= device.shared_per_block
        assert tile.shared_bytes(stages) >= 4 * tile.rows * tile.columns, "the epilogue spreads the whole tile out"


@DEVICES
def test_no_other_tile_wastes_less_when_the_product_is_one_small_tile(device):
    assert choose_tile(TENSOR_TILES, (64,), 64, 1, device)[:2] == (64, 64)


def test_large_products_take_the_widest_tile():
    device = BUILT_IN["H200"]
    assert choose_tile(TENSOR_TILES, (50176,), 1024, 1, device)[:2] == (128, 128)
    assert choose_tile(TENSOR_TILES, (802816,), 64, 1, device)[:2] == (128, 64)


AXES = [
    axis
    for axis in itertools.product(range(1, 8), range(1, 5), range(1, 6), range(0, 4), range(1, 4))
    if conv_output_size(*axis) > 0
]


def test_taps_of_the_parity_classes_partition_all_meetings_of_input_and_tap():
    """Input h, tap r and output p meet when h = p * stride - padding + r * dilation: every class finds each once."""
    for size, kernel, stride, padding, dilation in AXES:
        outputs = conv_output_size(size, kernel, stride, padding, dilation)
        meetings = {
            (p * stride - padding + r * dilation, r, p)
            for p in range(outputs)
            for r in range(kernel)
            if 0 <= p * stride - padding + r * dilation < size
        }
        common = np.gcd(stride, dilation)
        found, seen = [], []
        for part in axis_classes(size, kernel, stride, padding, dilation):
            for i in range(part.count):
                h = part.start + i * stride
                seen.append(h)
                for j in range(part.taps):
                    r, p = part.first + j * (stride // common), i + part.offset - j * (dilation // common)
                    assert 0 <= r < kernel
                    # A tap beyond the output's border reads zeros; it must still meet its coordinate there.
                    assert p * stride - padding + r * dilation == h
                    if 0 <= p < outputs:
                        found.append((h, r, p))
        assert sorted(seen) == list(range(size)), "each input coordinate belongs to one class"
        assert len(found) == len(set(found)) and set(found) == meetings


def test_strided_data_gradient_makes_no_structural_zeros():
    """3x3, stride 2: 1 + 2 + 2 + 4 taps per four pixels instead of 36, and the longest blocks start first."""
    conv = convolution("test", (1, 8, 8, 16), (16, 3, 3, 16), (2, 2), (1, 1), (1, 1), 1)
    assert [h.taps * w.taps for h, w in parity_classes(conv)] == [4, 2, 2, 1]


def test_chunks_are_whole_and_bounded():
    for pixels, tiles in itertools.product((1, 31, 257, 12544, 802816, 2**34), (1, 5, 144, 4096)):
        chunk = pixel_chunk(pixels, tiles)
        assert chunk % 32 == 0 and 0 < chunk <= 2**29
        assert ceil_div(pixels, chunk) * tiles <= max(WEIGHT_BLOCKS, tiles) or chunk == 2**29


def test_lanes_stay_within_a_warp_and_a_line():
    for channels, vec, itemsize in itertools.product((1, 3, 8, 64, 1000), (1, 2, 4, 8), (2, 4)):
        lanes = lanes_along(channels, vec, itemsize)
        assert lanes & (lanes - 1) == 0 and 1 <= lanes <= 32
        assert lanes == 1 or lanes * vec * itemsize <= 128


def _launches(device, run):
    with dry_run(device) as log:
        run()
    return log.launches


@pytest.mark.parametrize("groups", [1, 4, 64], ids=["dense", "grouped", "depthwise"])
def test_the_order_of_a_weight_gradients_sum_is_the_same_on_all_devices_of_a_family(groups):
    """Chunks show in the second step's split and in the first step's blocks per tile."""

    def run():
        from minidl import cuda as ops

        x, dy = ops.empty((32, 28, 28, 64), bfloat16), ops.empty((32, 28, 28, 64), bfloat16)
        out = ops.empty((64, 3, 3, 64 // groups), np.float32)
        options = {**PLAIN, "padding": (1, 1), "groups": groups}
        ops.conv2d_backward_weight(dy, x, **options, out=out)
        ops.channel_sum(dy, out=ops.empty(64, np.float32))

    def chunks(launch):
        defines = dict(launch.defines)
        if launch.name != "conv2d_weight_kernel":
            return launch
        tiles = ceil_div(64 // groups, defines["TILE_M"]) * ceil_div(9 * 64 // groups, defines["TILE_N"])
        return launch.grid[0] // tiles

    families = {}
    for device in BUILT_IN.values():
        launches = _launches(device, run)
        families.setdefault(launches[0].stem, []).append([chunks(launch) for launch in launches])
    assert len(families) == (1 if groups == 64 else 2)
    for logs in families.values():
        assert len(logs) >= 2 and len(logs[0]) >= 3 and all(log == logs[0] for log in logs)


@pytest.mark.parametrize("dtype", [float32, bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("channels", [3, 48, 64, 72])
@pytest.mark.parametrize("groups", [1, 0], ids=["dense", "depthwise"])
def test_the_order_of_every_sum_is_the_same_for_misaligned_slices(dtype, channels, groups):
    """Alignment may narrow vectors and tiles, never change chunks, the order of the depth, or who sums which pixel."""
    groups = groups or channels

    def order(offset):
        from minidl import cuda as ops

        def slice_of(*shape):
            wide = ops.empty((*shape[:-1], shape[-1] + 2 * offset), dtype)
            return wide[..., offset : offset + shape[-1]]

        def run():
            x, dy = slice_of(32, 28, 28, channels), slice_of(32, 28, 28, channels)
            w = ops.empty((channels, 3, 3, channels // groups), dtype)
            out = ops.empty(w.shape, np.float32)
            options = {**PLAIN, "padding": (1, 1), "groups": groups}
            ops.conv2d(x, w, **options)
            ops.conv2d_backward_data(dy, w, x.shape, **options)
            ops.conv2d_backward_weight(dy, x, **options, out=out)

        ordering = []
        for launch in _launches(None, run):
            defines = dict(launch.defines)
            if launch.stem == "array":
                continue  # a copy, where a family wants its operands dense
            if launch.stem.startswith("conv2d_stem"):
                ordering.append((launch.name, launch.grid, {k: v for k, v in defines.items() if "VEC" not in k}))
            elif launch.name == "conv2d_kernel":
                ordering.append((launch.name, defines["PACKED"]))
            elif launch.name == "conv2d_weight_kernel":
                columns = 9 * wide_channels(channels, dtype.itemsize)
                tiles = ceil_div(channels, defines["TILE_M"]) * ceil_div(columns, defines["TILE_N"])
                ordering.append((launch.name, launch.grid[0] // tiles))
            elif launch.name == "depthwise_weight_kernel":
                slabs = ceil_div(channels, defines["LANES"] * defines["VEC"])
                ordering.append((launch.name, defines["LANES"], defines["TAPS"], launch.grid[0] // slabs))
            elif launch.name == "depthwise_strip_weight_kernel":
                ordering.append((launch.name, *(defines[key] for key in ("COLUMNS", "LANES", "DEEP")), launch.grid))
            elif launch.name == "conv2d_hopper_kernel":  # one order for all tiles of as many parts
                ordering.append((launch.name, defines["CUT"]))
            elif launch.name not in ("depthwise_kernel", "depthwise_strip_kernel"):  # their pixels sum taps in order
                ordering.append((launch.name, defines.get("SPLIT"), launch.grid))
        return ordering

    aligned = order(0)
    assert len(aligned) >= 2 and order(1) == aligned and order(4) == aligned


def test_images_of_few_channels_are_padded_to_asynchronous_copies():
    assert [wide_channels(c, 2) for c in (1, 3, 4, 5, 12, 37, 64)] == [4, 4, 4, 8, 12, 40, 64]
    assert [wide_channels(c, 4) for c in (1, 3, 4, 5, 12, 37, 64)] == [4, 4, 4, 8, 12, 40, 64]


def test_many_parity_classes_take_several_launches():
    def run():
        from minidl import cuda as ops

        options = {**PLAIN, "stride": (5, 5)}
        w = ops.empty((8, 3, 3, 16), bfloat16)
        ops.conv2d_backward_data(ops.empty((2, 2, 2, 8), bfloat16), w, (2, 11, 11, 16), **options)

    with family("generic"):
        assert [launch.grid[1] for launch in _launches(None, run)] == [16, 9]
    with family("hopper"):
        assert len(_launches(None, run)) == 7, "four classes each"


def test_tf32_of_16_bit_arrays_is_refused():
    from minidl import cuda as ops

    with dry_run():
        x, w = ops.empty((1, 4, 4, 8), bfloat16), ops.empty((8, 1, 1, 8), bfloat16)
        with pytest.raises(ValueError, match="tf32"):
            ops.conv2d(x, w, **PLAIN, tf32=True)


# ------------------------------------------------------------------------------------------------------------ on a GPU


BIG = [
    Case("stem", (16, 112, 112, 3), (64, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("1x1", (16, 56, 56, 64), (256, 1, 1)),
    Case("3x3", (16, 28, 28, 128), (128, 3, 3), padding=(1, 1)),
    Case("1x1-stride-2", (16, 28, 28, 256), (512, 1, 1), stride=(2, 2)),
    Case("3x3-stride-2", (16, 14, 14, 512), (512, 3, 3), stride=(2, 2), padding=(1, 1)),
]


def test_tf32_rounds_its_operands_and_nothing_else(cuda_ops, rng):
    """Against products of operands rounded on the host the error is that of float32, far below that of TF32."""
    case = Case("3x3-stride-2", (8, 28, 28, 64), (96, 3, 3), stride=(2, 2), padding=(1, 1))
    # No value is a tie: which way those go differs between the instruction that rounds and the copy that does.
    hosts = [(host.view(np.uint32) | 1).view(np.float32) for host in drawn(rng, case, float32)]
    results = three(cuda_ops, case, *put(cuda_ops, *hosts), tf32=1)
    exacts = three_expected(case, *hosts, float32)
    near = three_expected(case, *map(rounded, hosts), float32)
    for result, exact, expected, n in zip(results, exacts, near, case.terms, strict=True):
        # Tensor cores cut the sums of a step off instead of rounding them: four units where rounding makes half of one.
        assert_close(result, expected, terms=n, scale=32)
        assert_close(result, exact, terms=n, scale=4, tf32=True)
        assert np.abs(result - exact).max() > 2.0**-24 * 64 * np.abs(exact).max(), "tf32 had no effect"


@cases(BIG)
def test_exact_float32_stays_exact_at_size(cuda_ops, rng, case):
    case = dataclasses.replace(case, x=(2, *case.x[1:]))
    hosts = drawn(rng, case, float32)
    results = three(cuda_ops, case, *put(cuda_ops, *hosts))
    for result, expected, n in zip(results, three_expected(case, *hosts, float32), case.terms, strict=True):
        assert_close(result, expected, terms=n, scale=6)


@cases(BIG)
@SIXTEEN
def test_16_bit_equals_exact_float32_of_the_same_values(cuda_ops, rng, storage, case):
    """Products of 16-bit values are exact in float32, so only summation and one rounding may differ."""
    placed = put(cuda_ops, *drawn(rng, case, storage))
    wide = three(cuda_ops, case, *(cuda_ops.cast(array, float32) for array in placed))
    for result, expected, dtype, n in zip(
        three(cuda_ops, case, *placed), wide, (storage, storage, float32), case.terms, strict=True
    ):
        assert_close(result, expected, dtype, terms=n, scale=32)


@pytest.mark.parametrize("groups", [1, 2, 24], ids=["dense", "grouped", "depthwise"])
def test_every_output_is_written(cuda_ops, dtype, rng, groups, monkeypatch):
    """Results on top of NaN equal results on top of whatever was there: no output and no partial sum is left out."""
    case = Case("any", (3, 13, 11, 24), (48, 3, 3), stride=(3, 2), padding=(1, 0), groups=groups)
    placed = put(cuda_ops, *drawn(rng, case, dtype))
    expected = three(cuda_ops, case, *placed)

    poison(monkeypatch, "conv2d", "channel_sum", "widen")
    found = three(cuda_ops, case, *placed)
    assert all(np.isfinite(array.astype(np.float32)).all() for array in found)
    same_bits(found, expected)


def test_more_than_two_to_the_31_elements(forced_ops, rng):
    last_of_many_images(forced_ops, Case("large", (41000, 29, 29, 64), (16, 1, 1)), rng, data=True)


# ------------------------------------------------------------------------------------------------- textbook kernels


TEXTBOOK_SHAPES = [
    pytest.param((2, 17, 35, 3), (20, 3, 3), {"padding": (1, 1)}, id="ragged tiles"),
    pytest.param((1, 9, 11, 9), (5, 1, 1), {}, id="1x1"),
    pytest.param((2, 20, 19, 17), (33, 5, 3), {"stride": (2, 3), "padding": (2, 0), "dilation": (1, 2)}, id="strided"),
    pytest.param((1, 2, 3, 8), (16, 5, 5), {"padding": (3, 2)}, id="filter over image"),
]


@pytest.mark.parametrize("name", ["direct", "tiled"])
@pytest.mark.parametrize(("x_shape", "filters", "options"), TEXTBOOK_SHAPES)
def test_textbook_kernels_equal_the_definition(cuda_ops, rng, name, x_shape, filters, options):
    options = {**PLAIN, **options}
    x, w = draw(rng, x_shape, float32), draw(rng, (*filters, x_shape[3]), float32)
    bias = draw(rng, filters[0], float32)
    with family(name):
        y = cuda_ops.conv2d(*map(cuda_ops.from_host, (x, w, bias)), **options)
    expected = reference.conv2d(x, w, bias, **options)
    assert_close(cuda_ops.to_host(y), expected, float32, terms=x_shape[3] * filters[1] * filters[2] + 1, scale=4)


def test_textbook_kernels_refuse_what_they_cannot_do():
    from minidl import cuda as ops

    def run(name, dtype=float32, kernel=3, **options):
        x, w = ops.empty((1, 300, 300, 8), dtype), ops.empty((8, kernel, kernel, 8 // options.get("groups", 1)), dtype)
        with dry_run(), family(name):
            ops.conv2d(x, w, **PLAIN | options)

    with dry_run():
        for wrong in ({"dtype": bfloat16}, {"groups": 2}):
            for name in ("direct", "tiled"):
                with pytest.raises(ValueError, match=f"{name} family does not apply"):
                    run(name, **wrong)
        with pytest.raises(ValueError, match="tiled family does not apply"):
            run("tiled", kernel=9, stride=(8, 8), dilation=(4, 4))
        run("direct", kernel=9, stride=(8, 8), dilation=(4, 4))
        with pytest.raises(ValueError, match="generic or grouped or hopper or small or stem"):
            run("textbook")
