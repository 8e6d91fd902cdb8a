"""Whole training steps (forward, loss, backward, update) of networks beside PyTorch, on the CPU or a GPU.

    python benchmarks/bench_train.py --device cpu --cases resnet20/32 [--json PATH]
    python benchmarks/bench_train.py --device cuda --cases resnet50/256 unet/32 --precision bf16 tf32
    python benchmarks/bench_train.py --device cuda --cases resnet50/32 --arms compiled --peers torch-compile

A case is MODEL/BATCH or MODEL/BATCH/PRECISION. Arms are ways of running ours: eager or compiled (`minidl.compile`), or
serial, which is compiled with each kernel beginning when the last has ended; with a plan of batch-norm fusion after a
colon: ``compiled:elementwise``. Both sides run the same layers from the same
weights on the same resident batch, SGD with momentum included, and take turns in blocks of steps, so that drift of the
machine meets all, and each follows each of the others; after each block one step is timed that finds the GPU idle,
until its call returns: the host's time.
Losses are compared over the first steps, those of compiled arms with eager ones to the bit. PyTorch runs channels_last:
eager, and on a GPU also as a CUDA graph, compiled, and as the CUDA graph of what it compiled. bf16 is autocast there,
storage here. Bytes are the driver's: what a running arm holds, weights and kernels included, what its first steps only
tried out excluded.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import minidl as m
from minidl import checks, models
from minidl.bench import warm
from minidl.bench.setup import Setup
from minidl.compile import CompiledStep
from minidl.cuda.launch import overlapping
from minidl.fusion import fuse
from minidl.precision import precision
from minidl.profile.results import result, write
from minidl.profile.tables import show
from minidl.profile.timing import Timing, balanced
from minidl.step import EagerStep

LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4
CHECKED_STEPS = 4  # a compiled step replays from the third on
STARTED = time.perf_counter()
TOLERANCE = {"fp32": 1e-3}  # of losses, relative; else 3e-2
PEERS = ("torch-eager", "torch-graph", "torch-compile", "torch-compile-graph")

Step = Callable[[], Any]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--cases", nargs="+", default=["resnet20/32"], metavar="MODEL/BATCH[/PRECISION]")
    p.add_argument("--precision", nargs="+", default=["fp32"], help="of the cases that name none")
    p.add_argument("--arms", nargs="+", metavar="ARM", help="KIND[:PLAN]; default: all that apply")
    p.add_argument("--blocks", type=int, default=12, help="timed blocks of steps of each arm")
    p.add_argument("--steps", type=int, default=5, help="steps in a block")
    p.add_argument("--peers", nargs="*", choices=PEERS, help=f"of {', '.join(PEERS)}; default: all that apply")
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    checks.at_least("bench_train", "--blocks", a.blocks, 2)
    gpu = a.device == "cuda"
    if a.peers is None:
        a.peers = list(PEERS) if gpu else ["torch-eager"]
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


def used_bytes(device: str) -> int:
    """Device memory in use, as the driver says."""
    if device != "cuda":
        return 0
    import cupy

    free, total = cupy.cuda.runtime.memGetInfo()
    return total - free


def clean(device: str) -> None:
    """Give back memory that nobody uses, on both sides."""
    gc.collect()
    if device == "cuda":
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()
        if "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()


class Ours:
    """Our network. Its arms take turns on one model: the weights and modes are set before each."""

    def __init__(self, setup: Setup):
        self.device = setup.device
        clean(self.device)
        self.used_before = used_bytes(self.device)
        self.model = m.Model(setup.graph(), device=setup.device, precision=setup.precision)
        self.parts = self.model, m.SGD(self.model, LR, MOMENTUM, DECAY), m.SoftmaxCrossEntropy()
        images, labels = data(setup)
        self.batch = [self.model.ops.from_host(a) for a in (images.astype(self.model.precision.storage), labels)]
        self.start = self.model.state_dict(), self.parts[1].state_dict()

    def arm(self, name: str) -> tuple[Step, Callable[[], None]]:
        """(one step, what to do before a run of them)."""
        kind, _, plan = name.partition(":")
        step = {"eager": EagerStep, "compiled": CompiledStep, "serial": CompiledStep}[kind](*self.parts)

        def run() -> Any:
            with overlapping(kind != "serial"):
                return step(*self.batch)

        return run, lambda: fuse(self.model, plan or "none")

    def first_losses(self, name: str) -> tuple[list[float], int]:
        """Losses of an arm's first steps from the starting weights, and the memory that it holds from then on."""
        self.model.load_state_dict(self.start[0])
        self.parts[1].load_state_dict(self.start[1])
        self.model.random.step = 0  # what is dropped is a function of the step
        self.model.ops.synchronize()
        clean(self.device)
        step, prepare = self.arm(name)
        prepare()
        losses = [step().loss for _ in range(CHECKED_STEPS)]
        self.model.ops.synchronize()
        clean(self.device)
        step()
        return losses, used_bytes(self.device) - self.used_before


