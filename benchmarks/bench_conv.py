"""Convolutions of ResNet-18, ResNet-50, VGG-16 and U-Net, of MobileNetV2 and EfficientNet-B0 (depthwise or the others),
grouped ones and fully connected layers: every distinct layer in each of its three passes, beside PyTorch.

    python benchmarks/bench_conv.py --precision bf16 tf32 --json out.json
    python benchmarks/bench_conv.py --device cpu --network resnet18 --precision fp32

On a GPU the peer is cuDNN: channels_last memory, cudnn.benchmark; of fully connected layers also cuBLAS. Our weight
gradients are float32, theirs of the operands' type: in 16 bits of fully connected layers, where writing them takes most
of the time, cuBLAS with a float32 result is the peer that counts. On the CPU it is oneDNN with as many threads, in
channels_last and in contiguous NCHW memory; the sides take turns, so that drift of the machine meets all. Of every
timed output a part is held against float64, the peer's beside it. First stands what loses the networks most time. A
--batch is told in the names.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.conv_layers import NETWORKS, Layer
from benchmarks.device import clean
from minidl import backend, cuda
from minidl.cpu import _conv2d
from minidl.cuda import ahead
from minidl.precision import bfloat16, float16, float32
from minidl.profile.cost import PASSES
from minidl.profile.device_ceilings import copy_bandwidth
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, DeviceTimer, HostTimer, Timing, input_sets
from minidl.torch_bridge import borrow, lend

SAME = "cublas to float32"  # where there is this peer, it alone does the same work
SAMPLE_MS = 20.0  # a sample on the CPU lasts so long at least
CHECKED = 10**10  # FLOP in float64 that check an output
SUMS_BOUND = 1e-4  # of float32 sums of 16-bit products: tensor cores cut off in each of up to thousands of steps


class Precision(NamedTuple):
    """``tflops``: dense arithmetic rate of an H200 (data sheet). ``bound``: error of what is written in this type,
    against float64, of the largest value.
    """

    dtype: np.dtype
    tf32: int
    tflops: float
    bound: float


PRECISIONS = {
    "bf16": Precision(bfloat16, 0, 989.0, 5e-3),
    "fp16": Precision(float16, 0, 989.0, 6e-4),
    "tf32": Precision(float32, 1, 494.0, 2e-3),
    "tf32x3": Precision(float32, 3, 494.0 / 3, 2e-5),
    "fp32": Precision(float32, 0, 67.0, 2e-5),
}


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

        x, dy, w = layer.shapes
        self.x, self.dy = [draw(*x) for _ in range(sets)], [draw(*dy) for _ in range(sets)]
        filters = [draw(*w) for _ in range(sets if layer.connected else 1)]
        self.w, self.ws = filters[0], [filters[i % len(filters)] for i in range(sets)]

    def array(self, tensor: Any) -> Any:
        """Our array of a tensor's memory."""
        return borrow(_torch(), self.ops, tensor)

    def ours(self, which: str) -> list[Callable[[], Any]]:
        sets = [tuple(map(self.array, arrays)) for arrays in zip(self.x, self.dy, self.ws, strict=True)]
        return [_call(self.ops, self.layer, self.precision, which, *arrays) for arrays in sets]

    def peer(self, which: str, contiguous: bool = False) -> list[Callable[[], Any]]:
        """In channels_last memory, or in contiguous NCHW."""

        def placed(tensor: Any) -> Any:
            return _nchw(tensor).contiguous() if contiguous else _nchw(tensor)

        sets = [tuple(map(placed, arrays)) for arrays in zip(self.x, self.dy, self.ws, strict=True)]
        return [partial(self._by_peer, which, *arrays) for arrays in sets]

    def _by_peer(self, which: str, x: Any, dy: Any, w: Any) -> Any:
        stride, padding, groups = [self.layer.stride] * 2, [self.layer.padding] * 2, self.layer.groups
        if which == "forward":
            return _torch().nn.functional.conv2d(x, w, None, stride, padding, 1, groups)
        mask = [which == "backward_data", which == "backward_weight", False]
        arguments = (stride, padding, [1, 1], False, [0, 0], groups, mask)
        return _torch().ops.aten.convolution_backward(dy, x, w, None, *arguments)[mask.index(True)]

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

    def errors(self, which: str, ours: Any, peer: Any) -> tuple[float, float]:
        """How far ours and the peer's result for the last operands are from that in float64, at most, relative to its
        largest value; not finite where they are not. Of images, or of a weight gradient's filters, some are computed.
        """
        torch, layer, weight = _torch(), self.layer, which == "backward_weight"
        every, all_of = slice(None, None, max(1, layer.flop // CHECKED)), slice(None)
        images, filters = (all_of, every if layer.groups == 1 else all_of) if weight else (every, all_of)
        operands = self.x[-1][images], self.dy[-1][images][..., filters], self.ws[-1][filters]
        cudnn, tried = torch.backends.cudnn, torch.backends.cudnn.benchmark
        cudnn.benchmark = False  # trying kernels out for one call takes longer than the call
        expected = self._by_peer(which, *(_nchw(one).double() for one in operands)).permute(0, 2, 3, 1)
        cudnn.benchmark, largest = tried, expected.abs().max()
        part = filters if weight else images
        found = (one[part].double() for one in (lend(torch, ours), peer.permute(0, 2, 3, 1)))
        return tuple(float((one - expected).abs().max() / largest) for one in found)


def _call(ops: Any, layer: Layer, precision: Precision, which: str, x: Any, dy: Any, w: Any) -> Callable[[], Any]:
    """Our call for a pass."""
    options = {"stride": (layer.stride,) * 2, "padding": (layer.padding,) * 2, "dilation": (1, 1)}
    options |= {"groups": layer.groups, "tf32": precision.tf32}
    if which == "forward":
        return partial(ops.conv2d, x, w, **options)
    if which == "backward_data":
        return partial(ops.conv2d_backward_data, dy, w, x.shape, **options)
    out = ops.empty(w.shape, np.float32)

    def weight() -> Any:
        ops.conv2d_backward_weight(dy, x, **options, out=out)
        return out

    return weight


def compile_ahead(layers: list[Layer], names: list[str], wanted: list[str]) -> None:
    """All of our kernels that will run on a GPU, by several processes."""

    def walk() -> None:
        for layer, name in itertools.product(layers, names):
            arrays = [cuda.empty(shape, PRECISIONS[name].dtype) for shape in layer.shapes]
            for which in passes_of(layer, wanted):
                _call(cuda, layer, PRECISIONS[name], which, *arrays)()

    ahead.compile_ahead(walk)


def _torch() -> Any:
    import torch

    return torch


def _nchw(tensor: Any) -> Any:
    return tensor.permute(0, 3, 1, 2)


def _measure(
    layer: Layer, name: str, wanted: list[str], bandwidth: float, cache: int, samples: int
) -> list[dict[str, Any]]:
    """On the GPU."""
    from minidl.bench.torch_calls import time_calls

    precision = PRECISIONS[name]
    sets = min(40 if layer.connected else 8, input_sets(layer.bytes(precision.dtype.itemsize), cache))
    arrays = Arrays(layer, precision, sets, "cuda")
    rows = []
    for which in passes_of(layer, wanted):
        ours, peer = arrays.ours(which), arrays.peer(which)
        errors = checked(arrays, name, which, ours[-1](), peer[-1]())
        budget = Budget(samples, seconds=math.inf)
        mine, peers = DeviceTimer().replayed(ours, budget), {"cudnn": peer}
        if layer.connected:
            peers["cublas"] = arrays.products(which)
            if which == "backward_weight" and precision.dtype != float32:
                peers[SAME] = arrays.products(which, out_dtype=_torch().float32)
        theirs = {name: time_calls(calls, budget, "replayed", "cuda") for name, calls in peers.items()}
        floor = floor_ms(layer, precision, bandwidth)
        rows.append(row_of(layer, name, which, errors, mine, theirs) | {"floor_ms": floor})
        del ours, peer, peers
        clean("cuda")
    return rows


def _measure_on_cpu(layer: Layer, name: str, wanted: list[str], samples: int) -> list[dict[str, Any]]:
    arrays, rows = Arrays(layer, PRECISIONS[name], 1, "cpu"), []
    for which in passes_of(layer, wanted):
        (ours,), (last,), (contiguous,) = arrays.ours(which), arrays.peer(which), arrays.peer(which, contiguous=True)
        errors = checked(arrays, name, which, ours(), last())
        calls = {"minidl": ours, "onednn-channels-last": last, "onednn-contiguous": contiguous}
        budget = Budget(samples, seconds=math.inf, sample_ms=SAMPLE_MS)
        times = dict(zip(calls, HostTimer().in_turns([[call] for call in calls.values()], budget), strict=True))
        row = row_of(layer, name, which, errors, times.pop("minidl"), times)
        rows.append(row | _work_space(ours))
    return rows


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


def checked(arrays: Arrays, name: str, which: str, ours: Any, peer: Any) -> tuple[float, float]:
    """The errors of both, ours refused when it is more than a rounding error of its type."""
    precision = PRECISIONS[name]
    errors, bound = arrays.errors(which, ours, peer), precision.bound if ours.dtype == precision.dtype else SUMS_BOUND
    if not errors[0] <= bound:
        raise AssertionError(f"{arrays.layer.name} {which} {name}: {errors[0]:.1e} off float64, more than {bound}")
    return errors


def row_of(
    layer: Layer, name: str, which: str, errors: tuple[float, float], ours: Timing, peers: dict[str, Timing]
) -> dict[str, Any]:
    peers_ms, beside = {peer: timing.ms for peer, timing in peers.items()}, {"beside": SAME} if SAME in peers else {}
    best = peers[beside.get("beside", min(peers_ms, key=peers_ms.__getitem__))]
    return beside | {
        "case": layer.name, "pass": which, "dtype": name, "arm": "minidl", "ms": ours.ms, "spread": ours.spread,
        "min_ms": ours.min_ms, "floor_ms": None, "tflops": layer.flop / ours.ms * 1e-9,
        "count": layer.count, "batch": layer.batch, "error": errors[0], "peer_error": errors[1],
        "peers": peers_ms, "peer_spread": best.spread, "peer_min_ms": best.min_ms,
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
        str(row["count"]), f"{_lost(row):+.3f}", f"{row['error']:.1e}", f"{row['peer_error']:.1e}",
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
    columns += ["its spread", "speed", "of minima", "count", "lost ms", "error", "its error"]
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
    if a.device == "cuda":
        compile_ahead(layers, a.precision, a.passes)
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
