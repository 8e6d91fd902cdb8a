"""Momentum that lies on the host and is on the device only around its update: a tensor that visits.

Within the backward pass (`minidl.SGD.update_in_backward`) a layer's momentum is needed in one moment of the step. Its
home is then the host: it comes before its first touch and goes behind its last, in each step. What is on the device
at a step is decided before other tensors are planned, so that to planners a visitor is what a short-lived tensor is.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Collection, Sequence

from minidl.memory.simulate import Link
from minidl.memory.trace import Tensor, Trace

LEAST_VISITOR = 16 << 20  # bytes: a smaller one frees less than it costs to look after


def last_pass(trace: Trace) -> int:
    """The last step that is no update."""
    return max(t for t, step in enumerate(trace.steps) if step.pass_name != "update")


def candidates(trace: Trace, least: int = LEAST_VISITOR) -> list[int]:
    """The momentum that may visit: updated before the backward pass ends, so that it is away again by then."""
    end = last_pass(trace)
    return [
        i for i, tensor in enumerate(trace.tensors)
        if tensor.kind == "momentum" and tensor.bytes >= least and tensor.touches
        and trace.loss < tensor.touches[0] and tensor.touches[-1] < end
    ]  # fmt: skip


def visiting(
    trace: Trace, numbers: Collection[int], times_ms: Sequence[float] | None = None, link: Link | None = None
) -> Trace:
    """The same step with the tensors ``numbers`` on the host but around their updates.

    Args:
        times_ms, link: of the steps, and of the transfers, which then have as long as they take to hide beside the
            passes before and behind; without, one step each.
    """
    end, tensors = last_pass(trace), list(trace.tensors)
    order = sorted(numbers, key=lambda i: tensors[i].touches)
    if times_ms is None:
        windows = {i: (tensors[i].touches[0] - 1, tensors[i].touches[-1] + 1) for i in order}
    else:
        windows = _windows([tensors[i] for i in order], times_ms, link or Link())
        windows = dict(zip(order, windows, strict=True))
    for i, (first, last) in windows.items():
        # What fetches it waits for a step of this training step.
        visit = max(first, 1), min(last, end - 1)
        tensors[i] = dataclasses.replace(tensors[i], given=False, visit=visit)
    return dataclasses.replace(trace, tensors=tuple(tensors))


def _windows(tensors: Sequence[Tensor], times_ms: Sequence[float], link: Link) -> list[tuple[int, int]]:
    """First and last step of each visit, in the order of need: the copies of one direction go one after the other."""
    begin = [0.0, *itertools.accumulate(times_ms)]  # of each step
    firsts, late = [], begin[-1]
    for tensor in reversed(tensors):
        late = min(late, begin[tensor.touches[0]]) - link.in_ms(tensor.bytes)
        firsts.append(bisect.bisect_right(begin, late) - 1)
    lasts, early = [], 0.0
    for tensor in tensors:
        early = max(early, begin[tensor.touches[-1] + 1]) + link.out_ms(tensor.bytes)
        lasts.append(bisect.bisect_left(begin, early) - 1)
    return list(zip(reversed(firsts), lasts, strict=True))
