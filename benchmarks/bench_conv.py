"""Convolutions of ResNet-18, ResNet-50, VGG-16 and U-Net, of MobileNetV2 and EfficientNet-B0 (depthwise or the others),
grouped ones and fully connected layers: every distinct layer in each of its three passes, beside PyTorch.

    python benchmarks/bench_conv.py --precision bf16 tf32 --json out.json
    python benchmarks/bench_conv.py --device cpu --network resnet18 --precision fp32

On a GPU the peer is cuDNN: channels_last memory, cudnn.benchmark; of fully connected layers also cuBLAS. Our weight
gradients are float32, theirs of the operands' type: in 16 bits of fully connected layers, where writing them takes most
of the time, cuBLAS with a float32 result is the peer that counts. On the CPU it is oneDNN with as many threads, in
channels_last and in contiguous NCHW memory; the sides take turns, so that drift of the machine meets all. Every timed
output is compared with the peer's. First stands what loses the networks most time. A --batch is told in the names.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidl import backend, cuda, models
from minidl.cpu import _conv2d
from minidl.graph import Graph
from minidl.layers import Conv2d
from minidl.precision import bfloat16, float16, float32
from minidl.profile.device_ceilings import copy_bandwidth
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, DeviceTimer, Timing, input_sets

__all__ = ["NETWORKS", "PASSES", "PRECISIONS", "Arrays", "Layer", "checked", "floor_ms", "main", "passes_of", "row_of"]

PASSES = ("forward", "backward_data", "backward_weight")
SAME = "cublas to float32"  # where there is this peer, it alone does the same work
SAMPLE_MS = 20.0  # a sample on the CPU lasts so long at least


class Precision(NamedTuple):
    """``tflops``: dense arithmetic rate of an H200 (data sheet). ``bound``: error against the peer, of the largest."""

    dtype: np.dtype
    tf32: int
    tflops: float
    bound: float


PRECISIONS = {
    "bf16": Precision(bfloat16, 0, 989.0, 1e-2),
    "fp16": Precision(float16, 0, 989.0, 2e-3),
    "tf32": Precision(float32, 1, 494.0, 2e-3),
    "tf32x3": Precision(float32, 3, 494.0 / 3, 2e-5),
    "fp32": Precision(float32, 0, 67.0, 2e-5),
}


@dataclass(frozen=True)
class Layer:
    """A square convolution: images of size x size, ``count`` times in its network; padded by half of its kernel."""

    network: str
    batch: int
    size: int
    channels: int
    filters: int
    kernel: int
    stride: int
    count: int
    groups: int = 1

    @property
    def name(self) -> str:
        stride = f"/{self.stride}" if self.stride > 1 else ""
        groups = f" in {self.groups}" if self.groups > 1 else ""
        return f"{self.network} {self.kernel}x{self.kernel}{stride} {self.channels}-{self.filters}{groups} @{self.size}"

    @property
    def padding(self) -> int:
        return self.kernel // 2

    @property
    def out_size(self) -> int:
        return (self.size + 2 * self.padding - self.kernel) // self.stride + 1

    @property
    def flop(self) -> int:
        return 2 * self.batch * self.out_size**2 * self.filters * self.channels // self.groups * self.kernel**2

    def bytes(self, itemsize: int) -> int:
        """Of the images on both sides; of a fully connected layer the weights, too, which are most of them."""
        weights = self.channels * self.filters if self.connected else 0
        return itemsize * (self.batch * (self.size**2 * self.channels + self.out_size**2 * self.filters) + weights)

    @property
    def connected(self) -> bool:
        """A fully connected layer: images of one pixel."""
        return self.size == 1


def _resnet18(batch: int = 256) -> list[Layer]:
    layers = [Layer("ResNet-18", batch, 224, 3, 64, 7, 2, 1), Layer("ResNet-18", batch, 56, 64, 64, 3, 1, 4)]
    for width, size in ((128, 56), (256, 28), (512, 14)):
        layers.append(Layer("ResNet-18", batch, size, width // 2, width, 3, 2, 1))
        layers.append(Layer("ResNet-18", batch, size, width // 2, width, 1, 2, 1))
        layers.append(Layer("ResNet-18", batch, size // 2, width, width, 3, 1, 3))
    return layers


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
    return _merged([*layers, Layer("U-Net", batch, size, widths[0], 2, 1, 1, 1)])


def _inverted(label: str, build: Callable[[], Graph], depthwise: bool, batch: int = 128) -> list[Layer]:
    """The depthwise convolutions of a network, or all others."""
    graph, layers = build(), []
    for node in graph.nodes:
        if isinstance(node.layer, Conv2d) and (node.layer.groups > 1) == depthwise:
            size, _, channels = graph.nodes[node.inputs[0]].shape
            kernel, stride = node.layer.kernel_size[0], node.layer.stride[0]
            layers.append(Layer(label, batch, size, channels, node.shape[-1], kernel, stride, 1, node.layer.groups))
    return _merged(layers)


def _grouped(batch: int = 128) -> list[Layer]:
    """ResNeXt-50 32x4d and 32x8d's, AlexNet's, ShuffleNet's, and widths of groups that fill no vector."""
    layers, size = [], 56
    for width, blocks in ((128, 3), (256, 4), (512, 6), (1024, 3)):
        if width > 128:
            layers.append(Layer("ResNeXt", batch, size, width, width, 3, 2, 1, 32))
            size //= 2
        layers.append(Layer("ResNeXt", batch, size, width, width, 3, 1, blocks - (width > 128), 32))
    layers.append(Layer("ResNeXt", batch, 7, 2048, 2048, 3, 1, 2, 32))
    layers.append(Layer("AlexNet", batch, 27, 96, 256, 5, 1, 1, 2))
    layers.append(Layer("AlexNet", batch, 13, 384, 384, 3, 1, 1, 2))
    layers.append(Layer("ShuffleNet", batch, 28, 240, 240, 1, 1, 1, 3))
    layers += [Layer("odd", batch, 28, channels, channels, 3, 1, 1, 32) for channels in (64, 192, 320, 384)]
    return layers


