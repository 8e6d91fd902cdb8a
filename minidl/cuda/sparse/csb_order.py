"""Which warp of the float32 product takes which output feature: found once for a pattern, kept in 4 bytes a feature.

Pruned rows are uneven, and warps of a thread block wait for each other: of 2048 features as they lie in a matrix
pruned to 2 %, the fullest warp has twice the mean. So features are dealt, those with most elements first, each to
whoever has fewest so far and has room (R. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17,
1969). With features last lines of eight neighbours are dealt as one, as they fill a sector of memory: single ones were
brought side by side through shared memory before they were written, which took longer than the better shares saved.
Lines of four, which write half a sector at a time, took 1.1 to 3.1 times as long; lines of sixteen, whose shares are
less even, 0.97 to 1.13.
On an H200 products at 98 % were 1.12 times as fast as with features as they lie (1.09 to 1.18), features last 1.02
(0.99 to 1.08).
"""

from __future__ import annotations

import heapq

import numpy as np

from minidl.shapes import round_up

UNIT = 16  # output features of a warp
RANGE = 1024  # among which features are dealt: csb_lists.cu looks for those of a thread block there
MOST_UNITS = 16  # of a thread block
LEAST_UNITS = 4


def line(features_last: bool) -> int:
    """Neighbours that are dealt as one."""
    return 8 if features_last else 1


def deal(elements: np.ndarray, line: int) -> np.ndarray:
    """Output features by warps, UNIT for each.

    Args:
        elements: (features,) how many each of them has.
        line: neighbours that stay together, a power of two up to UNIT.

    Returns:
        (n,) int32, n a multiple of MOST_UNITS * UNIT; numbers from ``features`` on fill it.
    """
    features = len(elements)
    dealt, size = round_up(features, LEAST_UNITS * UNIT), round_up(features, MOST_UNITS * UNIT)
    lines = np.pad(np.asarray(elements, np.int64), (0, dealt - features)).reshape(-1, line).sum(1)
    order = np.arange(size, dtype=np.int32).reshape(-1, line)
    for first in range(0, len(lines), RANGE // line):
        some = lines[first : first + RANGE // line]
        order[first : first + some.size] = order[first + _shares(some, some.size * line // UNIT)]
    return order.reshape(-1)


def _shares(loads: np.ndarray, count: int) -> np.ndarray:
    """Numbers of ``loads``, in ``count`` shares of one size whose sums are about the same, share after share."""
    room = loads.size // count
    shares: list[list[int]] = [[] for _ in range(count)]
    least = [(0, share) for share in range(count)]
    for which in np.argsort(-loads, kind="stable").tolist():
        load, share = heapq.heappop(least)
        shares[share].append(which)
        if len(shares[share]) < room:
            heapq.heappush(least, (load + int(loads[which]), share))
    return np.concatenate([sorted(share) for share in shares])
