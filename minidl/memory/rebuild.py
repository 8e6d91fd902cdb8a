"""Recipes: how a saved tensor can be made again from others instead of being kept or moved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from minidl.memory.gaps import Problem
from minidl.memory.trace import Trace

MOST_STEPS = 4


@dataclass(frozen=True)
class Recipe:
    """Forward steps that make a tensor again.

    Attributes:
        steps: in order.
        sources: numbers of the gaps whose tensors must be there.
        beside: bytes on the device while it runs, beside the result.
        ms: what running it costs.
        elementwise: no step of it is a product.
    """

    steps: tuple[int, ...]
    sources: tuple[int, ...]
    beside: int
    ms: float
    elementwise: bool


def recipes(problem: Problem, times_ms: Sequence[float]) -> list[Recipe | None]:
    """For each gap the shortest recipe, or None: what is given, and what would take more than a few steps.

    The recipe starts from tensors that the layers saved. What was not saved on the way (a batch norm's output in front
    of a ReLU) is made again with it.
    """
    trace = problem.trace
    touched: dict[int, list[int]] = defaultdict(list)
    for i, tensor in enumerate(trace.tensors):
        for t in tensor.touches:
            if t <= trace.loss:
                touched[t].append(i)
    gap_of = {gap.tensor: i for i, gap in enumerate(problem.gaps)}
    return [_recipe(trace, touched, gap_of, gap.tensor, gap.back, times_ms) for gap in problem.gaps]


def _recipe(
    trace: Trace,
    touched: dict[int, list[int]],
    gap_of: dict[int, int],
    target: int,
    back: int,
    times_ms: Sequence[float],
) -> Recipe | None:
    if trace.tensors[target].given or not trace.tensors[target].again:
        return None
    steps: set[int] = set()
    sources: set[int] = set()
    todo = [trace.tensors[target].first]
    while todo:
        r = todo.pop()
        if r in steps:
            continue
        steps.add(r)
        if len(steps) > MOST_STEPS:
            return None
        for i in touched[r]:
            tensor = trace.tensors[i]
            if not tensor.given and tensor.first == r:
                if tensor.reread and i in gap_of:
                    sources.add(gap_of[i])
                elif tensor.reread and tensor.last < back:
                    return None  # nobody else keeps it
                continue
            if i in gap_of:
                sources.add(gap_of[i])
            elif tensor.resident:
                continue
            elif tensor.saved and tensor.last >= back:
                continue  # small or short-lived: it is there
            elif tensor.given or not tensor.again:
                return None
            else:
                todo.append(tensor.first)
    order = tuple(sorted(steps))
    made, most = 0, 0
    for r in order:
        made += sum(trace.tensors[i].bytes for i in touched[r] if trace.tensors[i].first == r and i != target)
        most = max(most, made + trace.steps[r].workspace)
    products = any(trace.steps[r].matrix for r in order)
    return Recipe(order, tuple(sorted(sources)), most, sum(times_ms[r] for r in order), not products)
