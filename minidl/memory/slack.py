"""Memory that a plan leaves free gives transfers more time: earlier prefetches, later deadlines for copies out."""

from __future__ import annotations

import dataclasses

import numpy as np

from minidl.memory.plan import Plan
from minidl.memory.simulate import check
from minidl.memory.trace import Trace

__all__ = ["widen"]


def widen(trace: Trace, plan: Plan) -> Plan:
    """The same choices with wider windows, within the plan's limit.

    Each copy in may start as early as the planned memory of the steps before allows, those needed first coming first;
    then each copy out gets as much longer, the first to leave coming first.
    """
    device = np.array(check(trace, plan).device, np.int64)
    decisions = list(plan.decisions)
    moved = [i for i, d in enumerate(decisions) if d.choice == "offload"]
    for i in sorted(moved, key=lambda i: decisions[i].back):
        d = decisions[i]
        size = trace.tensors[d.tensor].bytes
        full = np.flatnonzero(device[d.gone + 1 : d.fetch] + size > plan.capacity)
        fetch = d.gone + 2 + int(full[-1]) if len(full) else min(d.gone + 1, d.fetch)
        device[fetch : d.fetch] += size
        decisions[i] = dataclasses.replace(d, fetch=fetch)
    for i in sorted(moved, key=lambda i: decisions[i].leave):
        d = decisions[i]
        size = trace.tensors[d.tensor].bytes
        full = np.flatnonzero(device[d.gone : d.fetch - 1] + size > plan.capacity)
        gone = d.gone + int(full[0]) if len(full) else max(d.fetch - 1, d.gone)
        device[d.gone : gone] += size
        decisions[i] = dataclasses.replace(d, gone=gone)
    return dataclasses.replace(plan, decisions=tuple(decisions), peak=int(device.max()))
