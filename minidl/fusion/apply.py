"""Finds the plan that is asked for, and sets the modes that it asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType

from minidl import checks
from minidl.cuda.device import DeviceRecord, current_device
from minidl.dist.agree import on_rank_0
from minidl.fusion import kept
from minidl.fusion.clock import Clock, DeviceClock
from minidl.fusion.cost import Machine, heuristic
from minidl.fusion.plans import PLANS, Plan, choose, fingerprint, modes_on, set_modes
from minidl.fusion.sites import Site, find_sites
from minidl.fusion.tune import tune
from minidl.graph import Graph
from minidl.layer import Layer
from minidl.model import Model
from minidl.precision import Precision
from minidl.store import TensorStore

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
        ValueError: an unknown name, a plan for another network, device, precision or batch, or no batch to measure for.
        TypeError: for what is no Model, or no plan.
        OSError: a file that cannot be read.
    """
    checks.instance("fuse", "model", model, Model, "a Model", "Model(graph, ...) makes one of a Graph")
    sites = find_sites(model.graph)
    plan = on_rank_0(
        model.comm,
        lambda: plan_for(model.graph, model.ops, model.precision, how, batch=batch, clock=clock, progress=progress),
    )
    plan.check(sites, kept.setting(model.ops, model.precision, batch) if plan.setting else None)
    _switch(model.layers, sites, plan)
    model.fusion = plan
    return plan


def fuse_graph(graph: Graph, how: str | Path | Plan, precision: Precision, device: DeviceRecord) -> Plan:
    """Let a network that no model has follow a plan on a device that need not be here: for tracing and planning.

    Raises:
        ValueError: as `fuse`; ``"adaptive"``, which measures.
    """
    sites = find_sites(graph)
    if how == "auto":
        plan = heuristic(graph, sites, precision, Machine.of(device))
    elif how == "adaptive":
        raise checks.bad_value("fusion", "plan", "one that reads no clock", how, "pass the file of minidl fuse --tune")
    elif isinstance(how, Plan):
        plan = how
    else:
        plan = choose(sites, str(how)) if how in PLANS else _load(how)
    plan.check(sites, None)
    _switch(graph.layers, sites, plan)
    return plan


def _switch(layers: Iterable[Layer], sites: Sequence[Site], plan: Plan) -> None:
    """Set the modes of all layers as the plan has them."""
    set_modes(layers, modes_on(sites, plan))


def fuse_by_default(model: Model) -> None:
    """On a GPU, run a model by ``"auto"`` where nobody has chosen; memory planned for other modes stays as planned."""
    if model.fusion is None and model.ops.name == "cuda" and type(model.store) is TensorStore:
        fuse(model, "auto")


def machine_of(ops: ModuleType) -> Machine:
    """The device of an operation table, as the model of time knows it."""
    return Machine.of(current_device() if ops.name == "cuda" else None)


def plan_for(
    graph: Graph,
    ops: ModuleType,
    precision: Precision,
    how: str | Path | Plan,
    *,
    batch: int | None = None,
    clock: Clock | None = None,
    anew: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """The plan that `fuse` would follow for a network on the device of ``ops``; nothing is set.

    Args:
        anew: measure also what was measured and kept before.

    Raises:
        ValueError, TypeError, OSError: as `fuse`.
    """
    sites = find_sites(graph)
    checks.instance("fuse", "how", how, str | Path | Plan, "the name of a plan, a Plan or its file")
    if isinstance(how, Plan):
        return how
    if how in PLANS:
        return choose(sites, str(how))
    if how == "auto":
        return heuristic(graph, sites, precision, machine_of(ops))
    if how != "adaptive":
        return _load(how)
    if batch is None:
        raise checks.bad_value("fuse", "batch", "the samples of a step on each rank, to measure for", None)
    setting = kept.setting(ops, precision, batch)
    path = kept.path_of(ops, setting, fingerprint(sites))
    plan = kept.load(path) if clock is None and not anew else None
    if plan is None:
        if clock is None and ops.name == "cpu":
            clock = DeviceClock(ops, precision)
        plan = tune(graph, batch, precision, machine_of(ops), clock, setting=setting, progress=progress)
        progress(f"kept in {kept.keep(plan, path)}")
    return plan


def _load(how: str | Path) -> Plan:
    if not Path(how).exists() and Path(how).suffix != ".json":
        raise checks.unknown("fusion", str(how), CHOICES)  # a misspelt name, rather than a missing file
    return Plan.load(how)
