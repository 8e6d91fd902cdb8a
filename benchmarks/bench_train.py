"""Whole training steps (forward, loss, backward, update) of a network beside PyTorch, on the CPU or a GPU.

    python benchmarks/bench_train.py --device cpu --model resnet20 --batch 32 [--json PATH]
    python benchmarks/bench_train.py --device cuda --model resnet50 --batch 64 --precision bf16 tf32

Both sides run the same layers from the same weights on the same resident batch, SGD with momentum included, and take
turns in blocks of steps, so that drift of the machine meets both; their losses are compared after the first steps.
PyTorch runs channels_last: eager, and on a GPU also as a CUDA graph and compiled. bf16 is autocast there, storage here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import minidl as m
from minidl import models
from minidl.fusion import fuse
from minidl.precision import precision
from minidl.profile.results import result, write
from minidl.profile.tables import show
from minidl.profile.timing import Timing

LR, MOMENTUM, DECAY = 0.01, 0.9, 1e-4
CHECKED_STEPS = 3

Step = Callable[[], Any]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    p.add_argument("--model", default="resnet20")
    p.add_argument("--image-size", type=int)
    p.add_argument("--classes", type=int)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--precision", nargs="+", default=["fp32"])
    p.add_argument("--fusion", default="none", help="plan of batch-norm fusion, on our side")
    p.add_argument("--blocks", type=int, default=12, help="timed blocks of steps on each side")
    p.add_argument("--steps", type=int, default=5, help="steps in a block")
    p.add_argument("--peers", nargs="*", default=None, help="of torch-eager, torch-graph, torch-compile; default: all")
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    small = a.model in ("resnet20", "lenet", "mlp")
    a.image_size = a.image_size or (32 if small else 256 if a.model == "unet" else 224)
    a.classes = a.classes or (10 if small else 2 if a.model == "unet" else 1000)
    if a.peers is None:
        a.peers = ["torch-eager"] + (["torch-graph", "torch-compile"] if a.device == "cuda" else [])
    return a


def data(a: argparse.Namespace) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W, 3) and labels, per image or per pixel."""
    rng = np.random.default_rng(0)
    images = rng.standard_normal((a.batch, a.image_size, a.image_size, 3), np.float32)
    shape = images.shape[:3] if a.model == "unet" else images.shape[:1]
    return images, rng.integers(0, a.classes, shape).astype(np.int32)


def graph(a: argparse.Namespace) -> m.Graph:
    return models.build(a.model, (a.image_size, a.image_size, 3), a.classes)


def ours(a: argparse.Namespace, mode: str) -> tuple[Step, Callable[[Any], float], m.Model]:
    """(one step, its loss as a number, the model)."""
    model = m.Model(graph(a), device=a.device, precision=mode)
    fuse(model, a.fusion)
    optimizer = m.SGD(model, LR, MOMENTUM, DECAY)
    loss = m.SoftmaxCrossEntropy()
    images, labels = data(a)
    x = model.ops.from_host(images.astype(model.precision.storage))
    t = model.ops.from_host(labels)

    def step() -> Any:
        totals = loss.forward(model.forward(x), t)
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()
        return totals

    return step, lambda totals: totals.loss, model


def theirs(a: argparse.Namespace, mode: str, arm: str, state: dict[str, np.ndarray]) -> Step:
    """One step of PyTorch, returning the loss tensor."""
    import torch

    from minidl.bench.torch_peer import TorchGraph, from_nhwc

    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    peer = TorchGraph(graph(a)).load(state).to(a.device)
    network = torch.compile(peer) if arm == "torch-compile" else peer
    optimizer = torch.optim.SGD(peer.parameters(), LR, MOMENTUM, weight_decay=DECAY)
    images, labels = data(a)
    x, t = from_nhwc(images, a.device), torch.from_numpy(labels).long().to(a.device)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mode)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=arm != "torch-graph")
        with torch.autocast(a.device, dtype=half or torch.bfloat16, enabled=half is not None):
            loss = torch.nn.functional.cross_entropy(network(x), t)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return captured(step) if arm == "torch-graph" else step


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


def block_ms(step: Step, steps: int, wait: Callable[[], None]) -> float:
    wait()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - started) / steps * 1e3


def measure(a: argparse.Namespace, mode: str) -> dict[str, Any]:
    """One row."""
    step, read, model = ours(a, mode)
    state = model.state_dict()
    rivals = {arm: theirs(a, mode, arm, state) for arm in a.peers}
    losses = [read(step()) for _ in range(CHECKED_STEPS)]
    for arm, rival in rivals.items():
        if arm != "torch-graph":  # its capture has taken steps already
            found = [float(rival()) for _ in range(CHECKED_STEPS)]
            tolerance = 1e-3 if mode == "fp32" else 3e-2
            if not np.allclose(found, losses, rtol=tolerance):
                raise AssertionError(f"{arm} computes something else: losses {found}, ours {losses}")

    def wait() -> None:
        model.ops.synchronize()
        if a.device == "cuda" and rivals:
            import torch

            torch.cuda.synchronize()

    arms: dict[str, Step] = {"minidl": step, **rivals}
    for one in arms.values():
        block_ms(one, 2, wait)
    samples: dict[str, list[float]] = {arm: [] for arm in arms}
    for _ in range(a.blocks):
        for arm, one in arms.items():
            samples[arm].append(block_ms(one, a.steps, wait))
    timings = {arm: Timing(tuple(values)) for arm, values in samples.items()}
    mine = timings.pop("minidl")
    return {
        "case": f"{a.model}/{a.image_size}x{a.image_size}/b{a.batch}",
        "pass": "step",
        "dtype": precision(mode).name,
        "arm": "eager" if a.fusion == "none" else f"eager, {a.fusion}",
        "ms": mine.ms,
        "spread": mine.spread,
        "floor_ms": None,
        "peers": {arm: timing.ms for arm, timing in timings.items()},
        "peer_spreads": {arm: timing.spread for arm, timing in timings.items()},
        "images_per_s": a.batch / mine.ms * 1e3,
        "ratio_to_best_peer": min((t.ms for t in timings.values()), default=float("nan")) / mine.ms,
    }


def main() -> None:
    a = arguments()
    rows = [measure(a, mode) for mode in a.precision]
    rows.sort(key=lambda row: row["ratio_to_best_peer"])
    columns = ["case", "dtype", "ms", "spread", "images/s", *a.peers, "best peer / ours"]
    table = [
        [row["case"], row["dtype"], f"{row['ms']:.2f}", f"{row['spread']:.1%}", f"{row['images_per_s']:.0f}"]
        + [f"{row['peers'][arm]:.2f}" for arm in a.peers]
        + [f"{row['ratio_to_best_peer']:.2f}"]
        for row in rows
    ]
    show("training step, milliseconds (peers: milliseconds)", columns, table)
    if a.json:
        write(a.json, result("bench_train", rows))


if __name__ == "__main__":
    main()
