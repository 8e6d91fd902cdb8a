"""Batch-norm fusion: every way of every batch norm, neighbours together, and whole training steps by plan.

    python benchmarks/bench_fusion.py --cases unet/32 --json benchmarks/results/h200/bench_fusion_unet.json.gz on a GPU
    python benchmarks/bench_fusion.py --cases unet/32 densenet121/128 --parts steps --peers torch-graph

`sites` times each batch norm with the layers around it in every way that it can run, forward and backward apart.
`steps` times compiled training steps in turns, by the fixed plans, by the model of bytes (`auto`) and by measurement
(`adaptive`), with PyTorch beside, as `bench_train.py` does; the first losses of all plans are compared. Convolutions
decline to normalise what they read where a pass of its own should be faster, in the plan `bnff` too; in the arm
`bnff-everywhere` none declines: that is what the literature's restructuring costs on these kernels. `pairs` tries all
ways of two batch norms that share a convolution, and tells how far the measured plan is from the best (its regret).
All three go by one tuning of the network. `map` is the best way over sizes of feature maps and channels (`minidl fuse
--map` draws it). `convolutions` times single kernels (`fusion_convolutions.py`). --json is written after each case;
--compile runs nothing, but compiles what the same call without it will run.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.fusion import each_site, fused_convolutions, fused_pairs, fused_sites, fused_steps

from benchmarks import bench_train
from benchmarks.device import clean
from minidl import cuda as ops
from minidl import fusion
from minidl.bench import warm
from minidl.bench.setup import Setup
from minidl.cuda.convolution import conv2d_hopper, conv2d_weight_hopper
from minidl.fusion.apply import machine_of
from minidl.fusion.clock import BUDGET, DeviceClock
from minidl.fusion.cost import heuristic
from minidl.fusion.groups import Group, groups
from minidl.fusion.map import compile_map, measure_map
from minidl.fusion.measure import PASSES, compile_ahead, measure
from minidl.fusion.piece import cut
from minidl.fusion.tune import fastest as fastest_plan
from minidl.fusion.tune import told
from minidl.precision import precision
from minidl.profile.results import result, write

Row = dict[str, Any]
STEPS = 5  # of a sample
EVERYWHERE = "bnff-everywhere"
KINDS = ("statistics", "gradients", "prologue", "packed", "lazy", "join")
ARMS = list(fusion.CHOICES)
ARMS.insert(ARMS.index("bnff") + 1, EVERYWHERE)
CASES = ["resnet50/256", "densenet121/128", "unet/32", "resnet34/256", "vgg16_bn/64"]  # the last two: unseen


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--parts", nargs="+", default=["sites", "steps", "pairs"], choices=PARTS)
    p.add_argument("--cases", nargs="+", default=CASES, metavar="MODEL/BATCH[/IMAGE]")
    p.add_argument("--network", default="resnet50", help="whose convolutions, for the part of that name")
    p.add_argument("--batch", type=int, default=256, help="of that part, and of the map")
    p.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="of what convolutions do on the way")
    p.add_argument("--precision", default="bf16", choices=["fp32", "bf16", "fp16"])
    p.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS, help="plans of the steps")
    p.add_argument("--peers", nargs="*", default=["torch-eager", "torch-graph"], help="of the steps; none: ours alone")
    p.add_argument("--samples", type=int, default=7)
    p.add_argument("--most-pairs", type=int, default=1000, help="of neighbours, evenly chosen where there are more")
    p.add_argument("--compile", action="store_true", help="only compile the kernels")
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    a.device = "cuda"
    return a


def setup_of(a: argparse.Namespace, case: str) -> Setup:
    model, batch, *image = case.split("/")
    return Setup(model, int(batch), a.precision, "cuda", 1, *map(int, image))


# -- batch norms -------------------------------------------------------------------------------------------------------


class Tuned:
    """A network whose batch norms were measured: in all ways with ``everything``, else in those worth it.

    Attributes:
        groups: with the ways that the model does not rule out.
        plan: the fastest one.
        seconds: that measuring took.
    """

    def __init__(self, setup: Setup, samples: int, everything: bool):
        self.setup, self.graph, self.mode = setup, setup.graph(), precision(setup.precision)
        machine = machine_of(ops)
        self.groups = groups(self.graph, setup.batch, self.mode, machine)
        timed = groups(self.graph, setup.batch, self.mode, machine, everything=everything)
        compile_ahead(self.graph, setup.batch, self.mode, timed)
        self.clock = DeviceClock(ops, self.mode, replace(BUDGET, samples=samples))
        started = time.perf_counter()
        self.found = measure(self.graph, setup.batch, timed, self.clock)
        self.plan = fastest_plan(self.graph, setup.batch, self.mode, machine, timed, self.found, self.clock)
        self.clock.release()
        self.seconds = time.perf_counter() - started
        self.sites = fusion.find_sites(self.graph)
        print(f"{setup.title}: tuned in {self.seconds:.1f} s; {told(self.plan)}", flush=True)


_tuned: dict[str, Tuned] = {}  # of the case that is at work


def tuned(a: argparse.Namespace, case: str) -> Tuned:
    if case not in _tuned:
        _tuned.clear()
        _tuned[case] = Tuned(setup_of(a, case), a.samples, everything="sites" in a.parts)
    return _tuned[case]


def sites(a: argparse.Namespace, case: str) -> list[Row]:
    """A row for each distinct group of batch norms, pass and way."""
    found = tuned(a, case)
    auto = heuristic(found.graph, found.sites, precision(a.precision), machine_of(ops))
    plans = {how: fusion.choose(found.sites, how).sites for how in fusion.PLANS}
    plans |= {"auto": auto.sites, "adaptive": found.plan.sites}
    pieces = [cut(found.graph, group.sites, found.setup.batch) for group in found.groups]
    keys = [piece.key if piece else group.names for piece, group in zip(pieces, found.groups, strict=True)]
    counts, rows = Counter(keys), []
    for group, key, record in zip(found.groups, keys, found.found.evidence, strict=True):
        if not counts[key] or not record["timed"]:
            continue
        runs = {how: group.same[tuple(ways[name] for name in group.names)] for how, ways in plans.items()}
        for row, which in itertools.product(record["rows"], PASSES):
            rows.append({
                "case": found.setup.title, "site": " and ".join(group.names), "shape": record["shape"], "pass": which,
                "dtype": a.precision, "arm": " and ".join(row["ways"]), "ms": row[f"{which}_ms"],
                "spread": row["spread"], "floor_ms": None, "peers": {}, "count": counts[key],
                "predicted_ms": row["predicted_ms"], "seconds": found.seconds,
                "plans": [how for how, ways in runs.items() if list(ways) == row["ways"]],
            })  # fmt: skip
        counts[key] = 0
    return rows


def pairs(a: argparse.Namespace, case: str) -> list[Row]:
    """A row for each distinct pair of batch norms with a convolution between them: the plan's ways and the best."""
    found, distinct = tuned(a, case), {}
    for one, other in itertools.permutations(found.groups, 2):
        if {s.taker for s in one.sites} & {s.producer for s in other.sites} - {None}:
            piece = cut(found.graph, (*one.sites, *other.sites), found.setup.batch)
            if piece is not None:
                distinct.setdefault(piece.key, (piece, one, other))
    chosen = list(distinct.values())[:: max(-(-len(distinct) // a.most_pairs), 1)]
    print(f"{found.setup.title}: {len(chosen)} of {len(distinct)} pairs", flush=True)
    rows = [_pair(found, *pair) for pair in chosen]
    found.clock.release()
    return rows


def _pair(tuned: Tuned, piece: Any, one: Group, other: Group) -> Row:
    plan = tuple(group.same[tuple(tuned.plan.sites[n] for n in group.names)] for group in (one, other))
    both = list(itertools.product(dict.fromkeys((*one.timed, plan[0])), dict.fromkeys((*other.timed, plan[1]))))
    times = dict.fromkeys(both, 0.0)
    spread = 0.0
    for which in PASSES:
        variants = {(p, q): one.on(p, which) | other.on(q, which) for p, q in both}
        distinct = list(dict.fromkeys(variants.values()))
        took = dict(zip(distinct, tuned.clock(piece, which, distinct), strict=True))
        times = {key: times[key] + took[on].ms for key, on in variants.items()}
        spread = max(spread, *(timing.spread for timing in took.values()))
    best = min(times, key=times.__getitem__)
    return {
        "case": tuned.setup.title, "site": " and ".join((*one.names, *other.names)), "pass": "step",
        "dtype": tuned.setup.precision, "arm": "adaptive", "ms": times[plan], "spread": spread, "floor_ms": None,
        "peers": {}, "best_ms": times[best], "best": "; ".join(" and ".join(ways) for ways in best),
        "regret": times[plan] / times[best] - 1, "tried": len(both),
    }  # fmt: skip


# -- steps -------------------------------------------------------------------------------------------------------------


def steps(a: argparse.Namespace, case: str) -> list[Row]:
    """A row for each plan: compiled steps, as training takes them."""
    setup = setup_of(a, case)
    _compile_steps(setup, a.arms)
    measured = tuned(a, case) if "adaptive" in a.arms else None
    named = {EVERYWHERE: "bnff"} | ({"adaptive": measured.plan} if measured else {})
    ours = bench_train.Ours(setup, named, _kernels_of)
    found = bench_train.in_turns(ours, [f"compiled:{how}" for how in a.arms], a.peers, a.samples, STEPS)
    plans = {how: ours.plan(how) for how in a.arms}
    return [
        {**row, "arm": how, "ways": dict(Counter(plans[how].sites.values())), "contest": plans[how].contest}
        | {"tuning_s": measured.seconds if measured and how == "adaptive" else None}
        for how, row in zip(a.arms, found, strict=True)
    ]


@contextmanager
def _kernels_of(arm: str) -> Iterator[None]:
    """Within, no convolution of the arm that says so declines to normalise what it reads."""
    if arm != EVERYWHERE:
        yield
        return
    pays = lambda *_: True  # noqa: E731
    weighs = lambda conv: conv.groups == 1  # noqa: E731
    with mock.patch.object(conv2d_hopper, "normalizing_pays", pays):
        with mock.patch.object(conv2d_weight_hopper, "normalizes", weighs):
            yield


def _compile_steps(setup: Setup, arms: list[str]) -> None:
    """Compile what the steps will run."""
    warm.compile_ahead(setup.graph(), setup.batch, setup.precision, "adaptive", warm.this_gpu())
    if EVERYWHERE in arms:
        with _kernels_of(EVERYWHERE):
            warm.compile_ahead(setup.graph(), setup.batch, setup.precision, "bnff", warm.this_gpu())


# -- the map -----------------------------------------------------------------------------------------------------------


def map_(a: argparse.Namespace, case: str) -> list[Row]:
    """A row for each way at each point: the thesis' figure."""
    mode = precision(a.precision)
    clock = DeviceClock(ops, mode, replace(BUDGET, samples=a.samples))
    return measure_map(ops, a.batch, mode, machine_of(ops), clock, progress=print)


def convolutions(a: argparse.Namespace, case: str) -> list[Row]:
    """Rows of `fusion_convolutions`."""
    import fusion_convolutions

    return fusion_convolutions.convolutions(a)


BY_CASE = {"sites": sites, "steps": steps, "pairs": pairs}
PARTS = {**BY_CASE, "map": map_, "convolutions": convolutions}
TABLES = {
    "sites": (fused_sites, each_site), "steps": (fused_steps,), "pairs": (fused_pairs,),
    "convolutions": (fused_convolutions,),
}  # fmt: skip


def compiled(a: argparse.Namespace) -> None:
    """Compile what the parts will run of the cases, one after the other."""
    mode = precision(a.precision)
    for setup in (setup_of(a, case) for case in a.cases):
        started, graph = time.perf_counter(), setup.graph()
        if "steps" in a.parts:
            _compile_steps(setup, a.arms)
        found = groups(graph, setup.batch, mode, machine_of(ops), everything="sites" in a.parts)
        compile_ahead(graph, setup.batch, mode, found)
        print(f"{setup.title}: kernels after {time.perf_counter() - started:.1f} s", flush=True)
    if "map" in a.parts:
        compile_map(a.batch, mode, machine_of(ops))


def main() -> None:
    a = arguments()
    if a.compile:
        compiled(a)
        return
    rows: list[Row] = []
    wanted = [(part, case) for case in a.cases for part in a.parts if part in BY_CASE]
    for part, case in [*wanted, *((part, "") for part in a.parts if part not in BY_CASE)]:
        print(f"{part} of {case or a.batch}", flush=True)
        rows += [{**row, "part": part} for row in PARTS[part](a, case)]
        clean("cuda")
        content = result("bench_fusion", rows)
        if a.json:
            write(a.json, content)
    for part in a.parts:
        print_tables(content, *TABLES.get(part, ()))


if __name__ == "__main__":
    main()
