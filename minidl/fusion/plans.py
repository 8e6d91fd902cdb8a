"""Plans: how each batch norm of a network is run. Records of names only; they can be saved, compared and forced."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minidl import checks
from minidl.fusion.sites import Site

__all__ = ["PLANS", "Plan", "choose"]

SCHEMA = 1

# What a site can be, with the names of the literature's passes (F, J: forward, B: backward). Each includes those before
# as far as the site can.
PLANS = {
    "none": "each layer in its own kernels (F0, J0, B0)",
    "elementwise": "normalisation, residual sum and ReLU in one pass, the mask in the gradient's (F1, J1, J4, B1)",
    "statistics": "that, and the convolution below takes the statistics of what it writes (F3, J3)",
    "gradients": "that, and the data gradient of the convolution above masks and sums what it writes (B3)",
    "bnff": "that, and the convolution above normalises what it reads: the ReLU's output is never written (F4)",
}


@dataclass(frozen=True)
class Plan:
    """A way of running for each site, of the network whose sites have this fingerprint."""

    sites: dict[str, str]
    fingerprint: str

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        content = {"schema": SCHEMA, "fingerprint": self.fingerprint, "sites": self.sites}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote.

        Raises:
            OSError: when it cannot be read.
            ValueError: when it is no plan.
        """
        try:
            content: Any = json.loads(Path(path).read_text())
            if content["schema"] != SCHEMA:
                raise ValueError(f"{path}: a plan of schema {content['schema']!r}; this minidl reads {SCHEMA}")
            sites, fingerprint = dict(content["sites"]), str(content["fingerprint"])
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{path}: not a fusion plan ({type(error).__name__}: {error})") from error
        return cls(sites, fingerprint)

    def check(self, sites: Sequence[Site]) -> None:
        """That this is a plan for these sites.

        Raises:
            ValueError: naming the first that is missing, unknown or cannot run so.
        """
        names = [site.name for site in sites]
        unknown = [name for name in self.sites if name not in names]
        missing = [name for name in names if name not in self.sites]
        if unknown or missing:
            what = f"the plan has {unknown[0]!r}" if unknown else f"the plan lacks {missing[0]!r}"
            raise ValueError(f"fusion: a plan for another network: {what}")
        for site in sites:
            way = self.sites[site.name]
            if way not in PLANS:
                raise checks.unknown("fusion of a batch norm", way, PLANS)
            if _obstacle(site, way):
                raise ValueError(f"fusion: {site.name} cannot be {way}: {_obstacle(site, way)}")
        if self.fingerprint != fingerprint(sites):
            raise ValueError("fusion: a plan for another network: same names, other shapes or readers")


def fingerprint(sites: Sequence[Site]) -> str:
    """Of the sites' names, surroundings and shapes; no batch, no device: a plan without measurements fits any."""
    text = json.dumps([(s.name, s.kind, s.readers, s.partner, s.shape, s.producer, s.taker, s.sole) for s in sites])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _obstacle(site: Site, way: str) -> str | None:
    """Why a site cannot be run so."""
    if way == "elementwise" and site.kind == "alone":
        return f"it is {site.why}"
    if way == "statistics" and site.producer is None:
        return "no convolution writes for it alone"
    if way == "gradients" and site.taker is None:
        return "no convolution has the last gradient of the ReLU above it"
    if way == "bnff" and not (site.kind == "relu" and site.sole):
        return "no convolution alone reads a ReLU over it"
    return None


def choose(sites: Sequence[Site], how: str) -> Plan:
    """One of `PLANS` wherever it applies, elsewhere the one before it that does.

    Raises:
        ValueError: unknown ``how``, listing the known ones.
    """
    if how not in PLANS:
        raise checks.unknown("fusion", how, PLANS)
    known = list(PLANS)
    best_first = known[known.index(how) :: -1]
    ways = {site.name: next(way for way in best_first if not _obstacle(site, way)) for site in sites}
    return Plan(ways, fingerprint(sites))
