"""The part of bench_fusion that times what convolutions do for the batch norms around them, against doing it apart.

Forward, a convolution takes the statistics of what it writes; its data gradient is masked for the ReLU below and
summed for the batch norm below that (at a block's input with the gradient so far added, and the mask of the sum);
output and weight gradient are also those of an input that is normalised as it is read, the prologue, and the output
that of one normalised in packed 16-bit arithmetic; and one kernel makes both gradients of what the input gradient of
a batch norm above is made of, `lazy`, masked and summed for the batch norm below as well (at a block's input with the
gradient so far added); `join` is a residual sum that
the convolution makes, and writes, as it reads it, with the statistics of its own output. `apart` is the same in passes
of their own, `plain` the convolution alone; `cost` is the kernel with over the kernel without; `floor` is the kernel's
with: all arrays moved once at the speed of a copy, or its products made at the data sheet's rate; `bound` what the cost
cannot be below where that is more than the kernel without takes; `plan` whether the network's plan `auto` does this at
the layer; `whole` also adds up what the kernel leaves. What is farthest over its limit comes first. The peer is
PyTorch's convolution with its own passes; inputs rotate past the cache on both sides.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import bench_conv
import numpy as np
from conv_layers import NETWORKS, Layer

from benchmarks.device import clean
from minidl import cuda as ops
from minidl import fusion
from minidl.bench.setup import Setup
from minidl.cuda import ahead
from minidl.cuda.convolution import conv2d
from minidl.cuda.device import current_device
from minidl.cuda.norm.signs import signs_shape
from minidl.fusion.apply import machine_of
from minidl.fusion.cost import heuristic
from minidl.fusion.plans import MODES, modes_of
from minidl.precision import bfloat16, float32, precision
from minidl.profile.device_ceilings import copy_bandwidth
from minidl.profile.timing import Budget, DeviceTimer, input_sets

Row = dict[str, Any]


class Arrays(bench_conv.Arrays):
    """Those of a layer, with what lies around it."""

    def __init__(self, layer: Layer, sets: int) -> None:
        import torch

        super().__init__(layer, bench_conv.PRECISIONS["bf16"], sets, "cuda")
        self.joined = _joined(layer)
        self.inputs = [torch.randn_like(x) for x in self.x]  # of the batch norm below
        self.outputs = [x.relu() for x in self.x]
        self.vector = torch.rand(layer.channels, device="cuda") + 0.5
        self.moments = ops.from_host(np.stack([np.zeros(layer.channels), np.ones(layer.channels)]).astype(np.float32))
        self.affine = ops.from_host(np.ones(layer.channels, np.float32)), None
        self.norm = self.moments, self.affine[0], ops.from_host(np.zeros(layer.channels, np.float32))
        above = np.stack([np.zeros(layer.filters), np.ones(layer.filters)])  # of the batch norm there
        self.above = [ops.from_host(a) for a in (above.astype(np.float32), np.ones(layer.filters, np.float32), above)]
        self.above.append(ops.from_host(np.array([float(self.dy[0].numel() // layer.filters)])))
        zeros = self.array(torch.zeros_like(self.x[0]))
        self.signs = [ops.batch_norm_join(self.array(x), *self.norm, zeros)[1] for x in self.x]
        options = {"stride": (layer.stride,) * 2, "padding": (layer.padding,) * 2, "dilation": (1, 1), "groups": 1}
        self.options = options

    def added_bytes(self, kind: str) -> int:
        """Of the arrays that a convolution reads, or writes, for what it does besides."""
        if kind == "lazy":
            return self.x[0].nbytes * (1 if _lazily(self.layer) == NORM else 2) + self.dy[0].nbytes
        if kind == "join":
            return 2 * self.x[0].nbytes + self.signs[0].nbytes
        return self.x[0].nbytes + (self.signs[0].nbytes if self.joined else 0) if kind == "gradients" else 0

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

        def call(dy: Any, raw: Any, y: Any, add: Any, signs: Any) -> Any:
            add = add if self.joined else None
            if arm in ("whole", "kernel"):
                output = {"y": y, "signs": signs} if self.joined else {}
                found = ops.conv2d_backward_data_masked(
                    dy, w, raw, self.moments, *self.affine, **output, add=add, **self.options
                )
                return found if arm == "kernel" else (found, ops.batch_norm_backward_sums(found[1], self.moments))
            g = ops.conv2d_backward_data(dy, w, raw.shape, add=add, **self.options)
            if arm == "plain":
                return g
            if self.joined:
                return g, ops.batch_norm_join_backward_stats(g, signs, raw, self.moments)
            return g, ops.batch_norm_activate_backward_stats(g, raw, self.moments, *self.affine)

        groups = zip(self.dy, self.inputs, self.outputs, self.x, strict=True)
        arrays = [tuple(map(self.array, group)) for group in groups]
        return [partial(call, *group, signs) for group, signs in zip(arrays, self.signs, strict=True)]

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

    def prologue(self, arm: str, packed: bool = False) -> list[Callable[[], Any]]:
        w = self.array(self.w)

        def call(x: Any) -> Any:
            if arm == "apart":
                return ops.conv2d(ops.batch_norm_apply(x, *self.norm, relu=True), w, **self.options)
            return ops.conv2d(x, w, **self.options, norm=None if arm == "plain" else self.norm, packed=packed)

        return [partial(call, self.array(x)) for x in self.x]

    def prologue_peer(self) -> list[Callable[[], Any]]:
        import torch

        torch_conv = torch.nn.functional.conv2d
        w, where = bench_conv._nchw(self.w), ([self.layer.stride] * 2, [self.layer.padding] * 2)
        return [lambda x=x: torch_conv(self._normalised(x), w, None, *where) for x in self.x]

    def packed(self, arm: str) -> list[Callable[[], Any]]:
        return self.prologue(arm, True)

    packed_peer = prologue_peer

    def prologue_weight(self, arm: str) -> list[Callable[[], Any]]:
        def call(dy: Any, x: Any, out: Any) -> Any:
            norm = self.norm if arm in ("kernel", "whole") else None
            x = ops.batch_norm_apply(x, *self.norm, relu=True) if arm == "apart" else x
            ops.conv2d_backward_weight(dy, x, **self.options, out=out, norm=norm)
            return out

        pairs = zip(self.dy, self.x, strict=True)
        return [partial(call, *map(self.array, pair), ops.empty(tuple(self.w.shape), np.float32)) for pair in pairs]

    def prologue_weight_peer(self) -> list[Callable[[], Any]]:
        import torch

        layer, w, nchw = self.layer, bench_conv._nchw(self.w), bench_conv._nchw
        how = [layer.stride] * 2, [layer.padding] * 2, [1, 1], False, [0, 0], 1, [False, True, False]
        backward = torch.ops.aten.convolution_backward
        pairs = zip(self.dy, self.x, strict=True)
        return [lambda dy=dy, x=x: backward(nchw(dy), self._normalised(x), w, None, *how)[1] for dy, x in pairs]

    def lazy(self, arm: str) -> list[Callable[[], Any]]:
        w, how, made = self.array(self.w), self.options, _lazily(self.layer) == NORM  # whether z is made of raw

        def call(dz: Any, y: Any, raw: Any, z: Any, add: Any, signs: Any, out: Any) -> Any:
            add = add if self.joined else None
            if arm == "plain":
                ops.conv2d_backward_weight(dz, z, **how, out=out)
                return ops.conv2d_backward_data(dz, w, z.shape, **how, add=add), out
            if arm == "apart":
                dy = ops.batch_norm_backward_apply(dz, y, *self.above)
                ops.conv2d_backward_weight(dy, raw if made else z, **how, out=out, norm=self.norm if made else None)
                output = {} if made else {"y": z, "signs": signs}
                dx, parts = ops.conv2d_backward_data_masked(dy, w, raw, *self.norm, **output, **how, add=add)
            else:
                x, below = (raw, {"norm": self.norm}) if made else (z, {"below": (raw, self.moments)})
                dx, parts = ops.conv2d_backward_both(dz, y, *self.above, w, x, **below, **how, add=add, out=out)
            return dx, out, parts if arm == "kernel" else ops.batch_norm_backward_sums(parts, self.moments)

        groups = zip(self.dy, self._above(), self.inputs, self.outputs, self.x, strict=True)
        arrays = zip([tuple(map(self.array, group)) for group in groups], self.signs, strict=True)
        return [partial(call, *group, signs, ops.empty(tuple(self.w.shape), np.float32)) for group, signs in arrays]

    def lazy_peer(self) -> list[Callable[[], Any]]:
        import torch

        layer, w, nchw = self.layer, bench_conv._nchw(self.w), bench_conv._nchw
        how = [layer.stride] * 2, [layer.padding] * 2, [1, 1], False, [0, 0], 1, [True, True, False]
        backward, vector = torch.ops.aten.convolution_backward, self.vector
        ones, zeros = (make(layer.filters, device="cuda") for make in (torch.ones, torch.zeros))
        count = torch.tensor([self.dy[0].numel() // layer.filters], dtype=torch.int32, device="cuda")

        def call(dz: Any, y: Any, raw: Any, z: Any, add: Any) -> Any:
            dy = torch.batch_norm_backward_elemt(dz, y, zeros, ones, ones, zeros, ones, count)
            g, dw, _ = backward(dy, z, w, None, *how)
            if self.joined:
                g = g + add
            g = torch.ops.aten.threshold_backward(g, z, 0)
            return g, dw, torch.batch_norm_backward_reduce(g, raw, vector, vector, vector, True, True, True)

        groups = zip(self.dy, self._above(), self.inputs, self.outputs, self.x, strict=True)
        return [partial(call, *map(nchw, group)) for group in groups]

    def join(self, arm: str) -> list[Callable[[], Any]]:
        w, how = self.array(self.w), self.options

        def call(raw: Any, other: Any, z: Any) -> Any:
            if arm == "plain":
                return ops.conv2d(z, w, **how)
            if arm == "apart":
                z, signs = ops.batch_norm_join(raw, *self.norm, other)
                return z, signs, *ops.conv2d_stats(z, w, **how)
            return ops.conv2d_join(raw, *self.norm, other, w, **how, statistics=True, finish=arm == "whole")

        groups = zip(self.inputs, self.x, self.outputs, strict=True)
        return [partial(call, *map(self.array, group)) for group in groups]

    def join_peer(self) -> list[Callable[[], Any]]:
        import torch

        vector, w, nchw = self.vector, bench_conv._nchw(self.w), bench_conv._nchw
        normalise, convolve = torch.nn.functional.batch_norm, torch.nn.functional.conv2d

        def call(raw: Any, other: Any) -> Any:
            z = normalise(raw, vector, vector, vector, vector, training=False).add_(other).relu_()
            y = convolve(z, w, None, self.layer.stride, self.layer.padding)
            return z, y, torch.batch_norm_stats(y, 1e-5)

        return [partial(call, nchw(raw), nchw(x)) for raw, x in zip(self.inputs, self.x, strict=True)]

    def _above(self) -> list[Any]:
        """Inputs of the batch norm above: of another set what has the size of their gradient."""
        return self.dy[1:] + self.dy[:1]

    def _normalised(self, x: Any) -> Any:
        import torch

        vector = self.vector
        y = torch.nn.functional.batch_norm(bench_conv._nchw(x), vector, vector, vector, vector, training=False)
        return y.relu_()


PASSES = {
    "forward": ("forward", "statistics"),
    "backward_data": ("backward_data", "gradients"),
    "prologue": ("forward", "prologue"),
    "packed": ("forward", "packed"),
    "prologue_weight": ("backward_weight", "prologue"),
    "lazy": ("backward", "lazy"),
    "join": ("forward", "join"),
}  # the part of `Arrays`, the pass and the arm of its rows
# Of what they should cost.
NORM = {"norm": True}
LIMITS = {"statistics": 0.08, "gradients": 0.08, "prologue": 0.15, "packed": 0.15, "lazy": 0.15, "join": 0.15}


def _joined(layer: Layer) -> bool:
    """Whether it reads a block's input."""
    return layer.kernel == 1 and layer.channels > layer.filters


