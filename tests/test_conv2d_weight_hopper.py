"""The weight gradient on Hopper's matrix units: laws with the family forced; plans: test_conv2d_weight_plans.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_weight_hopper as hopper
from minidl.cuda.convolution import conv2d_weight_tiles
from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.device import BUILT_IN
from minidl.precision import bfloat16, float16, float32
from tests.convolutions import Case, cases, pitched, plan_of, weight_gradient
from tests.reference import conv2d as reference
from tests.tolerance import assert_close, draw, draw_integers, rounded

CASES = [
    Case("3x3", (2, 9, 10, 64), (64, 3, 3), padding=(1, 1)),
    Case("3x3-asymmetric-padding", (3, 8, 9, 16), (24, 3, 3), padding=(0, 2)),
    Case("3x3-valid", (2, 11, 7, 72), (64, 3, 3)),
    Case("3x3-dilated", (2, 12, 11, 40), (72, 3, 3), padding=(2, 3), dilation=(2, 3)),
    Case("3x3-wide", (1, 5, 131, 8), (16, 3, 3), padding=(1, 1)),
    Case("3x3-beyond-padding", (2, 6, 5, 8), (8, 3, 3), padding=(4, 3)),
    Case("3x3-dilation-beyond-image", (2, 5, 6, 8), (8, 3, 3), padding=(6, 7), dilation=(6, 7)),
    Case("3x3-one-pixel", (5, 1, 1, 24), (40, 3, 3), padding=(1, 1)),
    Case("3x3-one-column", (3, 70, 1, 8), (8, 3, 3), padding=(1, 1)),
    Case("3x3-many-steps", (9, 30, 31, 136), (200, 3, 3), padding=(1, 1)),
    Case("3x3-stride-2", (3, 8, 8, 72), (200, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("3x5-padded", (3, 7, 11, 8), (16, 3, 5), padding=(1, 2)),
    Case("7x7-stride-2", (2, 15, 17, 24), (40, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("11x11-stride-3-1", (2, 20, 23, 16), (72, 11, 11), stride=(3, 1), padding=(5, 5)),
    Case("stride-asymmetric", (2, 11, 13, 16), (8, 3, 2), stride=(3, 2), padding=(0, 1)),
    Case("stride-over-kernel", (2, 13, 12, 8), (16, 2, 1), stride=(3, 4)),
    Case("dilation-stride", (2, 14, 15, 136), (64, 3, 3), stride=(2, 3), padding=(3, 1), dilation=(3, 2)),
    Case("kernel-over-image", (2, 3, 2, 64), (64, 5, 7), padding=(2, 3)),
    Case("1x1", (2, 6, 5, 24), (40, 1, 1)),
    Case("1x1-many-steps", (16, 15, 14, 264), (520, 1, 1)),
    Case("1x1-stride-2", (2, 7, 8, 328), (136, 1, 1), stride=(2, 2)),
    Case("1x1-padded", (2, 4, 3, 8), (8, 1, 1), padding=(2, 1), stride=(2, 2)),
    Case("linear", (7, 1, 1, 104), (32, 1, 1)),
    Case("linear-one-sample", (1, 1, 1, 264), (72, 1, 1)),
    Case("groups-of-blocks", (2, 9, 8, 192), (128, 3, 3), padding=(1, 1), groups=2),
    Case("groups-beside-blocks", (3, 7, 9, 120), (216, 3, 3), stride=(2, 1), padding=(1, 2), groups=3),
    Case("groups-dilated", (3, 8, 11, 144), (160, 3, 3), padding=(2, 1), dilation=(2, 1), groups=2),
    Case("groups-1x1", (2, 6, 7, 32), (416, 1, 1), groups=4),
]
KINDS = {"bf16": (bfloat16, 0), "fp16": (float16, 0), "tf32": (float32, 1), "tf32x3": (float32, 3)}
KIND = pytest.mark.parametrize(("storage", "tf32"), KINDS.values(), ids=KINDS)
TILES = [(tile, 0) for tile in (*hopper.TILES, hopper.HALO)]
TILES += [(tile, tf32) for tf32 in (1, 3) for tile in hopper.tiles_of(tf32)]
DIVISIONS = (1, 1), (3, 1), (2, 2), (1, 2), (5, 1, 3), (3, 1, 5), (1, 1, 2)
H200 = BUILT_IN["H200"]
CUT = 32  # tensor cores cut the sums of a step off: four units where rounding makes half of one


def draw_exact(rng, shape, storage, tf32) -> np.ndarray:
    """Values that products take as they are."""
    return rounded(draw(rng, shape, storage)) if tf32 == 1 else draw(rng, shape, storage)


def cut_off(case: Case, expected: np.ndarray) -> float:
    """`CUT`, or what a share of many steps of 16 bits adds up: in each a unit in the last place of its sum at most."""
    steps = case.terms[2] / hopper.choose(plan_of(case))[1].parts / 16
    return max(CUT, steps * float(np.abs(expected).max()) / (8 * case.terms[2] ** 0.5))


def is_divided(case: Case, tile, division: tuple[int, ...], tf32: int) -> bool:
    """Whether there are partial sums; each has a stage of pixels for every block of its cluster, at least."""
    images, height, width, _ = case.y
    if tile is hopper.HALO:
        height, width = hopper.halo(plan_of(case)).size
    stages = -(-images * height * width // (32 if tf32 else 64))
    return min(division[0], stages // division[1]) > 1


HALO_CASES = [case for case in CASES if hopper.halo(plan_of(case)) is not None]


def _needs_hopper(ops):
    from minidl.cuda.device import HOPPER, current_device

    if current_device().arch != HOPPER:
        pytest.skip("needs compute capability 9.0")
    return ops


@pytest.fixture
def hopper_ops(cuda_ops):
    return _needs_hopper(cuda_ops)


@pytest.fixture
def taking(monkeypatch):
    """A function that makes every plan take this tile, number of partial sums and cluster, and take gradients for some
    that overflow the cache.
    """

    def take(tile, *division, overflowing=False):
        hopper.plan.cache_clear()
        chosen = tile, hopper.Division(*division)
        monkeypatch.setattr(hopper, "choose", lambda conv, normalized, tf32: chosen)
        for module in (hopper, conv2d_weight_tiles):
            monkeypatch.setattr(module, "overflows", lambda conv: overflowing)

    yield take
    hopper.plan.cache_clear()


@KIND
@pytest.mark.parametrize("name", ["hopper", "generic"])
@cases(CASES)
def test_equals_definition_and_accumulates(hopper_ops, case, storage, tf32, name, rng):
    x, dy = draw_exact(rng, case.x, storage, tf32), draw_exact(rng, case.y, storage, tf32)
    start = draw(rng, case.w, np.float32)
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    placed, scale = (hopper_ops.from_host(dy), hopper_ops.from_host(x)), CUT if tf32 else cut_off(case, expected)
    with family(name):
        gradient = weight_gradient(hopper_ops, case, *placed, tf32=tf32)
        assert_close(gradient, expected, terms=case.terms[2], scale=scale)
        again = weight_gradient(hopper_ops, case, *placed, tf32=tf32)
        assert np.array_equal(gradient, again), "another run, other bits"
        added = weight_gradient(hopper_ops, case, *placed, start=start, tf32=tf32)
    assert_close(added, start + expected, terms=case.terms[2] + 1, scale=scale)


@cases(CASES)
@pytest.mark.parametrize("kind", ["bf16", "tf32", "tf32x3"])
def test_every_tile_equals_definition(hopper_ops, case, kind, rng, taking):
    """Bit by bit, on whole numbers: as one sum, too, where a tensor core's cuts of a long sum would add up."""
    storage, tf32 = KINDS[kind]
    x, dy = (draw_integers(rng, shape, storage) for shape in (case.x, case.y))
    start = draw_integers(rng, case.w, np.float32)
    expected = start + reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    placed = hopper_ops.from_host(dy), hopper_ops.from_host(x)
    for tile, of in TILES:
        if of != tf32 or (tile is hopper.HALO and case not in HALO_CASES):
            continue
        for division in DIVISIONS:
            if len(division) > 2 and not hopper.shares(tile, tf32):
                continue
            taking(tile, *division)
            with family("hopper"):
                gradient = weight_gradient(hopper_ops, case, *placed, start=start, tf32=tf32)
            np.testing.assert_array_equal(gradient, expected, f"{tile.name} {division}")


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("division", [(1, 1), (1, 1, 2), (5, 1, 3), (2, 2)], ids=str)
@cases([case for case in CASES if case.name in ("linear", "1x1-many-steps", "3x3-many-steps", "groups-1x1")])
def test_a_gradient_that_overflows_the_cache_equals_definition(hopper_ops, case, division, accumulate, rng, taking):
    """Bit by bit, on whole numbers: in the other order of tiles, by stores that leave the cache first."""
    x, dy = (draw_integers(rng, shape, bfloat16) for shape in (case.x, case.y))
    start = draw_integers(rng, case.w, np.float32)
    expected = (start if accumulate else 0) + reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    placed = hopper_ops.from_host(dy), hopper_ops.from_host(x)
    for tile in hopper.TILES:
        taking(tile, *division, overflowing=True)
        with family("hopper"):
            gradient = weight_gradient(hopper_ops, case, *placed, start=start if accumulate else None)
        np.testing.assert_array_equal(gradient, expected, tile.name)


