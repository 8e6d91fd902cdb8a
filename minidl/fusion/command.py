"""``minidl fuse``: the batch norms of a network, what each way of running them costs, and the plan; or measures it."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from minidl import backend, checks, models
from minidl.cuda.device import BUILT_IN, current_device
from minidl.cuda.launch import dry_run
from minidl.fusion import kept
from minidl.fusion.apply import CHOICES, machine_of, plan_for
from minidl.fusion.clock import DeviceClock
from minidl.fusion.cost import SiteCost, site_cost
from minidl.fusion.groups import Group, Ways, groups
from minidl.fusion.map import measure_map
from minidl.fusion.piece import Piece, cut
from minidl.fusion.plans import Plan
from minidl.fusion.sites import Site, find_sites
from minidl.fusion.tune import told
from minidl.graph import Graph
from minidl.precision import PRECISIONS, Precision, precision
from minidl.profile import plots
from minidl.profile.results import result, write
from minidl.profile.tables import show


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of ``minidl fuse``."""
    p.add_argument("--model", default="resnet50", help=models.CHOICES)
    p.add_argument("--batch", type=int, default=32, help="samples per rank")
    p.add_argument("--image-size", type=int, help="side of the images; default: usual for the network")
    p.add_argument("--classes", type=int, help="number of classes; default: usual for the network")
    p.add_argument("--precision", default="bf16", choices=PRECISIONS)
    p.add_argument("--plan", default="auto", metavar="PLAN", help=f"{', '.join(CHOICES)}, or a plan file")
    p.add_argument("--tune", action="store_true", help="measure on this machine and keep the plan for --plan adaptive")
    p.add_argument("--explain", action="store_true", help="explain every option of every batch norm")
    p.add_argument(
        "--device", default="auto", choices=["auto", "cpu", *BUILT_IN],
        help="GPU to plan for; auto: this machine's, else an H200; a named one need not be here",
    )  # fmt: skip
    p.add_argument("--copy-gb-per-s", type=float, help="memory bandwidth, to predict milliseconds")
    p.add_argument(
        "--map", metavar="PICTURE", help="measure the best option over sizes and channels, and plot that instead"
    )
    p.add_argument("--json", metavar="PATH", help="write the plan here, or the rows of --map")


def run(a: argparse.Namespace) -> int:
    """Find the plan, print a row for each batch norm, or one for each of its ways; the exit status."""
    batch = checks.at_least("", "--batch", a.batch, 1)
    if a.copy_gb_per_s is not None:
        checks.number("", "--copy-gb-per-s", a.copy_gb_per_s, "above 0, finite", lambda v: 0 < v < math.inf)
    side, classes = models.usual_task(a.model, a.image_size, a.classes)
    graph = models.build(a.model, (side, side, 3), classes)
    ops, there = _table(a.device)
    if not there:
        if a.tune or a.map or a.plan == "adaptive":
            raise checks.impossible("", "there is no GPU to measure on", "use --device cpu, or --plan auto")
        with dry_run(BUILT_IN[a.device if a.device in BUILT_IN else "H200"]):
            return _told(a, graph, batch, ops, there)
    return _told(a, graph, batch, ops, there)


def _table(device: str) -> tuple[ModuleType, bool]:
    """The operation table to plan for, and whether its device is there."""
    if device == "cpu":
        return backend.get_ops("cpu"), True
    if device == "auto":
        try:
            return backend.open_device("cuda"), True
        except (ImportError, RuntimeError):
            pass
    return backend.get_ops("cuda"), False


def _told(a: argparse.Namespace, graph: Graph, batch: int, ops: ModuleType, there: bool) -> int:
    mode, sites = precision(a.precision), find_sites(graph)
    if a.map:
        return _map(a, ops, batch, mode)
    how = "adaptive" if a.tune else a.plan
    plan = plan_for(graph, ops, mode, how, batch=batch, anew=a.tune, progress=_tell)
    plan.check(sites, kept.setting(ops, mode, batch) if plan.setting and there else None)
    title = f"{a.model}, batch {batch}, {a.precision}, {current_device().name if ops.name == 'cuda' else 'CPU'}"
    if a.explain:
        _explain(title, graph, groups(graph, batch, mode, machine_of(ops), everything=True), plan, batch, mode)
    else:
        _summary(title, sites, plan, batch, mode.storage.itemsize, a.copy_gb_per_s)
    if a.json:
        plan.save(a.json)
        print(f"wrote {a.json}")
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _map(a: argparse.Namespace, ops: ModuleType, batch: int, mode: Precision) -> int:
    """Measure and draw the best way over sizes of feature maps and channels."""
    rows = measure_map(ops, batch, mode, machine_of(ops), DeviceClock(ops, mode), progress=_tell)
    device = kept.setting(ops, mode, batch)["device"]
    picture = plots.fusion(rows, "The fastest way of running a batch norm", f"{device}, batch {batch}, {mode.name}")
    plots.save(picture, a.map)
    if a.json:
        write(a.json, result("fusion_map", rows))
    print(f"wrote {' and '.join(filter(None, (a.map, a.json)))}")
    return 0


# -- a row for each batch norm ------------------------------------------------------------------------------------


