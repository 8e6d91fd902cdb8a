"""The gap between two kernels: chains of dependent operations in a CUDA graph, microseconds for one of them.

    python benchmarks/bench_overlap.py [--json PATH]

``serial``: each kernel is started when the one before it has ended. ``overlapping``, the default of the library: while
that one drains, and it waits (`await_predecessor`, minidl/cuda/common.cuh). Both take turns in one run; the peer is
PyTorch's graph of the same chain. Its small operations cost what a kernel costs that has next to nothing to do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidl.backend import get_ops
from minidl.cuda.launch import overlapping
from minidl.precision import bfloat16
from minidl.profile.results import result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, Timing, timer

LENGTH = 200  # operations of a chain
BATCH = 32
# name, (H, W, C), kernel of a convolution with as many filters; 0: a sum of two arrays
CASES = [
    ("sum 64@7", (7, 7, 64), 0), ("sum 256@14", (14, 14, 256), 0), ("sum 256@56", (56, 56, 256), 0),
    ("convolution 1x1 512@7", (7, 7, 512), 1), ("convolution 3x3 256@14", (14, 14, 256), 3),
    ("convolution 3x3 64@56", (56, 56, 64), 3),
]  # fmt: skip


def arrays(shape: tuple[int, ...], kernel: int) -> tuple[np.ndarray, np.ndarray]:
    """A batch, and what is done to it: filters (KRSC) that keep its variance, or small summands."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((BATCH, *shape), np.float32)
    channels = shape[2]
    other = (channels, kernel, kernel, channels) if kernel else x.shape
    scale = (kernel * kernel * channels) ** -0.5 if kernel else 1e-2
    return x, rng.standard_normal(other, np.float32) * np.float32(scale)


def ours(shape: tuple[int, ...], kernel: int) -> Callable[[], Any]:
    """The chain."""
    ops = get_ops("cuda")
    x, other = (ops.from_host(a.astype(bfloat16)) for a in arrays(shape, kernel))
    pad = (kernel // 2, kernel // 2)

    def chain() -> Any:
        y = x
        for _ in range(LENGTH):
            if kernel:
                y = ops.conv2d(y, other, stride=(1, 1), padding=pad, dilation=(1, 1), groups=1)
            else:
                y = ops.add(y, other)
        return y

    return chain


def theirs(shape: tuple[int, ...], kernel: int) -> tuple[float, float]:
    """PyTorch's (microseconds for an operation, spread)."""
    import torch

    from benchmarks.torch_steps import captured

    torch.backends.cudnn.benchmark = True
    x, other = (torch.from_numpy(a).permute(0, 3, 1, 2).cuda().bfloat16() for a in arrays(shape, kernel))

    def chain() -> Any:
        y = x
        for _ in range(LENGTH):
            y = torch.nn.functional.conv2d(y, other, padding=kernel // 2) if kernel else y + other
        return y

    with torch.no_grad():
        replay = captured(chain)
    samples = []
    for _ in range(20):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(5):
            replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end) / 5 / LENGTH * 1e3)
    timing = Timing(tuple(samples))
    return timing.ms, timing.spread


def measure(name: str, shape: tuple[int, ...], kernel: int) -> list[dict[str, Any]]:
    """The rows of one chain, an arm each."""
    chain = ours(shape, kernel)

    def arm(wanted: bool) -> Callable[[], Any]:
        def run() -> Any:
            with overlapping(wanted):
                return chain()

        return run

    timings = timer(get_ops("cuda")).in_turns([[arm(False)], [arm(True)]], Budget())
    peer, spread = theirs(shape, kernel)
    return [
        {
            "case": f"{name}/{BATCH}",
            "pass": "forward",
            "dtype": "bf16",
            "arm": found,
            "ms": timing.ms / LENGTH,
            "spread": timing.spread,
            "floor_ms": None,
            "peers": {"torch-graph": peer / 1e3},
            "peer_spreads": {"torch-graph": spread},
        }
        for found, timing in zip(("serial", "overlapping"), timings, strict=True)
    ]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        rows += measure(*case)
        if a.json:
            write(a.json, result("bench_overlap", rows))
    table = [
        [row["case"], row["arm"], f"{row['ms'] * 1e3:.2f}", f"{row['spread']:.1%}"]
        + [f"{row['peers']['torch-graph'] * 1e3:.2f}"]
        for row in rows
    ]
    show("an operation of a chain, microseconds", ["case", "arm", "us", "spread", "torch-graph"], table)


if __name__ == "__main__":
    main()
