"""``minidl plan``: what a limit of GPU memory costs, before anything runs. No GPU is needed."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl import checks, models
from minidl.bench.setup import Setup, add_images
from minidl.cuda.device import BUILT_IN
from minidl.fusion import PLANS, fuse_graph
from minidl.memory import Infeasible, Plan, Problem, Timeline, check, problem, record
from minidl.memory.gaps import NO_WINDOW
from minidl.memory.limit import parse_limit
from minidl.memory.limited import FUSIONS
from minidl.memory.plan import human, smallest
from minidl.memory.planner import StepPlanner
from minidl.memory.simulate import Link
from minidl.memory.times import CEILINGS, SHARE, link_of, measured, modelled
from minidl.memory.trace import Trace
from minidl.memory.visits import candidates, visiting
from minidl.precision import PRECISIONS, precision
from minidl.profile.plots import style
from minidl.profile.results import load, write
from minidl.profile.tables import show

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_GIB = 1 << 30
_GROUPED = 24  # layers beyond which the table shows groups of them


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl plan``."""
    p.add_argument("--model", default="resnet50", help=models.CHOICES)
    p.add_argument("--batch", type=int, default=32, help="samples per GPU")
    p.add_argument("--limit", default="50%", help="GPU memory: 8GB, 7.5GiB, or 25%% of what the step needs")
    p.add_argument("--precision", default="fp32", choices=PRECISIONS)
    ways = f"{', '.join((*PLANS, 'auto'))}, a file; default: the fastest within the limit of {', '.join(FUSIONS)}"
    p.add_argument("--fusion", metavar="PLAN", help=f"how batch norms are fused: {ways}; with --times auto")
    add_images(p)
    p.add_argument("--momentum", type=float, default=0.9, help="momentum of sgd; 0: the optimizer has no state")
    p.add_argument("--gradients", default="keep", choices=["keep", "ring", "momentum"], help="as in minidl train")
    p.add_argument(
        "--ranks", type=int, default=1, help="GPUs that train together; a ring then also holds gradients on their way"
    )
    p.add_argument("--device", default="H200", choices=sorted(BUILT_IN), help="GPU to plan for")
    p.add_argument(
        "--times", metavar="FILE.json", help="take times and link rate from a result file of minidl bench layers"
    )
    p.add_argument("--host", metavar="LIMIT", help="host memory, such as 64GB; a plan that needs more is refused")
    p.add_argument(
        "--share", type=float, default=SHARE, help="share of the roofline that a pass reaches, without --times"
    )
    p.add_argument("--link", type=float, metavar="GB/S", help="rate of the link to the host, each way")
    p.add_argument("--state", action="store_true", help="parameters, gradients and momentum may move to the host, too")
    p.add_argument(
        "--host-momentum", action="store_true",
        help="with --gradients ring: keep the momentum of large layers in host memory",
    )  # fmt: skip
    p.add_argument("--no-rebuild", action="store_true", help="only move tensors, recompute none")
    p.add_argument("--layers", action="store_true", help="print a row for each layer, however many")
    p.add_argument(
        "--alternatives",
        action="store_true",
        help="also print the largest batch within the limit, and gradient accumulation",
    )
    p.add_argument("--json", metavar="PATH", help="write the plan here")
    p.add_argument("--trace", metavar="PATH", help="write the trace here")
    p.add_argument("--plot", metavar="PATH", help="plot memory with and without the plan, as .svg or .png (extra plot)")


@dataclass(frozen=True)
class _Case:
    """A traced step with its times."""

    problem: Problem
    times_ms: list[float]
    link: Link
    how: str  # where the times come from


