"""The GPU side of bench_csb.py: sparse products beside dense cuBLAS and cuSPARSE, through PyTorch, in the same run.

Every time is that of a captured graph whose calls rotate among operands larger than the L2 cache. cuSPARSE multiplies
CSR with 32-bit indices, for the transposed product the CSR of a *stored transpose*, whose upkeep in training is not
counted. It gets the same operands; rows with features last also have its times with operands features first ("-first").
A row's ``error`` is the largest over |A||x|, from float64, at some outputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from benchmarks.device import clean
from minidl.precision import bfloat16, float32
from minidl.profile.timing import Budget, DeviceTimer, Timing, input_sets
from minidl.sparse import CSBMatrix
from minidl.torch_bridge import lend

# (M, K, N): those of benchmarks/results' first measurements, ResNet-50's 1x1 layers at batch 256, a Transformer's.
SHAPES = {
    "square": (2048, 2048, 4096),
    "large": (4096, 4096, 4096),
    "wide": (512, 2048, 12544),
    "deep": (256, 2304, 12544),
    "tall": (1024, 512, 50176),
    "resnet50/layer1.conv3": (256, 64, 200704),
    "resnet50/layer4.conv3": (2048, 512, 12544),
    "transformer/ffn1": (2048, 512, 8192),
    "transformer/ffn2": (512, 2048, 8192),
    "few/larger/64": (16384, 16384, 64),
    "few/larger/32": (16384, 16384, 32),
    "few/larger/16": (16384, 16384, 16),
    "few/64": (8192, 8192, 64),
    "few/32": (8192, 8192, 32),
    "few/16": (8192, 8192, 16),
}
ANCHORS = ("square", "large", "wide", "deep", "tall")  # of a short run
# (N, H, W, C, K, kernel): convolutions of ResNet-50.
CONVOLUTIONS = {
    "conv/layer1.conv2": (64, 56, 56, 64, 64, 3),
    "conv/layer2.conv2": (64, 28, 28, 128, 128, 3),
    "conv/layer3.conv2": (64, 14, 14, 256, 256, 3),
    "conv/layer4.conv2": (64, 7, 7, 512, 512, 3),
}
SPARSITIES = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
FEW = 64  # samples up to which only 16-bit types are measured
CHECKED = 64  # outputs whose error is taken
BANDWIDTH = 4.2e12  # bytes a second
SHARED_RATE, BF16_RATE = 16.7e12, 989e12  # FLOP a second; a quarter of float32's
SPLIT_RATES = {"tf32x3": BF16_RATE / 6, "bf16x3": BF16_RATE / 3}

Row = dict[str, Any]
Calls = list[Callable[[], Any]]


def _torch() -> Any:
    import torch

    return torch


def _tensor(array: Any) -> Any:
    """The PyTorch tensor of a CuPy array's memory."""
    return lend(_torch(), array)


def _pruned(m: int, k: int, sparsity: float) -> Any:
    """A float32 weight whose smallest elements are zero; rows and columns vary in scale as in trained layers."""
    import cupy as cp

    rng = cp.random.default_rng(0)
    scale = cp.exp(0.25 * rng.standard_normal((m, 1)) + 0.35 * rng.standard_normal((1, k)))
    weight = (scale * rng.standard_normal((m, k))).astype(float32)
    size = cp.abs(weight)
    weight[
        size <= cp.partition(size.reshape(-1), round(sparsity * weight.size) - 1)[round(sparsity * weight.size) - 1]
    ] = 0
    return weight


@functools.lru_cache(maxsize=4)
def _matrix(m: int, k: int, sparsity: float) -> CSBMatrix:
    """Made on the host, which takes seconds: shapes that differ in samples alone share it."""
    return CSBMatrix.from_dense(_pruned(m, k, sparsity))


def _draw(rng: Any, shape: tuple[int, int], dtype: Any) -> Any:
    from minidl.cuda import cast

    return cast(rng.standard_normal(shape, dtype="float32"), dtype)


