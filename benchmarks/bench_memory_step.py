"""Training steps under a limit of GPU memory: against no limit, against the link's bound, beside PyTorch's ways.

    python benchmarks/bench_memory_step.py --model resnet152 --batch 64 --limit 25% [--precision bf16] [--json PATH]
    python benchmarks/bench_memory_step.py --model unet --batch 32 --limit 55% 60%
    mpirun -n 2 python benchmarks/bench_memory_step.py --model resnet50 --batch 256 --limit --peers \\
        --gradients ring "ring of two" --group 4 25

Each arm runs alone: what the others held is given back first, so that the peak that the driver reports is its own. Ours
are CUDA graphs of the whole step, update included; for each limit the joint plan (keep, move, make again) and moving
alone. Losses, gradients, momentum and weights after some steps must be those of the run without a limit, bit for bit,
and peaks below the limits.
PyTorch (`torch_steps.py`, eager): as it is, with saved tensors on the host
(torch.autograd.graph.save_on_cpu, pinned), with torch.utils.checkpoint around runs of layers.

The bound of a plan is max(forward, out / rate) + max(backward and making again, in / rate), with the measured times of
the step without a limit and the rate of the link measured in this run, both directions at once.

Ways to hold gradients (--gradients) run without a limit. Beside what is held of gradients a row has the largest
workspace of a weight gradient (partial sums of split products), copies that are sent, and ``step_bytes``: what lives at
the worst moment of the step, with all of these, by the trace. On several ranks each has --batch samples, messages are
groups of --group MiB, times are those of the slowest rank, and rank 0 writes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.memory import held_gradients, limited_steps

from benchmarks.bench_train import data
from benchmarks.device import clean, row_ms, used_bytes, wait
from minidl import dist, models
from minidl.bench.setup import Setup
from minidl.bench.step import TrainingStep
from minidl.cuda import ahead
from minidl.cuda.capture import Room
from minidl.fusion import fuse
from minidl.memory import Infeasible, limit_memory, problem
from minidl.memory.plan import human
from minidl.memory.record import blank, record_model
from minidl.memory.times import CEILINGS, SHARE, modelled
from minidl.profile.results import result, write
from minidl.profile.timing import Timing

CHECKED = 3
Step = Callable[[], Any]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", default="resnet152")
    p.add_argument("--image-size", type=int)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--precision", default="bf16")
    p.add_argument("--fusion", default="auto", help="of batch norms, in all arms of ours")
    p.add_argument("--free", nargs="*", default=[], metavar="FUSION", help="steps without a limit by other fusions")
    p.add_argument("--gradients", nargs="*", default=[], choices=list(GRADIENTS), help="ways to hold them, no limit")
    p.add_argument("--group", nargs="*", type=int, default=[], metavar="MIB", help="of messages; default: as tuned")
    p.add_argument("--limit", nargs="*", default=["25%"], help="of GPU memory, or of what a step needs")
    p.add_argument("--held", choices=list(GRADIENTS), help="how steps within limits hold gradients; default: all")
    p.add_argument("--arms", nargs="+", default=["joint", "moved"], choices=["joint", "moved"])
    p.add_argument(
        "--ample", action="store_true", help="a limit above the need too, its steps in turn with those without"
    )
    p.add_argument("--share", type=float, default=SHARE, help="of the roofline that the planner takes a pass to reach")
    p.add_argument("--blocks", type=int, default=7, help="timed blocks of steps")
    p.add_argument("--steps", type=int, default=4, help="steps in a block")
    p.add_argument("--checkpoints", type=int, nargs="*", default=[16], help="runs of layers for torch.utils.checkpoint")
    p.add_argument("--peers", nargs="*", default=["torch-eager", "torch-save-on-cpu", "torch-checkpoint"])
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    a.image_size, a.classes = models.usual_task(a.model, a.image_size)
    return a


def graph(a: argparse.Namespace) -> Any:
    return models.build(a.model, (a.image_size, a.image_size, 3), a.classes)


# -- what the driver says ---------------------------------------------------------------------------------------------


def empty() -> None:
    """Give back what nobody uses."""
    wait("cuda")
    clean("cuda")


def idle_bytes() -> int:
    """Bytes that CuPy's pool holds for nobody and cannot give back: rests of pieces that are in use in part."""
    import cupy

    empty()
    pool = cupy.get_default_memory_pool()
    return pool.total_bytes() - pool.used_bytes()


def link_rate() -> float:
    """Bytes/s each way, both at once."""
    import cupy

    count = 256 << 20
    device, host = cupy.empty(2 * count, np.uint8), cupy.cuda.pinned_memory.PinnedMemory(2 * count)
    out, into = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    copy, samples = cupy.cuda.runtime.memcpyAsync, []
    for _ in range(4):
        cupy.cuda.Device().synchronize()
        begun = time.perf_counter()
        copy(host.ptr, device.data.ptr, count, 2, out.ptr)
        copy(device.data.ptr + count, host.ptr + count, count, 1, into.ptr)
        out.synchronize()
        into.synchronize()
        samples.append(time.perf_counter() - begun)
    return count / sorted(samples)[1]


