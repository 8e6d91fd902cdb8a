"""Memory plans without a GPU: bytes kept, optimality against a MILP, predicted step time, time to plan.

    python benchmarks/bench_pinning.py [--models resnet50 unet] [--shares 0.25 0.5] [--fusion auto] [--json PATH]

Every policy sees the same trace of one training step (SGD with momentum, batch norms fused by a plan) and the same
candidates: saved tensors of at least 1 MiB. Shares are of what the step needs without a plan, parameters, gradients and
momentum included. The oracle is scipy.optimize.milp (HiGHS) on rows written from the definition
(tests/reference/pinning.py), not from the planner.
"joint" is what `limit_memory` plans by: keeping, moving or rebuilding, with windows for copies and without.
``gap`` is (bytes moved - least bytes moved) / all candidates where the MILP proved its optimum, else null.
Step times are predicted, from FLOP and bytes at 80 % of an H200's measured roofline and its measured link.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.memory import pinning

from benchmarks.memory_policies import cheap, geeps, static, vdnn
from minidl import models
from minidl.cuda.device import BUILT_IN
from minidl.fusion import fuse_graph
from minidl.memory import Infeasible, Joint, Plan, Problem, check, pin, problem, record, timeline, widen
from minidl.memory.gaps import LEAST
from minidl.memory.planner import StepPlanner
from minidl.memory.times import CEILINGS, SHARE, link_of, modelled
from minidl.precision import precision
from minidl.profile.results import result, write
from tests.reference.pinning import milp, model

CASES = {
    "resnet50": (224, 32), "resnet101": (224, 32), "resnet152": (224, 32), "vgg16": (224, 64), "unet": (512, 4),
    "densenet121": (224, 32),
}  # fmt: skip
SHARES = (0.1, 0.2, 0.25, 0.3, 0.4, 0.5, 0.6, 0.7, 0.75, 0.8, 0.9, 1.0)
REPEATS = 5
UNITS = 65536


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--models", nargs="+", default=list(CASES), choices=list(CASES))
    p.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    p.add_argument("--precision", default="fp32")
    p.add_argument("--fusion", default="none", help="plan of batch norms, as training within a limit may choose it")
    p.add_argument("--seconds", type=float, default=5.0, help="time limit of the MILP for each plan")
    p.add_argument("--deep", type=int, default=1000, help="layers of the deep chain that is planned as well; 0: none")
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    return p.parse_args()


def timed(make: Callable[[], Any], repeats: int = REPEATS) -> tuple[Any, float, float]:
    """(what it makes, least milliseconds, spread of the others over it)."""
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        made = make()
        samples.append((time.perf_counter() - start) * 1e3)
    least = min(samples)
    return made, least, statistics.median(samples) / least - 1


class Bench:
    """One network at one precision."""

    def __init__(self, name: str, a: argparse.Namespace):
        self.side, self.batch = CASES[name]
        self.name, self.precision, self.fusion, self.seconds = name, a.precision, a.fusion, a.seconds
        shape = (self.side, self.side, 3)
        graph = models.build(name, shape, 2 if name == "unet" else 1000)
        fuse_graph(graph, a.fusion, precision(a.precision), BUILT_IN["H200"])
        trace = record(graph, self.batch, precision=a.precision, model=name)
        self.problem: Problem = problem(trace)
        self.times = modelled(trace, CEILINGS["H200"])
        self.link = link_of(CEILINGS["H200"])
        self.definition = model(trace, least=LEAST)
        self.joint = Joint(self.problem, self.times)
        self.total = sum(gap.bytes for gap in self.problem.gaps)

    def rows(self, share: float) -> list[dict[str, Any]]:
        """One row for each policy at ``share`` of the peak."""
        p, limit = self.problem, int(self.problem.peak * share)
        if limit < p.floor:
            return [self.row("dp", share, limit, None, None, None)]
        start = time.perf_counter()
        moved, bound, proven = milp(p.trace, limit, self.definition, seconds=self.seconds)
        peers = {"milp": (time.perf_counter() - start) * 1e3}
        oracle = {"milp_moved_bytes": moved, "milp_bound_bytes": bound, "milp_proven": proven}
        policies: dict[str, tuple[Callable[[], Plan], int]] = {
            "dp": (lambda: pin(p, limit), REPEATS),
            "static": (lambda: static(p, limit), 1),
            "geeps": (lambda: geeps(p, limit), 1),
            "vdnn-all": (lambda: vdnn(p, limit), 1),
            "vdnn-conv": (lambda: vdnn(p, limit, "conv"), 1),
            "cheap": (lambda: cheap(p, limit, self.joint), 1),
            "joint": (lambda: StepPlanner(p.trace, self.times, self.link).best(limit)[0], 1),
        }
        rows = []
        for arm, (make, repeats) in policies.items():
            try:
                plan, ms, spread = timed(make, repeats)
            except Infeasible:
                plan, ms, spread = None, None, None
            row = self.row(arm, share, limit, plan, ms, spread)
            if arm == "dp":
                row |= {"peers": peers, **oracle, "gap": (plan.moved_bytes - moved) / self.total if proven else None}
                assert bound <= plan.moved_bytes and (moved is None or plan.moved_bytes <= moved), "not optimal"
            rows.append(row)
        return rows

    def row(
        self, arm: str, share: float, limit: int, plan: Plan | None, ms: float | None, spread: float | None
    ) -> dict[str, Any]:
        """A row of the result file; without a plan the policy has none that fits."""
        p = self.problem
        fused = f", {self.precision}, fused by {self.fusion}" if self.fusion != "none" else ""
        row = {
            "case": f"{self.name}/{self.side}x{self.side}/b{self.batch}{fused}", "pass": "plan",
            "dtype": self.precision, "fusion": self.fusion, "arm": arm, "ms": ms, "spread": spread, "floor_ms": None,
            "peers": {}, "share": share, "limit_bytes": limit, "feasible": plan is not None, "need_bytes": p.peak,
            "floor_bytes": p.floor, "candidate_bytes": self.total, "candidates": len(p.gaps),
        }  # fmt: skip
        if plan is None:
            return row
        check(p.trace, plan)
        wide = widen(p.trace, dataclasses.replace(plan, capacity=max(limit, plan.peak)))
        run = timeline(p.trace, wide, self.times, self.link)
        return row | {
            "kept_bytes": plan.kept_bytes, "moved_bytes": plan.moved_bytes, "rebuilt_bytes": plan.rebuilt_bytes,
            "peak_bytes": plan.peak, "granule_bytes": plan.granule, "proven": plan.proven,
            "step_ms": run.total_ms, "step_bound_ms": run.bound_ms, "step_unlimited_ms": run.compute_ms,
            "step_exposed_ms": run.exposed_ms, "step_rebuild_ms": run.rebuild_ms,
        }  # fmt: skip


def deep_row(layers: int) -> dict[str, Any]:
    """A random residual step of so many layers with sizes that share no divisor, at 65,536 units."""
    import numpy as np

    from tests.memory_cases import random_trace

    rng = np.random.default_rng(0)
    trace = random_trace(rng, layers, jitter=3)
    tensors = [
        dataclasses.replace(t, bytes=int(rng.integers(1 << 20, 1 << 26))) if t.saved else t for t in trace.tensors
    ]
    p = problem(dataclasses.replace(trace, tensors=tuple(tensors)))
    limit = p.floor + (p.peak - p.floor) // 3
    plan, ms, spread = timed(lambda: pin(p, limit, most_units=UNITS))
    check(p.trace, plan)
    return {
        "case": f"random/{layers} layers", "pass": "plan", "dtype": "fp32", "arm": "dp", "ms": ms, "spread": spread,
        "floor_ms": None, "peers": {}, "share": limit / p.peak, "limit_bytes": limit, "feasible": True,
        "candidates": len(p.gaps), "kept_bytes": plan.kept_bytes, "moved_bytes": plan.moved_bytes,
        "peak_bytes": plan.peak, "granule_bytes": plan.granule, "proven": plan.proven,
    }  # fmt: skip


def main() -> None:
    a = arguments()
    rows = []
    for name in a.models:
        bench = Bench(name, a)
        for share in a.shares:
            rows += bench.rows(share)
            print(f"{name} {share:.0%}", file=sys.stderr, flush=True)
    if a.deep:
        rows.append(deep_row(a.deep))
    facts = {"ceilings": CEILINGS["H200"], "roofline_share": SHARE, "milp_seconds": a.seconds}
    content = result("bench_pinning", rows, assumptions=facts)
    print_tables(content, pinning)
    if a.json:
        write(a.json, content)
        print(f"wrote {a.json}")


if __name__ == "__main__":
    main()