class Case:
    """A weight, its operands and its rivals."""

    def __init__(
        self, name: str, shape: tuple[int, int, int], sparsity: float, matrix: CSBMatrix, dtype: Any, cache: int
    ) -> None:
        import cupy as cp

        self.name, self.sparsity, self.dtype = name, sparsity, dtype
        self.m, self.k, self.n = shape
        self.matrix = matrix.astype(dtype)
        self.dense = self.matrix.toarray()
        rng, size = cp.random.default_rng(1), dtype.itemsize
        sets = min(8, input_sets(size * self.n * (self.m + self.k), cache))
        self.x = [_draw(rng, (self.k, self.n), dtype) for _ in range(sets)]
        self.dy = [_draw(rng, (self.m, self.n), dtype) for _ in range(sets)]
        # Few samples hardly fill the cache: there the matrix rotates.
        copies = min(4, input_sets(6 * self.matrix.nnz, cache)) if self.n <= FEW else 1
        self.matrices = [self.matrix, *(self.matrix.copy() for _ in range(copies - 1))]

    def operands(self, which: str, last: bool) -> list[Any]:
        import cupy as cp

        arrays = self.dy if which == "backward_data" else self.x
        return [cp.ascontiguousarray(a.T) for a in arrays] if last else arrays

    def ours(self, which: str, last: bool, split: str | None) -> Calls:
        if which == "backward_weight":
            dys = self.operands("backward_data", last)
            return [
                partial(self.matrix.sampled, dy, x, features_last=last, split=split)
                for dy, x in zip(dys, self.operands("forward", last), strict=True)
            ]
        arrays = self.operands(which, last)
        matrices = [a.T if which == "backward_data" else a for a in self.matrices]
        return [
            partial(matrices[i % len(matrices)].matmul, arrays[i % len(arrays)], features_last=last, split=split)
            for i in range(max(len(arrays), len(matrices)))
        ]

    def cublas(self, which: str, last: bool) -> Calls:
        """Operands in the same orientation as ours."""
        w = [_tensor(self.dense.copy()) for _ in self.matrices]
        if which == "backward_weight":
            pairs = zip(self.operands("backward_data", last), self.operands("forward", last), strict=True)
            tensors = [(_tensor(dy), _tensor(x)) for dy, x in pairs]
            return [partial(_torch().mm, *((dy.t(), x) if last else (dy, x.t()))) for dy, x in tensors]
        xs = [_tensor(x) for x in self.operands(which, last)]
        w = [v.t() for v in w] if which == "backward_data" else w
        count = max(len(xs), len(w))
        pairs = [(xs[i % len(xs)], w[i % len(w)]) for i in range(count)]
        return [partial(_torch().mm, *((x, v.t()) if last else (v, x))) for x, v in pairs]

    def cusparse(self, which: str, last: bool, columns: bool = False) -> Calls:
        """CSR of the operator as it is applied; ``columns``: CSC of it, that is its transpose's CSR, transposed."""
        torch = _torch()
        dense = _tensor(self.dense)
        csr = (dense.t().contiguous() if (which == "backward_data") != columns else dense).to_sparse_csr()
        parts = csr.crow_indices().int(), csr.col_indices().int(), csr.values()
        make = torch.sparse_csc_tensor if columns else torch.sparse_csr_tensor
        matrix = make(*parts, size=csr.shape[::-1] if columns else csr.shape)
        xs = [_tensor(x) for x in self.operands(which, last)]
        return [partial(torch.mm, matrix, x.t() if last else x) for x in xs]

    def route(self, which: str, last: bool, split: str | None) -> str | None:
        """What our products ran on."""
        if which == "backward_weight":
            return None
        a = self.matrix.T if which == "backward_data" else self.matrix
        return a.route(self.n, features_last=last, split=split)

    def floor_ms(self, which: str, split: str | None) -> float:
        """Of bytes and of multiply-adds, whichever takes longer."""
        size, dense = self.dtype.itemsize, 2 * self.m * self.k * self.n
        moved = size * self.n * (self.m + self.k) + (size + 2) * self.matrix.nnz
        if split or size == 2:
            flop = dense / SPLIT_RATES.get(split, BF16_RATE)
        else:
            flop = 2 * self.matrix.nnz * self.n / SHARED_RATE
        if which == "backward_weight" and size == 4:
            flop = 0.0
        return 1e3 * max(moved / BANDWIDTH, flop)

    def error(self, which: str, last: bool, split: str | None) -> float:
        import cupy as cp

        got = self.ours(which, last, split)[0]()
        a, x, dy = (v.astype(cp.float64) for v in (self.dense, self.x[0], self.dy[0]))
        if which == "backward_weight":
            row, column = (cp.asarray(v) for v in self.matrix.pattern.coordinates())
            some = cp.linspace(0, row.size - 1, 16 * CHECKED).astype(int)
            products = dy[row[some]] * x[column[some]]
            return float((abs(got[some] - products.sum(1)) / abs(products).sum(1)).max())
        a, x = (a.T, dy) if which == "backward_data" else (a, x)
        rows = cp.linspace(0, a.shape[0] - 1, CHECKED).astype(int)
        wide = (got.T if last else got)[rows].astype(cp.float64)
        bound = abs(a[rows]) @ abs(x) + 1e-30
        return float((abs(wide - a[rows] @ x) / bound).max())