def timed(step: Step, a: argparse.Namespace) -> Timing:
    """Of blocks of steps, on the slowest rank."""
    return in_turn([step], a)[0]


def in_turn(steps: list[Step], a: argparse.Namespace) -> list[Timing]:
    """Of blocks of each, one after the other: the clock of a GPU at its power limit drifts for all alike."""
    samples: list[list[float]] = [[] for _ in steps]
    for step in steps:
        step()  # allocates, loads kernels
    for _ in range(a.blocks):
        for step, found in zip(steps, samples, strict=True):
            found.append(row_ms(a.comm, step, a.steps, "cuda"))
    return [Timing(tuple(found)) for found in samples]


# -- ours -------------------------------------------------------------------------------------------------------------


def bits(step: TrainingStep) -> list[bytes]:
    """Losses, weights, statistics and momentum after the first steps, and gradients where all are held."""
    ops, seen, arena = step.ops, [], step.model.arena
    for _ in range(CHECKED):
        seen.append(ops.to_host(step().array).tobytes())
    seen += [value.tobytes() for value in (*step.model.state_dict().values(), *step.optimizer.state_dict().values())]
    return seen if arena.adds or arena.slots else [*seen, ops.to_host(arena.grad).tobytes()]


GRADIENTS: dict[str, Callable[[Any], None]] = {
    "ring": lambda optimizer: optimizer.update_in_backward(1),
    "ring of two": lambda optimizer: optimizer.update_in_backward(2),  # double-buffered
    "ring of four": lambda optimizer: optimizer.update_in_backward(4),
    "momentum": lambda optimizer: optimizer.gradients_in_momentum(),
}


_first_weights: list[dict[str, np.ndarray]] = []  # drawn once: for large networks that takes seconds


def started(a: argparse.Namespace, fusion: str | None = None, group: int | None = None) -> TrainingStep:
    """A step of the network; all begin with the same weights."""
    network = blank(graph(a)) if _first_weights else graph(a)
    options = {"comm": a.comm, "group_bytes": None if group is None else group << 20}
    options["factors"] = not a.limit  # which limits do not go with: their sums differ in the last bits
    step = TrainingStep(network, batch=a.batch, device="cuda", precision=a.precision, **options)
    fuse(step.model, fusion or a.fusion)
    if _first_weights:
        step.model.load_state_dict(_first_weights[0])
    else:
        _first_weights.append(step.model.state_dict())
    return step


def ours(
    a: argparse.Namespace,
    limit: str | None,
    rebuild: bool = True,
    gradients: str | None = None,
    fusion: str | None = None,
    group: int | None = None,
    turns: bool = False,
) -> dict[str, Any]:
    """One arm: bits of the first steps, times of the replayed graph, peak of the driver; with ``turns`` also times of
    steps without a limit, taken in turn."""
    empty()
    before = used_bytes("cuda")
    step = started(a, fusion, group)
    if gradients is not None:
        GRADIENTS[gradients](step.optimizer)
    found: dict[str, Any] = {"limit": limit, "fusion": fusion or a.fusion, "group": group}
    if limit is not None:
        begun = time.perf_counter()
        times = partial(modelled, ceilings=CEILINGS["H200"], share=a.share)
        memory = limit_memory(step.model, a.batch, limit, rebuild=rebuild, times=times, reserve=idle_bytes())
        found["plan_s"] = time.perf_counter() - begun
        found |= {"script": memory.script, "predicted": memory.predicted}
        found |= {"limit_bytes": memory.limit, "need_bytes": memory.need}
    found["bits"] = bits(step)
    found["costs"] = gradient_costs(a, step)
    eager = used_bytes("cuda") - before
    empty()  # the graph is captured on another stream, with a pool of its own
    replay = step.capture()
    replay()
    wait("cuda")
    found["peak_bytes"] = max(used_bytes("cuda") - before, eager)
    if turns:
        found["unlimited"], found["timing"] = in_turn([started(a, group=group).capture(), replay], a)
    else:
        found["timing"] = timed(replay, a)
    if limit is None:
        found["forward_ms"] = forward_ms(a, step)
        found["state"] = step.model.state_dict()
    return found


