"""Convolution's families of GPU kernels, each forced on what it can do: one law for all of them.

Small shapes at every edge of the families' limits; the definition is the float64 reference.
"""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest

from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_halo, conv2d_hopper, conv2d_hopper_tiles, conv2d_walk
from minidl.cuda.convolution.conv2d_family import Choice, family, forced_family
from minidl.cuda.convolution.conv2d_family import kernel as by_name
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.convolution.conv2d_walk import walks_of
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float16, float32
from minidl.shapes import ceil_div
from tests.convolutions import (
    CASES as ALL,
)
from tests.convolutions import (
    SIXTEEN,
    Case,
    bits_of_dense_arrays,
    both,
    cases,
    drawn,
    equals_definition,
    independent_of_the_batch,
    plan_of,
    put,
    same_bits,
    same_bits_by_every_tile,
    writes_its_output_alone,
)
from tests.tolerance import draw

CASES = [
    Case("plain-3x3", (2, 9, 10, 16), (32, 3, 3), padding=(1, 1)),
    Case("one-pixel", (1, 1, 1, 8), (8, 1, 1)),
    Case("linear", (300, 1, 1, 200), (72, 1, 1)),
    Case("1x1", (3, 14, 13, 64), (264, 1, 1)),
    Case("1x1-deep", (2, 8, 9, 456), (136, 1, 1)),
    Case("1x1-stride-2", (3, 13, 12, 72), (40, 1, 1), stride=(2, 2)),
    Case("1x1-padded", (2, 4, 3, 8), (16, 1, 1), padding=(2, 1), stride=(2, 3)),
    Case("channels-over-stages", (2, 8, 7, 200), (136, 3, 3), padding=(1, 1)),
    Case("two-column-tiles", (2, 10, 9, 64), (320, 3, 3), padding=(1, 1)),
    Case("asymmetric", (3, 11, 17, 24), (40, 3, 5), stride=(1, 2), padding=(1, 2)),
    Case("asymmetric-mirrored", (3, 17, 11, 24), (40, 5, 3), stride=(2, 1), padding=(0, 1)),
    Case("stride-2", (5, 15, 14, 72), (64, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("stride-3", (3, 16, 14, 16), (24, 3, 3), stride=(3, 3), padding=(1, 0)),
    Case("stride-3-2-dilated", (2, 19, 20, 8), (16, 3, 4), stride=(3, 2), padding=(2, 1), dilation=(2, 3)),
    Case("stride-over-kernel", (2, 13, 12, 8), (16, 2, 1), stride=(3, 4)),
    Case("dilation-2", (2, 12, 11, 16), (24, 3, 3), padding=(2, 2), dilation=(2, 2)),
    Case("dilation-beyond-image", (2, 5, 6, 8), (8, 3, 3), padding=(6, 7), dilation=(6, 7)),
    Case("5x5", (2, 9, 8, 16), (16, 5, 5), padding=(2, 2)),
    Case("7x7-stride-2", (2, 17, 19, 8), (16, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("11x11", (2, 12, 13, 8), (8, 11, 11), padding=(5, 5)),
    Case("11x11-valid", (1, 13, 12, 8), (16, 11, 11)),
    Case("kernel-over-image", (3, 3, 2, 16), (8, 5, 7), padding=(2, 3)),
    Case("one-pixel-3x3", (130, 1, 1, 16), (24, 3, 3), padding=(1, 1)),
    Case("wide-row", (1, 1, 300, 8), (16, 1, 3), padding=(0, 1)),
    Case("windows", (2, 41, 21, 72), (136, 3, 3), padding=(1, 1)),
    Case("windows-narrow", (3, 30, 16, 64), (64, 3, 3), padding=(1, 1)),
    Case("windows-dilated", (1, 37, 19, 136), (200, 2, 3), padding=(2, 0), dilation=(3, 2)),
    Case("many-images", (70, 3, 5, 40), (48, 3, 3), padding=(1, 1)),
]
NAMES = ("channels-over-stages", "stride-2", "stride-3-2-dilated", "1x1", "windows-narrow")
FEW = [case for case in CASES if case.name in NAMES]
CUT = 32  # tensor cores cut the sums of a step off: four units where rounding makes half of one
HOPPER = {"conv2d_hopper_kernel", "conv2d_halo_kernel"}


# ---------------------------------------------------------------------------------------------------- without a GPU


def test_the_default_is_the_first_family_that_applies():
    from minidl import cuda as ops

    def kernels(device, storage, case):
        with dry_run(BUILT_IN[device]) as log:
            both(ops, case, *(ops.empty(shape, storage) for shape in (case.x, case.w, case.y)))
        return {launch.name for launch in log.launches}

    plain = Case("plain", (2, 9, 10, 16), (32, 3, 3), padding=(1, 1))
    assert kernels("H200", bfloat16, plain) == kernels("H100", float16, plain) <= HOPPER
    assert kernels("A100", bfloat16, plain) == kernels("H200", float32, plain) == {"conv2d_kernel"}
    for x, filters, options in (
        ((2, 9, 10, 20), (32, 3, 3), {}),
        ((2, 9, 10, 16), (36, 3, 3), {}),
        ((2, 9, 10, 30), (32, 3, 3), {"groups": 2}),
        ((2, 300, 10, 16), (32, 2, 3), {"dilation": (255, 1)}),
        ((2, 9, 10, 16), (32, 3, 3), {"padding": (129, 1)}),
        ((2, 30, 10, 16), (32, 3, 3), {"stride": (9, 1)}),
        ((2, 30, 10, 24), (32, 5, 5), {"stride": (2, 2)}),  # its output alone: stages would be three eighths full
    ):
        assert "conv2d_kernel" in kernels("H200", bfloat16, Case("generic", x, filters, **options))


@cases([case for case in ALL if case.x[0]])
def test_alignment_never_changes_the_family(case):
    from minidl import cuda as ops

    def names(offset):
        def slice_of(*shape):
            return ops.empty((*shape[:-1], shape[-1] + 2 * offset), bfloat16)[..., offset : offset + shape[-1]]

        with dry_run() as log:
            both(ops, case, *(slice_of(*shape) for shape in (case.x, case.w, case.y)), add=slice_of(*case.x))
        return [launch.name for launch in log.launches if launch.name.startswith(("conv2d", "depthwise"))]

    aligned = names(0)
    assert aligned and names(1) == aligned and names(4) == aligned and names(8) == aligned


def test_a_family_that_cannot_do_it_is_refused():
    from minidl import cuda as ops

    case = Case("narrow", (2, 9, 10, 12), (32, 3, 3))
    with dry_run(), family("hopper"):
        x, w, dy = (ops.empty(shape, bfloat16) for shape in (case.x, case.w, case.y))
        with pytest.raises(ValueError, match="family"):
            both(ops, case, x, w, dy)
    with pytest.raises(ValueError, match="family"), family("fastest"):
        pass
    assert forced_family() is None, "nothing is forced any more"


@cases(CASES)
def test_small_cases_reach_the_hopper_family(case):
    assert all(conv2d_hopper.applies(plan_of(case), 1, back, BUILT_IN["H200"]) for back in (False, True))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward_data"])
@cases(CASES)
def test_the_walk_of_the_copy_engine_meets_every_tap(case, backward):
    """Pixels of the bounding box, moved by a tap's offset, are those of the definition, and the box holds them all."""
    conv = plan_of(case)
    for axis in (0, 1):
        sizes, outputs = (conv.height, conv.width)[axis], (conv.out_height, conv.out_width)[axis]
        stride, padding, dilation = conv.stride[axis], conv.padding[axis], conv.dilation[axis]
        meetings = {
            (p, r, p * stride - padding + r * dilation)
            for p, r in product(range(outputs), range(conv.kernel[axis]))
            if 0 <= p * stride - padding + r * dilation < sizes
        }
        found = set()
        for walk in {pair[axis] for pair in walks_of(conv, backward)}:
            low, high = walk.corners
            assert range(low, walk.source + high, walk.step)[: walk.count][-1] == low + (walk.count - 1) * walk.step
            assert len(range(low, walk.source + high, walk.step)) == walk.count
            for i, j in product(range(walk.count), range(walk.taps)):
                at = walk.first + i * walk.step + walk.offset + j * walk.delta
                here, tap = walk.start + i * walk.spread, walk.tap + j * walk.tap_step
                if 0 <= at < walk.source:
                    found.add((at, tap, here) if backward else (here, tap, at))
        assert found == meetings


@pytest.mark.parametrize(
    ("stem", "name", "twin"),
    [
        ("conv2d_hopper", "Class", conv2d_hopper._CLASS),
        ("conv2d_hopper", "Problem", conv2d_hopper._PROBLEM),
        ("conv2d_halo", "Problem", conv2d_halo._PROBLEM),
    ],
)
def test_structures_are_those_of_the_kernels(stem, name, twin):
    text = re.sub(r"//[^\n]*", "", nvrtc.sources()[f"{stem}.cu"].read_text())
    body = re.search(rf"struct {name} {{(.*?)}};", text, re.DOTALL)[1]
    fields = re.findall(r"(\w+)(?=[,;\[])", re.sub(r"\[\d+\]", "", body))
    assert tuple(fields) == twin.names


SIZES = list(product((1, 3, 32, 256), (1, 7, 28, 56, 113), (8, 64, 200), (8, 64, 256, 2048), ((1, 1), (3, 1), (3, 2))))


@pytest.mark.parametrize("name", ["H100", "H200"])
def test_chosen_tiles_apply_and_blocks_are_short(name):
    device, chosen = BUILT_IN[name], set()
    for images, size, channels, filters, (kernel, stride) in SIZES:
        shape, pad = (images, size, size, channels), (kernel // 2,) * 2
        conv = convolution("test", shape, (filters, kernel, kernel, channels), (stride, stride), pad, (1, 1), 1)
        for backward in (False, True):
            tile, share = conv2d_hopper_tiles.choose(conv, backward, device)
            assert tile in conv2d_hopper_tiles.candidates(conv, backward, device, parts=tile.parts)
            chosen.add(tile)
            rounds = ceil_div(conv2d_hopper_tiles.work(conv, backward, tile)[0], device.multiprocessors * tile.resident)
            length = conv2d_hopper_tiles.microseconds(conv, backward, tile, device)[0] / rounds * share
            assert share == 1 or length <= 2 * conv2d_hopper_tiles.LONGEST
    assert len(chosen) >= 6, "all but one have their uses"


def test_more_images_never_take_less_time():
    device = BUILT_IN["H200"]
    for size, channels, filters, kernel, stride in ((27, 96, 192, 3, 1), (14, 256, 64, 1, 1), (30, 320, 320, 3, 2)):
        times: dict[str, list[float]] = {}
        for images in (1, 2, 3, 5, 8, 16, 24, 100, 256):
            shape, pad = (images, size, size, channels), (kernel // 2,) * 2
            conv = convolution("test", shape, (filters, kernel, kernel, channels), (stride,) * 2, pad, (1, 1), 1)
            for backward, tile in product((False, True), conv2d_hopper_tiles.candidates(conv, False, device)):
                if tile in conv2d_hopper_tiles.candidates(conv, backward, device):
                    time = conv2d_hopper_tiles.microseconds(conv, backward, tile, device)[1]
                    times.setdefault(f"{tile.name} {backward}", []).append(time)
        for name, row in times.items():
            assert row == sorted(row) and row[0] < row[-1], (name, row)


def test_swapped_tiles_are_for_one_round_of_blocks_in_16_bits():
    """As ResNet-50's third stage is at 32 images: 132 tiles where others are 98."""

    def swapped(images, filters=256, groups=1, **options):
        w, places = (filters, 1, 1, 1024 // groups), ((1, 1), (0, 0), (1, 1))
        conv = convolution("test", (images, 14, 14, 1024), w, *places, groups)
        found = conv2d_hopper_tiles.candidates(conv, False, BUILT_IN["H200"], **options)
        return {(tile.rows, tile.columns) for tile in found if tile in conv2d_hopper_tiles.SWAPPED}

    assert swapped(32) == {(96, 128), (112, 128)} and swapped(33) == {(112, 128)} and not swapped(64)
    assert len(swapped(1)) == len(conv2d_hopper_tiles.SWAPPED)
    assert not swapped(32, code=0) and not swapped(32, normalized=True) and not swapped(32, groups=4)
    for tile in conv2d_hopper_tiles.SWAPPED:
        assert tile.rows % 16 == tile.columns % 64 == 0 and tile.patches == tile.resident == tile.parts == 1


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize("backward", [False, True])
def test_stages_that_rows_do_not_fill_take_no_less_to_fetch(backward, code):
    """Of pixels and of filters: ends of lines and zeros cost the engine more than values do."""
    tile, vector = conv2d_hopper_tiles.TILES[0], 8 if code else 4

    def fetched(channels, filters):
        places = (1, 1), (1, 1), (1, 1)
        conv = convolution("test", (2, 20, 20, channels), (filters, 3, 3, channels), *places, 1)
        least, more = conv2d_hopper_tiles._fetched(conv, backward, tile, code)
        assert least > 0 <= more
        return least + more

    full = fetched(256, 256)
    for narrow in range(256 - vector, 192, -vector):  # as many stages; as many columns of the tile, or less than it has
        depth = fetched(256, narrow) if backward else fetched(narrow, 256)
        assert depth >= full, narrow
    within, whole = (fetched(256, n) if backward else fetched(n, 256) for n in (3 * vector, 4 * vector))
    assert within > whole, "rows that start within a sector of the cache"


# What passes took that rows in parts of lines slow down: microseconds of an H200, x, filters, whether data gradient.
MEASURED = [
    ((56, 86, 96, 72), (128, 3, 1), True, {"halo32": 85.4, "halo28": 97.5, "256x128x4": 116.2, "192x128x4": 135.7}),
    ((8, 23, 29, 1128), (264, 3, 3), False, {"halo28": 86.7, "128x192x4": 88.5, "192x128x4": 91.7, "128x128x5": 102.3}),
    ((11, 24, 25, 48), (48, 5, 5), True, {"80x64x8T": 7.5, "112x64x8T": 8.2, "64x64x6*2": 8.2, "160x64x7T": 10.1}),
    ((15, 28, 20, 32), (80, 1, 5), False, {"96x128x7T": 4.3, "112x128x6T": 4.4, "160x64x7T": 5.2, "64x64x6*2": 6.1}),
    ((8, 50, 54, 144), (1392, 3, 1), True, {"128x192x4": 76.0, "halo28": 77.2, "256x64x4": 82.3, "192x128x4": 89.0}),
]


@pytest.mark.parametrize(("x", "filters", "backward", "times"), MEASURED)
def test_rows_in_parts_of_lines_are_reckoned_with(x, filters, backward, times):
    padding = tuple(size // 2 for size in filters[1:])
    conv = convolution("test", x, (*filters, x[3]), (1, 1), padding, (1, 1), 1)
    chosen = conv2d_hopper_tiles.choose(conv, backward, BUILT_IN["H200"])[0].name
    assert times.get(chosen, float("inf")) <= 1.1 * min(times.values()), chosen


@pytest.mark.parametrize(("size", "stride", "kernel"), [(14, 2, 3), (28, 2, 1), (9, 3, 3), (15, 3, 2)])
def test_the_busiest_multiprocessor_has_as_many_stages_as_blocks_find(size, stride, kernel):
    """Tile by tile, as `within_class` of conv2d_hopper_tile.cuh looks up which of a class it is: those of blocks that
    have one each lie on multiprocessors in turn, others are taken by whoever is free."""
    conv = convolution("test", (40, size, size, 136), (192, kernel, kernel, 136), (stride,) * 2, (1, 1), (1, 1), 1)
    walks, device = conv2d_walk.walks_of(conv, True), BUILT_IN["H200"]
    for tile in conv2d_hopper_tiles.TILES:
        group, columns, most = device.multiprocessors * tile.resident, ceil_div(136, tile.columns), 0
        for launch in (walks[i : i + 4] for i in range(0, len(walks), 4)):
            tiles = [ceil_div(conv.images * h.count * w.count, tile.rows) * columns for h, w in launch]
            stages = [h.taps * w.taps * 3 for h, w in launch]
            count = max(1, sum(stage > 0 for stage in stages))
            cycles, found = min(tiles[:count]) // group, [0] * device.multiprocessors
            held = [0] * group
            for index in range(sum(tiles)):
                cycle, part = divmod(index // group, count)
                left, rest = index - cycles * group * count, 0
                if cycle >= cycles:
                    part = 0
                    while left >= (rest := tiles[part] - (cycles * group if part < count else 0)):
                        left, part = left - rest, part + 1
                found[index % group % device.multiprocessors] += stages[part]
                held[held.index(min(held))] += stages[part]
            most += max(found) if sum(tiles) <= group else tile.resident * max(held)
        assert conv2d_hopper_tiles._most(conv, tile, device, 1) == most, tile.name


def test_what_lies_across_cache_lines_is_known():
    """Pixels of 48 channels, 96 bytes: every second one lies in two lines. Of 96: one of four stages."""
    reads = conv2d_walk.reads
    assert all(reads(channels, 2) == (0.0, False) for channels in (16, 32, 64, 128, 320, 2048))
    assert reads(48, 2) == (0.5, False) and reads(96, 2) == (0.25, False)
    assert reads(24, 2) == (0.25, True) and reads(40, 2) == (0.5, True)
    assert all(reads(channels // 2, 4) == reads(channels, 2) for channels in (24, 48, 64, 96, 320)), "bytes count"


# ------------------------------------------------------------------------------------------------------- on a GPU


@SIXTEEN
@cases(CASES)
def test_equals_definition(forced_ops, case, storage, rng):
    equals_definition(forced_ops, case, storage, rng, both, scale=CUT)


@cases(CASES)
def test_pitched_and_misaligned_arrays_give_the_bits_of_dense_ones(forced_ops, case, rng):
    bits_of_dense_arrays(forced_ops, case, bfloat16, rng, both, ((8, 16), (3, 2), (4, 4)))


def test_dense_arrays_at_odd_addresses(forced_ops, rng):
    case = FEW[0]
    hosts = *drawn(rng, case, bfloat16), draw(rng, case.w[0], float32)

    def shifted(host):
        flat = forced_ops.from_host(np.concatenate([np.full(1, np.nan, host.dtype), host.ravel()]))
        return flat[1:].reshape(host.shape)

    same_bits(both(forced_ops, case, *map(shifted, hosts)), both(forced_ops, case, *put(forced_ops, *hosts)))


@SIXTEEN
@cases(CASES)
def test_all_of_the_output_and_nothing_else_is_written(forced_ops, case, storage, rng, monkeypatch):
    writes_its_output_alone(forced_ops, case, storage, rng, both, monkeypatch)


@cases(FEW)
def test_an_images_result_does_not_depend_on_its_batch(forced_ops, case, rng):
    # Of Hopper's family the sizes say whether the depth is cut; named, it is or is not.
    with by_name(Choice("hopper", conv2d_hopper_tiles.TILES[0].name, (1,))):
        independent_of_the_batch(forced_ops, case, rng)


@cases(FEW)
def test_batches_beyond_a_launch_are_split(forced_ops, case, rng, monkeypatch):
    placed = put(forced_ops, *drawn(rng, case, bfloat16))
    add = forced_ops.from_host(draw(rng, case.x, bfloat16))
    whole = both(forced_ops, case, *placed, add=add)
    monkeypatch.setattr(conv2d_hopper, "ROW_LIMIT", case.x[1] * case.x[2])
    same_bits(both(forced_ops, case, *placed, add=add), whole)


@cases(CASES)
@pytest.mark.parametrize("share", [1, 3])
def test_every_tile_gives_the_same_bits(hopper, case, rng, monkeypatch, share):
    same_bits_by_every_tile(hopper, case, bfloat16, rng, monkeypatch, share)
