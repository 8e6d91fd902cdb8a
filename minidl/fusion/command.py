"""``minidl fuse``: the sites of a network, what each way of running them moves through memory, and the plan."""

from __future__ import annotations

import argparse

from minidl import checks, models
from minidl.fusion.cost import SiteCost, site_cost
from minidl.fusion.plans import PLANS, Plan, choose
from minidl.fusion.sites import Site, find_sites
from minidl.precision import precision
from minidl.profile.tables import show

__all__ = ["add_arguments", "run"]


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of ``minidl fuse``."""
    p.add_argument("--model", default="resnet50", help=f"one of {', '.join(sorted(models.MODELS))}")
    p.add_argument("--batch", type=int, default=32, help="samples of each rank")
    p.add_argument("--image-size", type=int, default=224)
    p.add_argument("--classes", type=int, default=1000)
    p.add_argument("--precision", default="bf16", choices=["fp32", "tf32", "bf16", "fp16"])
    p.add_argument("--plan", default="elementwise", metavar="PLAN", help=f"{', '.join(PLANS)}, or the path of a plan")
    p.add_argument("--copy-gb-per-s", type=float, help="memory bandwidth, to tell milliseconds")
    p.add_argument("--json", metavar="PATH", help="write the plan here")


def run(a: argparse.Namespace) -> int:
    """Print one row per batch norm, and the sums. Needs no GPU."""
    batch = checks.at_least("fuse", "--batch", a.batch, 1)
    sites = find_sites(models.build(a.model, (a.image_size, a.image_size, 3), a.classes))
    plan = choose(sites, a.plan) if a.plan in PLANS else Plan.load(a.plan)
    plan.check(sites)
    itemsize = precision(a.precision).storage.itemsize
    costs = [[site_cost(s, way, batch, itemsize) for way in ("none", plan.sites[s.name])] for s in sites]
    rows = [_row(site, plan, before, after) for site, (before, after) in zip(sites, costs, strict=True)]
    columns = [
        "batch norm",
        "shape",
        "kind",
        "with",
        "plan",
        "passes unfused",
        "passes",
        "MB unfused",
        "MB",
        "saved MB",
    ]
    title = f"{a.model}, batch {batch}, {a.precision}: what batch norms, their ReLUs and sums move through memory"
    show(title, columns, rows, notes=_notes(costs, a.copy_gb_per_s))
    if a.json:
        plan.save(a.json)
        print(f"wrote {a.json}")
    return 0


def _row(site: Site, plan: Plan, before: SiteCost, after: SiteCost) -> list[str]:
    passes = lambda cost: f"{cost.forward} + {cost.backward}"  # noqa: E731
    mega = lambda count: f"{count / 1e6:.1f}"  # noqa: E731
    return [
        site.name, "x".join(map(str, site.shape)), site.kind, site.why or ", ".join(site.readers),
        plan.sites[site.name], passes(before), passes(after), mega(before.bytes), mega(after.bytes),
        mega(before.bytes - after.bytes),
    ]  # fmt: skip


def _notes(costs: list[list[SiteCost]], bandwidth: float | None) -> list[str]:
    before, after = (sum(cost.bytes for cost in column) for column in zip(*costs, strict=True)) if costs else (0, 0)
    text = f"all: {before / 1e9:.2f} GB unfused, {after / 1e9:.2f} GB by the plan"
    if bandwidth:
        text += f"; at {bandwidth:.0f} GB/s {before / bandwidth / 1e6:.2f} and {after / bandwidth / 1e6:.2f} ms"
    return [f"{text}. Passes: forward + backward, over the batch norm's tensor, beside those of the convolutions."]