def theirs(setup: Setup, arm: str, state: dict[str, np.ndarray]) -> Step:
    """One step of PyTorch, returning the loss tensor."""
    import torch

    from minidl.bench.torch_peer import TorchGraph, from_nhwc

    mode, device = setup.precision, setup.device
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    peer = TorchGraph(setup.graph()).load(state).to(device)
    network, replayed = torch.compile(peer) if "compile" in arm else peer, arm.endswith("graph")
    optimizer = torch.optim.SGD(peer.parameters(), LR, MOMENTUM, weight_decay=DECAY)
    images, labels = data(setup)
    x, t = from_nhwc(images, device), torch.from_numpy(labels).long().to(device)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=not replayed)
        with torch.autocast(device, dtype=half or torch.bfloat16, enabled=half is not None):
            loss = torch.nn.functional.cross_entropy(network(x), t)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return captured(step) if replayed else step


def captured(step: Step) -> Step:
    """``step`` as a CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(CHECKED_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        loss = step()

    def replay(inputs: Step = step) -> Any:  # the graph reads its inputs' memory: who replays it keeps them alive
        whole.replay()
        return loss

    return replay


def peer(setup: Setup, arm: str, state: dict[str, np.ndarray], expected: list[float]) -> tuple[Step, int]:
    """One step of PyTorch that computes what we do, and the memory it holds."""
    clean(setup.device)
    before = used_bytes(setup.device)
    step = theirs(setup, arm, state)
    # The capture has taken steps already.
    losses = [float(step()) for _ in range(CHECKED_STEPS)] if not arm.endswith("graph") else expected
    if not np.allclose(losses, expected, rtol=TOLERANCE.get(setup.precision, 3e-2)):
        raise AssertionError(f"{arm} computes something else: losses {losses}, ours {expected}")
    clean(setup.device)
    step()
    return step, used_bytes(setup.device) - before


def block_ms(step: Step, steps: int, wait: Callable[[], None]) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - started) / steps * 1e3


def host_ms(step: Step, wait: Callable[[], None]) -> float:
    """Until a step that finds the device idle returns: what the host takes to start all of its work."""
    wait()
    started = time.perf_counter()
    step()
    taken = time.perf_counter() - started
    wait()
    return taken * 1e3


def tell(text: str) -> None:
    """Progress, for those who wait: PyTorch tries out kernels for minutes where a network has many convolutions."""
    print(f"{time.perf_counter() - STARTED:6.1f} s: {text}", file=sys.stderr, flush=True)


def compared(ours: Ours, names: list[str], mode: str) -> tuple[list[float], dict[str, int]]:
    """(the first losses of our arms, which agree; the memory that each holds)."""
    found: dict[str, list[float]] = {}
    held = {}
    for name in names:
        tell(f"first steps, {name}")
        losses, held[name] = ours.first_losses(name)
        plan = name.partition(":")[2]
        if found.setdefault(plan, losses) != losses:
            raise AssertionError(f"{name} has not the bits of the arm before: {losses}, expected {found[plan]}")
        if not np.allclose(losses, next(iter(found.values())), rtol=TOLERANCE.get(mode, 3e-2)):
            raise AssertionError(f"{name} computes something else: {found}")
    return next(iter(found.values())), held


def measure(a: argparse.Namespace, setup: Setup) -> list[dict[str, Any]]:
    """The rows of one case, an arm each."""
    tell(f"{setup.title} {setup.precision}")
    for plan in dict.fromkeys(name.partition(":")[2] for name in a.arms if a.device == "cuda"):
        warm.compile_ahead(setup.graph(), setup.batch, setup.precision, plan or "none", warm.this_gpu())
    ours = Ours(setup)
    losses, held = compared(ours, a.arms, setup.precision)
    arms = {name: ours.arm(name) for name in a.arms}
    for name in a.peers:
        tell(f"first steps, {name}")
        step, held[name] = peer(setup, name, ours.start[0], losses)
        arms[name] = step, lambda: None

    def wait() -> None:
        ours.model.ops.synchronize()
        if a.device == "cuda" and a.peers:
            import torch

            torch.cuda.synchronize()

    tell("all of them in turns")
    samples: dict[str, list[float]] = {arm: [] for arm in arms}
    hosts: dict[str, list[float]] = {arm: [] for arm in arms}
    names, orders = list(arms), balanced(len(arms))
    for block in range(a.blocks + 1):
        for arm in (names[i] for i in orders[block % len(orders)]):
            step, prepare = arms[arm]
            prepare()
            ms = block_ms(step, a.steps if block else CHECKED_STEPS, wait)
            if block:
                samples[arm].append(ms)
                hosts[arm].append(host_ms(step, wait))
    timings = {arm: Timing(tuple(values)) for arm, values in samples.items()}
    host = {arm: Timing(tuple(values)).ms for arm, values in hosts.items()}
    return [row(setup, name, timings, host, held, a.peers) for name in a.arms]


def row(
    setup: Setup, name: str, timings: dict[str, Timing], host: dict[str, float], held: dict[str, int], peers: list[str]
) -> dict[str, Any]:
    mine = timings[name]
    gpu = setup.device == "cuda"
    return {
        "case": setup.title,
        "pass": "step",
        "dtype": setup.precision,
        "arm": name.replace(":", ", "),
        "ms": mine.ms,
        "spread": mine.spread,
        "floor_ms": None,
        "peers": {peer: timings[peer].ms for peer in peers},
        "peer_spreads": {peer: timings[peer].spread for peer in peers},
        "images_per_s": setup.batch / mine.ms * 1e3,
        "ratio_to_best_peer": min(timings[peer].ms for peer in peers) / mine.ms if peers else None,
        "host_ms": host[name] if gpu else None,
        "peer_host_ms": {peer: host[peer] for peer in peers} if gpu else {},
        "device_bytes": held[name] if gpu else None,
        "peer_device_bytes": {peer: held[peer] for peer in peers} if gpu else {},
    }


def main() -> None:
    a = arguments()
    rows = []
    for setup in setups(a):
        found = measure(a, setup)
        rows += found
        figures = ", ".join(f"{row['arm']} {row['ms']:.2f} ms" for row in found)
        print(f"{setup.title} {setup.precision}: {figures}", flush=True)
        if a.json:
            write(a.json, result("bench_train", rows))
    rows.sort(key=lambda row: row["ratio_to_best_peer"] or 0)
    columns = ["case", "dtype", "arm", "ms", "spread", "host", "images/s", "GB", *a.peers, "best peer / ours"]
    table = [
        [row["case"], row["dtype"], row["arm"], f"{row['ms']:.2f}", f"{row['spread']:.1%}"]
        + [f"{row['host_ms'] or row['ms']:.2f}", f"{row['images_per_s']:.0f}"]
        + [f"{(row['device_bytes'] or 0) / 1e9:.2f}"]
        + [f"{row['peers'][peer]:.2f} ({row['peer_host_ms'].get(peer, row['peers'][peer]):.2f})" for peer in a.peers]
        + [f"{row['ratio_to_best_peer']:.2f}" if a.peers else ""]
        for row in rows
    ]
    show("training step, milliseconds (peers: milliseconds, and the host's)", columns, table)


if __name__ == "__main__":
    main()
