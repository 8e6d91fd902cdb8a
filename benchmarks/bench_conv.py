"""Convolutions of ResNet-50, VGG-16 and U-Net, every distinct layer in each of its three passes, beside cuDNN.

``python benchmarks/bench_conv.py --precision bf16 tf32 --json out.json`` needs a GPU and PyTorch. The peer runs in
channels_last memory with cudnn.benchmark. Every timed output is compared with the peer's. The table lists first what
costs the networks most against the peer: the time lost, weighted by how often the layer occurs.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidl import cuda
from minidl.precision import bfloat16, float16, float32
from minidl.profile.device_ceilings import copy_bandwidth
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, DeviceTimer, input_sets

__all__ = ["Layer", "floor_ms", "main"]

PASSES = ("forward", "backward_data", "backward_weight")


class Precision(NamedTuple):
    """``tflops``: dense arithmetic rate of an H200 (data sheet). ``bound``: error against the peer, of the largest."""

    dtype: np.dtype
    tf32: bool
    tflops: float
    bound: float


PRECISIONS = {
    "bf16": Precision(bfloat16, False, 989.0, 1e-2),
    "fp16": Precision(float16, False, 989.0, 2e-3),
    "tf32": Precision(float32, True, 494.0, 2e-3),
    "fp32": Precision(float32, False, 67.0, 2e-5),
}


@dataclass(frozen=True)
class Layer:
    """A square convolution: images of size x size, ``count`` times in its network."""

    network: str
    batch: int
    size: int
    channels: int
    filters: int
    kernel: int
    stride: int
    count: int

    @property
    def name(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        return f"{self.network} {self.kernel}x{self.kernel}{stride} {self.channels}-{self.filters} @{self.size}"

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def out_size(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def flop(self) -> int:
        return 2 * self.batch * self.out_size**2 * self.filters * self.channels * self.kernel**2

    def bytes(self, itemsize: int) -> int:
        """Of the images on both sides."""
        return itemsize * self.batch * (self.size**2 * self.channels + self.out_size**2 * self.filters)


def _resnet50(batch: int = 256) -> list[Layer]:
    """Stride in the 3x3 convolution of a stage's first block."""
    layers = [Layer("ResNet-50", batch, 224, 3, 64, 7, 2, 1)]
    channels, size = 64, 56
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        stride = 1 if width == 64 else 2
        inner = size // stride
        layers.append(Layer("ResNet-50", batch, size, channels, width, 1, 1, 1))
        layers.append(Layer("ResNet-50", batch, size, width, width, 3, stride, 1))
        layers.append(Layer("ResNet-50", batch, size, channels, 4 * width, 1, stride, 1))
        layers.append(Layer("ResNet-50", batch, inner, width, 4 * width, 1, 1, blocks))
        layers.append(Layer("ResNet-50", batch, inner, 4 * width, width, 1, 1, blocks - 1))
        layers.append(Layer("ResNet-50", batch, inner, width, width, 3, 1, blocks - 1))
        channels, size = 4 * width, inner
    return _merged(layers)


def _vgg16(batch: int = 64) -> list[Layer]:
    layers, channels, size = [], 3, 224
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers.append(Layer("VGG-16", batch, size, channels, width, 3, 1, 1))
            channels = width
        size //= 2
    return _merged(layers)


def _unet(batch: int = 32) -> list[Layer]:
    """Padded 3x3 convolutions, five levels; the way up reads the skip and the upsampled half side by side."""
    layers, widths, size = [], (64, 128, 256, 512, 1024), 256
    channels = 3
    for level, width in enumerate(widths):
        layers.append(Layer("U-Net", batch, size >> level, channels, width, 3, 1, 1))
        layers.append(Layer("U-Net", batch, size >> level, width, width, 3, 1, 1 if level == 4 else 2))
        if level < 4:
            layers.append(Layer("U-Net", batch, size >> level, 2 * width, width, 3, 1, 1))
        channels = width
    return _merged(layers)