def _connected(batch: int | None = None) -> list[Layer]:
    """The fully connected layers of VGG-16 and ResNet-50."""
    sizes = [("VGG-16", 64, 25088, 4096), ("VGG-16", 64, 4096, 4096), ("VGG-16", 64, 4096, 1000)]
    sizes += [("ResNet-50", 256, 2048, 1000), ("ResNet-50", 32, 2048, 1000)]
    return [Layer(f"Linear of {name}", batch or images, 1, c, k, 1, 1, 1) for name, images, c, k in sizes]


def _merged(layers: list[Layer]) -> list[Layer]:
    counts: dict[Layer, int] = {}
    for layer in layers:
        key = replace(layer, count=0)
        counts[key] = counts.get(key, 0) + layer.count
    return [replace(key, count=count) for key, count in counts.items()]


NETWORKS: dict[str, Callable[..., list[Layer]]] = {
    "resnet18": _resnet18, "resnet50": _resnet50, "vgg16": _vgg16, "unet": _unet,
    "mobilenet_v2": partial(_inverted, "MobileNetV2", models.mobilenet_v2, True),
    "mobilenet_v2_1x1": partial(_inverted, "MobileNetV2", models.mobilenet_v2, False),
    "efficientnet_b0": partial(_inverted, "EfficientNet-B0", models.efficientnet_b0, True),
    "grouped": _grouped, "connected": _connected,
}  # fmt: skip


def floor_ms(layer: Layer, precision: Precision, bandwidth: float) -> float:
    """Below this no pass can be: each image array moved once, each product made once at the data sheet's rate."""
    return max(layer.bytes(precision.dtype.itemsize) / bandwidth, layer.flop / (precision.tflops * 1e12)) * 1e3


