"""Plans: how each batch norm of a network is run. Records of names only; they can be saved, compared and forced.

A *mode* is one thing that some layer at a batch norm does on the way; a *way* of running a batch norm is a set of
modes, and a plan gives every batch norm its way.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from minidl import checks
from minidl.checkpoint import write_whole
from minidl.fusion.sites import Site
from minidl.layer import Layer

SCHEMA = 3
UNFUSED = "none"


class Mode(NamedTuple):
    """One thing that a plan switches on.

    Attributes:
        attribute: of the layer that does it, True or False.
        where: the field of `Site` that names this layer, or several; None there: the site cannot have the mode.
        by: the field that names the convolution whose kernels do it; None: kernels of their own.
        passes: those that run other kernels for it.
        needs: modes without which it does nothing, of those that the site can have.
        costs: how much longer the convolution takes, forward and backward, in passes over the batch norm's tensor:
            about the median over ResNet-50 (batch 256, bf16) on an H200.
        lacking: what a site is told that cannot have it.
        text: what it does.
    """

    attribute: str
    where: str
    by: str | None
    passes: tuple[str, ...]
    needs: tuple[str, ...]
    costs: tuple[float, float]
    lacking: str
    text: str


MODES = {
    "elementwise": Mode(
        "deferred", "shared", None, ("forward", "backward"), (), (0.0, 0.0), "it is {site.why}",
        "normalisation, residual sum and activation in one pass, the mask in the gradient's",
    ),
    "pooled": Mode(
        "deferred", "pooled", None, ("forward", "backward"), ("elementwise",), (0.25, 0.4),
        "no max pooling alone reads a ReLU over it",
        "the max pooling above normalises what it reads; backward, sums are taken of what was pooled",
    ),
    "gated": Mode(
        "deferred", "gated", None, ("forward", "backward"), ("elementwise",), (0.1, 0.3),
        "no squeeze and excitation alone reads an activation over it",
        "the squeeze and excitation above makes what it reads, twice; backward, sums of each image do for its gate",
    ),
    "statistics": Mode(
        "statistics", "summed", "producer", ("forward",), (), (0.3, 0.0),
        "no convolution writes for it alone",
        "the convolution below takes the statistics of what it writes",
    ),
    "joined": Mode(
        "statistics", "joined", None, ("forward",), (), (0.1, 0.0),
        "it is not over a concatenation",
        "statistics of a concatenation are those of its parts, each taken once (DenseNet's composite layers)",
    ),
    "rectified": Mode(
        "rectifies", "rectifier", "producer", ("forward",), (), (0.05, 0.0),
        "it is no ReLU over a convolution",
        "the convolution below writes what the ReLU would",
    ),
    "gradients": Mode(
        "masks", "masking", "taker", ("backward",), ("elementwise", "pooled"), (0.0, 0.1),
        "no convolution has the last gradient of the ReLU above it",
        "the gradient of the convolution or pooling above masks what it writes, and sums it for who is below",
    ),
    "lazy": Mode(
        "lazy", "leaving", "producer", ("backward",), ("elementwise", "pooled", "gradients"), (0.0, 0.3),
        "no 1x1 convolution without stride and bias writes for it alone, nor, under a pooling, the first one",
        "the input's gradient is never written: the convolution below makes its own of what that is made of",
    ),
    "join": Mode(
        "ahead", "ahead", "taker", ("forward",), ("elementwise", "gradients"), (0.1, 0.0),
        "no 1x1 convolution without stride and bias reads a residual sum over it first",
        "the convolution above makes the residual sum as it reads it, and writes it for the others",
    ),
    "prologue": Mode(
        "deferred", "passed_on", "taker", ("forward", "backward"), ("elementwise",),
        (2.1, 2.0), "no convolution alone reads a ReLU over it",
        "the convolution above normalises what it reads: the ReLU's output is never written",
    ),
}  # fmt: skip

# The same modes at every batch norm, as far as it can: each plan includes those before.
PLANS = {
    UNFUSED: (),
    "elementwise": ("elementwise", "pooled", "gated"),
    "statistics": ("elementwise", "pooled", "gated", "statistics", "joined", "rectified"),
    "gradients": ("elementwise", "pooled", "gated", "statistics", "joined", "rectified", "gradients"),
    "bnff": (
        "elementwise",
        "pooled",
        "gated",
        "statistics",
        "joined",
        "rectified",
        "gradients",
        "lazy",
        "join",
        "prologue",
    ),
}


def way_of(modes: Iterable[str]) -> str:
    """Modes as one word: ``elementwise+statistics``, or ``none``."""
    chosen = set(modes)
    return "+".join(name for name in MODES if name in chosen) or UNFUSED


def modes_of(way: str) -> tuple[str, ...]:
    """The modes of a way.

    Raises:
        ValueError: an unknown one.
    """
    names = () if way == UNFUSED else tuple(way.split("+"))
    for name in names:
        if name not in MODES:
            raise checks.unknown("mode of a batch norm", name, (UNFUSED, *MODES))
    return names


def obstacle(site: Site, mode: str) -> str | None:
    """Why a site cannot have a mode."""
    facts = MODES[mode]
    return facts.lacking.format(site=site) if getattr(site, facts.where) is None else None


def switches(site: Site, way: str, which: str | None = None) -> frozenset[tuple[str, str]]:
    """(name of a layer, its attribute) for each mode of a way; of those only that a pass notices, if one is named."""
    modes = [MODES[name] for name in modes_of(way)]
    return frozenset(
        (layer, m.attribute) for m in modes if which is None or which in m.passes for layer in _layers(site, m)
    )


def modes_on(sites: Iterable[Site], plan: Plan) -> frozenset[tuple[str, str]]:
    """`switches` of all sites as a plan has them."""
    return frozenset().union(*(switches(site, plan.sites[site.name]) for site in sites))


def set_modes(layers: Iterable[Layer], on: Set[tuple[str, str]]) -> None:
    """Let layers have exactly these modes, (name, attribute) each, of those that plans set and layers name."""
    for layer in layers:
        for attribute in dict.fromkeys(mode.attribute for mode in MODES.values()):
            if attribute in layer.modes:
                setattr(layer, attribute, (layer.name, attribute) in on)


def _layers(site: Site, mode: Mode) -> tuple[str, ...]:
    """Who does a mode."""
    found = getattr(site, mode.where)
    return found if isinstance(found, tuple) else (found,)


def candidates(site: Site) -> list[str]:
    """Every way of running a site: unfused first, then by the number of modes."""
    possible = [name for name in MODES if obstacle(site, name) is None]
    sets = itertools.chain.from_iterable(itertools.combinations(possible, n) for n in range(len(possible) + 1))
    return [way_of(modes) for modes in sets if all(needs(site, name) <= set(modes) for name in modes)]


def needs(site: Site, mode: str) -> set[str]:
    """Modes without which this one does nothing at this site."""
    return {name for name in MODES[mode].needs if obstacle(site, name) is None}


@dataclass(frozen=True)
class Plan:
    """A way of running for each site, of the network whose sites have this fingerprint.

    Attributes:
        sites: the way of each batch norm.
        fingerprint: of the sites (`fingerprint`).
        setting: what the measurements hold for that chose it (`minidl.fusion.kept.setting`); None: any.
        evidence: what was measured, one record for each group of batch norms that share a kernel.
        contest: whole passes of the network by several plans, whose winner this one is: ``plan``, ``ms`` and ``spread``
            of each, and of how many ``turns`` it was ``ahead`` of ``"auto"``; ``"composed"`` is the one put together of
            the fastest ways.
    """

    sites: dict[str, str]
    fingerprint: str
    setting: dict[str, Any] | None = None
    evidence: list[dict[str, Any]] = field(default_factory=list, compare=False)
    contest: list[dict[str, Any]] = field(default_factory=list, compare=False)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_whole(path, f"{json.dumps(self.record(), indent=1)}\n".encode())

    def record(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        return {
            "schema": SCHEMA, "fingerprint": self.fingerprint, "setting": self.setting, "sites": self.sites,
            "evidence": self.evidence, "contest": self.contest,
        }  # fmt: skip

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what `save` wrote.

        Raises:
            OSError: when it cannot be read.
            ValueError: when it is no plan.
        """
        try:
            return cls.of(json.loads(Path(path).read_text()))
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: not a fusion plan ({type(error).__name__}: {error})") from error

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Plan:
        """The plan of a `record`; KeyError, TypeError or ValueError when it is none."""
        if record["schema"] != SCHEMA:
            raise ValueError(f"a plan of schema {record['schema']!r}; this minidl reads {SCHEMA}")
        setting = dict(record["setting"]) if record["setting"] is not None else None
        found = list(record["evidence"]), list(record["contest"])
        sites = dict(record["sites"])
        for name, way in sites.items():
            if not isinstance(way, str):
                raise checks.bad_dtype("", f"the way of {name}", "a string such as 'elementwise'", repr(way))
        return cls(sites, str(record["fingerprint"]), setting, *found)

    def check(self, sites: Sequence[Site], setting: Mapping[str, Any] | None = None) -> None:
        """That this is a plan for these sites, and here.

        Args:
            setting: of this machine and run; what is None or missing there is not compared.

        Raises:
            ValueError: naming the first site that is missing, unknown or cannot run so, or what it was measured for.
        """
        names = [site.name for site in sites]
        unknown = [name for name in self.sites if name not in names]
        missing = [name for name in names if name not in self.sites]
        if unknown or missing:
            what = f"the plan has {unknown[0]!r}" if unknown else f"the plan lacks {missing[0]!r}"
            raise ValueError(f"fusion: a plan for another network: {what}")
        for site in sites:
            for mode in modes_of(self.sites[site.name]):
                if (reason := obstacle(site, mode)) is not None:
                    raise ValueError(f"fusion: {site.name} cannot be {self.sites[site.name]}: {reason}")
        if self.fingerprint != fingerprint(sites):
            raise ValueError("fusion: a plan for another network: same names, other shapes or readers")
        for key, value in (self.setting or {}).items():
            own = (setting or {}).get(key)
            if own is not None and own != value:
                raise ValueError(
                    f"fusion: a plan measured for {key} {value!r}, this is {own!r}; measure anew: minidl fuse --tune"
                )


def fingerprint(sites: Sequence[Site]) -> str:
    """Of the sites' names, surroundings and shapes; no batch, no device: a plan without measurements fits any."""
    facts = [(s.name, s.kind, s.readers, s.partner, s.shape, s.producer, s.taker, s.sole) for s in sites]
    further = [(s.joined, s.pooled, s.gated) for s in sites if s.joined or s.pooled or s.gated]
    text = json.dumps([*facts, *further])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def choose(sites: Sequence[Site], how: str) -> Plan:
    """One of `PLANS`, as far as each site can.

    Raises:
        ValueError: unknown ``how``, listing the known ones.
    """
    if how not in PLANS:
        raise checks.unknown("fusion", how, PLANS)
    ways = {site.name: fixed_way(site, how) for site in sites}
    return Plan(ways, fingerprint(sites))


def fixed_way(site: Site, how: str) -> str:
    """The way of one of `PLANS` at this site."""
    possible = {mode for mode in PLANS[how] if obstacle(site, mode) is None}
    return way_of(mode for mode in possible if needs(site, mode) <= possible)