@cases(CASES)
@pytest.mark.parametrize("kind", ["bf16", "tf32", "tf32x3"])
def test_pitched_and_misaligned_arrays_give_the_bits_of_dense_ones(hopper_ops, case, kind, rng):
    storage, tf32 = KINDS[kind]
    x, dy = draw(rng, case.x, storage), draw(rng, case.y, storage)
    with family("hopper"):
        expected = weight_gradient(hopper_ops, case, hopper_ops.from_host(dy), hopper_ops.from_host(x), tf32=tf32)
        for before, after in ((8, 16), (3, 2), (8, 1), (1, 7)):  # aligned, or in need of a copy
            placed = [pitched(hopper_ops, host, before, after) for host in (dy, x)]
            assert np.array_equal(weight_gradient(hopper_ops, case, *placed, tf32=tf32), expected)


@pytest.mark.parametrize("kind", ["bf16", "tf32", "tf32x3"])
@pytest.mark.parametrize("division", [(1, 1), (4, 1), (1, 2), (2, 2), (5, 1, 3)], ids=str)
@cases([case for case in CASES if case.name in ("3x3", "3x3-many-steps", "1x1-many-steps", "11x11-stride-3-1")])
def test_all_of_the_gradient_is_written_and_nothing_else(hopper_ops, case, rng, division, kind, monkeypatch, taking):
    """Into a slice of an arena, also where it begins amid 16 bytes and is copied to; what is made on the way is
    poisoned, with canaries around all.
    """
    import cupy

    storage, tf32 = KINDS[kind]
    x, dy = (draw_integers(rng, shape, storage) for shape in (case.x, case.y))
    guards = []

    def guarded(shape, dtype):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arena = cupy.full(size + 2048, 255, np.uint8)  # NaN in every storage type
        guards.append((arena, size))
        return arena[1024 : 1024 + size].view(dtype).reshape(shape)

    tiles = [hopper.tiles_of(tf32)[0], *([hopper.HALO] if case in HALO_CASES and not tf32 else [])]
    if len(division) > 2:
        tiles = [tile for tile in tiles if hopper.shares(tile, tf32)]
        if not tiles:
            pytest.skip("blocks share no tiles of three products in TF32")
    for tile, offset in itertools.product(tiles, (0, 1)):
        taking(tile, *division)
        placed = hopper_ops.from_host(dy), hopper_ops.from_host(x)
        size = int(np.prod(case.w))
        arena = cupy.full(size + 258, np.nan, np.float32)
        out, before = arena[128 + offset : 128 + offset + size].reshape(case.w), len(guards)
        with monkeypatch.context() as patch, family("hopper"):
            patch.setattr(hopper, "empty", guarded)
            hopper_ops.conv2d_backward_weight(*placed, **case.options, out=out, tf32=tf32)
        made = is_divided(case, tile, division, tf32) + offset
        assert len(guards) - before == made, "partial sums, and a place of its own"
        expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
        np.testing.assert_array_equal(hopper_ops.to_host(out), expected)
        around = hopper_ops.to_host(arena)
        assert np.isnan(around[: 128 + offset]).all() and np.isnan(around[128 + offset + size :]).all()
    for arena, size in guards:
        host = cupy.asnumpy(arena)
        assert (host[:1024] == 255).all() and (host[1024 + size :] == 255).all()
        if len(division) == 2:  # where blocks share tiles, some leave less than there is room for
            assert np.isfinite(host[1024 : 1024 + size].view(np.float32)).all()


@KIND
def test_large_sums_equal_those_of_exact_float32(hopper_ops, storage, tf32, rng):
    """At the sizes of training, by default, against float32 kernels on the same values."""
    for x_shape, filters, stride in (
        ((16, 56, 56, 64), (64, 3, 3), 1),
        ((32, 28, 28, 128), (128, 3, 3), 1),
        ((16, 56, 56, 64), (256, 1, 1), 1),
        ((16, 28, 28, 256), (512, 1, 1), 2),
        ((32, 14, 14, 256), (256, 3, 3), 2),
    ):
        padding = filters[1] // 2
        case = Case("large", x_shape, filters, stride=(stride, stride), padding=(padding, padding))
        placed = [hopper_ops.from_host(draw_exact(rng, shape, storage, tf32)) for shape in (case.y, case.x)]
        exact = weight_gradient(hopper_ops, case, *[hopper_ops.cast(a, float32) for a in placed])
        found = weight_gradient(hopper_ops, case, *placed, tf32=tf32)
        cuts = 2 * CUT if tf32 == 1 else CUT  # after 8 products instead of 16: twice as many in a long sum
        assert_close(found, exact, terms=case.terms[2], scale=cuts)