class Arrays:
    """The arrays of one layer, as tensors of the peer and, of the same memory, as our arrays."""

    def __init__(self, layer: Layer, precision: Precision, sets: int, device: str) -> None:
        import torch

        self.layer, self.precision, self.ops = layer, precision, backend.get_ops(device)
        kind = {bfloat16: torch.bfloat16, float16: torch.float16, float32: torch.float32}[precision.dtype]

        def draw(*shape: int) -> Any:
            return torch.randn(shape, device=device).to(kind)

        n, h, p, c, k, r = layer.batch, layer.size, layer.out_size, layer.channels, layer.filters, layer.kernel
        self.x, self.dy = [draw(n, h, h, c) for _ in range(sets)], [draw(n, p, p, k) for _ in range(sets)]
        filters = [draw(k, r, r, c // layer.groups) for _ in range(sets if layer.connected else 1)]
        self.w, self.ws = filters[0], [filters[i % len(filters)] for i in range(sets)]

    def array(self, tensor: Any) -> Any:
        """Our array of a tensor's memory."""
        dtype = self.precision.dtype
        bits = tensor.view({2: _torch().int16, 4: _torch().int32}[dtype.itemsize])
        if self.ops.name == "cpu":
            return bits.numpy().view(dtype)
        import cupy

        return cupy.from_dlpack(bits).view(dtype)

    def ours(self, which: str) -> list[Callable[[], Any]]:
        layer, ops = self.layer, self.ops
        stride, padding = (layer.stride,) * 2, (layer.padding,) * 2
        options = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": layer.groups}
        options["tf32"] = self.precision.tf32
        sets = [tuple(map(self.array, arrays)) for arrays in zip(self.x, self.dy, self.ws, strict=True)]
        if which == "forward":
            return [partial(ops.conv2d, x, w, **options) for x, _, w in sets]
        if which == "backward_data":
            return [partial(ops.conv2d_backward_data, dy, w, x.shape, **options) for x, dy, w in sets]

        def weight(dy: Any, x: Any, out: Any) -> Any:
            ops.conv2d_backward_weight(dy, x, **options, out=out)
            return out

        return [partial(weight, dy, x, ops.empty(w.shape, np.float32)) for x, dy, w in sets]

    def peer(self, which: str, contiguous: bool = False) -> list[Callable[[], Any]]:
        """In channels_last memory, or in contiguous NCHW."""
        torch, layer = _torch(), self.layer

        def placed(tensor: Any) -> Any:
            return _nchw(tensor).contiguous() if contiguous else _nchw(tensor)

        xs, dys, ws = ([placed(one) for one in some] for some in (self.x, self.dy, self.ws))
        stride, padding = [layer.stride] * 2, [layer.padding] * 2
        if which == "forward":
            conv2d = torch.nn.functional.conv2d
            return [partial(conv2d, x, w, None, stride, padding, 1, layer.groups) for x, w in zip(xs, ws, strict=True)]
        mask = [which == "backward_data", which == "backward_weight", False]
        wanted = mask.index(True)

        def backward(dy: Any, x: Any, w: Any) -> Any:
            arguments = (stride, padding, [1, 1], False, [0, 0], layer.groups, mask)
            return torch.ops.aten.convolution_backward(dy, x, w, None, *arguments)[wanted]

        return [partial(backward, *arrays) for arrays in zip(dys, xs, ws, strict=True)]

    def products(self, which: str, **options: Any) -> list[Callable[[], Any]]:
        """The peer's matrix products of a fully connected layer. ``options``: of torch.mm."""
        mm, sets = partial(_torch().mm, **options), [
            tuple(one.flatten(1) for one in arrays) for arrays in zip(self.x, self.dy, self.ws, strict=True)
        ]  # fmt: skip
        if which == "forward":
            return [partial(mm, x, w.t()) for x, _, w in sets]
        if which == "backward_data":
            return [partial(mm, dy, w) for _, dy, w in sets]
        return [partial(mm, dy.t(), x) for x, dy, _ in sets]

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
    layer: Layer, name: str, wanted: list[str], bandwidth: float, cache: int, samples: int
) -> list[dict[str, Any]]:
    """On the GPU."""
    import cupy

    from minidl.bench.torch_calls import time_calls

    precision = PRECISIONS[name]
    sets = min(40 if layer.connected else 8, input_sets(layer.bytes(precision.dtype.itemsize), cache))
    arrays = Arrays(layer, precision, sets, "cuda")
    rows = []
    for which in passes_of(layer, wanted):
        ours, peer = arrays.ours(which), arrays.peer(which)
        error = checked(arrays, name, which, ours[-1](), peer[-1]())
        budget = Budget(samples, seconds=math.inf)
        mine, peers = DeviceTimer().replayed(ours, budget), {"cudnn": peer}
        if layer.connected:
            peers["cublas"] = arrays.products(which)
            if which == "backward_weight" and precision.dtype != float32:
                peers[SAME] = arrays.products(which, out_dtype=_torch().float32)
        theirs = {name: time_calls(calls, budget, "replayed", "cuda") for name, calls in peers.items()}
        floor = floor_ms(layer, precision, bandwidth)
        rows.append(row_of(layer, name, which, error, mine, theirs) | {"floor_ms": floor})
        del ours, peer, peers
        cupy.get_default_memory_pool().free_all_blocks()
        _torch().cuda.empty_cache()
    return rows


def _measure_on_cpu(layer: Layer, name: str, wanted: list[str], samples: int) -> list[dict[str, Any]]:
    arrays, rows = Arrays(layer, PRECISIONS[name], 1, "cpu"), []
    for which in passes_of(layer, wanted):
        (ours,), (last,), (contiguous,) = arrays.ours(which), arrays.peer(which), arrays.peer(which, contiguous=True)
        error = checked(arrays, name, which, ours(), last())
        calls = {"minidl": ours, "onednn-channels-last": last, "onednn-contiguous": contiguous}
        times = _by_turns(calls, samples)
        row = row_of(layer, name, which, error, times.pop("minidl"), times)
        rows.append(row | _work_space(ours))
    return rows


def _by_turns(calls: dict[str, Callable[[], Any]], samples: int) -> dict[str, Timing]:
    """Milliseconds per call, the calls sampled in turn."""

    def elapsed(call: Callable[[], Any], repeats: int) -> float:
        started = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - started) / repeats * 1e3

    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(samples):
        for name, call in calls.items():
            once = elapsed(call, 1)  # not counted: threads of the side before may still be spinning
            taken[name].append(elapsed(call, max(1, math.ceil(SAMPLE_MS / once))))
    return {name: Timing(tuple(ms)) for name, ms in taken.items()}


