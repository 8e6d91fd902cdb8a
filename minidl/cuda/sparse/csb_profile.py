"""The parts of a product with a sparse matrix, to be timed one by one; for `minidl.sparse.profile`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, empty, to_host
from minidl.cuda.device import current_device
from minidl.cuda.sparse import csb_lanes, csb_rows, csb_tensor
from minidl.cuda.sparse.csb import csb_expand
from minidl.shapes import Pair, ceil_div, round_up

__all__ = ["parts_of"]

Parts = dict[str, Callable[[], Any]]


def parts_of(
    indptr: Any, indices: Any, values: Any, x: Any, shape: Pair, side: int, transposed: bool, features_last: bool,
    route: str, split: str | None,
) -> tuple[Parts, dict[str, float]]:  # fmt: skip
    """(calls that do a part of the product and nothing else, how uneven its work is), both by name.

    Args:
        route: one of `csb_routes.ROUTES`; those that find elements while they multiply have no parts.
        split: as `minidl.cuda.sparse.csb.csb_matmul`.
    """
    arrays = indptr, indices, values
    if route == "lanes":
        return _lanes(arrays, as_rows(x), shape, side, transposed, features_last)
    if route == "rows":
        return _rows(arrays, as_rows(x), shape, side, transposed, features_last)
    if route == "split":
        return {"index decode": lambda: csb_tensor.spread(*arrays, shape, side, transposed, split)}, {}
    if route == "dense":
        return {"index decode": lambda: csb_expand(*arrays, shape, side)}, {}
    return {}, {}


def _lanes(
    arrays: tuple[Any, ...], x: Any, shape: Pair, side: int, transposed: bool, features_last: bool
) -> tuple[Parts, dict[str, float]]:
    y, features, samples = _output(x, shape, transposed, features_last)
    tile = csb_lanes.choose_tile(features, samples, current_device())

    def decode() -> tuple[Any, Any, Any]:
        return csb_lanes.streams(*arrays, shape, side, transposed, tile)

    made = decode()

    def multiply(phase: str) -> None:
        csb_lanes.multiply(tile, *made, x, y, features_last, None, False, phase)

    together = to_host(made[1])[..., 1].astype(np.int64).reshape(-1, csb_lanes.TOGETHER)
    waiting = float(together.max(1).sum() / max(together.mean(1).sum(), 1e-30))
    tiles = ceil_div(features, tile.features) * ceil_div(samples, csb_lanes.SAMPLES)
    return _parts(decode, multiply), {"lanes": waiting, "rounds": _rounds(tiles)}


def _rows(
    arrays: tuple[Any, ...], x: Any, shape: Pair, side: int, transposed: bool, features_last: bool
) -> tuple[Parts, dict[str, float]]:
    y, features, samples = _output(x, shape, transposed, features_last)
    depth = shape[0] if transposed else shape[1]
    density = arrays[1].size / (features * depth)
    tile = csb_rows.choose_tile(features, depth, samples, density, features_last, current_device())

    def decode() -> tuple[Any, Any, Any]:
        return csb_rows.lists(*arrays, shape, side, transposed, tile)

    made = decode()

    def multiply(phase: str) -> None:
        csb_rows.multiply(tile, *made, x, y, features_last, None, False, phase)

    tiles = ceil_div(features, tile.units * csb_rows.UNIT) * ceil_div(samples, 32 * tile.vec)
    return _parts(decode, multiply), {"warps": _uneven(made[1], tile.units), "rounds": _rounds(tiles)}


def _output(x: Any, shape: Pair, transposed: bool, features_last: bool) -> tuple[Any, int, int]:
    """(room for the product, its features, its samples)."""
    features, samples = shape[1 if transposed else 0], x.shape[0 if features_last else 1]
    return empty((samples, features) if features_last else (features, samples), x.dtype), features, samples


def _parts(decode: Callable[[], Any], multiply: Callable[[str], None]) -> Parts:
    return {"index decode": decode} | {name: partial(multiply, name) for name in ("loads", "multiply-adds")}


def _rounds(tiles: int) -> float:
    return round_up(tiles, current_device().multiprocessors) / tiles


def _uneven(units: Any, together: int) -> float:
    """Items of the longest list of each stage over the mean; ``together``: units of a thread block."""
    items = to_host(units)[..., 1].astype(np.int64)
    items = np.maximum(items - csb_rows.HEADER, 0)
    items = np.pad(items, ((0, round_up(len(items), together) - len(items)), (0, 0))).reshape(
        -1, together, items.shape[1]
    )
    return float(items.max(1).sum() / max(items.mean(1).sum(), 1e-30))
