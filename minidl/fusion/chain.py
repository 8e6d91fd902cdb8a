"""The ways of all batch norms that take least time together, where some terms depend on neighbours.

A step's time is a sum of terms, each a table over the ways of one batch norm, or of a few that share a kernel:
neighbours along a chain of convolutions, or the two below a residual sum. `best` eliminates the batch norms one by one,
the one with the fewest neighbours first, keeping for each the best way as a function of theirs: dynamic programming
on a graph (Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972), exact, and on a chain the usual one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """Milliseconds for ways of these sites, in this order; combinations that are not in the table add nothing."""

    sites: tuple[str, ...]
    ms: Mapping[tuple[str, ...], float]

    def of(self, ways: Mapping[str, str]) -> float:
        """The milliseconds for a way of each site."""
        return self.ms.get(tuple(ways[site] for site in self.sites), 0.0)


def total(ways: Mapping[str, str], terms: Iterable[Term]) -> float:
    """Milliseconds of a plan."""
    return sum(term.of(ways) for term in terms)


def best(options: Mapping[str, Sequence[str]], terms: Sequence[Term]) -> dict[str, str]:
    """A way of each site such that the terms' sum is least; among equals the one named first in ``options``."""
    left, open_sites = list(terms), list(options)
    decided: list[tuple[str, tuple[str, ...], dict[tuple[str, ...], str]]] = []
    while open_sites:
        site = min(open_sites, key=lambda name: len(_neighbours(name, left)))
        mine = [term for term in left if site in term.sites]
        around = tuple(name for name in options if name in _neighbours(site, left))
        choice, table = {}, {}
        for combination in itertools.product(*(options[name] for name in around)):
            ways = dict(zip(around, combination, strict=True))
            times = {way: total(ways | {site: way}, mine) for way in options[site]}
            choice[combination] = min(times, key=times.__getitem__)
            table[combination] = times[choice[combination]]
        left = [term for term in left if site not in term.sites] + [Term(around, table)]
        decided.append((site, around, choice))
        open_sites.remove(site)
    found: dict[str, str] = {}
    for site, around, choice in reversed(decided):
        found[site] = choice[tuple(found[name] for name in around)]
    return {site: found[site] for site in options}


def _neighbours(site: str, terms: Iterable[Term]) -> set[str]:
    return {name for term in terms if site in term.sites for name in term.sites} - {site}