def _work_space(call: Callable[[], Any]) -> dict[str, int]:
    """Bytes of memory that our call takes beside its result: by thread, and shared (packed filters, partial sums)."""
    module, taken = sys.modules["minidl.cpu.conv2d"], []

    def spy(threads: int, floats: int) -> Any:
        work = original(threads, floats)
        taken.append(work)
        return work

    original = module._work
    with mock.patch.object(module, "_work", spy):
        call()
    *shared, own = taken or [np.empty((1, 0))]
    return {"thread_work_bytes": own.nbytes // own.shape[0], "shared_work_bytes": sum(work.nbytes for work in shared)}


def passes_of(layer: Layer, wanted: list[str]) -> list[str]:
    """No network asks for the gradient of its images."""
    return [which for which in wanted if which != "backward_data" or layer.channels > 3]


def checked(arrays: Arrays, name: str, which: str, ours: Any, peer: Any) -> float:
    """The error against the peer, refused when it is more than a rounding error."""
    error, bound = arrays.error(ours, peer), PRECISIONS[name].bound
    if not error <= bound:
        raise AssertionError(f"{arrays.layer.name} {which} {name}: {error:.1e} off the peer, more than {bound}")
    return error


def row_of(layer: Layer, name: str, which: str, error: float, ours: Timing, peers: dict[str, Timing]) -> dict[str, Any]:
    peers_ms, beside = {peer: timing.ms for peer, timing in peers.items()}, {"beside": SAME} if SAME in peers else {}
    best = peers[beside.get("beside", min(peers_ms, key=peers_ms.__getitem__))]
    return beside | {
        "case": layer.name, "pass": which, "dtype": name, "arm": "minidl", "ms": ours.ms, "spread": ours.spread,
        "min_ms": ours.min_ms, "floor_ms": None, "tflops": layer.flop / ours.ms * 1e-9,
        "count": layer.count, "batch": layer.batch,
        "error": error, "peers": peers_ms, "peer_spread": best.spread, "peer_min_ms": best.min_ms,
    }  # fmt: skip


def _best(row: dict[str, Any]) -> float:
    """Milliseconds of the fastest peer, or of the one that does the same work."""
    return row["peers"][row["beside"]] if "beside" in row else min(row["peers"].values())


def _lost(row: dict[str, Any]) -> float:
    """Milliseconds per training step by which the best peer is ahead."""
    return row["count"] * (row["ms"] - _best(row))


def _cells(row: dict[str, Any], names: list[str]) -> list[str]:
    peers = [f"{row['peers'][name]:.3f}" if name in row["peers"] else "" for name in names]
    if row["floor_ms"] is None:
        figures = [f"{row['tflops'] * 1e3:.0f} G", f"{row['thread_work_bytes'] / 2**20:.2f}"]
        figures.append(f"{row['shared_work_bytes'] / 2**20:.2f}")
    else:
        figures = [f"{row['tflops']:.0f} T", f"{row['floor_ms']:.3f}"]
    return [
        f"{row['case']} {row['pass']}", row["dtype"], f"{row['ms']:.3f}", f"{row['spread']:.1%}", *figures, *peers,
        f"{row['peer_spread']:.1%}", f"{_best(row) / row['ms']:.2f}", f"{row['peer_min_ms'] / row['min_ms']:.2f}",
        str(row["count"]), f"{_lost(row):+.3f}",
    ]  # fmt: skip


def _totals(rows: list[dict[str, Any]]) -> list[list[str]]:
    """Per network, precision and pass: the sums over all layers, weighted by count."""
    sums: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        total = sums.setdefault((row["case"].split()[0], row["dtype"], row["pass"]), [0.0, 0.0])
        for i, ms in enumerate((row["ms"], _best(row))):
            total[i] += row["count"] * ms
    return [[" ".join(key), f"{ms:.2f}", f"{peer:.2f}", f"{peer / ms:.2f}"] for key, (ms, peer) in sums.items()]


def _show(rows: list[dict[str, Any]], device: str) -> None:
    rows.sort(key=_lost, reverse=True)
    middle = ["work MB/thread", "shared MB"] if device == "cpu" else ["floor ms"]
    names = list(dict.fromkeys(name for row in rows for name in row["peers"]))
    columns = ["layer and pass", "type", "ms", "spread", "FLOP/s", *middle, *(f"{name} ms" for name in names)]
    columns += ["its spread", "speed", "of minima", "count", "lost ms"]
    show("convolutions, worst first", columns, [_cells(row, names) for row in rows])
    columns = ["network, type, pass", "ms", "best peers ms", "speed against the best peers"]
    show("all layers, weighted by count", columns, _totals(rows))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, help="default: bf16, on the CPU fp32")
    parser.add_argument("--network", nargs="+", choices=NETWORKS, help="default: resnet50 vgg16 unet; CPU: resnet18")
    parser.add_argument("--pass", nargs="+", dest="passes", choices=PASSES, default=list(PASSES))
    parser.add_argument("--batch", type=int, help="images (default: of a training step on a GPU; on the CPU 8)")
    parser.add_argument("--samples", type=int, default=9, help="timed samples per measurement (default 9)")
    parser.add_argument("--json", metavar="PATH", help="write the result file here")
    a = parser.parse_args()
    on_cpu = a.device == "cpu"
    a.precision = a.precision or (["fp32"] if on_cpu else ["bf16"])
    a.network = a.network or (["resnet18"] if on_cpu else ["resnet50", "vgg16", "unet"])
    if on_cpu and not {"tf32", "tf32x3"}.isdisjoint(a.precision):
        parser.error("TF32 exists on the GPU only")
    return a