def gradient_costs(a: argparse.Namespace, step: TrainingStep) -> dict[str, int]:
    """Bytes of gradients, of what weight gradients take beside while they are made, and of copies that are sent; and
    all that lives at the worst moment of the step."""
    arena, trace = step.model.arena, record_model(step.model, a.batch).trace
    return {
        "gradient_bytes": 0 if arena.adds else arena.grad.nbytes,
        "weight_workspace_bytes": max(s.workspace for s in trace.steps if s.pass_name == "backward_weight"),
        "staging_bytes": arena.wire.nbytes if arena.wire is not arena.grad else 0,
        "step_bytes": problem(trace).peak,
    }


def forward_ms(a: argparse.Namespace, step: TrainingStep) -> float:
    """The forward half of the step, loss included, as a graph of its own."""

    def half() -> Any:
        return step.loss.forward(step.model.forward(step.x), step.labels)

    return timed(Room().capture(half)[0], a).ms


# -- PyTorch ----------------------------------------------------------------------------------------------------------


def theirs(a: argparse.Namespace, arm: str, state: dict[str, np.ndarray], runs: int = 0) -> dict[str, Any]:
    import torch

    from benchmarks import torch_steps

    empty()
    before = used_bytes("cuda")
    setup, on_host = Setup(a.model, a.batch, a.precision, "cuda", image_size=a.image_size), arm == "torch-save-on-cpu"
    options: dict[str, Any] = {"run": lambda peer: Checkpointed(peer, runs)} if runs else {}
    if on_host:  # what waits for the link gains nothing from a search among kernels, which takes longer than its steps
        options = {"search": False, "within": partial(torch.autograd.graph.save_on_cpu, pin_memory=True)}
    step = torch_steps.step_of(setup, "torch-eager", state, data(setup), **options)
    if on_host:  # a step takes long, the first one, which pins the memory, longest
        timing = timed(told(step), argparse.Namespace(blocks=2, steps=1, comm=a.comm))
    else:
        step()  # another one: the search among kernels goes on in it
        timing = timed(step, a)
    allocated = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return {"timing": timing, "peak_bytes": used_bytes("cuda") - before, "allocated_bytes": allocated}


def told(step: Step) -> Step:
    """``step``, whose time is printed each time: who is cut off has that much."""

    def run() -> Any:
        begun = time.perf_counter()
        result = step()
        result.item()
        print(f"  {(time.perf_counter() - begun) * 1e3:.0f} ms", flush=True)
        return result

    return run


