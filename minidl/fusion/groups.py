"""Groups of batch norms that share kernels whatever the plan, and the ways of running them that are worth timing."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from minidl.fusion.cost import Machine, predict, runs_as, site_cost
from minidl.fusion.plans import MODES, Plan, candidates, modes_of, switches
from minidl.fusion.sites import Site, find_sites
from minidl.graph import Graph
from minidl.precision import Precision

Switches = frozenset[tuple[str, str]]
Ways = tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """Batch norms that are timed together, and every way of running them.

    Attributes:
        ways: the combinations, one way for each site.
        same: for each combination the one whose kernels it runs, see `minidl.fusion.cost.runs_as`.
        predicted_ms: by the model, forward and backward.
        timed: the combinations that are worth a measurement.
    """

    sites: tuple[Site, ...]
    ways: tuple[Ways, ...]
    same: Mapping[Ways, Ways]
    predicted_ms: Mapping[Ways, float]
    timed: tuple[Ways, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(site.name for site in self.sites)

    def runs(self, plan: Plan) -> Ways:
        """The ways whose kernels these sites run by a plan."""
        return self.same[tuple(plan.sites[name] for name in self.names)]

    def on(self, ways: Ways, which: str) -> Switches:
        """The modes of a combination that a pass notices."""
        return frozenset().union(*(switches(s, w, which) for s, w in zip(self.sites, ways, strict=True)))


def groups(
    graph: Graph, batch: int, precision: Precision, machine: Machine, *, everything: bool = False
) -> list[Group]:
    """The groups of a network; with ``everything`` also ways that others dominate are to be timed."""
    sites = {site.name: site for site in find_sites(graph)}
    found, seen = [], set()
    for site in sites.values():
        if site.name not in seen:
            members = (site,) if site.partner is None else (site, sites[site.partner])
            seen |= {member.name for member in members}
            found.append(_group(graph, members, batch, precision, machine, everything))
    return found


def _group(
    graph: Graph, sites: tuple[Site, ...], batch: int, precision: Precision, machine: Machine, everything: bool
) -> Group:
    same, times, moved = {}, {}, {}
    for ways in itertools.product(*map(candidates, sites)):
        pairs = list(zip(sites, ways, strict=True))
        same[ways] = tuple(runs_as(graph, site, way, precision, machine) for site, way in pairs)
        times[ways] = sum(predict(graph, site, way, batch, precision, machine).ms for site, way in pairs)
        moved[ways] = sum(site_cost(site, way, batch, 1).bytes for site, way in pairs)
    distinct = list(dict.fromkeys(same.values()))
    timed = distinct if everything else _worth_timing(distinct, moved)
    return Group(sites, tuple(same), same, times, tuple(timed))


def _worth_timing(ways: Sequence[Ways], moved: Mapping[Ways, int]) -> list[Ways]:
    """Without those that move more bytes than another which asks no more of convolutions."""
    asked = {w: {(i, m) for i, way in enumerate(w) for m in modes_of(way) if MODES[m].by} for w in ways}
    return [w for w in ways if not any(asked[v] <= asked[w] and moved[v] < moved[w] for v in ways)]