def main() -> None:
    a = _arguments()
    torch, machine, rows, more = _torch(), machine_record(), [], {}
    if a.device == "cpu":
        more["threads"] = _conv2d.max_threads()
        torch.set_num_threads(more["threads"])
    else:
        torch.backends.cudnn.benchmark = True
        bandwidth = copy_bandwidth(cuda, DeviceTimer()) * 1e9
    batch = a.batch or (8 if a.device == "cpu" else None)
    layers = [layer for network in a.network for layer in NETWORKS[network](*([batch] if batch else []))]
    if a.batch:
        layers = [replace(layer, network=f"{layer.network}/b{batch}") for layer in layers]
    for name in a.precision:
        for peer in (torch.backends.cudnn, torch.backends.cuda.matmul):
            peer.allow_tf32 = PRECISIONS[name].tf32 == 1  # the peer of three products is float32
        for layer in sorted(layers, key=lambda layer: layer.bytes(1)):
            started = time.perf_counter()
            if a.device == "cpu":
                rows += _measure_on_cpu(layer, name, a.passes, a.samples)
            else:
                rows += _measure(layer, name, a.passes, bandwidth, machine["l2_bytes"], a.samples)
            print(f"{layer.name} {name}: {time.perf_counter() - started:.1f} s", file=sys.stderr, flush=True)
            if a.json:  # what there is, in case that the rest takes too long
                write(a.json, result("bench_conv", sorted(rows, key=_lost, reverse=True), machine, **more))
    _show(rows, a.device)


if __name__ == "__main__":
    main()
