"""Whole training steps (forward, loss, backward, update) of networks beside PyTorch, on the CPU or a GPU.

    python benchmarks/bench_train.py --device cpu --cases resnet20/32 [--json PATH]
    python benchmarks/bench_train.py --device cuda --cases resnet50/256 unet/32 --precision bf16 tf32
    python benchmarks/bench_train.py --device cuda --cases resnet50/32 --arms compiled --peers torch-compile

A case is MODEL/BATCH or MODEL/BATCH/PRECISION. Arms are ways of running ours: eager or compiled (`minidl.compile`),
with a plan of batch-norm fusion after a colon: ``compiled:elementwise``. Both sides run the same layers from the same
weights on the same resident batch, SGD with momentum and a scaled loss in fp16 included, and take turns in blocks of
steps, so that drift of the machine meets all, and each follows each of the others; before a block steps run for a fifth
of a second, until a GPU at its limit of power has the clock that the arm lets it have, and after it one step is timed
that finds the GPU idle, until its call returns: the host's time.
Losses are compared over the first steps, those of compiled arms with eager ones to the bit. `torch_steps.py` tells how
PyTorch runs; 16 bits are autocast there, storage here. Bytes are the driver's: what a running arm holds, weights and
kernels included, what its first steps only tried out excluded. --compile runs nothing, but leaves in the caches on disk
what the same call without it compiles, ours and torch.compile's, all cases at once.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import minidl as m
from benchmarks.device import clean, row_ms, used_bytes, wait
from minidl import checks, models
from minidl.bench import warm
from minidl.bench.setup import Setup
from minidl.bench.step import DECAY, LR, MOMENTUM
from minidl.compile import CompiledStep
from minidl.fusion import Plan, fuse
from minidl.precision import precision
from minidl.profile.results import result, write
from minidl.profile.timing import Timing, balanced
from minidl.step import EagerStep

CHECKED_STEPS = 4  # a compiled step replays from the third on
SETTLE_S = 0.2  # of steps before a timed block
STARTED = time.perf_counter()
TOLERANCE = {"fp32": 1e-3}  # of losses, relative; else 3e-2
OTHER_MASKS = 0.1  # where PyTorch drops other values than we do
PEERS = ("torch-eager", "torch-graph", "torch-compile", "torch-compile-graph", "torch-autotune-graph")

Row = dict[str, Any]
Step = Callable[[], Any]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--cases", nargs="+", default=["resnet20/32"], metavar="MODEL/BATCH[/PRECISION]")
    p.add_argument("--precision", nargs="+", default=["fp32"], help="of the cases that name none")
    p.add_argument("--arms", nargs="+", metavar="ARM", help="KIND[:PLAN]; default: all that apply")
    p.add_argument("--blocks", type=int, default=12, help="timed blocks of steps of each arm, at least")
    p.add_argument("--steps", type=int, default=5, help="steps in a block")
    p.add_argument("--peers", nargs="*", choices=PEERS, help=f"of {', '.join(PEERS)}; default: all that apply")
    p.add_argument("--compile", action="store_true", help="only compile, on all cores")
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    checks.at_least("bench_train", "--blocks", a.blocks, 2)
    gpu = a.device == "cuda"
    if a.peers is None:
        a.peers = list(PEERS[:-1]) if gpu else ["torch-eager"]
    if a.arms is None:
        a.arms = ["eager", "compiled", "compiled:elementwise"] if gpu else ["eager", "eager:elementwise"]
    return a


def setups(a: argparse.Namespace) -> list[Setup]:
    """All cases in all their precisions."""
    found = []
    for case in a.cases:
        model, batch, *own = case.split("/")
        if model not in models.MODELS or not batch.isdecimal() or len(own) > 1:
            raise SystemExit(f"--cases: {case} is no MODEL/BATCH; models: {', '.join(sorted(models.MODELS))}")
        found += [Setup(model, int(batch), precision(mode).name, a.device) for mode in own or a.precision]
    return found


def data(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W, 3) and labels, per image or per pixel."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((setup.batch, setup.image, setup.image, 3), np.float32)
    shape = images.shape[:3] if setup.model == "unet" else images.shape[:1]
    return images, rng.integers(0, setup.num_classes, shape).astype(np.int32)


class Ours:
    """Our network. Its arms take turns on one model: the weights and modes are set before each.

    Args:
        plans: what `fuse` takes for plans of these names; others are known to it.
        within: the context in which steps by a plan of some name run.
    """

    def __init__(
        self,
        setup: Setup,
        plans: Mapping[str, str | Plan] | None = None,
        within: Callable[[str], AbstractContextManager[None]] = lambda plan: nullcontext(),
    ):
        self.setup, self._plans, self._within = setup, plans or {}, within
        self.tolerance = TOLERANCE.get(setup.precision, 3e-2)
        clean(setup.device)
        self.used_before = used_bytes(setup.device)
        self.model = m.Model(setup.graph(), device=setup.device, precision=setup.precision)
        self.parts = self.model, m.SGD(self.model, LR, MOMENTUM, DECAY), m.SoftmaxCrossEntropy()
        images, labels = data(setup)
        self.batch = [self.model.ops.from_host(a) for a in (images.astype(self.model.precision.storage), labels)]
        self.start = self.model.state_dict(), self.parts[1].state_dict()

    def plan(self, name: str) -> Plan:
        """The fusion plan of this name, which the model then follows."""
        return fuse(self.model, self._plans.get(name, name or "none"), batch=self.setup.batch)

    def arm(self, name: str) -> tuple[Step, Callable[[], None]]:
        """(one step, what to do before a run of them)."""
        kind, _, how = name.partition(":")
        step = {"eager": EagerStep, "compiled": CompiledStep}[kind](*self.parts)
        plan = self.plan(how)

        def run() -> Any:
            with self._within(how):
                return step(*self.batch)

        return run, lambda: fuse(self.model, plan)

    def first_losses(self, name: str) -> tuple[list[float], int]:
        """Losses of an arm's first steps from the starting weights, and the memory that it holds from then on."""
        self.model.load_state_dict(self.start[0])
        self.parts[1].load_state_dict(self.start[1])
        self.model.random.step = 0  # what is dropped is a function of the step
        self.model.ops.synchronize()
        clean(self.setup.device)
        step, prepare = self.arm(name)
        prepare()
        losses = [step().loss for _ in range(CHECKED_STEPS)]
        self.model.ops.synchronize()
        clean(self.setup.device)
        step()
        return losses, used_bytes(self.setup.device) - self.used_before


