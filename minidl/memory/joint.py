"""Keep, offload or rebuild: one dynamic programme over all three, with a price on each byte that crosses the link.

Within a block of gaps (see `minidl.memory.gaps`; neighbouring ones are joined where one is rebuilt from another) every
combination is an option: what it keeps, what it needs at each step of the block beyond the base load, and what it
costs: the milliseconds of rebuilding plus the price of the bytes moved. A tensor from which another is rebuilt has to
be back by then, and what is rebuilt stays until it was used; both is counted.

A source may lie in another block. In one further in it may be back by then whatever is decided. In one further out it
has to be kept: a *link*. The recurrence of `minidl.memory.pinning` then has a table for each set of kept links that
blocks behind still ask for.

For one price the answer is exact within this model. The price itself is a guess at how well transfers hide:
`minidl.memory.planner` tries several.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

import numpy as np

from minidl.memory.gaps import Problem, blocks
from minidl.memory.pinning import Options, cheapest, choose, granule_of, owned_steps, split
from minidl.memory.plan import Decision, Plan
from minidl.memory.rebuild import Recipe, recipes
from minidl.memory.simulate import measure

KEEP, OFFLOAD, REBUILD = range(3)
LARGEST_GROUP = 6
PAIRED_GROUP = 12
MOST_OPTIONS = 1500
MOST_LINKS = 3


class Joint:
    """The joint problem of one trace.

    Args:
        problem: the candidates.
        times_ms: of each step of the trace.
        granule: bytes of a unit; default as for `pin`.
        largest: tensors of blocks that are joined. With more than `LARGEST_GROUP` two neighbouring residual blocks are
            one, so that the output of the second may be made again from that of the first; in such blocks, either all
            is moved or only what cannot be made again.
    """

    def __init__(
        self, problem: Problem, times_ms: Sequence[float], granule: int | None = None, *, largest: int = LARGEST_GROUP
    ):
        self.problem, self.largest = problem, largest
        self.recipes = recipes(problem, times_ms)
        self.granule = granule or granule_of([gap.bytes for gap in problem.gaps])
        self.exact, self.gaps, self.apart, rest = split(problem.gaps)
        runs = [[rest[i] for i in run] for run in blocks([self.gaps[i] for i in rest])]
        self.runs = self._joined(runs)
        self.steps = owned_steps(self.gaps, self.runs)
        inner = [max(self.gaps[i].stop for i in run) for run in self.runs[1:]]
        # The first step behind the loss that belongs to each block: what happens in it must not happen earlier.
        inner.append(problem.trace.loss)
        self.begin = {run[0]: inner[k] + 1 for k, run in enumerate(self.runs)}
        self.block = {i: k for k, run in enumerate(self.runs) for i in run}
        self._own = {run[0]: self._usable(run) for run in self.runs}
        self._link()
        self._cache: dict[tuple, tuple[np.ndarray, ...]] = {}
        self.tables = [self._table(run, steps) for run, steps in zip(self.runs, self.steps, strict=True)]

    def _joined(self, runs: list[list[int]]) -> list[list[int]]:
        """Neighbouring blocks together, up to a size: where the inner one can be rebuilt from the outer one, and where
        both end at one step, so that the outer one has none behind the loss to rebuild anything at."""
        joined: list[list[int]] = []
        for run in runs:
            if joined and len(joined[-1]) + len(run) <= self.largest and self._belong(joined[-1], run):
                joined[-1] = joined[-1] + run
            else:
                joined.append(list(run))
        return joined

    def _belong(self, outer: Sequence[int], inner: Sequence[int]) -> bool:
        sources = {s for i in inner if (recipe := self.recipes[i]) is not None for s in recipe.sources}
        return bool(sources & set(outer)) or max(self.gaps[i].stop for i in outer) <= max(
            self.gaps[i].stop for i in inner
        )

    def usable(self, run: Sequence[int]) -> list[Recipe | None]:
        """The recipes that may be used in a block."""
        return self._own[run[0]]

    def _usable(self, run: Sequence[int]) -> list[Recipe | None]:
        """Those whose sources may be there and that end within the block; of too many those of the largest tensors."""
        latest, begin = max(self.gaps[i].stop for i in run), self.begin[run[0]]
        own = [self.recipes[i] if latest >= begin else None for i in run]
        for p, (i, recipe) in enumerate(zip(run, own, strict=True)):
            need = min(self.problem.gaps[i].back, latest)
            if recipe is not None and not all(
                (s in run and need <= self._last(s)) or self._back(s, need) or self._before(s, i)
                for s in recipe.sources
            ):
                own[p] = None
        largest = sorted((p for p, r in enumerate(own) if r is not None), key=lambda p: -self.gaps[run[p]].bytes)
        count = 1 << len(run)
        for p in largest:
            if not self._paired(run):
                count = count * 3 // 2
            if count > (1 << PAIRED_GROUP if self._paired(run) else MOST_OPTIONS):
                own[p] = None
        return own

    def _back(self, source: int, need: int) -> bool:
        """Whether a gap's tensor is there before step ``need`` behind the loss, whatever is decided."""
        return self.problem.gaps[source].back <= need <= self._last(source)

    def _before(self, source: int, i: int) -> bool:
        """Whether the block of ``source`` comes before that of gap ``i``, so that it may be kept for it."""
        return self.block.get(source, -1) < self.block[i] and self._last(source) >= self.problem.gaps[i].back

    def _last(self, i: int) -> int:
        return self.problem.trace.tensors[self.gaps[i].tensor].last

    def _link(self) -> None:
        """Find the links and give each a bit, as many at once as `MOST_LINKS`; recipes beyond that are dropped.

        Those of the largest tensors come first. A bit is free again behind the last block that asks for it.
        """
        ends: dict[int, int] = {}  # link -> the last block that asks for it
        open_ = np.zeros(len(self.runs), np.int64)  # links that are asked for in a block or behind it
        wanted = [(i, r) for run in self.runs for i, r in zip(run, self.usable(run), strict=True) if r is not None]
        for i, recipe in sorted(wanted, key=lambda pair: -self.gaps[pair[0]].bytes):
            k, more = self.block[i], np.zeros_like(open_)
            for s in (links := self._outer(i, recipe)):
                more[max(ends.get(s, self.block.get(s, -1) - 1) + 1, 0) : k + 1] += 1
            if links and (open_ + more).max() > MOST_LINKS:
                self._own[self.runs[k][0]][self.runs[k].index(i)] = None
            else:
                open_ += more
                ends |= {s: max(ends.get(s, k), k) for s in links}
        self.bits: dict[int, int] = {}
        self.awaited = [0] * len(self.runs)
        for link in sorted(ends, key=lambda i: self.block.get(i, -1)):
            begin = self.block.get(link, -1)
            taken = {self.bits[o] for o in self.bits if ends[o] >= begin}
            bit = self.bits[link] = next(1 << n for n in itertools.count() if 1 << n not in taken)
            for k in range(max(begin, 0), ends[link]):
                self.awaited[k] |= bit

    def _outer(self, i: int, recipe: Recipe) -> list[int]:
        """The sources of a recipe that have to be kept in blocks before."""
        run = self.runs[self.block[i]]
        need = min(self.problem.gaps[i].back, max(self.gaps[j].stop for j in run))
        return [s for s in recipe.sources if s not in run and not self._back(s, need)]

    def _paired(self, run: Sequence[int]) -> bool:
        return self.largest > LARGEST_GROUP and len(run) > LARGEST_GROUP

    def _ways(self, run: Sequence[int], own: Sequence[Recipe | None]) -> np.ndarray:
        """(combinations, tensors) all choices that are considered in a block."""
        again = (KEEP, REBUILD) if self._paired(run) else (KEEP, OFFLOAD, REBUILD)
        ways = [(KEEP, OFFLOAD) if recipe is None else again for recipe in own]
        found = list(itertools.product(*ways))
        if self._paired(run):
            found.append((OFFLOAD,) * len(run))  # whatever the limit, this fits
        return np.array(found, np.int64).reshape(-1, len(run))

    def _needs(self, run: Sequence[int], choices: np.ndarray, own: Sequence[Recipe | None]) -> np.ndarray:
        """(combinations, tensors) the step before which each tensor of a block must be there."""
        latest = max(self.gaps[i].stop for i in run)
        need = np.tile([self.problem.gaps[i].back for i in run], (len(choices), 1))
        place = {i: p for p, i in enumerate(run)}
        made = sorted(range(len(run)), key=lambda p: -self.problem.trace.tensors[self.gaps[run[p]].tensor].first)
        for p in made:  # those made last first: what they are made from must be there as early as they
            again = choices[:, p] == REBUILD
            if not again.any():
                continue
            need[again, p] = np.minimum(need[again, p], latest)  # while the steps around still belong to this block
            for source in (s for s in own[p].sources if s in place):
                need[again, place[source]] = np.minimum(need[again, place[source]], need[again, p])
        return need

    def _table(self, run: Sequence[int], steps: np.ndarray) -> tuple[np.ndarray, ...]:
        """Of every combination in a block: units at each step, units kept, bytes moved, ms, choices, links it needs and
        keeps."""
        own = self.usable(run)
        place = {i: p for p, i in enumerate(run)}
        begin, end = min(self.gaps[i].start for i in run), max(self.gaps[i].stop for i in run)
        # Blocks of one shape are alike.
        key: list = [len(steps), int((steps <= self.problem.trace.loss).sum()), self.begin[run[0]] - end]
        for i, recipe in zip(run, own, strict=True):
            gap = self.gaps[i]
            need = self.problem.gaps[i].back - end
            key.append((gap.bytes, gap.start - begin, gap.stop - end, need))
            key.append(self.bits.get(i, 0))
            if recipe is not None:
                inside = tuple(place[s] for s in recipe.sources if s in place)
                key.append((inside, self._asked(i, recipe), self._earliest(i, recipe) - end, recipe.beside, recipe.ms))
        key = tuple(key)
        if key in self._cache:
            return self._cache[key]
        table = self._cache[key] = self._rows(run, steps, self._ways(run, own), own)
        return table

    def _rows(
        self, run: Sequence[int], steps: np.ndarray, choices: np.ndarray, own: Sequence[Recipe | None]
    ) -> tuple[np.ndarray, ...]:
        need = self._needs(run, choices, own)
        earliest = np.array([0 if r is None else self._earliest(i, r) for i, r in zip(run, own, strict=True)])
        possible = ((choices != REBUILD) | (need >= earliest)).all(axis=1)
        choices, need = choices[possible], need[possible]
        asked, given = np.zeros(len(choices), np.int64), np.zeros(len(choices), np.int64)
        usage = np.zeros((len(choices), len(steps)), np.int64)
        kept, moved = np.zeros(len(choices), np.int64), np.zeros(len(choices), np.int64)
        ms, codes = np.zeros(len(choices)), np.zeros(len(choices), np.int64)
        for p, i in enumerate(run):
            gap, choice = self.gaps[i], choices[:, p]
            size = -(-gap.bytes // self.granule)
            keep, move, again = choice == KEEP, choice == OFFLOAD, choice == REBUILD
            back = np.where(move, self._fetch(i, need[:, p], self.begin[run[0]]), need[:, p])
            begin = np.where(keep, gap.start, back)
            usage += size * ((begin[:, None] <= steps) & (steps <= gap.stop))
            kept += size * keep
            moved += 2 * gap.bytes * move
            given |= self.bits.get(i, 0) * keep
            if again.any():
                asked |= self._asked(i, own[p]) * again
                ms += own[p].ms * again
                usage += -(-own[p].beside // self.granule) * (again[:, None] & (steps == need[:, p, None]))
            codes += choice * 3**p
        return usage, kept, moved, ms, codes, asked, given

    def _asked(self, i: int, recipe: Recipe) -> int:
        """Bits of the links of a recipe."""
        return sum(self.bits[s] for s in self._outer(i, recipe))

    def _earliest(self, i: int, recipe: Recipe) -> int:
        """The first step before which a recipe can run: what it reads of inner blocks is back."""
        run = self.runs[self.block[i]]
        outer = self._outer(i, recipe)
        return max((self.problem.gaps[s].back for s in recipe.sources if s not in run and s not in outer), default=0)

    def _fetch(self, i: int, need: np.ndarray, begin: int) -> np.ndarray:
        """The step at which the copy of gap ``i`` back may begin: it is needed at ``need``, its block at ``begin``."""
        return np.minimum(self.problem.gaps[i].stop + 1, np.maximum(need - self.problem.window[1], begin))

    def solve(self, capacity: int, price: float) -> Plan:
        """The cheapest plan at ``price`` milliseconds for each byte moved.

        Raises:
            Infeasible: when one step alone exceeds ``capacity``.
        """
        self.problem.require(capacity)

        def best(room: np.ndarray, kept: list[int]) -> tuple[float, list[int]]:
            tables = []
            for (usage, units, moved, ms, codes, asked, given), steps in zip(self.tables, self.steps, strict=True):
                most = (room[steps] - usage).min(axis=1, initial=np.iinfo(np.int64).max)
                tables.append(Options(units, most, price * moved + ms, codes, asked, given).pruned())
            return choose(tables, int(room.max(initial=0)), sum(self.bits.get(i, 0) for i in kept), self.awaited)

        costs = [2 * price * gap.bytes for gap in self.gaps]
        return self.finish(
            capacity, *cheapest(self.problem, capacity, self.granule, self.gaps, self.apart, costs, best)
        )

    def finish(self, capacity: int, kept: Collection[int], codes: Sequence[int], policy: str = "joint") -> Plan:
        """The plan of given choices.

        Args:
            kept: of the gaps that were decided apart, those that stay.
            codes: for each block the choices, in base 3.
        """
        decisions: list[Decision | None] = [None] * len(self.gaps)
        for i in self.apart:
            gap = self.problem.gaps[i]
            choice = "keep" if i in kept else "offload"
            decisions[i] = Decision(gap.tensor, choice, gap.leave, gap.start, gap.stop + 1, gap.back)
        for run, code in zip(self.runs, codes, strict=True):
            choices = [int(code) // 3**p % 3 for p in range(len(run))]
            own = self.usable(run)
            needs = self._needs(run, np.array([choices]), own)[0].tolist()
            for i, choice, need, recipe in zip(run, choices, needs, own, strict=True):
                decisions[i] = self._decision(run, i, choice, need, recipe)
        assert all(d is not None for d in decisions)
        return _finished(self.problem, capacity, self.granule, decisions, policy)

    def _decision(self, run: Sequence[int], i: int, choice: int, need: int, recipe: Recipe | None) -> Decision:
        gap = self.problem.gaps[i]
        if choice == REBUILD:
            return Decision(gap.tensor, "recompute", gap.leave, gap.leave + 1, need, need, recipe.steps)
        name = "keep" if choice == KEEP else "offload"
        fetch = int(self._fetch(i, np.int64(need), self.begin[run[0]]))
        return Decision(gap.tensor, name, gap.leave, gap.start, fetch, need)


def _finished(problem: Problem, capacity: int, granule: int, decisions: Sequence[Decision], policy: str) -> Plan:
    """A plan with its totals."""

    def total(choice: str) -> int:
        return sum(problem.trace.tensors[d.tensor].bytes for d in decisions if d.choice == choice)

    peak = measure(problem.trace, decisions, capacity).peak
    return Plan(
        problem.trace.digest, policy, capacity, granule, False, peak,
        total("keep"), total("offload"), total("recompute"), tuple(decisions),
    )  # fmt: skip