def _summary(title: str, sites: Sequence[Site], plan: Plan, batch: int, itemsize: int, bandwidth: float | None) -> None:
    costs = [[site_cost(s, way, batch, itemsize) for way in ("none", plan.sites[s.name])] for s in sites]
    rows = [_row(site, plan, before, after) for site, (before, after) in zip(sites, costs, strict=True)]
    columns = [
        "batch norm", "shape", "kind", "with", "plan", "passes unfused", "passes", "MB unfused", "MB", "saved MB"
    ]  # fmt: skip
    title += ": what batch norms, their ReLUs and sums move through memory"
    show(title, columns, rows, notes=_notes(costs, bandwidth))


def _row(site: Site, plan: Plan, before: SiteCost, after: SiteCost) -> list[str]:
    passes = lambda cost: f"{cost.forward} + {cost.backward}"  # noqa: E731
    mega = lambda count: f"{count / 1e6:.1f}"  # noqa: E731
    beside = site.why or ", ".join(site.readers or filter(None, (site.producer, site.taker)))
    return [
        site.name, _sizes(site.shape), site.kind, beside, plan.sites[site.name],
        passes(before), passes(after), mega(before.bytes), mega(after.bytes), mega(before.bytes - after.bytes),
    ]  # fmt: skip


def _sizes(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def _notes(costs: list[list[SiteCost]], bandwidth: float | None) -> list[str]:
    before, after = (sum(cost.bytes for cost in column) for column in zip(*costs, strict=True)) if costs else (0, 0)
    text = f"all: {before / 1e9:.2f} GB unfused, {after / 1e9:.2f} GB by the plan"
    if bandwidth:
        text += f"; at {bandwidth:.0f} GB/s {before / bandwidth / 1e6:.2f} and {after / bandwidth / 1e6:.2f} ms"
    return [f"{text}. Passes: forward + backward, over the batch norm's tensor, beside those of the convolutions."]


# -- a row for each way -------------------------------------------------------------------------------------------


def _explain(title: str, graph: Graph, found: Sequence[Group], plan: Plan, batch: int, mode: Precision) -> None:
    """Every way of every group of batch norms; groups that do the same work by the same choice are told once."""
    measured = {(*record["sites"], *row["ways"]): row for record in plan.evidence for row in record["rows"]}
    alike: dict[Any, list[Group]] = {}
    for group in found:
        piece = cut(graph, group.sites, batch)
        alike.setdefault((piece.key if piece else group.names, group.runs(plan)), []).append(group)
    table, behind = [], 0.0
    for some in alike.values():
        ways, regret = _ways(graph, some[0], plan, batch, mode, measured)
        names = " and ".join(some[0].names) + (f", {len(some) - 1} alike" if len(some) > 1 else "")
        heads = [[names, _sizes((batch, *some[0].sites[0].shape))], *[["", ""]] * (len(ways) - 1)]
        table += [[*head, *cells] for head, cells in zip(heads, ways, strict=True)]
        behind += len(some) * regret
    columns = ["batch norm", "shape", "way", "model us", "forward us", "backward us", "us", "behind", "frees MB", ""]
    notes = ["model: what batch norms, sums and ReLUs take beside the convolutions; the others: measured, with these"]
    if plan.evidence:
        notes.append(f"regret: the choices are {behind:.3f} ms behind the fastest ways of each, taken one by one")
        notes.append(told(plan))
    show(f"{title}: ways of batch norms", columns, table, notes=notes)


def _ways(
    graph: Graph, group: Group, plan: Plan, batch: int, mode: Precision, measured: Mapping[Any, Any]
) -> tuple[list[list[str]], float]:
    """(cells of each way of a group, milliseconds by which the chosen one is behind)."""
    chosen, ways = group.runs(plan), list(dict.fromkeys(group.same.values()))
    rows = {w: measured.get((*group.names, *w)) for w in ways}
    took = {w: row["ms"] for w, row in rows.items() if row and row["forward_ms"] is not None}
    fastest, saved = min(took.values(), default=0.0), _saved_bytes(graph, group, ways, batch, mode)
    micro = lambda ms: f"{1e3 * ms:.1f}" if ms is not None else ""  # noqa: E731
    cells = []
    for way in ways:
        row = rows[way] or {}
        freed = f"{(saved[ways[0]] - saved[way]) / 1e6:.1f}" if saved else ""
        behind = micro(took[way] - fastest) if way in took else ""
        cells.append([
            " and ".join(way), micro(group.predicted_ms[way]), micro(row.get("forward_ms")),
            micro(row.get("backward_ms")), micro(took.get(way)), behind, freed, "chosen" * (way == chosen),
        ])  # fmt: skip
    return cells, took[chosen] - fastest if chosen in took else 0.0


def _saved_bytes(graph: Graph, group: Group, ways: Sequence[Ways], batch: int, mode: Precision) -> dict[Ways, int]:
    """What a group's layers keep for the backward pass, found on shapes; nothing for layers of unknown kinds."""
    piece = cut(graph, group.sites, batch)
    if piece is None:
        return {}
    with dry_run(BUILT_IN["H200"]):
        layers = Piece(piece, backend.get_ops("cuda"), mode, cache_bytes=0)
        return {way: layers.saved_bytes(group.on(way, "forward") | group.on(way, "backward")) for way in ways}