def _peer(calls: Calls, budget: Budget, way: str = "replayed") -> float:
    from minidl.bench.torch_calls import time_calls

    return time_calls(calls, budget, way, "cuda").ms


def _arms(dtype: Any, which: str) -> list[tuple[str, str | None]]:
    """(dtype of the row, split)."""
    if dtype == bfloat16:
        return [("bf16", None)]
    return [("fp32", None), *((s, s) for s in SPLIT_RATES if s == "bf16x3" or which != "backward_weight")]


def rows_of(case: Case, budget: Budget, compare: bool, columns: bool) -> Iterator[Row]:
    """Rows of one case. ``compare``: with cuSPARSE; ``columns``: with its CSC, too."""
    timer = DeviceTimer()
    few = case.n <= FEW
    for which in ("forward", "backward_data", *(() if few else ("backward_weight",))):
        sparse: dict[bool, dict[str, float]] = {True: {}, False: {}}
        if compare and case.dtype == float32 and which != "backward_weight":
            name = "cusparse-csr-of-transpose" if which == "backward_data" else "cusparse-csr"
            first = _peer(case.cusparse(which, False), budget)
            sparse[False][name] = sparse[True][f"{name}-first"] = first
            sparse[True][name] = _peer(case.cusparse(which, True)[:1], budget)  # takes milliseconds, cache or not
            if columns:
                # PyTorch cannot capture it, and it takes milliseconds: launched by the host.
                calls = case.cusparse(which, False, columns=True)[:1]
                sparse[False]["cusparse-csc"] = _peer(calls, Budget(3, least=2), "hot")
        for last in (True,) if few else (True, False):
            peers = {"cublas": _peer(case.cublas(which, last), budget)} | sparse[last]
            for name, split in _arms(case.dtype, which):
                taken = case.route(which, last, split)
                time: Timing = timer.replayed(case.ours(which, last, split), budget)
                yield {
                    "case": f"{case.name}/{100 * case.sparsity:g}%", "pass": which, "dtype": name,
                    "arm": "features-last" if last else "features-first", "ms": time.ms, "spread": time.spread,
                    "floor_ms": case.floor_ms(which, split if taken == "split" else None), "peers": peers,
                    "sparsity": case.sparsity, "shape": [case.m, case.k, case.n], "route": taken,
                    "error": case.error(which, last, split),
                }  # fmt: skip


