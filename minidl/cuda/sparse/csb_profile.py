"""The parts of a product with a sparse matrix, to be timed one by one; for `minidl.sparse.profile`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from minidl.cuda.array import as_rows, empty, to_host
from minidl.cuda.device import current_device
from minidl.cuda.sparse import csb_rows, csb_tensor
from minidl.cuda.sparse.csb import csb_expand
from minidl.shapes import Pair, ceil_div, round_up

Parts = dict[str, Callable[[], Any]]


def parts_of(
    indptr: Any, indices: Any, values: Any, x: Any, shape: Pair, side: int, transposed: bool, features_last: bool,
    route: str, split: str | None, order: Any,
) -> tuple[Parts, dict[str, float]]:  # fmt: skip
    """(calls that do a part of the product and nothing else, how uneven its work is), both by name.

    Args:
        route: one of `csb_routes.ROUTES`; those that find elements while they multiply have no parts.
        split, order: as `minidl.cuda.sparse.csb.csb_matmul`.
    """
    arrays = indptr, indices, values
    if route == "rows":
        return _rows(arrays, as_rows(x), shape, side, transposed, features_last, order)
    if route == "split":
        return {"index decode": lambda: csb_tensor.spread(*arrays, shape, side, transposed, split)}, {}
    if route == "dense":
        return {"index decode": lambda: csb_expand(*arrays, shape, side)}, {}
    return {}, {}


def _rows(
    arrays: tuple[Any, ...], x: Any, shape: Pair, side: int, transposed: bool, features_last: bool, order: Any
) -> tuple[Parts, dict[str, float]]:
    device, (features, depth) = current_device(), shape[::-1] if transposed else shape
    samples = x.shape[0 if features_last else 1]
    y = empty((samples, features) if features_last else (features, samples), x.dtype)
    tile = csb_rows.choose_tile(features, depth, samples, arrays[1].size / (features * depth), features_last, device)

    def decode() -> tuple[Any, Any]:
        return csb_rows.lists(*arrays, order, shape, side, transposed, features, tile)

    made = decode()

    def phase(name: str) -> Callable[[], None]:
        return lambda: csb_rows.multiply(tile, *made, order, x, y, features_last, None, False, name)

    tiles = ceil_div(features, tile.units * csb_rows.UNIT) * ceil_div(samples, 32 * tile.vec)
    uneven = {"warps": _uneven(made[1], tile.units), "rounds": round_up(tiles, device.multiprocessors) / tiles}
    return {"index decode": decode, "loads": phase("loads"), "multiply-adds": phase("multiply-adds")}, uneven


def _uneven(units: Any, together: int) -> float:
    """Items of the longest list of each stage over the mean; ``together``: units of a thread block."""
    items = to_host(units)[..., 1].astype(np.int64)
    items = np.maximum(items - csb_rows.HEADER, 0)
    items = np.pad(items, ((0, round_up(len(items), together) - len(items)), (0, 0))).reshape(
        -1, together, items.shape[1]
    )
    return float(items.max(1).sum() / max(items.mean(1).sum(), 1e-30))
