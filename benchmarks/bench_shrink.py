"""What a training step gains when pruned filters are cut out, or single weights left to sparse layers: the dense
network, the masked one, and the small or sparse one.

    python benchmarks/bench_shrink.py --model resnet50 --batch 64 --precision bf16 [--json PATH]
    python benchmarks/bench_shrink.py --model resnet20 --batch 128 --granularity weight --sparsity 0.9 [--json PATH]

They go by magnitude from starting weights: what a step takes does not depend on values. Arms take turns in each round
of some steps; on a GPU steps are compiled, as `minidl.train.Trainer` runs them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.sparse import shrunk

from benchmarks.device import row_ms
from minidl import checks
from minidl.bench.setup import Setup, device_of
from minidl.compile import CompiledStep
from minidl.dist.communicator import SOLO
from minidl.graph import Graph
from minidl.loss import SoftmaxCrossEntropy
from minidl.model import Model
from minidl.optim import SGD
from minidl.profile.cost import PassCost
from minidl.profile.results import result, write
from minidl.profile.timing import Timing
from minidl.sparse import PrunedSGD, Pruning, shrink, to_sparse
from minidl.step import EagerStep


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--model", default="resnet50")
    p.add_argument("--image-size", type=int)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--precision", default="fp32")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--granularity", nargs="+", default=["filter", "filter:8"])
    p.add_argument("--sparsity", type=float, nargs="+", default=[0.3, 0.5, 0.7])
    p.add_argument("--rounds", type=int, default=11)
    p.add_argument("--steps", type=int, default=5, help="of a round")
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    return p.parse_args()


def cost(graph: Graph, batch: int, itemsize: int) -> PassCost:
    """Of the three passes of all layers."""
    return sum((cost.total for _, cost in graph.costs(batch, itemsize)), PassCost())


def smaller(setup: Setup, state: dict[str, np.ndarray], granularity: str, sparsity: float) -> tuple[str, Graph]:
    """(the arm's name, the network without what went): shrunk where filters or branches go, else sparse layers."""
    masked = Model(setup.graph())
    masked.load_state_dict(state)
    optimizer = PrunedSGD(masked, 0.0, pruning=Pruning(None, granularity=granularity))
    optimizer.prune(sparsity)
    name = f"{granularity} {sparsity:.0%}"
    if granularity.startswith(("filter", "layer")):
        return name, shrink(setup.graph(), masked.state_dict())[0]
    graph = setup.graph()
    replaced = to_sparse(graph, masked.state_dict(), optimizer.masks())
    return f"{name}, {len(replaced)} layers sparse", graph


def step_of(model: Model, optimizer: SGD, batch: int) -> Callable[[], Any]:
    """A training step on one batch."""
    rng, ops = np.random.default_rng(0), model.ops
    x = rng.standard_normal((batch, *model.graph.nodes[0].shape)).astype(np.float32)
    labels = rng.integers(0, model.graph.output_node.shape[-1], (batch, *model.graph.output_node.shape[:-1]))
    arrays = ops.from_host(x.astype(model.precision.storage)), ops.from_host(labels.astype(np.int32))
    step = (CompiledStep if ops.name == "cuda" else EagerStep)(model, optimizer, SoftmaxCrossEntropy())
    return partial(step, *arrays)


def measured(
    calls: dict[str, Callable[[], Any]], rounds: int, steps: int, device: str
) -> Iterator[dict[str, list[float]]]:
    """Milliseconds of a step, by arm, after each round from the second on; a round before the first compiles."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            ms = row_ms(SOLO, call, steps, device)
            if number:
                times[name].append(ms)
            else:
                print(f"bench_shrink: {name}: first steps took {steps * ms / 1e3:.1f} s", file=sys.stderr, flush=True)
        if number > 1:
            yield times


def rows_of(
    setup: Setup, arms: dict[str, tuple[Model, float]], times: dict[str, list[float]], precision: str
) -> list[dict[str, Any]]:
    """The rows of the rounds so far."""
    dense = arms["dense"][0]
    itemsize = dense.precision.storage.itemsize
    whole, rows = cost(dense.graph, setup.batch, itemsize), []
    timings = {name: Timing(tuple(taken)) for name, taken in times.items()}
    for name, (model, sparsity) in arms.items():
        own = cost(model.graph, setup.batch, itemsize)
        rows.append({
            "case": setup.title, "pass": "step", "dtype": precision, "arm": name, "ms": timings[name].ms,
            "spread": timings[name].spread, "floor_ms": None, "sparsity": sparsity, "parameters": model.num_parameters,
            "peers": {peer: timings[peer].ms for peer in ("dense", "masked")},
            "flop_ratio": own.flop / whole.flop, "bytes_ratio": own.bytes / whole.bytes,
        })  # fmt: skip
    return rows


def main() -> None:
    a = arguments()
    checks.at_least("bench_shrink", "--rounds", a.rounds, 2)
    device = device_of(a.device, SOLO)
    setup = Setup(a.model, a.batch, a.precision, device, image_size=a.image_size)
    dense = Model(setup.graph(), device=device, precision=a.precision)
    state = dense.state_dict()
    arms: dict[str, tuple[Model, float]] = {"dense": (dense, 0.0)}
    for granularity in a.granularity:
        for sparsity in a.sparsity:
            name, graph = smaller(setup, state, granularity, sparsity)
            arms[name] = Model(graph, device=device, precision=a.precision), sparsity
    options = {"lr": 1e-9, "momentum": 0.9}
    calls = {name: step_of(model, SGD(model, **options), a.batch) for name, (model, _) in arms.items()}
    twin = Model(setup.graph(), device=device, precision=a.precision)
    pruning = PrunedSGD(twin, **options, pruning=Pruning(None, granularity="filter"))
    calls["masked"] = step_of(twin, pruning, a.batch)
    for times in measured(calls, a.rounds, a.steps, device):
        statistic = f"median of {len(times['dense'])} interleaved rounds of {a.steps} steps"
        content = result("bench_shrink", rows_of(setup, arms, times, a.precision), statistic=statistic)
        if a.json:  # after each round: a run that is cut leaves those before
            write(a.json, content)
    print_tables(content, shrunk)


if __name__ == "__main__":
    main()