def convolution_rows(name: str, sparsity: float, budget: Budget) -> Iterator[Row]:
    """The three passes of a sparse convolution, exact and in TF32, beside cuDNN's dense one, padding and all."""
    import cupy as cp

    from minidl import cuda as ops
    from minidl.sparse import CSBConv2d

    torch, timer = _torch(), DeviceTimer()
    n, h, w, c, k, size = CONVOLUTIONS[name]
    filters = _pruned(k, size * size * c, sparsity).reshape(k, size, size, c)
    layer = CSBConv2d.from_dense(cp.asnumpy(filters), padding=size // 2)
    pattern, values = layer.pattern.on(ops), ops.from_host(layer.at_pattern(cp.asnumpy(filters)))
    where = layer.pattern.shape, layer.pattern.side
    order, back = layer.pattern.order(ops, False, True), layer.pattern.order(ops, True, True, size * size, c)
    rng = cp.random.default_rng(1)
    sets = min(8, input_sets(4 * n * h * w * (c + k), timer.cache_bytes))
    xs = [rng.standard_normal((n, h, w, c), dtype="float32") for _ in range(sets)]
    dys = [rng.standard_normal((n, h, w, k), dtype="float32") for _ in range(sets)]
    out = ops.empty(values.shape, float32)
    dense = _tensor(filters).permute(0, 3, 1, 2)
    images = [(_tensor(dy).permute(0, 3, 1, 2), _tensor(x).permute(0, 3, 1, 2)) for dy, x in zip(dys, xs, strict=True)]
    backward = partial(
        torch.ops.aten.convolution_backward.default, bias_sizes=None, stride=[1, 1], padding=[size // 2] * 2,
        dilation=[1, 1], transposed=False, output_padding=[0, 0], groups=1,
    )  # fmt: skip
    peers = {
        "forward": [partial(torch.conv2d, x, dense, padding=size // 2) for _, x in images],
        "backward_data": [partial(backward, dy, x, dense, output_mask=[True, False, False]) for dy, x in images],
        "backward_weight": [partial(backward, dy, x, dense, output_mask=[False, True, False]) for dy, x in images],
    }
    for tf32 in (0, 1):
        options = {**layer.geometry, "tf32": tf32}
        ours = {
            "forward": [partial(ops.csb_conv2d, *pattern, values, x, *where, **options, order=order) for x in xs],
            "backward_data": [
                partial(ops.csb_conv2d_backward_data, *pattern, values, dy, xs[0].shape, *where, **options, order=back)
                for dy in dys
            ],
            "backward_weight": [
                partial(ops.csb_conv2d_backward_weight, *pattern, dy, x, *where, **options, out=out)
                for dy, x in zip(dys, xs, strict=True)
            ],
        }
        for which, calls in ours.items():
            time = timer.replayed(calls, budget)
            torch.backends.cudnn.allow_tf32 = bool(tf32)
            peer = _peer(peers[which], budget)
            torch.backends.cudnn.allow_tf32 = False
            yield {
                "case": f"{name}/{100 * sparsity:g}%", "pass": which, "dtype": "tf32" if tf32 else "fp32",
                "arm": "features-last", "ms": time.ms, "spread": time.spread, "floor_ms": None,
                "peers": {"cudnn": peer}, "sparsity": sparsity, "shape": [n, h, w, c, k, size], "route": None,
                "error": None,
            }  # fmt: skip


def measure(only: str, sparsities: list[float], samples: int, dtypes: list[str], short: bool = False) -> Iterator[Row]:
    """All rows; cuSPARSE takes part from 80 % on. ``short``: the anchors, and convolutions at 90 %."""
    torch = _torch()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    cache, budget = DeviceTimer().cache_bytes, Budget(samples, seconds=math.inf, sample_ms=0.5 if short else 1.0)
    for name, shape in SHAPES.items():
        for sparsity in sparsities if only in name and (not short or name in ANCHORS) else ():
            matrix = _matrix(*shape[:2], sparsity)
            for dtype in dtypes:
                kind = bfloat16 if dtype == "bf16" else float32
                if kind == float32 and shape[2] <= FEW:
                    continue
                case = Case(name, shape, sparsity, matrix, kind, cache)
                yield from rows_of(case, budget, sparsity >= 0.8, sparsity == 0.9)
                del case
                clean("cuda")
    for name in CONVOLUTIONS if "fp32" in dtypes else ():
        for sparsity in [s for s in sparsities if only in name and (not short or s == 0.9)]:
            yield from convolution_rows(name, sparsity, budget)
