"""Tensor maps: how the copy engine of Hopper (sm_90) sees an array. The instructions that read them are in hopper.cuh.

A map is a box, or a column of pixels, that walks over an array of up to five dimensions; sizes and pitches are given
fastest dimension first. What lies outside of the array is read as zeros and not written.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from minidl.cuda._launch import Map
from minidl.cuda.device import driver
from minidl.shapes import Pair

TF32 = 3  # a view's code: of float32 that the engine rounds to TF32 on the way to shared memory
BYTES = 4  # of bytes, whose rows lie side by side in shared memory
ROOM = 227 * 1024  # bytes of shared memory that a block can have
# CU_TENSOR_MAP_DATA_TYPE_FLOAT32, _BFLOAT16, _FLOAT16, _TFLOAT32, _UINT8
_DATA_TYPE = {0: 7, 1: 9, 2: 6, TF32: 11, BYTES: 0}
_SWIZZLE_128B, _SWIZZLE_NONE, _PROMOTION_128B, _PROMOTION_256B = 3, 0, 2, 3
_CORNERS = range(-128, 128)


class View(NamedTuple):
    """One map but for the array's address.

    Attributes:
        code: the macro DTYPE, `TF32` or `BYTES`.
        sizes: elements along each dimension.
        pitches: bytes from one element to the next along each dimension but the first.
        box: elements along each dimension, at most 256; of a column of pixels (channels, pixels).
        corners: None, or of a column of pixels the first pixel's (w, h) and, counted from the last pixel of the image,
            the last one's: the pixels that a column walks through.
        steps: between the pixels of a column, (w, h).
        offset: bytes from the array's address.
        neighbours: whether the second-level cache shall fetch 256 bytes for a row, so with the next one's, or just it.
        swizzled: whether rows, of 128 bytes, are swizzled in shared memory; those of `BYTES` never are.
    """

    code: int
    sizes: tuple[int, ...]
    pitches: tuple[int, ...]
    box: tuple[int, ...]
    corners: tuple[Pair, Pair] | None = None
    steps: Pair = (1, 1)
    offset: int = 0
    neighbours: bool = True
    swizzled: bool = True

    @property
    def legal(self) -> bool:
        """Whether the engine can do it, given an array whose address is a multiple of 16 bytes."""
        extents = all(0 < size <= 2**32 for size in self.sizes)
        pitches = all(pitch % 16 == 0 and 0 < pitch < 2**40 for pitch in (*self.pitches, self.offset or 16))
        if self.corners is None:
            return extents and pitches and max(self.box) <= 256
        corners = all(at in _CORNERS for corner in self.corners for at in corner)
        return extents and pitches and corners and self.box[0] <= 256 and self.box[1] <= 1024 and max(self.steps) <= 8


class Views:
    """The maps of a kernel but for addresses: each a view and the index of the array that it is of."""

    def __init__(self, *views: tuple[View, int]) -> None:
        self._views = views

    def __iter__(self) -> Iterator[tuple[View, int]]:
        return iter(self._views)

    @property
    def legal(self) -> bool:
        return all(view.legal for view, _ in self._views)

    @functools.cached_property
    def maps(self) -> list[tuple[Map, int]]:
        """As `minidl.cuda.launch.launch` hands them over; needs the driver."""
        return [(_map(view), index) for view, index in self._views]


class TensorMaps(NamedTuple):
    """An argument of `launch`: the maps of ``views`` over ``arrays``, passed to the kernel by value."""

    views: Views
    arrays: tuple[Any, ...]


def _map(view: View) -> Map:
    """A view as the driver takes it."""
    name = "cuTensorMapEncodeTiled" if view.corners is None else "cuTensorMapEncodeIm2col"
    entry = ctypes.cast(getattr(driver(), name), ctypes.c_void_p).value
    steps = (1,) * len(view.sizes) if view.corners is None else (1, *view.steps, 1)
    swizzle = _SWIZZLE_NONE if view.code == BYTES or not view.swizzled else _SWIZZLE_128B
    promotion = _PROMOTION_256B if view.neighbours else _PROMOTION_128B
    sizes = view.sizes, view.pitches, view.box, view.corners, steps, view.offset
    return Map(entry, _DATA_TYPE[view.code], *sizes, swizzle, promotion, view)