def run(a: argparse.Namespace) -> int:
    """Trace, plan, report; the exit status.

    Raises:
        ValueError: for options that cannot be, and a limit that one step alone exceeds: with the step, its tensors and
            the smallest feasible limit.
    """
    checks.at_least("", "--ranks", a.ranks, 1)
    if a.fusion is None and not a.times:
        limit, case, plan, run_ = _fastest(a)
    else:
        a.fusion = a.fusion or "auto"
        case = _case(a, a.batch)
        limit = parse_limit(a.limit, case.problem.peak)
        case, plan, run_ = _planned(a, case, limit)
    _report(a, case, limit, plan, run_)
    if a.alternatives:
        _alternatives(a, case, limit)
    for path, text in ((a.json, plan.to_json), (a.trace, case.problem.trace.to_json)):
        if path:
            write(path, f"{text()}\n".encode())
            print(f"wrote {path}")
    if a.plot:
        style.save(_picture(case.problem, plan, limit), a.plot)
        print(f"wrote {a.plot}")
    return 0


def _fastest(a: argparse.Namespace) -> tuple[int, _Case, Plan, Timeline]:
    """The limit, and the plan by the fusion with which a step within it is predicted fastest.

    A limit that is a part is one of what the first fusion needs.
    """
    limit, errors = None, []
    found: dict[str, tuple[_Case, Plan, Timeline]] = {}
    for how in FUSIONS:
        a.fusion = how
        case = _case(a, a.batch)
        limit = parse_limit(a.limit, case.problem.peak) if limit is None else limit
        if found and sum(case.times_ms) >= min(run_.total_ms for *_, run_ in found.values()):
            continue  # no plan is faster than the step without a limit
        try:
            found[how] = _planned(a, case, limit)
        except Infeasible as error:
            errors.append(error)
    if not found:
        raise smallest(errors)
    predicted = {how: f"{run_.total_ms:.2f} ms" for how, (*_, run_) in found.items()}
    a.fusion = min(found, key=lambda how: found[how][2].total_ms)
    others = [f"{how} {ms}" for how, ms in predicted.items() if how != a.fusion]
    print(f"fusion {a.fusion}: predicted {', '.join([predicted[a.fusion], *others])}")
    return limit, *found[a.fusion]


def _case(a: argparse.Namespace, batch: int) -> _Case:
    setup = Setup(a.model, batch, a.precision, "cuda", 1, a.image_size, a.classes)
    graph = setup.graph()
    fuse_graph(graph, a.fusion, precision(a.precision), BUILT_IN[a.device])
    trace = record(
        graph, batch, precision=a.precision, momentum=a.momentum, gradients=a.gradients, ranks=a.ranks,
        device=BUILT_IN[a.device], model=a.model, image_size=setup.image, classes=setup.num_classes,
    )  # fmt: skip
    content = load(a.times) if a.times else {}
    ceilings = content.get("ceilings") or _ceilings(a)
    link = Link(a.link, a.link) if a.link is not None else link_of(ceilings)
    if a.times:
        times, how = measured(trace, content), f"measured in {Path(a.times).name}"
    else:
        times = modelled(trace, ceilings, a.share)
        how = f"modelled: FLOP and bytes at {a.share:.0%} of the roofline of an {ceilings['machine']}"
    if a.host_momentum:
        trace = _visited(trace)
    return _Case(problem(trace, state=a.state), times, link, how)


def _visited(trace: Trace) -> Trace:
    """The step with the momentum of large layers on the host but around their updates, copied in a hurry."""
    numbers = candidates(trace)
    if not numbers:
        expected = "large layers, updated within the backward pass"
        remedy = "pass --gradients ring, or leave --host-momentum out"
        raise checks.bad_value("plan", "--host-momentum", expected, "none", remedy)
    return visiting(trace, numbers)


def _ceilings(a: argparse.Namespace) -> Mapping[str, Any]:
    if a.device not in CEILINGS:
        remedy = "pass --times with a result file of minidl bench layers"
        raise checks.bad_value("plan", "--device", f"one with known rates ({', '.join(CEILINGS)})", a.device, remedy)
    return CEILINGS[a.device]