def peer(setup: Setup, arm: str, state: dict[str, np.ndarray]) -> tuple[Step, list[float], int]:
    """One step of PyTorch that computes what we do, the losses of its first ones, and the memory it holds."""
    from benchmarks import torch_steps

    clean(setup.device)
    before = used_bytes(setup.device)
    step, losses = torch_steps.first_steps(torch_steps.step_of(setup, arm, state, data(setup)), arm)
    clean(setup.device)
    step()
    return step, losses, used_bytes(setup.device) - before


def settle(step: Step, device: str) -> None:
    """Run steps for a while."""
    until = time.perf_counter() + SETTLE_S
    while time.perf_counter() < until:
        row_ms(m.dist.SOLO, step, 1, device)


def host_ms(step: Step, device: str) -> float:
    """Until a step that finds the device idle returns: what the host takes to start all of its work."""
    wait(device)
    started = time.perf_counter()
    step()
    taken = time.perf_counter() - started
    wait(device)
    return taken * 1e3


def tell(text: str) -> None:
    """Progress, for those who wait: PyTorch tries out kernels for minutes where a network has many convolutions."""
    print(f"{time.perf_counter() - STARTED:6.1f} s: {text}", file=sys.stderr, flush=True)


def check(name: str, losses: list[float], expected: list[float], tolerance: float) -> None:
    """That an arm computes what the first one does.

    Raises:
        AssertionError: it does not.
    """
    if not np.allclose(losses, expected, rtol=tolerance):
        raise AssertionError(f"{name} computes something else: losses {losses}, expected {expected}")


def check_finite(name: str, last: Any) -> None:
    """That the network of an arm has not diverged in the steps that were timed; ``last``: what the last one returned.

    Raises:
        AssertionError: it has; where values are NaN, passes take other times.
    """
    loss = float(getattr(last, "loss", last))
    if not math.isfinite(loss):
        raise AssertionError(f"{name} has diverged: its loss became {loss}")


def apart(losses: Sequence[float], expected: Sequence[float]) -> float:
    """How far losses are from others, relative, at most."""
    return max(abs(one - other) / abs(other) for one, other in zip(losses, expected, strict=True))


def compared(ours: Ours, names: Sequence[str]) -> tuple[dict[str, list[float]], dict[str, int]]:
    """(the first losses of our arms, which agree; the memory that each holds)."""
    by_plan: dict[str, list[float]] = {}
    found, held = {}, {}
    for name in names:
        tell(f"first steps, {name}")
        found[name], held[name] = ours.first_losses(name)
        first = by_plan.setdefault(name.partition(":")[2] or "none", found[name])
        if first != found[name]:
            raise AssertionError(f"{name} has not the bits of the arm before: {found[name]}, expected {first}")
        check(name, found[name], next(iter(found.values())), ours.tolerance)
    return found, held


