"""Which tensors stay on the GPU: the dynamic programme, exact when every gap straddles the loss.

The cores of the gaps all contain the loss step, so they are nested but for small blocks (see `minidl.memory.gaps`).
At the steps that belong to block k all kept tensors of the blocks before are on the device, and none of the blocks
behind; so what the outer blocks keep enters as one number m, and a subset of block k is an option with three numbers:
kappa, what it keeps; lambda, the largest m with which every step of the block fits; cost. With f_k[m] the least cost of
the first k blocks that keep exactly m units,

    f_k[m + kappa] = min over options of f_{k-1}[m] + cost,  m <= lambda;        the answer is min over m of f_n[m].

A chain has blocks of one gap and two options each: a knapsack whose capacity shrinks as it is filled. Time is the sum
of options times the capacity in units. Gaps that tie many blocks together (the skips of a U-Net) are decided outside,
all their subsets one after the other.

Sizes are rounded up to granules and capacities down, so no plan exceeds its limit. Where a common divisor of all sizes
makes few enough units, nothing is rounded and the plan is optimal to the byte; else cost(C, g) <= optimum(C - n·g) for
n candidates. The granule does not depend on the limit: more memory never makes a worse plan.

Reconstructed from the claims of Jhu (National Taiwan University, 2018), with time added: a tensor is counted only at
the steps at which it would otherwise be absent.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minidl import checks
from minidl.memory._loops import relax, unbeaten
from minidl.memory.gaps import Gap, Problem, blocks, occupied
from minidl.memory.plan import Plan

MOST_UNITS = 1 << 18
LARGEST_BLOCK = 10
MOST_CROSSING = 6
_FIRST_GRANULE = 256 << 10
_TIE = 1 << 18  # a byte moved outweighs all ties
_NEVER = np.iinfo(np.int64).max // 4


@dataclass(frozen=True)
class Options:
    """The ways to treat one block, one entry each: units kept, most units kept outside, cost, and which it is.

    ``needs`` and ``gives`` are bits of tensors that other blocks look at (`minidl.memory.joint`): those that blocks
    before must have kept, and those that the entry keeps.
    """

    kappa: np.ndarray
    most: np.ndarray
    cost: np.ndarray
    code: np.ndarray
    needs: np.ndarray
    gives: np.ndarray

    @classmethod
    def plain(cls, kappa: np.ndarray, most: np.ndarray, cost: np.ndarray, code: np.ndarray) -> Options:
        """Options without bits."""
        nothing = np.zeros(len(code), np.int64)
        return cls(kappa, most, cost, code, nothing, nothing)

    def pruned(self) -> Options:
        """Without those that another one of the same bits beats in all three numbers."""
        order = np.lexsort((-self.most, self.cost, self.kappa))  # whoever beats another stands before it
        order = order[self.most[order] >= 0]
        order = unbeaten(order, self.most, self.cost, self.needs, self.gives)
        return Options(*(getattr(self, field.name)[order] for field in dataclasses.fields(self)))


def granule_of(sizes: Sequence[int], most_units: int = MOST_UNITS) -> int:
    """Bytes of one unit: the common divisor of ``sizes`` if they make few enough units, else a power of two.

    It is a function of the sizes alone, never of the limit.
    """
    total = sum(sizes)
    if total == 0:
        return 1
    divisor = math.gcd(*sizes)
    if total // divisor <= most_units:
        return divisor
    granule = _FIRST_GRANULE
    while total // granule > most_units:
        granule *= 2
    return granule


def pin(problem: Problem, capacity: int, granule: int | None = None, most_units: int = MOST_UNITS) -> Plan:
    """The plan that moves the fewest bytes within ``capacity``; among those, the one that moves the longest absent.

    Args:
        capacity: limit in bytes on what is on the device at any step.
        granule: bytes of one unit; default `granule_of` all candidates.
        most_units: bound on the number of units, which time and memory of the planner grow with.

    Returns:
        The plan; ``proven`` unless too many gaps cross (`crossing`), so that they were nested by force.

    Raises:
        Infeasible: when one step alone exceeds the limit, naming it, its tensors and the smallest feasible limit.
        ValueError: for a granule below one.
    """
    problem.require(capacity)
    if granule is None:
        granule = granule_of([gap.bytes for gap in problem.gaps], most_units)
    granule = checks.at_least("memory planner", "granule", granule, 1)
    exact, gaps, apart, rest = split(problem.gaps)
    costs = _costs(problem.gaps)
    kept, more = cheapest(
        problem, capacity, granule, gaps, apart, costs, lambda room, _: _nest(gaps, rest, costs, granule, room)
    )
    return problem.plan("dp", capacity, kept + more, granule=granule, proven=exact)


def split(gaps: Sequence[Gap]) -> tuple[bool, list[Gap], list[int], list[int]]:
    """(whether plans may be exact, the gaps, else nested by force, numbers of those to decide apart, the others)"""
    apart = crossing(gaps)
    exact = len(apart) <= MOST_CROSSING
    if not exact:
        return False, nested(gaps), [], list(range(len(gaps)))
    return True, list(gaps), apart, [i for i in range(len(gaps)) if i not in set(apart)]


def cheapest(
    problem: Problem,
    capacity: int,
    granule: int,
    gaps: Sequence[Gap],
    apart: Sequence[int],
    costs: Sequence[float],
    best: Callable[[np.ndarray, list[int]], tuple[float, list[int]]],
) -> tuple[list[int], list[int]]:
    """(kept ones of ``apart``, choices of all others) that cost least: all subsets of the few, one after the other.

    Args:
        costs: of not keeping each gap.
        best: (cost, choices) of the others, with so many units of room at each step while these are kept.
    """
    found: tuple[float, list[int], list[int]] | None = None
    for code in reversed(range(1 << len(apart))):
        kept = [i for bit, i in enumerate(apart) if code >> bit & 1]
        room = (capacity - problem.base - occupied((gaps[i] for i in kept), len(problem.base))) // granule
        spent = sum(costs[i] for i in apart if i not in kept)
        if room.min() < 0 or (found is not None and spent >= found[0]):
            continue
        cost, taken = best(room, kept)
        if found is None or spent + cost < found[0]:
            found = spent + cost, kept, taken
    assert found is not None, "evicting everything fits, as was checked"
    return found[1:]


def _nest(
    gaps: Sequence[Gap], some: Sequence[int], costs: Sequence[int], granule: int, room: np.ndarray
) -> tuple[int, list[int]]:
    """(cost, kept ones) of the best choice among the gaps numbered in ``some`` with ``room`` units at each step."""
    runs = [[some[i] for i in run] for run in blocks([gaps[i] for i in some])]
    units = {i: -(-gaps[i].bytes // granule) for i in some}
    tables = [
        _subsets([gaps[i] for i in run], [units[i] for i in run], [costs[i] for i in run], steps, room)
        for run, steps in zip(runs, owned_steps(gaps, runs), strict=True)
    ]
    cost, codes = choose(tables, int(room.max(initial=0)))
    return int(cost), [i for run, code in zip(runs, codes, strict=True) for bit, i in enumerate(run) if code >> bit & 1]


def _costs(gaps: Sequence[Gap]) -> list[int]:
    """Cost of evicting each: its bytes, then (far below one byte) the part of the longest absence that it lacks."""
    total = sum(gap.bytes for gap in gaps) or 1
    longest = max((gap.back - gap.leave for gap in gaps), default=1)
    return [
        gap.bytes * 2 * _TIE + int(_TIE * gap.bytes / total * (1 - (gap.back - gap.leave) / longest)) for gap in gaps
    ]


def owned_steps(gaps: Sequence[Gap], runs: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """For each block the steps at which its own gaps, all of the blocks before and none behind may be on the device."""
    owned = []
    for k, run in enumerate(runs):
        first, last = min(gaps[i].start for i in run), max(gaps[i].stop for i in run)
        if k + 1 < len(runs):
            inner = min(gaps[i].start for i in runs[k + 1]), max(gaps[i].stop for i in runs[k + 1])
            owned.append(np.r_[first : inner[0], inner[1] + 1 : last + 1])
        else:
            owned.append(np.arange(first, last + 1))
    return owned


def _subsets(
    gaps: Sequence[Gap], units: Sequence[int], costs: Sequence[int], steps: np.ndarray, room: np.ndarray
) -> Options:
    """All subsets of one block; bit i of the code says that gap i is kept."""
    code = np.arange(1 << len(gaps))
    kept = (code[:, None] >> np.arange(len(gaps)) & 1).astype(np.int64)
    inside = np.array([(gap.start <= steps) & (steps <= gap.stop) for gap in gaps])
    # Steps at which the same gaps are inside differ only in room: the least of it counts.
    patterns, which = np.unique(np.array(1 << np.arange(len(gaps))) @ inside, return_inverse=True)
    least = np.full(len(patterns), np.iinfo(np.int64).max)
    np.minimum.at(least, which, room[steps])
    inside = (patterns >> np.arange(len(gaps))[:, None] & 1) * np.array(units, np.int64)[:, None]
    most = (least - kept @ inside).min(axis=1, initial=np.iinfo(np.int64).max)
    cost = (1 - kept) @ np.array(costs, np.int64)
    return Options.plain(kept @ np.array(units, np.int64), most, cost, code).pruned()


def choose(
    tables: Sequence[Options], units: int, given: int = 0, awaited: Sequence[int] | None = None
) -> tuple[float, list[int]]:
    """(cost, codes) of the cheapest choice of one option for each block: the recurrence at the top of this file.

    Where options look at what other blocks keep, f_k is a table for each set of kept tensors that blocks behind k still
    look at; an option may follow the sets that hold what it needs.

    Args:
        tables: options of each block, from the outermost to the innermost.
        units: most units that may be kept at all.
        given: bits of what is kept before the first block.
        awaited: for each block the bits that blocks behind it look at.

    Raises:
        ValueError: when nothing fits.
    """
    units = min(units, sum(int(table.kappa.max(initial=0)) for table in tables))
    never = np.inf if any(table.cost.dtype.kind == "f" for table in tables) else _NEVER
    first = np.full(units + 1, never, float if never == np.inf else np.int64)
    first[0] = 0
    states = {given: (first, 0)}  # by bits: cost by units kept, most units kept
    taken = []
    for table, open_ in zip(tables, awaited or [0] * len(tables), strict=True):
        states, how = _behind(states, table, units, open_, never)
        taken.append(how)
    if not states:
        raise ValueError(_NOTHING)
    bits = min(states, key=lambda bits: states[bits][0].min())
    m = int(states[bits][0].argmin())
    cost = states[bits][0][m].item()
    if cost >= never:
        raise ValueError(_NOTHING)
    codes = []
    for table, (before, which) in zip(reversed(tables), reversed(taken), strict=True):
        at, option = divmod(int(which[bits][m]), len(table.kappa))
        codes.append(int(table.code[option]))
        m -= int(table.kappa[option])
        bits = before[at]
    return cost, codes[::-1]


_NOTHING = "memory planner: no choice of options fits the limit"
_States = dict[int, tuple[np.ndarray, int]]


def _behind(
    states: _States, table: Options, units: int, open_: int, never: float
) -> tuple[_States, tuple[list[int], dict[int, np.ndarray]]]:
    """The states behind one more block; the bits before it and, for each state, the ways that lead there.

    A way is the number of the state before, times the number of options, plus that of the option.
    """
    before, count = list(states), len(table.kappa)
    needs, gives = table.needs.tolist(), table.gives.tolist()
    kinds = np.min_scalar_type(len(before) * count)
    new: dict[int, np.ndarray] = {}
    which: dict[int, np.ndarray] = {}
    tops: dict[int, int] = {}
    for at, bits in enumerate(before):
        best, top = states[bits]
        for o in range(count):
            stop = min(top, int(table.most[o]), units - int(table.kappa[o])) + 1
            if stop <= 0 or needs[o] & ~bits:
                continue
            to, kappa = (bits | gives[o]) & open_, int(table.kappa[o])
            if to not in new:
                new[to], which[to], tops[to] = np.full_like(best, never), np.zeros(units + 1, kinds), 0
            place = slice(kappa, kappa + stop)
            relax(best[:stop], table.cost[o], new[to][place], which[to][place], at * count + o)
            tops[to] = max(tops[to], kappa + stop - 1)
    ways = {to: array[: tops[to] + 1].copy() for to, array in which.items()}
    return {to: (array, tops[to]) for to, array in new.items()}, (before, ways)


# -- blocks too large to enumerate ------------------------------------------------------------------------------------


def crossing(gaps: Sequence[Gap]) -> list[int]:
    """Few gaps without which all blocks are small: those that leave in another order than they come back.

    In a U-Net these are the skips: made early, read last by the decoder, needed late in the backward pass.
    """
    left, apart = list(range(len(gaps))), []
    while True:
        large = [run for run in blocks([gaps[i] for i in left]) if len(run) > LARGEST_BLOCK]
        if not large:
            return sorted(apart)
        for run in large:
            members = [left[i] for i in run]
            back = sorted(members, key=lambda i: (-gaps[i].stop, gaps[i].start, i))
            place = {i: p for p, i in enumerate(back)}
            apart.append(max(members, key=lambda i: abs(members.index(i) - place[i])))
        left = [i for i in left if i not in set(apart)]


def nested(gaps: Sequence[Gap]) -> list[Gap]:
    """Lengthen cores until each gap of a large block lies inside those that leave before it.

    A kept tensor then counts at more steps than it is there: plans stay feasible but may not be the best.
    """
    grown = list(gaps)
    for run in blocks(gaps):
        if len(run) > LARGEST_BLOCK:
            stop = -1
            for i in reversed(run):
                stop = max(stop, gaps[i].stop)
                grown[i] = dataclasses.replace(gaps[i], stop=stop)
    return grown