def _planned(a: argparse.Namespace, case: _Case, limit: int) -> tuple[_Case, Plan, Timeline]:
    """The fastest plan; momentum that visits may also be there for as long as its copies take to hide."""
    cases, found, errors = [case], [], []
    if case.problem.trace.visitors:
        trace = visiting(case.problem.trace, case.problem.trace.visitors, case.times_ms, case.link)
        cases.append(replace(case, problem=problem(trace, state=a.state)))
    for one in cases:
        planner = StepPlanner(one.problem.trace, one.times_ms, one.link, state=a.state, rebuild=not a.no_rebuild)
        try:
            found.append((one, *planner.best(limit)))
        except Infeasible as error:
            errors.append(error)
    if not found:
        raise smallest(errors)
    return min(found, key=lambda way: way[2].total_ms)


def _floor(a: argparse.Namespace, case: _Case) -> Problem:
    """Without windows for copies: its floor is the smallest feasible limit."""
    trace = case.problem.trace
    return problem(visiting(trace, trace.visitors), NO_WINDOW, state=a.state)


# -- the report -------------------------------------------------------------------------------------------------------


def _report(a: argparse.Namespace, case: _Case, limit: int, plan: Plan, run_: Timeline) -> None:
    p = case.problem
    usage = check(p.trace, plan)
    on_host = usage.host_peak + sum(p.trace.tensors[i].bytes for i in p.trace.visitors)
    _require_host(a, on_host)
    title = f"{a.model}, batch {a.batch}, {a.precision}: {human(limit)} of the {human(p.peak)} that a step needs"
    columns = ["layers" if not a.layers else "layer", "kept", "moved", "rebuilt", "of them"]
    show(title, columns, _rows(p, plan, by_layer=a.layers))
    state = sum(p.trace.resident_bytes.values())
    slower = run_.total_ms / run_.compute_ms if run_.compute_ms else 1.0
    print()
    for name, text in (
        ("memory", f"{human(usage.peak)} at most, {human(state)} of it parameters, gradients and momentum"),
        ("smallest limit", _smallest(_floor(a, case))),
        ("kept, moved, rebuilt", ", ".join(map(human, (plan.kept_bytes, plan.moved_bytes, plan.rebuilt_bytes)))),
        ("host memory", human(on_host)),
        ("predicted step", f"{run_.total_ms:.2f} ms, {slower:.2f} times the {run_.compute_ms:.2f} ms without a limit"),
        ("of which", f"rebuilding {run_.rebuild_ms:.2f} ms, waiting for transfers {max(run_.exposed_ms, 0):.2f} ms"),
        ("least for this plan", f"{run_.bound_ms:.2f} ms: max(forward, out) + max(backward, in)"),
        ("link", f"{case.link.out_gb_per_s:.1f} GB/s out, {case.link.in_gb_per_s:.1f} GB/s in, both at once"),
        ("step times", case.how),
        ("decided by", _decided(plan)),
    ):
        print(f"{name:<22}{text}")


@style.drawn
def _picture(problem: Problem, plan: Plan, limit: int) -> Figure:
    """Memory over the passes of a training step, without a plan and with it."""
    trace, facts = problem.trace, problem.trace.facts
    network = f"{facts.get('model', 'network')}, batch {facts.get('batch')}, {facts.get('precision')}"
    figure, (axes,) = style.page(4.0, "Memory over the passes of a step", network, top=1.1)
    for used, color, label in (
        (problem.usage, "#cfd8e3", "without a plan"), (check(trace, plan).device, "#2b6cb0", "planned")
    ):  # fmt: skip
        axes.fill_between(range(len(trace)), np.array(used) / _GIB, step="mid", color=color, label=label)
    axes.axhline(limit / _GIB, color="#c53030", linewidth=1, label="limit")
    axes.axvline(trace.loss, color=style.MUTED, linewidth=0.8, linestyle=":", label="loss")
    axes.set(xlabel="pass", ylabel="GiB on the GPU", xlim=(0, len(trace) - 1), ylim=(0, None))
    style.key(figure, axes.get_legend_handles_labels()[0], 0.72)
    return figure


def _require_host(a: argparse.Namespace, needed: int) -> None:
    if a.host is not None and needed > (most := parse_limit(a.host, needed)):
        remedy = "take a higher --limit, or a smaller --batch"
        raise checks.bad_value("plan", "--host", f"at least {human(needed)} ({needed} bytes)", human(most), remedy)


