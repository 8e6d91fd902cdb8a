"""What convolutions do for the batch norms around them, against doing it apart; and training steps by fusion plan.

    python benchmarks/bench_fusion.py --json benchmarks/results/h200/bench_fusion.json      on a GPU
    python benchmarks/bench_fusion.py --parts steps --plans none gradients --peers

Forward, a convolution takes the statistics of what it writes; its data gradient is masked for the ReLU below and summed
for the batch norm below that (at a block's input with the gradient so far added, and the mask of the sum). `apart` is
the same in passes of their own, `plain` the convolution alone; `cost` is the kernel with over the kernel without, and
`whole` also adds up what the kernel leaves. The peer is PyTorch's convolution with its own passes; inputs rotate past
the cache on both sides. Steps are captured, plans and peers in turn; the losses of the plans are compared.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import bench_conv
import bench_train

from minidl import cuda as ops
from minidl import fusion, models
from minidl.bench.step import TrainingStep
from minidl.cuda import conv2d_hopper
from minidl.cuda.device import current_device
from minidl.profile.results import result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, DeviceTimer, Timing, input_sets

Row = dict[str, Any]
LOSSES = 3  # steps whose losses are compared
TOLERANCE = 2e-2  # of their losses, in 16 bits


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--parts", nargs="+", default=["convolutions", "steps"], choices=["convolutions", "steps"])
    p.add_argument("--network", default="resnet50", choices=list(bench_conv.NETWORKS))
    p.add_argument("--model", default="resnet50")
    p.add_argument("--image-size", type=int, default=224)
    p.add_argument("--classes", type=int, default=1000)
    p.add_argument("--batch", type=int, default=256)
    p.add_argument("--plans", nargs="+", default=list(fusion.PLANS))
    p.add_argument("--peers", nargs="*", default=["torch-eager", "torch-graph"], help="of the steps; none: ours alone")
    p.add_argument("--samples", type=int, default=7)
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    a.device = "cuda"  # for bench_train
    return a


class Arrays(bench_conv._Arrays):
    """Those of a layer, with what lies around it."""

    def __init__(self, layer: bench_conv.Layer, sets: int) -> None:
        import torch

        super().__init__(layer, bench_conv.PRECISIONS["bf16"], sets, "cuda")
        self.joined = layer.kernel == 1 and layer.channels > layer.filters  # a block's input
        self.inputs = [torch.randn_like(x) for x in self.x]  # of the batch norm below
        self.outputs = [x.relu() for x in self.x]
        self.vector = torch.rand(layer.channels, device="cuda") + 0.5
        self.moments = ops.from_host(np.stack([np.zeros(layer.channels), np.ones(layer.channels)]).astype(np.float32))
        self.affine = ops.from_host(np.ones(layer.channels, np.float32)), None
        options = {"stride": (layer.stride,) * 2, "padding": (layer.padding,) * 2, "dilation": (1, 1), "groups": 1}
        self.options = options

    def forward(self, arm: str) -> list[Callable[[], Any]]:
        conv, w = ops.conv2d_stats if arm in ("whole", "kernel") else ops.conv2d, self.array(self.w)

        def call(x: Any) -> Any:
            y = conv(x, w, **self.options)
            return (y, ops.batch_norm_stats(y)) if arm == "apart" else y

        return [partial(call, self.array(x)) for x in self.x]

    def forward_peer(self) -> list[Callable[[], Any]]:
        import torch

        convolve = self.peer("forward")

        def call(conv: Callable[[], Any]) -> Any:
            y = conv()
            return y, torch.batch_norm_stats(y, 1e-5)

        return [partial(call, conv) for conv in convolve]

    def backward_data(self, arm: str) -> list[Callable[[], Any]]:
        w = self.array(self.w)

        def call(dy: Any, raw: Any, y: Any, add: Any) -> Any:
            add = add if self.joined else None
            if arm in ("whole", "kernel"):
                out = y if self.joined else None
                found = ops.conv2d_backward_data_masked(
                    dy, w, raw, self.moments, *self.affine, y=out, add=add, **self.options
                )
                return found if arm == "kernel" else (found, ops.batch_norm_backward_sums(found[1], self.moments))
            g = ops.conv2d_backward_data(dy, w, raw.shape, add=add, **self.options)
            if arm == "plain":
                return g
            if self.joined:
                return g, ops.batch_norm_join_backward_stats(g, y, raw, self.moments)
            return g, ops.batch_norm_relu_backward_stats(g, raw, self.moments, *self.affine)

        groups = zip(self.dy, self.inputs, self.outputs, self.x, strict=True)
        return [partial(call, *map(self.array, group)) for group in groups]

    def backward_data_peer(self) -> list[Callable[[], Any]]:
        import torch

        nchw, vector = bench_conv._nchw, self.vector

        def call(conv: Callable[[], Any], raw: Any, y: Any, add: Any) -> Any:
            g = conv()
            if self.joined:
                g = g + add
            g = torch.ops.aten.threshold_backward(g, y, 0)
            return g, torch.batch_norm_backward_reduce(g, raw, vector, vector, vector, True, True, True)

        groups = zip(self.peer("backward_data"), self.inputs, self.outputs, self.x, strict=True)
        return [partial(call, conv, *map(nchw, rest)) for conv, *rest in groups]


def convolutions(a: argparse.Namespace) -> list[Row]:
    layers = [layer for layer in bench_conv.NETWORKS[a.network](a.batch) if layer.channels > 4]
    rows = [row for layer in layers for row in _rows(layer, Budget(a.samples, seconds=math.inf))]
    rows.sort(key=lambda row: row["count"] * (row["ms"] - row["apart_ms"]), reverse=True)
    table = [
        [row["case"], row["pass"], str(row["count"])]
        + [f"{1e3 * row[key]:.1f}" for key in ("plain_ms", "kernel_ms")]
        + [f"{row['cost']:+.1%}", f"{1e3 * row['ms']:.1f}", f"{1e3 * row['apart_ms']:.1f}"]
        + [f"{1e3 * row['peers']['torch-eager']:.1f}"]
        for row in rows
    ]
    columns = ["layer", "pass", "times", "plain", "kernel", "cost", "whole", "apart", "PyTorch"]
    for which in ("forward", "backward_data"):
        mine = [row for row in rows if row["pass"] == which]
        total = lambda key, mine=mine: sum(row["count"] * row[key] for row in mine)  # noqa: E731
        mean = statistics.geometric_mean(1 + row["cost"] for row in mine)
        cost = total("kernel_ms") / total("plain_ms") - 1
        print(f"{which}: cost {mean - 1:+.1%} in the mean of layers, {cost:+.1%} of their sum")
        print(f"{which}: whole {total('ms'):.3f} ms, apart {total('apart_ms'):.3f} ms")
    show(f"batch norms in convolutions of {a.network}, batch {a.batch}, bf16: microseconds", columns, table)
    return rows


def _rows(layer: bench_conv.Layer, budget: Budget) -> list[Row]:
    import cupy
    import torch

    from minidl.bench.torch_calls import time_calls

    arrays, rows = Arrays(layer, min(8, input_sets(layer.bytes(2), current_device().l2_bytes))), []
    for which in ("forward", "backward_data"):
        times = {}
        for arm in ("plain", "kernel", "whole", "apart"):
            with _left_as_they_are(arm == "kernel"):
                times[arm] = DeviceTimer().replayed(getattr(arrays, which)(arm), budget)
        peer = time_calls(getattr(arrays, f"{which}_peer")(), budget, "replayed", "cuda")
        rows.append({
            "case": layer.name, "pass": which, "dtype": "bf16",
            "arm": "statistics" if which == "forward" else "gradients, join" if arrays.joined else "gradients, relu",
            "ms": times["whole"].ms, "spread": times["whole"].spread, "floor_ms": None, "count": layer.count,
            "plain_ms": times["plain"].ms, "kernel_ms": times["kernel"].ms, "apart_ms": times["apart"].ms,
            "cost": times["kernel"].ms / times["plain"].ms - 1, "peers": {"torch-eager": peer.ms},
        })  # fmt: skip
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    return rows


def _left_as_they_are(wanted: bool) -> Any:
    """Within, what the patches leave is not added up."""
    keep = lambda partial, count=0: partial  # noqa: E731
    names = {"moments_of": keep, "sums_of": keep} if wanted else {}
    return mock.patch.multiple(conv2d_hopper, **names) if names else nullcontext()


def steps(a: argparse.Namespace) -> list[Row]:
    mine = {how: _step(a, how) for how in a.plans}
    losses = {how: [float(step().loss) for _ in range(LOSSES)] for how, step in mine.items()}
    state = None
    for how, step in mine.items():
        if not np.allclose(losses[how], losses[a.plans[0]], rtol=TOLERANCE):
            raise AssertionError(f"plan {how}: losses {losses[how]}, of {a.plans[0]} {losses[a.plans[0]]}")
        state = state or step.model.state_dict()
    replays = {how: step.capture() for how, step in mine.items()}
    rivals = {arm: bench_train.theirs(a, "bf16", arm, state) for arm in a.peers}

    def wait() -> None:
        ops.synchronize()
        for replay in replays.values():
            replay.stream.synchronize()
        if rivals:
            sys.modules["torch"].cuda.synchronize()

    everyone = replays | rivals
    for one in everyone.values():
        bench_train.block_ms(one, 2, wait)
    samples: dict[str, list[float]] = {arm: [] for arm in everyone}
    for _ in range(a.samples):
        for arm, one in everyone.items():
            samples[arm].append(bench_train.block_ms(one, 3, wait))
    found = {arm: Timing(tuple(ms)) for arm, ms in samples.items()}
    peers = {arm: found[arm].ms for arm in rivals}
    rows = [{
        "case": f"{a.model}/{a.image_size}x{a.image_size}/b{a.batch}", "pass": "step", "dtype": "bf16", "arm": how,
        "ms": found[how].ms, "spread": found[how].spread, "floor_ms": None, "peers": peers,
        "images_per_s": a.batch / found[how].ms * 1e3, "losses": losses[how],
    } for how in a.plans]  # fmt: skip
    columns = ["plan", "ms", "spread", "images/s", *peers]
    table = [
        [row["arm"], f"{row['ms']:.2f}", f"{row['spread']:.1%}", f"{row['images_per_s']:.0f}"]
        + [f"{ms:.2f}" for ms in peers.values()]
        for row in rows
    ]
    show(f"captured training steps, {rows[0]['case']}, bf16", columns, table)
    return rows


def _step(a: argparse.Namespace, how: str) -> TrainingStep:
    graph = models.build(a.model, (a.image_size, a.image_size, 3), a.classes)
    step = TrainingStep(graph, batch=a.batch, device="cuda", precision="bf16")
    fusion.fuse(step.model, how)
    return step


def main() -> None:
    a = arguments()
    parts = {"convolutions": convolutions, "steps": steps}
    rows = [row for part in a.parts for row in parts[part](a)]
    if a.json:
        write(a.json, result("bench_fusion", rows))


if __name__ == "__main__":
    main()