def _merged(layers: list[Layer]) -> list[Layer]:
    counts: dict[tuple, int] = {}
    for layer in layers:
        key = tuple(vars(layer).values())[:-1]
        counts[key] = counts.get(key, 0) + layer.count
    return [Layer(*key, count) for key, count in counts.items()]


NETWORKS: dict[str, Callable[[], list[Layer]]] = {"resnet50": _resnet50, "vgg16": _vgg16, "unet": _unet}


def floor_ms(layer: Layer, precision: Precision, bandwidth: float) -> float:
    """Below this no pass can be: each image array moved once, each product made once at the data sheet's rate."""
    return max(layer.bytes(precision.dtype.itemsize) / bandwidth, layer.flop / (precision.tflops * 1e12)) * 1e3


class _Arrays:
    """The arrays of one layer, as tensors of the peer and, of the same memory, as our arrays."""

    def __init__(self, layer: Layer, precision: Precision, sets: int) -> None:
        import torch

        self.layer, self.precision = layer, precision
        kind = {bfloat16: torch.bfloat16, float16: torch.float16, float32: torch.float32}[precision.dtype]

        def draw(*shape: int) -> Any:
            return torch.randn(shape, device="cuda").to(kind)

        n, h, p, c, k, r = layer.batch, layer.size, layer.out_size, layer.channels, layer.filters, layer.kernel
        self.x, self.dy = [draw(n, h, h, c) for _ in range(sets)], [draw(n, p, p, k) for _ in range(sets)]
        self.w = draw(k, r, r, c)

    def ours(self, which: str) -> list[Callable[[], Any]]:
        import cupy

        from minidl import cuda as ops

        layer, dtype = self.layer, self.precision.dtype

        def array(tensor: Any) -> Any:
            bits = {2: _torch().int16, 4: _torch().int32}[dtype.itemsize]
            return cupy.from_dlpack(tensor.view(bits)).view(dtype)

        stride, padding = (layer.stride,) * 2, (layer.padding,) * 2
        options = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1, "tf32": self.precision.tf32}
        w = array(self.w)
        sets = [(array(x), array(dy)) for x, dy in zip(self.x, self.dy, strict=True)]
        if which == "forward":
            return [partial(ops.conv2d, x, w, **options) for x, _ in sets]
        if which == "backward_data":
            return [partial(ops.conv2d_backward_data, dy, w, x.shape, **options) for x, dy in sets]

        def weight(dy: Any, x: Any, out: Any) -> Any:
            ops.conv2d_backward_weight(dy, x, **options, out=out)
            return out

        return [partial(weight, dy, x, cupy.empty(w.shape, np.float32)) for x, dy in sets]

    def peer(self, which: str) -> list[Callable[[], Any]]:
        torch, layer = _torch(), self.layer
        w = _nchw(self.w)
        stride, padding = [layer.stride] * 2, [layer.padding] * 2
        if which == "forward":
            return [partial(torch.nn.functional.conv2d, _nchw(x), w, None, stride, padding) for x in self.x]
        mask = [which == "backward_data", which == "backward_weight", False]
        wanted = mask.index(True)

        def backward(dy: Any, x: Any) -> Any:
            arguments = (stride, padding, [1, 1], False, [0, 0], 1, mask)
            return torch.ops.aten.convolution_backward(_nchw(dy), _nchw(x), w, None, *arguments)[wanted]

        return [partial(backward, dy, x) for dy, x in zip(self.dy, self.x, strict=True)]

    def error(self, ours: Any, peer: Any) -> float:
        """Largest difference, relative to the largest value; NaN or infinity when ours is not finite."""
        torch = _torch()
        kind = torch.float32 if ours.dtype == float32 else self.w.dtype
        mine = torch.from_dlpack(ours.view({2: np.int16, 4: np.int32}[ours.dtype.itemsize])).view(kind)
        theirs = peer.permute(0, 2, 3, 1)
        return float((mine.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def _torch() -> Any:
    import torch

    return torch


def _nchw(tensor: Any) -> Any:
    return tensor.permute(0, 3, 1, 2)


def _measure(
    layer: Layer, name: str, passes: list[str], bandwidth: float, cache: int, samples: int
) -> list[dict[str, Any]]:
    import cupy

    from minidl.bench.torch_calls import time_calls

    torch, precision = _torch(), PRECISIONS[name]
    sets = min(8, input_sets(layer.bytes(precision.dtype.itemsize), cache))
    arrays = _Arrays(layer, precision, sets)
    rows = []
    for which in passes:
        if which == "backward_data" and layer.channels == 3:
            continue  # no network asks for the gradient of its images
        ours, peer = arrays.ours(which), arrays.peer(which)
        error = arrays.error(ours[-1](), peer[-1]())
        if not error <= precision.bound:
            raise AssertionError(f"{layer.name} {which} {name}: {error:.1e} off the peer, more than {precision.bound}")
        budget = Budget(samples, seconds=math.inf)
        mine, theirs = DeviceTimer().replayed(ours, budget), time_calls(peer, budget, "replayed", "cuda")
        rows.append(
            {
                "case": layer.name, "pass": which, "dtype": name, "arm": "minidl", "ms": mine.ms, "spread": mine.spread,
                "floor_ms": floor_ms(layer, precision, bandwidth), "tflops": layer.flop / mine.ms * 1e-9,
                "count": layer.count, "error": error,
                "peers": {"cudnn": theirs.ms}, "peer_spread": theirs.spread,
            }
        )  # fmt: skip
        del ours, peer
        cupy.get_default_memory_pool().free_all_blocks()
        torch.cuda.empty_cache()
    return rows


def _lost(row: dict[str, Any]) -> float:
    """Milliseconds per training step by which the peer is ahead."""
    return row["count"] * (row["ms"] - row["peers"]["cudnn"])


def _cells(row: dict[str, Any]) -> list[str]:
    peer = row["peers"]["cudnn"]
    return [
        f"{row['case']} {row['pass']}", row["dtype"], f"{row['ms']:.3f}", f"{row['spread']:.1%}",
        f"{row['tflops']:.0f}", f"{row['floor_ms']:.3f}", f"{peer:.3f}", f"{peer / row['ms']:.2f}", str(row["count"]),
        f"{_lost(row):+.3f}",
    ]  # fmt: skip


def _totals(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Per network, precision and pass: the sums over all layers, weighted by count."""
    sums: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        total = sums.setdefault((row["case"].split()[0], row["dtype"], row["pass"]), [0.0, 0.0, 0.0])
        for i, ms in enumerate((row["ms"], row["floor_ms"], row["peers"]["cudnn"])):
            total[i] += row["count"] * ms
    return [
        [" ".join(key), f"{ms:.2f}", f"{floor:.2f}", f"{peer:.2f}", f"{peer / ms:.2f}"]
        for key, (ms, floor, peer) in sums.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--pass", nargs="+", dest="passes", choices=PASSES, default=list(PASSES))
    parser.add_argument("--samples", type=int, default=9, help="timed samples per measurement (default 9)")
    parser.add_argument("--json", metavar="PATH", help="write the result file here")
    options = parser.parse_args()
    torch = _torch()
    torch.backends.cudnn.benchmark = True
    machine, bandwidth = machine_record(), copy_bandwidth(cuda, DeviceTimer()) * 1e9
    rows = []
    for name in options.precision:
        torch.backends.cudnn.allow_tf32 = PRECISIONS[name].tf32
        for network in options.network:
            for layer in NETWORKS[network]():
                rows += _measure(layer, name, options.passes, bandwidth, machine["l2_bytes"], options.samples)
    rows.sort(key=_lost, reverse=True)
    columns = ["layer and pass", "type", "ms", "spread", "TFLOP/s", "floor ms", "cudnn ms", "speed", "count", "lost ms"]
    show("convolutions, worst first", columns, map(_cells, rows))
    columns = ["network, type, pass", "ms", "floor ms", "cudnn ms", "speed against cudnn"]
    show("all layers, weighted by count", columns, _totals(rows))
    if options.json:
        write(options.json, result("bench_conv", rows, machine))


if __name__ == "__main__":
    main()