def in_turns(ours: Ours, names: Sequence[str], peers: Sequence[str], blocks: int, steps: int) -> list[Row]:
    """The rows of our arms, with PyTorch's beside: all of them in turns, in all orders of `balanced`.

    Args:
        blocks: at least so many, of each.
        steps: timed in each.
    """
    setup, draws = ours.setup, any(isinstance(layer, (m.Dropout, m.StochasticDepth)) for layer in ours.model.layers)
    losses, held = compared(ours, names)
    arms = {name: ours.arm(name) for name in names}
    if peers:
        import torch

        torch._dynamo.reset()  # what other cases compiled counts toward its limit
    for name in peers:
        tell(f"first steps, {name}")
        step, losses[name], held[name] = peer(setup, name, ours.start[0])
        check(name, losses[name], losses[names[0]], OTHER_MASKS if draws else ours.tolerance)
        arms[name] = step, lambda: None

    tell("all of them in turns")
    samples: dict[str, list[float]] = {arm: [] for arm in arms}
    hosts: dict[str, list[float]] = {arm: [] for arm in arms}
    for step, prepare in arms.values():
        prepare()
        row_ms(m.dist.SOLO, step, CHECKED_STEPS, setup.device)
    orders = balanced(len(arms))
    for order in orders * -(-blocks // len(orders)):
        for arm in (list(arms)[i] for i in order):
            step, prepare = arms[arm]
            prepare()
            settle(step, setup.device)
            samples[arm].append(row_ms(m.dist.SOLO, step, steps, setup.device))
            hosts[arm].append(host_ms(step, setup.device))
    for arm, (step, prepare) in arms.items():
        prepare()
        check_finite(arm, step())
    timings = {arm: Timing(tuple(values)) for arm, values in samples.items()}
    host = {arm: Timing(tuple(values)).ms for arm, values in hosts.items()}
    return [row(setup, name, timings, host, held, losses, peers) for name in names]


def row(
    setup: Setup,
    name: str,
    timings: dict[str, Timing],
    host: dict[str, float],
    held: dict[str, int],
    losses: dict[str, list[float]],
    peers: Sequence[str],
) -> Row:
    mine = timings[name]
    gpu = setup.device == "cuda"
    return {
        "case": setup.title,
        "pass": "step",
        "dtype": setup.precision,
        "arm": name.replace(":", ", "),
        "ms": mine.ms,
        "spread": mine.spread,
        "turns_ms": list(mine.samples_ms),
        "floor_ms": None,
        "peers": {peer: timings[peer].ms for peer in peers},
        "peer_spreads": {peer: timings[peer].spread for peer in peers},
        "images_per_s": setup.batch / mine.ms * 1e3,
        "ratio_to_best_peer": min(timings[peer].ms for peer in peers) / mine.ms if peers else None,
        "host_ms": host[name] if gpu else None,
        "peer_host_ms": {peer: host[peer] for peer in peers} if gpu else {},
        "device_bytes": held[name] if gpu else None,
        "peer_device_bytes": {peer: held[peer] for peer in peers} if gpu else {},
        "losses": losses[name],
        "losses_apart": {arm: apart(losses[name], others) for arm, others in losses.items() if arm != name},
        "peer_losses": {peer: losses[peer] for peer in peers},
    }


def warmed(a: argparse.Namespace, setup: Setup) -> None:
    """Compile the kernels of our arms of a case."""
    for plan in dict.fromkeys(name.partition(":")[2] for name in a.arms if a.device == "cuda"):
        warm.compile_ahead(setup.graph(), setup.batch, setup.precision, plan or "none", warm.this_gpu())


def _compile_peer(setup: Setup, mode: str, share: float) -> None:
    from benchmarks import torch_steps

    try:
        torch_steps.compile_ahead(setup, mode, data(setup), share)
    except Exception as error:  # the compiler's own cannot be sent to another process
        raise RuntimeError(f"{type(error).__name__}: {error}") from None


def compiled_ahead(a: argparse.Namespace) -> None:
    """Compile what all cases need: PyTorch's in processes of their own, ours beside them."""
    from benchmarks import torch_steps

    wanted = setups(a)
    modes = dict.fromkeys(mode for peer in a.peers if (mode := torch_steps.ARMS[peer]))
    with ProcessPoolExecutor(max(len(wanted), 1), multiprocessing.get_context("spawn")) as pool:
        jobs = {
            pool.submit(_compile_peer, setup, mode, 0.9 / len(wanted)): f"{setup.title} {setup.precision} {mode}"
            for mode in modes
            for setup in wanted
        }
        for job, title in jobs.items():
            job.add_done_callback(lambda job, title=title: tell(f"torch.compile: {title}: {job.exception() or 'done'}"))
        for setup in wanted:
            warmed(a, setup)
            tell(f"kernels of {setup.title} {setup.precision}")


def main() -> None:
    from pages.files import print_tables
    from pages.speed import training

    a = arguments()
    if a.compile:
        compiled_ahead(a)
        return
    rows, failed = [], []
    for setup in setups(a):
        tell(f"{setup.title} {setup.precision}")
        try:
            warmed(a, setup)
            found = in_turns(Ours(setup), a.arms, a.peers, a.blocks, a.steps)
        except (AssertionError, MemoryError, RuntimeError) as error:  # the other cases may do
            failed.append(f"{setup.title} {setup.precision}: {type(error).__name__}: {error}")
            tell(failed[-1])
            continue
        rows += found
        figures = ", ".join(f"{row['arm']} {row['ms']:.2f} ms" for row in found)
        print(f"{setup.title} {setup.precision}: {figures}", flush=True)
        content = result("bench_train", rows)
        if a.json:
            write(a.json, content)
    if rows:
        print_tables(content, training)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
