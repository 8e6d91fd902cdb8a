"""Which warp of the float32 product takes which output feature: found once for a pattern, kept in 4 bytes a feature.

Pruned rows are uneven, and warps of a thread block wait for each other: of 2048 features as they lie in a matrix
pruned to 2 %, the fullest warp has twice the mean. So features are dealt, those with most elements first, each to
whoever has fewest so far and has room (R. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17,
1969): first lines of eight neighbours, which fill a sector of memory with features last, among groups of four warps,
then the features of a group among its warps. That leaves 1.06 times the mean at most, where single features dealt among
all warps leave 1.05 (98 %, five shapes).
"""

from __future__ import annotations

import heapq

import numpy as np

from minidl.shapes import round_up

__all__ = ["GROUP", "RANGE", "UNIT", "deal"]

UNIT = 16  # output features of a warp
GROUP = 64  # of four warps
LINE = 8  # that stay together in a group
RANGE = 1024  # among which features are dealt: csb_lists.cu looks for those of a thread block there
MOST_UNITS = 16  # of a thread block
MOST = 1 << 26  # features that words have room for


def deal(elements: np.ndarray) -> np.ndarray:
    """Output features in the order of warps, UNIT for each.

    Args:
        elements: (features,) how many each of them has.

    Returns:
        (n,) uint32, n a multiple of MOST_UNITS * UNIT: feature * GROUP + its place in its group, where features rise.
        Numbers from ``features`` on fill the rest.
    """
    features = len(elements)
    assert features < MOST, features
    groups, size = round_up(features, GROUP), round_up(features, MOST_UNITS * UNIT)
    elements = np.pad(np.asarray(elements, np.int64), (0, groups - features))
    order = np.arange(size, dtype=np.uint32)
    order = order * GROUP + order % GROUP
    for first in range(0, groups, RANGE):
        some = elements[first : first + RANGE]
        for group, lines in enumerate(_shares(some.reshape(-1, LINE).sum(1), some.size // GROUP)):
            mine = (np.sort(lines)[:, None] * LINE + np.arange(LINE)).reshape(-1)
            places = np.concatenate(_shares(some[mine], GROUP // UNIT))
            begin = first + GROUP * group
            order[begin : begin + GROUP] = (first + mine[places]) * GROUP + places
    return order


def _shares(loads: np.ndarray, count: int) -> list[np.ndarray]:
    """Numbers of ``loads`` in ``count`` shares of one size, whose sums are about the same."""
    room = loads.size // count
    shares: list[list[int]] = [[] for _ in range(count)]
    least = [(0, share) for share in range(count)]
    for which in np.argsort(-loads, kind="stable").tolist():
        load, share = heapq.heappop(least)
        shares[share].append(which)
        if len(shares[share]) < room:
            heapq.heappush(least, (load + int(loads[which]), share))
    return [np.array(share) for share in shares]
