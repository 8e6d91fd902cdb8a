"""Finds the plan that is asked for, and sets the modes that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minidl import checks
from minidl.cuda.device import current_device
from minidl.dist.agree import require_same
from minidl.fusion import kept
from minidl.fusion.cost import Machine, heuristic
from minidl.fusion.plans import MODES, PLANS, Plan, choose, fingerprint, switches
from minidl.fusion.sites import Site, find_sites
from minidl.fusion.tune import Clock, DeviceClock, tune
from minidl.model import Model

__all__ = ["CHOICES", "fuse", "machine_of"]

# What `fuse` takes beside plans and their files.
CHOICES = (*PLANS, "auto", "adaptive")


def fuse(
    model: Model,
    how: str | Path | Plan = "auto",
    *,
    batch: int | None = None,
    clock: Clock | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Run ``model`` by a fusion plan from now on; a collective between its ranks, which all follow rank 0.

    Args:
        how: one of `PLANS`; ``"auto"``, the fastest by a model that reads no clock; ``"adaptive"``, the fastest as
            measured on this machine, now or earlier; a plan, or the path of a saved one.
        batch: samples of a step on this rank, for which ``"adaptive"`` measures and a measured plan must hold.
        clock: for ``"adaptive"``, who measures; default: this machine.
        progress: told what was measured.

    Returns:
        The plan; `fuse(model, "none")` undoes it.

    Raises:
        ValueError: an unknown name, a plan for another network, device, precision or batch, or no batch to measure.
        OSError: a file that cannot be read.
    """
    sites = find_sites(model.graph)
    if how == "adaptive" and batch is None:
        raise checks.bad_value("fuse", "batch", "the samples of a step on each rank, to measure for", None)
    if how in ("auto", "adaptive"):
        plan = _agreed(model, sites, str(how), batch, clock, progress)
    else:
        plan = how if isinstance(how, Plan) else choose(sites, str(how)) if str(how) in PLANS else _load(how)
    plan.check(sites, kept.setting(model.ops, model.precision, batch) if plan.setting else None)
    require_same(model.comm, "fusion plan", [f"{name} {way}" for name, way in plan.sites.items()])
    on = set().union(*(switches(site, plan.sites[site.name]) for site in sites))
    for layer in model.layers:
        for mode in MODES.values():
            if hasattr(layer, mode.attribute):
                setattr(layer, mode.attribute, (layer.name, mode.attribute) in on)
    model.fusion = plan
    return plan


def machine_of(ops: Any) -> Machine:
    """The device of an operation table, as the model of time knows it."""
    return Machine.of(current_device() if ops.name == "cuda" else None)


def _agreed(
    model: Model, sites: Sequence[Site], how: str, batch: int | None, clock: Clock | None, progress: Any
) -> Plan:
    """Rank 0's plan; where that has none, its error on every rank."""
    plan, problem = None, ""
    if model.comm.rank == 0:
        try:
            plan = _found(model, sites, how, batch, clock, progress).record()
        except Exception as error:  # whatever a kernel raises: the others are waiting
            if model.comm.size == 1:
                raise
            problem = f"{type(error).__name__}: {error}"
    plan, problem = model.comm.share((plan, problem))[0]
    if problem:
        raise ValueError(f"fusion plan of rank 0: {problem}")
    return Plan.of(plan)


def _found(
    model: Model, sites: Sequence[Site], how: str, batch: int | None, clock: Clock | None, progress: Any
) -> Plan:
    ops, precision, machine = model.ops, model.precision, machine_of(model.ops)
    if how == "auto":
        return heuristic(model.graph, sites, precision, machine)
    setting = kept.setting(ops, precision, batch)
    path = kept.path_of(ops, setting, fingerprint(sites))
    plan = kept.load(path) if clock is None else None
    if plan is None:
        clock = clock or (DeviceClock(ops, precision) if ops.name == "cpu" else None)
        plan = tune(model.graph, batch, precision, machine, clock, setting=setting, progress=progress)
        kept.keep(plan, path)
    return plan


def _load(how: str | Path) -> Plan:
    if not Path(how).exists() and Path(how).suffix != ".json":
        raise checks.unknown("fusion", str(how), CHOICES)  # a misspelt name, rather than a missing file
    return Plan.load(how)
