"""Oracles for memory plans, written from the definitions and without the planners' code."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from minidl.memory.trace import Trace


@dataclass(frozen=True)
class Model:
    """Sizes (n,); absent (n, steps): where a candidate takes no memory when evicted; full (steps,): all are there."""

    tensors: list[int]
    sizes: np.ndarray
    absent: np.ndarray
    full: np.ndarray


def model(trace: Trace, window: tuple[int, int] = (1, 1), least: int = 1, state: bool = False) -> Model:
    """Every saved tensor that can be away around the loss, step by step."""
    steps = len(trace)
    full = np.array([step.workspace for step in trace.steps], np.int64)
    tensors, sizes, absent = [], [], []
    for i, tensor in enumerate(trace.tensors):
        for t in range(steps):
            alive = tensor.resident or (tensor.given and t <= tensor.touches[-1])
            alive = alive or (tensor.touches and tensor.touches[0] <= t <= tensor.touches[-1])
            full[t] += tensor.bytes if alive else 0
        own = tensor.saved and not tensor.given  # the batch is the caller's
        if not (own or (state and tensor.resident)) or tensor.bytes < least:
            continue
        before = [t for t in tensor.touches if t <= trace.loss] or ([-1] if tensor.given else [])
        after = [t for t in tensor.touches if t > trace.loss]
        if not before or not after:
            continue
        away = [before[-1] + window[0] < t < after[0] - window[1] for t in range(steps)]
        if away[trace.loss]:
            tensors.append(i)
            sizes.append(tensor.bytes)
            absent.append(away)
    shape = (len(sizes), steps)
    return Model(tensors, np.array(sizes, np.int64), np.array(absent, np.int64).reshape(shape), full)


def brute_force(trace: Trace, capacity: int, window: tuple[int, int] = (1, 1), state: bool = False) -> int | None:
    """Fewest bytes moved out over all subsets; None when not even evicting everything fits."""
    m = model(trace, window, state=state)
    n = len(m.sizes)
    assert n <= 16
    evict = (np.arange(1 << n)[:, None] >> np.arange(n)) & 1
    usage = m.full - evict @ (m.absent * m.sizes[:, None])
    fits = (usage <= capacity).all(axis=1)
    return int((evict @ m.sizes)[fits].min()) if fits.any() else None


def milp(trace: Trace, capacity: int, m: Model, seconds: float = 10.0) -> tuple[int | None, int, bool]:
    """(bytes moved by the best plan found, proven lower bound of them, whether they are equal), by HiGHS.

    Sizes go in as multiples of their common divisor, so that all coefficients are small integers.
    """
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.optimize import milp as solve
    from scipy.sparse import csr_array

    n = len(m.sizes)
    if n == 0:
        return (0, 0, True) if (m.full <= capacity).all() else (None, 0, True)
    unit = math.gcd(*m.sizes.tolist())
    sizes = m.sizes // unit
    room = (capacity - (m.full - m.sizes @ m.absent)) // unit
    rows: dict[bytes, tuple[np.ndarray, int]] = {}
    for t in range(len(trace)):
        inside = m.absent[:, t].astype(np.int8)
        key = inside.tobytes()
        if key not in rows or room[t] < rows[key][1]:
            rows[key] = inside, int(room[t])
    if min(limit for _, limit in rows.values()) < 0:
        return None, 0, True
    matrix = csr_array(np.array([inside for inside, _ in rows.values()], float) * sizes)
    limits = np.array([limit for _, limit in rows.values()], float)
    found = solve(
        -sizes.astype(float), integrality=np.ones(n), bounds=Bounds(0, 1),
        constraints=LinearConstraint(matrix, -np.inf, limits), options={"time_limit": seconds, "mip_rel_gap": 0.0},
    )  # fmt: skip
    total = int(sizes.sum())
    bound = total - math.floor(-found.mip_dual_bound + 1e-6) if found.mip_dual_bound is not None else 0
    if found.x is None:
        return None, bound * unit, False
    keep = np.round(found.x).astype(np.int64)
    assert (matrix @ keep <= limits).all(), "rounded to integers, the solution breaks a row"
    moved = total - int(sizes @ keep)
    return moved * unit, bound * unit, moved <= bound
