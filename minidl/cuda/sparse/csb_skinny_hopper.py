"""The product of a large matrix in Compressed Sparse Blocks and at most 64 samples in a 16-bit type, on sm_90:
csb_skinny_hopper.cu."""

from __future__ import annotations

import functools
from typing import Any

from minidl.cuda.convolution.conv2d_hopper import aligned
from minidl.cuda.convolution.conv2d_plan import argument, struct
from minidl.cuda.device import DeviceRecord
from minidl.cuda.hopper import TensorMaps, View, Views
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, address, rows
from minidl.shapes import Pair, ceil_div

__all__ = ["applies", "matmul", "slices_of"]

ARCH = (9, 0)
SIDE, FEATURES, SAMPLES = 64, 256, 64  # of a block of A, of a thread block
THREADS = 384
SHARED = 5 * 5 * SIDE * 128  # bytes: stages of four tiles and x
MOST_BLOCKS, LEAST_BLOCKS = 132, 96  # thread blocks; constants, so that sums are cut alike on every device
LEAST_STEPS = 8  # of a slice
_PROBLEM = struct("", "samples features rows steps across relu")


def slices_of(features: int, depth: int) -> int:
    """In how many parts the sums are cut; 0 where there is too little to do for this kernel."""
    groups, steps = ceil_div(features, FEATURES), ceil_div(depth, SIDE)
    for slices in (8, 4, 2, 1):
        if groups * slices <= MOST_BLOCKS and steps >= LEAST_STEPS * slices:
            return slices if groups * slices >= LEAST_BLOCKS else 0
    return 1 if groups > MOST_BLOCKS else 0


def applies(side: int, dtype: Any, device: DeviceRecord, samples: int, features: int, depth: int) -> bool:
    """Whether this kernel does a product with features last."""
    fits = side == SIDE and dtype.itemsize == 2 and device.arch == ARCH and samples <= SAMPLES and depth % 8 == 0
    return fits and slices_of(features, depth) > 0


@functools.lru_cache(maxsize=64)
def _views(code: int, depth: int, samples: int, pitch: int) -> Views:
    views = Views((View(code, (depth, samples), (2 * pitch,), (SIDE, SAMPLES)), 0))
    assert views.legal, (depth, samples, pitch)
    return views


def matmul(
    indptr: Any, indices: Any, values: Any, x: Any, y: Any, shape: Pair, transposed: bool, bias: Any, relu: bool,
    slices: int | None = None,
) -> None:  # fmt: skip
    """Write the product to ``y`` (samples, features); x (samples, depth) at any row pitch, nothing empty."""
    x = aligned(x)
    samples, depth, pitch = rows(x)
    features, code = y.shape[1], DTYPE[y.dtype]
    slices = slices or slices_of(features, depth)
    # Elements are read four at a time: the array's last word may reach behind its end, never out of its allocation.
    assert address(values) % 8 == address(indices) % 8 == 0, "values and indices start at a multiple of 8 bytes"
    problem = argument(
        _PROBLEM, samples=samples, features=features, rows=ceil_div(features, SIDE), steps=ceil_div(depth, SIDE),
        across=ceil_div(shape[1], SIDE), relu=relu,
    )  # fmt: skip
    defines = {"DTYPE": code, "TRANSPOSED": int(transposed), "SLICES": slices, "VEC_Y": 1 if features % 4 else 4}
    arrays = indptr, indices, values, TensorMaps(_views(code, depth, samples, pitch), (x,)), bias, y
    grid = ceil_div(features, FEATURES), slices
    launch("csb_skinny_hopper", "csb_skinny_hopper_kernel", grid, THREADS, *arrays, problem, defines=defines,
           shared=SHARED)  # fmt: skip
