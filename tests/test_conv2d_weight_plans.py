"""The weight gradient on Hopper's matrix units, without a GPU: what the copy engine walks over, plans, which compile.

The tensor maps are walked as the engine does, and summed up by definition.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_weight_hopper as hopper
from minidl.cuda.convolution.conv2d_choice import options
from minidl.cuda.convolution.conv2d_family import Question, family
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.convolution.conv2d_weight_grid import halo_views
from minidl.cuda.convolution.conv2d_weight_tiles import WORKERS
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float32
from tests import weight_tiles
from tests.convolutions import cases, plan_of
from tests.kernel_calls import PROCESSES
from tests.kernel_checks import check_report
from tests.reference import conv2d as reference
from tests.test_conv2d_weight_hopper import CASES, H200, HALO_CASES, KIND, TILES
from tests.tolerance import draw


def walk(view, image: np.ndarray, start: tuple[int, int, int], count: int, offset=(0, 0)) -> np.ndarray:
    """A column of ``count`` pixels as the copy engine reads it, from (image, row, column) on; zeros outside."""
    n, h, w = start
    (first_w, first_h), (last_w, last_h) = view.corners
    _, width, height, images = view.sizes
    pixels = np.zeros((count, image.shape[-1]), image.dtype)
    for i in range(count):
        y, x = h + offset[0], w + offset[1]
        if n < images and 0 <= y < height and 0 <= x < width:
            pixels[i] = image[n, y, x]
        w += view.steps[0]
        if w > width - 1 + last_w:
            w, h = first_w, h + view.steps[1]
        if h > height - 1 + last_h:
            h, n = first_h, n + 1
    return pixels


def of_groups(conv):
    """(filters, channels) of each group"""
    every = (np.split(np.arange(count), conv.groups) for count in (conv.out_channels, conv.channels))
    return list(zip(*every, strict=True))


@cases(CASES)
@pytest.mark.parametrize(("code", "tf32"), [(1, 0), (0, 1)])
def test_the_engine_walks_the_pixels_of_the_definition(case, code, tf32, rng):
    conv = plan_of(case)
    x, dy = (draw(rng, shape, np.float64) for shape in (case.x, case.y))
    (_, _), (view, _) = hopper._views(conv, code, (conv.channels, conv.out_channels), tf32)._views
    rows = dy.reshape(-1, conv.out_channels)
    count = len(rows) + 70  # beyond the last image all is zero
    gradient = np.zeros(case.w)
    for r, s in np.ndindex(conv.kernel):
        if view.corners is None:
            pixels = x.reshape(-1, conv.channels)
        else:
            offset = r * conv.dilation[0], s * conv.dilation[1]
            pixels = walk(view, x, (0, -conv.padding[0], -conv.padding[1]), count, offset)
            assert not pixels[len(rows) :].any()
        for filters, channels in of_groups(conv):
            gradient[filters, r, s] = rows[:, filters].T @ pixels[: len(rows), channels]
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9)


@cases(HALO_CASES)
def test_a_tap_is_one_offset_for_all_points_of_the_grid(case, rng):
    conv = plan_of(case)
    grid = hopper.halo(conv)
    x, dy = (draw(rng, shape, np.float64) for shape in (case.x, case.y))
    (of_dy, _), (of_x, _) = halo_views(conv, 1, (conv.channels, conv.out_channels), grid)._views
    points = conv.images * grid.size[0] * grid.size[1]
    rows = walk(of_dy, dy, (0, 0, 0), points)
    pixels = walk(of_x, x, (0, -conv.padding[0], -conv.padding[1]), points + 2 * sum(grid.tap))
    gradient = np.zeros(case.w)
    for r, s in np.ndindex(3, 3):
        offset = r * grid.tap[0] + s * grid.tap[1]
        for filters, channels in of_groups(conv):
            gradient[filters, r, s] = rows[:, filters].T @ pixels[offset : offset + points, channels]
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    np.testing.assert_allclose(gradient, expected, rtol=1e-9, atol=1e-9)


def test_the_halo_serves_common_3x3_convolutions():
    for size in (1, 7, 14, 56, 128, 256):
        assert hopper.halo(convolution("test", (2, size, size, 64), (64, 3, 3, 64), (1, 1), (1, 1), (1, 1), 1))
    assert not hopper.halo(convolution("test", (2, 8, 8, 64), (64, 3, 3, 64), (2, 2), (1, 1), (1, 1), 1))
    assert not hopper.halo(convolution("test", (2, 8, 2000, 64), (64, 3, 3, 64), (1, 1), (1, 1), (1, 1), 1))


def test_every_block_has_a_step():
    divisions = itertools.product((1, 2, 7, 100), (1, 2), (1, 2, 3, 5))
    for case, (tile, tf32), (parts, cluster, shared) in itertools.product(CASES, TILES, divisions):
        conv = plan_of(case)
        if tile is hopper.HALO and hopper.halo(conv) is None:
            continue
        if shared > 1 and (cluster > 1 or not hopper.shares(tile, tf32)):
            continue
        forced = tile, hopper.Division(parts, cluster, shared)
        pitches = conv.channels, conv.out_channels
        planned = hopper.plan(conv, int(not tf32), pitches, False, forced, tf32=tf32)
        steps, chunks = (int(planned.problem[name][0]) for name in ("steps", "chunks"))
        tiles = int(planned.problem["tiles_m"][0] * planned.problem["tiles_n"][0]) * conv.groups
        together = 1 if tile is hopper.HALO else int(planned.problem["shared"][0])
        assert shared % together == 0 and tiles % together == 0
        most = min(steps * together, parts * cluster)
        assert planned.parts <= chunks == planned.parts * planned.defines["CLUSTER"] <= most
        assert planned.shared <= H200.shared_per_block
        assert planned.grid == chunks * tiles // together


@pytest.mark.parametrize(
    ("steps", "shared", "parts"), [(7, 1, 3), (12, 3, 5), (4, 5, 3), (196, 8, 11), (6, 2, 12), (1, 4, 1)]
)
def test_parts_of_a_tile_follow_one_another(steps, shared, parts):
    """By the formulas of conv2d_weight_hopper.cu, which leaves them, and conv2d_weight_sum.cu, which adds them up."""
    total = steps * shared
    left = {}
    for chunk in range(parts):
        at, end = total * chunk // parts, total * (chunk + 1) // parts
        while at < end:
            turn = at // steps
            last = min(end, (turn + 1) * steps)
            left.setdefault(turn, []).append((chunk + turn, last - at))
            at = last
    for turn in range(shared):
        begin = turn * steps
        first, last = ((begin + 1) * parts - 1) // total, ((begin + steps) * parts - 1) // total
        assert [part for part, _ in left[turn]] == list(range(first + turn, last + turn + 1))
        assert sum(count for _, count in left[turn]) == steps and last + turn < parts + shared - 1 + (first == last)


def test_large_products_keep_the_multiprocessors_busy():
    """Blocks for half of them at least, unless sums are short; and no block has next to nothing to do."""
    widths = (64, 96, 512), (64, 136, 1024)
    for tf32, size, channels, filters, kernel in itertools.product((0, 1, 3), (7, 14, 28, 56), *widths, (1, 3)):
        pad = (kernel // 2,) * 2
        w = filters, kernel, kernel, channels
        conv = convolution("test", (128, size, size, channels), w, (1, 1), pad, (1, 1), 1)
        planned = hopper.plan(conv, int(not tf32), (channels, filters), False, tf32=tf32)
        steps, chunks = (int(planned.problem[name][0]) for name in ("steps", "chunks"))
        if planned.stem == "conv2d_weight_hopper":
            steps *= int(planned.problem["shared"][0])  # of all tiles that blocks share
        assert steps // chunks >= 4 or chunks == 1
        assert planned.grid >= WORKERS // 2 or steps // chunks < 16


def test_blocks_in_either_order_have_every_tile_and_neighbours_share_the_larger_array():
    for (filters, channels), division in itertools.product(((256, 128), (128, 256)), ((2, 1), (1, 2))):
        conv = convolution("test", (8, 28, 28, channels), (filters, 1, 1, channels), (1, 1), (0, 0), (1, 1), 1)
        forced = hopper.TILES[-1], hopper.Division(*division)
        problem = hopper.plan(conv, 1, (channels, filters), False, forced).problem[0]
        down, across, turn_m, turn_n = (int(problem[name]) for name in ("tiles_m", "tiles_n", "turn_m", "turn_n"))
        tiles = [(i // turn_m % down, i // turn_n % across) for i in range(down * across)]
        assert len(set(tiles)) == down * across == filters * channels // 64**2
        shared = int((channels > filters) != (division[1] > 1))  # columns, of x; of clusters the other way round
        assert tiles[0][shared] == tiles[1][shared] and tiles[0][1 - shared] != tiles[1][1 - shared]


def test_partial_sums_hold_little_more_than_the_gradient():
    """A small layer's would else be many times its size, a tile each: work space that a step must have room for."""
    sizes = itertools.product((8, 16, 40, 64, 144), (8, 16, 32, 48, 96), (1, 3), (0, 1))
    for filters, channels, kernel, tf32 in sizes:
        w, pad = (filters, kernel, kernel, channels), (kernel // 2,) * 2
        conv = convolution("test", (16, 32, 32, channels), w, (1, 1), pad, (1, 1), 1)
        planned = hopper.plan(conv, int(not tf32), (channels, filters), False, tf32=tf32)
        if planned.summed is None:
            continue
        held = -(-filters // 16) * kernel**2 * -(-channels // 16) * 256
        one = filters <= 64 and channels <= 64 and not tf32  # tile of rows, span of channels
        assert planned.values <= (1.3 if one else 3) * planned.parts * held, conv


def test_the_family_is_the_one_that_measured_fastest():
    """By a tenth and more on an H200, in bfloat16: each of the four that can do weight gradients."""

    def chosen(x, filters, kernel, stride=1, groups=1):
        padding, w = tuple(taps // 2 for taps in kernel), (filters, *kernel, x[3] // groups)
        conv = convolution("test", x, w, (stride, stride), padding, (1, 1), groups)
        return options(Question("backward_weight", conv, 1, 0), H200)[0].family

    assert chosen((68, 50, 53, 16), 464, (3, 3), 2) == chosen((93, 64, 64, 16), 176, (1, 1)) == "hopper"
    assert chosen((2, 7, 5, 1384), 584, (5, 5)) == "hopper"  # the gradient does not fit the L2 cache
    assert chosen((36, 82, 108, 32), 136, (1, 5)) == chosen((33, 102, 103, 24), 264, (1, 1)) == "generic"
    assert chosen((49, 93, 93, 8), 176, (1, 1)) == chosen((86, 125, 125, 16), 16, (1, 1)) == "thin"
    assert chosen((128, 56, 56, 128), 128, (3, 3), groups=32) == "grouped"
    assert chosen((104, 10, 10, 512), 512, (3, 3), groups=32) == chosen((10, 8, 8, 128), 128, (3, 3), 1, 8) == "hopper"


@pytest.mark.parametrize(
    ("x", "filters", "stride", "times"),
    [
        ((19, 16, 13, 360), (968, 1, 1), 2, {"64x64x6*2 1/1": 6.9, "64x128x4*2 1/2": 7.6, "128x64x4*2 1/1": 8.7}),
        ((2, 33, 26, 272), (48, 3, 3), 1, {"64x128x4*2 5/1": 6.8, "64x64x6*2 1/2": 7.2, "64x64x6*2 2/1": 7.8}),
        ((16, 55, 49, 640), (64, 3, 3), 2, {"64x256x5 5/1": 24.8, "64x128x4*2 5/1": 25.1, "64x64x6*2 1/2": 27.9}),
        ((15, 28, 20, 32), (80, 1, 5), 1, {"128x64x4*2 26/1": 6.4, "128x192x5 33/1": 7.8}),
        ((18, 53, 58, 48), (112, 1, 5), 2, {"128x64x4*2 26/1": 8.6, "128x192x5 33/1": 9.8}),
    ],
)
def test_steps_wait_for_what_they_copy_and_for_zeros_beside_it(x, filters, stride, times):
    """The choice is within a tenth of the fastest by times of an H200, in microseconds."""
    padding = tuple(taps // 2 for taps in filters[1:])
    conv = convolution("test", x, (*filters, x[3]), (stride, stride), padding, (1, 1), 1)
    chosen = str(options(Question("backward_weight", conv, 1, 0), H200)[0]).removeprefix("hopper ")
    assert times.get(chosen, float("inf")) <= 1.1 * min(times.values()), chosen


@pytest.mark.parametrize("name", dict.fromkeys(tile.name for tile, _ in TILES))
def test_every_tile_compiles_and_fits(name):
    """Whichever tile sizes choose: each with each option that it can have, TF32 among them, and two options in some
    tile.
    """
    pytest.importorskip("cuda.pathfinder", reason="needs NVRTC")
    planned, variants = weight_tiles.planned()[name], weight_tiles.covering_tiles()[name]
    for variant, report in zip(variants, nvrtc.compile_all(variants, nvrtc.target(H200.arch), PROCESSES), strict=True):
        check_report(variant[0], report, *planned[variant], H200)


def _gradient_of(x, dy, shape, tf32=0):
    from minidl import cuda as ops

    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "tf32": tf32}
    ops.conv2d_backward_weight(dy, x, **options, out=ops.empty(shape, float32))


@pytest.mark.parametrize(("name", "fits"), [("A100", False), ("L40", False), ("H100", True), ("H200", True)])
@KIND
def test_only_hopper_takes_it(name, fits, storage, tf32):
    with dry_run(BUILT_IN[name]) as log, family("hopper"):
        from minidl import cuda as ops

        arrays = ops.empty((2, 9, 9, 64), storage), ops.empty((2, 9, 9, 32), storage)
        if not fits:
            with pytest.raises(ValueError, match="family"):
                _gradient_of(*arrays, (32, 3, 3, 64), tf32)
            return
        _gradient_of(*arrays, (32, 3, 3, 64), tf32)
    assert log.launches[0].name in ("conv2d_weight_hopper_kernel", "conv2d_weight_halo_kernel")


def test_what_does_not_fit_is_refused_or_left_to_the_generic_family():
    from minidl import cuda as ops

    for dtype, channels, filters, tf32 in ((float32, 64, 64, 0), (bfloat16, 64, 12, 0), (float32, 64, 14, 1)):
        with dry_run(H200) as log:
            x, dy = ops.empty((2, 9, 9, channels), dtype), ops.empty((2, 9, 9, filters), dtype)
            shape = filters, 3, 3, channels
            _gradient_of(x, dy, shape, tf32)
            assert log.launches[0].name == "conv2d_weight_kernel"
            with family("hopper"), pytest.raises(ValueError, match="family"):
                _gradient_of(x, dy, shape, tf32)
