"""Sets the modes that a plan asks for."""

from __future__ import annotations

from pathlib import Path

from minidl.dist.agree import require_same
from minidl.fusion.plans import PLANS, Plan, choose
from minidl.fusion.sites import find_sites
from minidl.model import Model

__all__ = ["fuse"]


def fuse(model: Model, how: str | Path | Plan = "elementwise") -> Plan:
    """Run ``model`` by a fusion plan from now on; a collective between its ranks.

    Args:
        how: one of `PLANS`, a plan, or the path of a saved one.

    Returns:
        The plan; `fuse(model, "none")` undoes it.

    Raises:
        ValueError: an unknown name, or a plan for another network.
        OSError: a file that cannot be read.
    """
    sites = find_sites(model.graph)
    plan = how if isinstance(how, Plan) else choose(sites, str(how)) if str(how) in PLANS else _load(how)
    plan.check(sites)
    require_same(model.comm, "fusion plan", [f"{name} {way}" for name, way in plan.sites.items()])
    for site in sites:
        way = plan.sites[site.name]
        model.graph[site.name].layer.deferred = way != "none" and site.kind != "alone"
        if site.producer is not None:
            model.graph[site.producer].layer.statistics = way in ("statistics", "gradients", "bnff")
        if site.taker is not None:
            model.graph[site.taker].layer.masks = way in ("gradients", "bnff")
        if site.kind == "relu":
            model.graph[site.readers[0]].layer.deferred = way == "bnff"
    return plan


def _load(how: str | Path) -> Plan:
    if not Path(how).exists() and Path(how).suffix != ".json":
        choose([], str(how))  # a misspelt name, rather than a missing file
    return Plan.load(how)