def _decided(plan: Plan) -> str:
    if plan.policy == "joint":
        return "dynamic programme over keeping, moving and rebuilding, at the price that simulates fastest"
    exact = "fewest bytes moved" if plan.proven else "few bytes moved, not proven least"
    return f"dynamic programme: {exact} at {human(plan.granule)} granules"


def _smallest(p: Problem) -> str:
    return f"{human(p.floor)} ({p.trace.steps[int(p.base.argmax())].title} alone needs that)"


def _rows(p: Problem, plan: Plan, *, by_layer: bool) -> list[list[str]]:
    """Bytes by choice for each layer, or for each group of layers (the first two parts of their names)."""
    layers = list(dict.fromkeys(p.trace.tensors[d.tensor].name.partition(":")[0] for d in plan.decisions))
    grouped = not by_layer and len(layers) > _GROUPED
    found: dict[str, dict[str, int]] = {}
    for d in plan.decisions:
        tensor = p.trace.tensors[d.tensor]
        layer = tensor.name.partition(":")[0]
        name = ".".join(layer.split(".")[:2]) if grouped and layer.count(".") > 1 else layer
        row = found.setdefault(name, dict.fromkeys(("keep", "offload", "recompute", "all"), 0))
        row[d.choice] += tensor.bytes
        row["all"] += 1
    rows = []
    for name, row in found.items():
        sizes = [human(row[c]) if row[c] else "-" for c in ("keep", "offload", "recompute")]
        rows.append([name, *sizes, f"{row['all']} tensors"])
    return rows


def _alternatives(a: argparse.Namespace, case: _Case, limit: int) -> None:
    """What else the limit allows: a larger batch under a plan; the same batch in pieces without one."""
    fits = _largest(a, case, limit, lambda c: _floor(a, c).floor)
    print(f"{'largest batch':<22}{fits} under a plan" if fits else f"{'largest batch':<22}none")
    small = _largest(a, case, limit, lambda c: c.problem.peak, most=a.batch)
    if not small:
        print(f"{'accumulation':<22}not even one sample fits without a plan")
        return
    if small >= a.batch:
        print(f"{'accumulation':<22}not needed: the batch fits without a plan")
        return
    pieces = -(-a.batch // small)
    each = -(-a.batch // pieces)
    updates = [t for t, s in enumerate(case.problem.trace.steps) if s.pass_name == "update"]
    part = _case(a, each)
    once = sum(case.times_ms[t] for t in updates)
    work = sum(ms for ms, s in zip(part.times_ms, part.problem.trace.steps, strict=True) if s.pass_name != "update")
    predicted = f"predicted {pieces * work + once:.2f} ms; batch norm then sees the small batches"
    print(f"{'accumulation':<22}{pieces} micro-batches of {each} without a plan: {predicted}")


def _largest(a: argparse.Namespace, case: _Case, limit: int, need: Any, most: int | None = None) -> int:
    """The largest batch whose ``need`` fits: bytes grow almost linearly, so a secant finds it in a few traces."""
    known = {a.batch: need(case)}

    def fits(batch: int) -> bool:
        if batch not in known:
            known[batch] = need(_case(a, batch))
        return known[batch] <= limit

    if most is not None and fits(most):
        return most
    if not fits(1):
        return 0
    low, high = max(b for b, n in known.items() if n <= limit), None
    while high is None or high - low > 1:
        b0, b1 = sorted(known)[-2:] if len(known) > 1 else (1, a.batch)
        slope = max((known[b1] - known[b0]) / max(b1 - b0, 1), 1.0)
        guess = int(low + (limit - known[low]) / slope)
        guess = max(guess, low + 1) if high is None else min(max(guess, low + 1), high - 1)
        if fits(guess):
            low = guess
        else:
            high = guess
        if high is not None and known[low] > 0.99 * limit:
            break  # within a hundredth: traces of large networks take seconds
    return low
