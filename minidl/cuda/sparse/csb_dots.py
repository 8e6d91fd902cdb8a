"""The sampled product in float32 on sm_90 where elements are few: csb_dots.cu."""

from __future__ import annotations

from typing import Any, NamedTuple

from minidl.cuda.array import empty
from minidl.cuda.convolution.channel_sum import sum_partials
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import HOPPER, DeviceRecord
from minidl.cuda.launch import launch
from minidl.cuda.rows import rows, vector_width
from minidl.cuda.sparse.csb_rows import LEAST_SIDE
from minidl.precision import float32
from minidl.shapes import Pair, ceil_div, round_up

CAPACITY = 1024  # elements of a pass
VEC, STAGES = 2, 2
REGIONS = ((256, 128), (128, 128), (64, 128), (64, 64))  # by falling size
FULL = 0.8  # of the capacity, to be left for regions that have more than most
DENSEST = {True: 0.09, False: 0.14}  # by features last: above that the dense tiles of csb_sampled.cu are faster
BLOCKS_WANTED = 264  # two for each multiprocessor of an H200: a constant, so that sums are cut alike on every device
LEAST_STEPS = 8  # stages of a chunk: below that listing the elements costs more than it saves

_PROBLEM = struct("dy_pitch x_pitch samples nnz", "rows columns across tiles_m tiles_n steps chunks accumulate")


class DotsTile(NamedTuple):
    """The region of a matrix that a thread block owns: the macros of the same names."""

    rows: int
    columns: int

    @property
    def shared_bytes(self) -> int:
        """For operands in either orientation; lists, masks and barriers."""
        samples = 32 * VEC
        lists = 8 * CAPACITY + self.rows * self.columns // 8 + 4 * self.rows + self.rows // 8 + 4
        return STAGES * (4 * samples * (self.rows + self.columns + 2) + 16) + lists + 8


def applies(side: int, dtype: Any, shape: Pair, nnz: int, features_last: bool, device: DeviceRecord) -> bool:
    """Whether this kernel can do a product, and the matrix is sparse enough for it."""
    fits = side >= LEAST_SIDE and dtype == float32 and device.arch == HOPPER
    return fits and nnz <= DENSEST[features_last] * shape[0] * shape[1]


def choose_tile(shape: Pair, nnz: int) -> DotsTile:
    """The largest region whose elements a thread block is expected to hold at a time."""
    density = nnz / (shape[0] * shape[1])
    room = DotsTile(*(round_up(n, 64) for n in shape))
    fitting = [DotsTile(*r) for r in REGIONS if r[0] <= room.rows or r[0] == 64 if r[1] <= room.columns or r[1] == 64]
    return next((t for t in fitting if t.rows * t.columns * density <= FULL * CAPACITY), fitting[-1])


def sampled(
    indptr: Any, indices: Any, dy: Any, x: Any, shape: Pair, side: int, features_last: bool, out: Any,
    accumulate: bool,
) -> None:  # fmt: skip
    """As `minidl.cuda.sparse.csb.csb_sampled`, nothing empty."""
    samples = dy.shape[0 if features_last else 1]
    tile, steps = choose_tile(shape, out.size), ceil_div(samples, 32 * VEC)
    tiles = ceil_div(shape[0], tile.rows), ceil_div(shape[1], tile.columns)
    chunks = max(1, min(ceil_div(BLOCKS_WANTED, tiles[0] * tiles[1]), steps // LEAST_STEPS))
    problem = argument(
        _PROBLEM, dy_pitch=rows(dy)[2], x_pitch=rows(x)[2], samples=samples, nnz=out.size,
        rows=shape[0], columns=shape[1], across=ceil_div(shape[1], side), tiles_m=tiles[0],
        tiles_n=tiles[1], steps=steps, chunks=chunks, accumulate=accumulate and chunks == 1,
    )  # fmt: skip
    defines = {"SIDE": side, "TALL": tile.rows, "WIDE": tile.columns, "VEC": VEC, "STAGES": STAGES}
    defines["FEATURES_LAST"] = int(features_last)
    for name, array in (("VEC_DY", dy), ("VEC_X", x)):
        defines[name] = 4 if not features_last and vector_width(array) >= 4 else 1
    grid = tiles[0] * tiles[1] * chunks
    assert grid < 2**31 and steps < 2**31, (shape, samples)
    partials = out if chunks == 1 else empty((chunks, out.size), float32)
    launch("csb_dots", "csb_dots_kernel", grid, 640, indptr, indices, dy, x, partials, problem, defines=defines,
           shared=tile.shared_bytes)  # fmt: skip
    if chunks > 1:
        sum_partials(partials, chunks, out, accumulate)