def _has(layer: Layer, which: str) -> bool:
    """Whether there is a kernel for it."""
    if which == "lazy":
        return _lazily(layer) is not None
    if which != "join":
        return True
    shape, w, options = _sizes(layer)
    return ops.conv2d_makes_join(shape, w, **options)


def _lazily(layer: Layer) -> dict[str, Any] | None:
    """What a kernel for both gradients is given of what lies below, if there is one."""
    ways = ({} if _joined(layer) else NORM), {"below": 1, "add": _joined(layer)}
    return next((way for way in ways if way and _makes_both(layer, way)), None)


def _makes_both(layer: Layer, way: dict[str, Any]) -> bool:
    shape, w, options = _sizes(layer)
    return ops.conv2d_makes_both(shape, w, **options, **way)


def _sizes(layer: Layer) -> tuple[tuple[int, ...], Any, dict[str, Any]]:
    """Of the input, filters, and how they meet."""
    w = ops.empty((layer.filters, layer.kernel, layer.kernel, layer.channels), bfloat16)
    options = {"stride": (layer.stride,) * 2, "padding": (layer.padding,) * 2, "dilation": (1, 1), "groups": 1}
    return (layer.batch, layer.size, layer.size, layer.channels), w, options


def _planned(network: str, batch: int) -> set[tuple]:
    """(mode, channels, filters, kernel, stride, size) of the convolutions that do something on the way in `auto`'s
    plan."""
    graph = Setup(network, batch, "bf16", "cuda").graph()
    sites, found = fusion.find_sites(graph), set()
    ways = heuristic(graph, sites, precision("bf16"), machine_of(ops)).sites
    for site in sites:
        for mode in modes_of(ways[site.name]):
            conv = graph[getattr(site, MODES[mode].by)].layer if MODES[mode].by else None
            if hasattr(conv, "stride"):
                size = site.shape[0] * (conv.stride[0] if MODES[mode].by == "producer" else 1)
                found.add((mode, conv.in_channels, conv.out_channels, conv.kernel_size[0], conv.stride[0], size))
    return found


