"""The product of `minidl.cuda.csb_skinny` on sm_90: csb_skinny_hopper.cu."""

from __future__ import annotations

from typing import Any

from minidl.cuda.conv2d_hopper import aligned
from minidl.cuda.conv2d_plan import argument, struct
from minidl.cuda.csb_skinny import SIDE
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, address, rows
from minidl.shapes import Pair, ceil_div

__all__ = ["applies", "matmul", "slices_of"]

ARCH = (9, 0)
GROUPS, TILES, STAGES, TILE_BYTES = 4, 4, 6, SIDE * 128
SHARED_BYTES = (GROUPS * TILES + STAGES) * TILE_BYTES + 16 * STAGES + 1024
BLOCKS_WANTED = 132  # a constant, so that sums are cut alike on every device
LEAST_STEPS, MOST_SLICES = 8, 8  # blocks of a slice; blocks of a cluster
_PROBLEM = struct("", "samples features rows steps across relu")


def applies(device: DeviceRecord) -> bool:
    """Whether this kernel can do a product that `minidl.cuda.csb_skinny` can."""
    return device.arch == ARCH


def slices_of(features: int, depth: int) -> int:
    """Among how many thread blocks the summed features are divided: a power of two, of the sizes alone."""
    groups, steps = ceil_div(features, GROUPS * SIDE), ceil_div(depth, SIDE)
    slices = 1
    while slices < MOST_SLICES and 2 * slices * groups <= BLOCKS_WANTED and steps >= 2 * slices * LEAST_STEPS:
        slices *= 2
    return slices


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, transposed: bool, bias: Any, relu: bool
) -> None:
    """As `minidl.cuda.csb_skinny.matmul`."""
    x = aligned(x)
    samples, depth, pitch = rows(x)
    features = y.shape[1]
    assert address(values) % 8 == address(indices) % 8 == 0, "values and indices start at a multiple of 8 bytes"
    views = Views((View(DTYPE[x.dtype], (depth, samples), (x.itemsize * pitch,), (SIDE, SIDE)), 0))
    assert views.legal, (shape, samples)
    slices = slices_of(features, depth)
    block_rows = ceil_div(features, SIDE)
    problem = argument(
        _PROBLEM, samples=samples, features=features, rows=block_rows, steps=ceil_div(depth, SIDE),
        across=ceil_div(shape[1], SIDE), relu=relu,
    )  # fmt: skip
    defines = {"DTYPE": DTYPE[y.dtype], "TRANSPOSED": int(transposed), "SLICES": slices}
    defines |= {"VEC_Y": 4 if features % 4 == 0 else 1}
    launch(
        "csb_skinny_hopper", "csb_skinny_hopper_kernel", ceil_div(block_rows, GROUPS) * slices, 544, indptr, indices,
        values, TensorMaps(views, (x,)), bias, y, problem, defines=defines, shared=SHARED_BYTES,
    )  # fmt: skip