class Checkpointed:
    """The twin in ``runs`` runs of layers, each made again in the backward pass."""

    def __init__(self, peer: Any, runs: int):
        self.peer = peer
        cuts = np.linspace(0, len(peer.steps), runs + 1).astype(int)
        self.runs = [range(a, b) for a, b in zip(cuts, cuts[1:], strict=False) if b > a]

    def __call__(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        values = {0: x}
        for run in self.runs:
            names = list(values)
            kept = [i for i in (*names, *(self.peer.steps[s][0] for s in run)) if self._needed(i, run)]
            given = [values[i] for i in names]
            values = dict(zip(kept, checkpoint(self._part, run, names, kept, *given, use_reentrant=False), strict=True))
        return values[self.peer.output]

    def _needed(self, i: int, run: range) -> bool:
        return i == self.peer.output or self.peer.last[i] > self.peer.steps[run[-1]][0]

    def _part(self, run: range, names: list[int], kept: list[int], *given: Any) -> tuple[Any, ...]:
        values = dict(zip(names, given, strict=True))
        for s in run:
            index, inputs = self.peer.steps[s]
            values[index] = self.peer.layers[self.peer.keys[s]](*(values[i] for i in inputs))
        return tuple(values[i] for i in kept)


# -- the rows ---------------------------------------------------------------------------------------------------------


def compile_ahead(a: argparse.Namespace) -> None:
    """All kernels of the step at once, on all cores."""

    def walk() -> None:
        plain = [(fusion, None) for fusion in (a.fusion, *a.free)]
        for fusion, gradients in (*plain, *((a.fusion, way) for way in a.gradients)):
            step = TrainingStep(blank(graph(a)), batch=a.batch, device="cuda", precision=a.precision)
            fuse(step.model, fusion)
            if gradients is not None:
                GRADIENTS[gradients](step.optimizer)
            step()

    if a.comm.local_rank == 0:
        ahead.compile_ahead(walk)
    a.comm.barrier()


def measure(a: argparse.Namespace) -> list[dict[str, Any]]:
    """All arms of one network; what is known so far is written after each."""
    compile_ahead(a)
    rate = link_rate()
    groups = [(f", messages of {g} MiB" if g is not None else "", g) for g in a.group or [None]]
    found = {f"without a limit{which}": ours(a, None, group=group) for which, group in groups}
    plain = next(iter(found.values()))
    tell(a, f"link {rate / 1e9:.1f} GB/s each way; no limit {plain['timing'].ms:.2f} ms, {plain['peak_bytes']}")
    for fusion in a.free:
        found[f"without a limit, fusion {fusion}"] = ours(a, None, fusion=fusion, group=plain["group"])
    for gradients, (which, group) in itertools.product(a.gradients, groups):
        found[f"gradients {gradients}{which}"] = ours(a, None, gradients=gradients, group=group)
        report(a, found, {}, rate)
    for limit, arm in itertools.product(a.limit, a.arms):
        name = f"{arm} {limit}" + (f", gradients {a.held}" if a.held else "")
        try:
            found[name] = ours(a, limit, arm == "joint", a.held, group=plain["group"])
        except Infeasible as error:
            tell(a, f"{arm} {limit}: {error}")
        report(a, found, {}, rate)
    if a.ample:
        found["a limit above the need"] = ours(a, "1TB", group=plain["group"], turns=True)
        report(a, found, {}, rate)
    peers: dict[str, dict[str, Any]] = {}
    for arm in a.peers:
        for runs in a.checkpoints if arm == "torch-checkpoint" else [0]:
            name = f"{arm}-{runs}" if runs else arm
            try:
                peers[name] = theirs(a, arm, plain["state"], runs)
            except Exception as error:  # a peer that cannot run is a finding, not the end
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                continue
            print(f"{name}: {peers[name]['timing'].ms:.2f} ms, {human(peers[name]['peak_bytes'])}", flush=True)
            rows = report(a, found, peers, rate)
    return rows if peers else report(a, found, peers, rate)


def tell(a: argparse.Namespace, text: str) -> None:
    if a.comm.rank == 0:
        print(text, flush=True)


def report(a: argparse.Namespace, found: dict[str, Any], peers: Any, rate: float) -> list[dict[str, Any]]:
    plains = {one["group"]: one for one in reversed(found.values())}  # the first of each, without a limit
    rows = [row(a, one, plains[one["group"]], peers, rate, arm) for arm, one in found.items()]
    if a.json and a.comm.rank == 0:
        write(a.json, result("bench_memory_step", rows))
    return rows


def row(a: Any, found: Any, plain: Any, peers: Any, rate: float, arm: str) -> dict[str, Any]:
    timing, forward = found["timing"], plain["forward_ms"]
    whole = found.get("unlimited", plain["timing"]).ms
    script, more = found.get("script"), {}
    identical = None  # another fusion rounds elsewhere
    if found["fusion"] == plain["fusion"]:
        identical = all(one == other for one, other in zip(found["bits"], plain["bits"], strict=False))
    floor = whole
    if script is not None:
        run = found["predicted"]
        moved = script.plan.moved_bytes / rate * 1e3
        again = run.rebuild_ms / run.compute_ms * whole  # the planner's share of the step, in measured time
        floor = max(forward, moved) + max(whole - forward + again, moved)
        more = {
            "limit_bytes": found["limit_bytes"], "arena_bytes": script.arena_bytes, "host_bytes": script.host_bytes,
            "kept_bytes": script.plan.kept_bytes, "moved_bytes": script.plan.moved_bytes,
            "made_again_bytes": script.plan.rebuilt_bytes, "predicted_ratio": run.total_ms / run.compute_ms,
            "plan_s": found["plan_s"], "need_bytes": found["need_bytes"],
        }  # fmt: skip
    return {
        "case": f"{a.model}/{a.image_size}x{a.image_size}/b{a.batch}", "pass": "step", "dtype": a.precision, "arm": arm,
        "fusion": found["fusion"], "ranks": a.comm.size, "group_mib": found["group"],
        "ms": timing.ms, "spread": timing.spread, "floor_ms": floor, "unlimited_ms": whole, "ratio": timing.ms / whole,
        "ratio_to_bound": timing.ms / floor, "identical": identical, **found["costs"],
        "peak_bytes": found["peak_bytes"], "unlimited_peak_bytes": plain["peak_bytes"], "link_gb_per_s": rate / 1e9,
        "peers": {name: peer["timing"].ms for name, peer in peers.items()},
        "peer_spreads": {name: peer["timing"].spread for name, peer in peers.items()},
        "peer_peak_bytes": {name: peer["peak_bytes"] for name, peer in peers.items()}, **more,
    }  # fmt: skip


def main() -> None:
    a = arguments()
    a.comm = dist.init("cuda")
    rows = measure(a)
    alike = all(a.comm.share(all(row["identical"] is not False for row in rows)))
    if a.comm.rank == 0:
        print_tables({"rows": rows}, limited_steps, held_gradients)
    a.comm.close()
    if not alike:
        raise SystemExit("other bits than without a limit")
    over = [row["arm"] for row in rows if row["peak_bytes"] > row.get("limit_bytes", row["peak_bytes"])]
    if over:
        raise SystemExit(f"over their limits, as the driver counts: {', '.join(over)}")


if __name__ == "__main__":
    main()