def _start(layer: Layer) -> None:
    """All arms of all passes, of arrays without values, for a dry run to see."""
    n, h, p, c, k, r = layer.batch, layer.size, layer.out_size, layer.channels, layer.filters, layer.kernel
    x, dy, w = (ops.empty(shape, bfloat16) for shape in ((n, h, h, c), (n, p, p, k), (k, r, r, c)))
    options = {"stride": (layer.stride,) * 2, "padding": (layer.padding,) * 2, "dilation": (1, 1), "groups": 1}
    moments, vector, out = (ops.empty(shape, float32) for shape in ((2, c), (c,), w.shape))
    norm = moments, vector, vector
    ops.conv2d_stats(x, w, **options)
    ops.batch_norm_stats(dy)
    z = ops.batch_norm_apply(x, *norm, relu=True)
    for given, packed in ((None, False), (norm, False), (norm, True)):
        ops.conv2d(x, w, **options, norm=given, packed=packed)
    for given in (None, norm):
        ops.conv2d_backward_weight(dy, x, **options, out=out, norm=given)
    ops.batch_norm_join(x, *norm, z)
    add, signs = (z, ops.empty(signs_shape(x.shape), np.uint8)) if _joined(layer) else (None, None)
    ops.conv2d_backward_data(dy, w, x.shape, add=add, **options)
    below = {} if signs is None else {"y": z, "signs": signs}
    _, parts = ops.conv2d_backward_data_masked(dy, w, x, moments, vector, **below, add=add, **options)
    ops.batch_norm_backward_sums(parts, moments)
    if signs is None:
        ops.batch_norm_activate_backward_stats(x, x, moments, vector, None)
    else:
        ops.batch_norm_join_backward_stats(x, signs, x, moments)
    if _has(layer, "lazy"):
        kinds = ((2, k), float32), (k, float32), ((2, k), np.float64), (1, np.float64)
        above = [ops.empty(shape, kind) for shape, kind in kinds]
        ops.batch_norm_backward_apply(dy, dy, *above)
        below = {"norm": norm} if _lazily(layer) == NORM else {"below": (x, moments)}
        ops.conv2d_backward_both(dy, dy, *above, w, x, **below, **options, add=add, out=out)
        ops.conv2d_backward_data_masked(dy, w, x, *norm, **options)
    if _has(layer, "join"):
        ops.conv2d_join(x, *norm, x, w, **options, statistics=True)


def convolutions(a: argparse.Namespace) -> list[Row]:
    """A row for each pass of each convolution of ``a.network``."""
    layers = [layer for layer in NETWORKS[a.network](a.batch) if layer.channels > 4]
    ahead.compile_ahead(lambda: list(map(_start, layers)))
    bandwidth = copy_bandwidth(ops, DeviceTimer()) * 1e9
    planned, budget = _planned(a.network, a.batch), Budget(a.samples, seconds=math.inf)
    parts = [which for which, (_, kind) in PASSES.items() if kind in a.kinds]
    chosen = [(layer, [which for which in parts if _has(layer, which)]) for layer in layers]
    return [row for layer, parts in chosen if parts for row in _rows(layer, parts, budget, bandwidth, planned)]


def _rows(layer: Layer, parts: list[str], budget: Budget, bandwidth: float, planned: set[tuple]) -> list[Row]:
    from minidl.bench.torch_calls import time_calls

    arrays, rows = Arrays(layer, min(8, input_sets(layer.bytes(2), current_device().l2_bytes))), []
    bf16, peers = bench_conv.PRECISIONS["bf16"], {}
    for which in parts:
        (pass_, kind), times = PASSES[which], {}
        for arm in ("plain", "kernel", "whole", "apart"):
            with _left_as_they_are(arm == "kernel"):
                times[arm] = DeviceTimer().replayed(getattr(arrays, which)(arm), budget)
        name = f"{which}_peer"
        peer = getattr(Arrays, name)  # of two parts it is the same
        if peer not in peers:
            peers[peer] = time_calls(getattr(arrays, name)(), budget, "replayed", "cuda")
        added, addend = arrays.added_bytes(kind), arrays.x[0].nbytes * (kind in ("gradients", "lazy") and arrays.joined)
        place = layer.channels, layer.filters, layer.kernel, layer.stride, layer.size
        products = layer.flop * (2 if kind == "lazy" else 1)
        floor = max((layer.bytes(2) + added + addend) / bandwidth, products / (bf16.tflops * 1e12))
        rows.append({
            "case": layer.name, "pass": pass_, "dtype": "bf16",
            "arm": kind if kind != "gradients" else "gradients, join" if arrays.joined else "gradients, relu",
            "ms": times["whole"].ms, "spread": times["whole"].spread, "count": layer.count,
            "plain_ms": times["plain"].ms, "kernel_ms": times["kernel"].ms, "apart_ms": times["apart"].ms,
            "cost": times["kernel"].ms / times["plain"].ms - 1, "limit": LIMITS[kind],
            "planned": ({"packed": "prologue"}.get(kind, kind), *place) in planned,
            "floor_ms": 1e3 * floor, "peers": {"torch-eager": peers[peer].ms},
        })  # fmt: skip
        clean("cuda")
    return rows


def _left_as_they_are(wanted: bool) -> Any:
    """Within, what the patches leave is not merged."""
    return mock.patch.object(conv2d, "batch_norm_merge", lambda parts: parts) if wanted else nullcontext()
