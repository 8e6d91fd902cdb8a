"""Where a U-Net's time goes, and what its convolutions gain from tiling, streams and a second GPU.

    python benchmarks/bench_unet.py --device cpu                               table of functions on the CPU
    python benchmarks/bench_unet.py [--batch 1 32] [--json PATH]               on one GPU
    mpirun -n 2 python benchmarks/bench_unet.py [--json PATH]                  a batch cut over two GPUs

The experiment of Ha, Adufu and Kim, "Empirical Experiments for Convolution Layer Optimization on Multi-GPUs": a U-Net's
forward pass on images of 128 x 191, in float32, with a convolution of one thread per value ("direct"), a tiled one in
shared memory ("tiled") and the library's own; the batch whole, in chunks on several streams, and cut over GPUs. They
report 1.05x end to end and 1.22x for the convolutions alone from a second GPU. Their 0.39 ms for all convolutions is
the time until the launches returned: here every time is taken after synchronisation, and the launches' own stands
beside.

One image cannot be cut; a batch of 32 is what scales. The whole batch on rank 0 alone, the others idle, is measured in
the same run, so that what further GPUs gain is a ratio of neighbours: of the fastest way of one GPU.

The library's own pass is also replayed as a CUDA graph, in which no launch waits for the host. Chunks are then branches
that run beside each other: blocks of one fill the multiprocessors that the last wave of another leaves idle.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import minidl as m
from benchmarks.device import wait
from minidl import dist, models
from minidl.bench.setup import device_of, join
from minidl.cuda.capture import Room
from minidl.profile.results import machine_record, result, write
from minidl.profile.spans import NULL_PROFILER
from minidl.profile.steps import StepProfiler
from minidl.profile.tables import show
from minidl.profile.timing import Timing, slowest

CONVOLUTIONS = ("Conv2d", "ConvTranspose2d")
PAPER = {"end to end": 1.05, "convolutions": 1.22}
SPEEDUPS = {"speedup": "ms", "speedup_with_copies": "with_copies_ms", "speedup_convolutions": "convolutions_ms"}
WARM_UP = 2

Forward = Callable[[], Any]


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--image-size", default="128x191", metavar="HxW")
    p.add_argument("--width", type=int, default=64, help="channels of the first level")
    p.add_argument("--batch", nargs="+", type=int, default=[1, 32], help="images, over all ranks")
    p.add_argument("--chunks", nargs="+", type=int, default=[1, 2, 4], help="parts of a rank's batch, each on a stream")
    p.add_argument("--kernels", nargs="+", default=["direct", "tiled", "minidl"], choices=["direct", "tiled", "minidl"])
    p.add_argument(
        "--precision", default="fp32", choices=["fp32", "tf32", "bf16", "fp16"], help="of minidl's own kernels"
    )
    p.add_argument("--samples", type=int, default=9)
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    a.image = tuple(int(size) for size in a.image_size.split("x"))
    if len(a.image) != 2 or min(a.image) < 16:
        p.error(f"--image-size: expected HxW, both at least 16, got {a.image_size}")
    return a


def network(a: argparse.Namespace, device: str, mode: str) -> m.Model:
    graph = models.build("unet", (*a.image, 3), 2, width=a.width)
    return m.Model(graph, device=device, precision=mode, comm=dist.SOLO).eval()


def images(a: argparse.Namespace, batch: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, *a.image, 3), np.float32)


# ---------------------------------------------------------------------------------------------------- where time goes


def by_function(model: m.Model, x: Any, samples: int) -> tuple[dict[str, float], float]:
    """(milliseconds of each type of layer in one forward pass, of the whole pass), medians."""
    types = {layer.name: type(layer).__name__ for layer in model.layers}
    profiler = StepProfiler(model.ops)
    model.observe(profiler)
    for _ in range(samples + 1):
        with profiler.step():
            model.forward(x, grad=False)
    model.observe(NULL_PROFILER)
    steps = profiler.read()[1:]
    parts: list[Counter[str]] = []
    for step in steps:
        part: Counter[str] = Counter()
        for span in step.spans:
            part[types.get(span.layer, span.layer)] += span.ms
        parts.append(part)
    return {name: median(p[name] for p in parts) for name in parts[0]}, median(step.ms for step in steps)


def function_rows(a: argparse.Namespace, model: m.Model, batch: int) -> list[dict[str, Any]]:
    """The paper's table of a U-Net's functions, longest first."""
    x = model.ops.from_host(images(a, batch).astype(model.precision.storage))
    parts, whole = by_function(model, x, max(3, a.samples // 2))
    named = sorted(parts.items(), key=lambda part: -part[1])
    convolution = sum(parts.get(name, 0.0) for name in CONVOLUTIONS)
    table = [[name, f"{ms:.2f}", f"{ms / whole:.1%}"] for name, ms in named]
    table += [
        ["all convolutions", f"{convolution:.2f}", f"{convolution / whole:.1%}"],
        ["whole pass", f"{whole:.2f}", ""],
    ]
    show(f"U-Net {a.image_size}, {batch} images, {model.ops.name}: functions (paper, CPU: 82 % convolution)",
         ["function", "ms", "share"], table)  # fmt: skip
    base = row(a, batch, model, "functions", 1)
    return [base | {"function": name, "ms": ms, "share": ms / whole} for name, ms in named] + [
        base | {"function": "convolutions", "ms": convolution, "share": convolution / whole},
        base | {"function": "whole", "ms": whole, "share": 1.0},
    ]


def row(a: argparse.Namespace, batch: int, model: m.Model, arm: str, ranks: int) -> dict[str, Any]:
    return {
        "case": f"unet/{a.image_size}/b{batch}", "pass": "forward", "dtype": model.precision.name, "arm": arm,
        "device": model.ops.name, "ranks": ranks, "ms": None, "spread": None, "floor_ms": None, "peers": {},
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ chunks on streams


class Chunks:
    """A batch on a GPU in parts, each with a stream of its own."""

    def __init__(self, model: m.Model, host: np.ndarray, count: int):
        import cupy

        self.model, self.cupy = model, cupy
        self.hosts = [self._pinned(part.astype(model.precision.storage)) for part in np.array_split(host, count)]
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in self.hosts]
        self.parts = [model.ops.from_host(part) for part in self.hosts]
        self._room: Room | None = None
        self.outputs = [self._pinned(self.model.ops.to_host(self._forward(part))) for part in self.parts]

    def _pinned(self, array: np.ndarray) -> np.ndarray:
        memory = self.cupy.cuda.alloc_pinned_memory(max(array.nbytes, 1))
        pinned = np.frombuffer(memory, array.dtype, array.size).reshape(array.shape)
        pinned[...] = array
        return pinned

    def _forward(self, x: Any) -> Any:
        return self.model.forward(x, grad=False)

    def resident(self) -> None:
        """Forward passes on images that are on the GPU."""
        for stream, part in zip(self.streams, self.parts, strict=True):
            with stream:
                self._forward(part)

    def copied(self) -> None:
        """Images from the host, logits back to it."""
        runtime = self.cupy.cuda.runtime
        to_gpu, to_host = runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost
        for stream, part, host, out in zip(self.streams, self.parts, self.hosts, self.outputs, strict=True):
            with stream:
                runtime.memcpyAsync(part.data.ptr, host.ctypes.data, host.nbytes, to_gpu, stream.ptr)
                logits = self._forward(part)
                runtime.memcpyAsync(out.ctypes.data, logits.data.ptr, out.nbytes, to_host, stream.ptr)

    def replayed(self, work: Forward) -> Forward:
        """`resident` or `copied` as a CUDA graph, in which each chunk is a branch."""
        room = self._room = self._room or Room()

        def branches() -> None:
            begin = room.stream.record()
            for stream in self.streams:
                stream.wait_event(begin)
            work()
            for stream in self.streams:
                room.stream.wait_event(stream.record())

        wait("cuda")
        return room.capture(branches)[0]


def timed(comm: dist.Communicator, work: Forward, samples: int) -> tuple[Timing, Timing]:
    """(from start to the end of all streams' work, until the calls returned), on the slowest rank. A collective."""
    whole, launched = [], []
    for i in range(WARM_UP + samples):
        wait("cuda")
        comm.barrier()
        started = time.perf_counter()
        work()
        returned = time.perf_counter()
        wait("cuda")
        if i >= WARM_UP:
            whole.append((time.perf_counter() - started) * 1e3)
            launched.append((returned - started) * 1e3)
    return slowest(comm, whole), slowest(comm, launched)


@contextmanager
def alone(comm: dist.Communicator) -> Iterator[bool]:
    """Rank 0 works, the others wait for it: whether this rank is the one."""
    comm.barrier()
    yield comm.rank == 0
    comm.barrier()


def forced(kernel: str) -> AbstractContextManager[None]:
    """The convolutions inside run on this kernel."""
    from minidl.cuda.convolution.conv2d_family import family

    return nullcontext() if kernel == "minidl" else family(kernel)


def device_rows(a: argparse.Namespace, comm: dist.Communicator, batch: int) -> list[dict[str, Any]]:
    """Each kernel on one GPU, in chunks, and cut over the ranks."""
    rows = []
    for kernel in a.kernels:
        mode = a.precision if kernel == "minidl" else "fp32"
        model = network(a, "cuda", mode)
        with forced(kernel):
            with alone(comm) as mine:
                one = one_gpu(a, model, kernel, batch) if mine else []
            rows += one
            if comm.size > 1 and batch >= comm.size:
                rows += several_gpus(a, comm, model, kernel, batch, one)
    return rows


def one_gpu(a: argparse.Namespace, model: m.Model, kernel: str, batch: int) -> list[dict[str, Any]]:
    return [
        row(a, batch, model, arm, 1) | measured(dist.SOLO, model, chunks, a.samples, graph)
        for arm, chunks, graph in ways(a, model, kernel, images(a, batch), batch)
    ]


def ways(
    a: argparse.Namespace, model: m.Model, kernel: str, host: np.ndarray, most: int
) -> Iterator[tuple[str, Chunks, bool]]:
    """(name, chunks, whether as a CUDA graph) of each way to run a kernel on these images."""
    for count in sorted({min(count, most) for count in a.chunks}):
        chunks = Chunks(model, host, count)
        for graph in (False, True) if kernel == "minidl" else (False,):
            yield kernel + "/graph" * graph + f"/{count} streams" * (count > 1), chunks, graph


def several_gpus(
    a: argparse.Namespace,
    comm: dist.Communicator,
    model: m.Model,
    kernel: str,
    batch: int,
    one: Sequence[dict[str, Any]],
) -> list[dict[str, Any]]:
    shard, rows = np.array_split(images(a, batch), comm.size)[comm.rank], []
    for arm, chunks, graph in ways(a, model, kernel, shard, batch // comm.size):
        found = row(a, batch, model, arm, comm.size) | measured(comm, model, chunks, a.samples, graph)
        for name, ms in SPEEDUPS.items():
            if comm.rank == 0 and found[ms]:
                found[name] = min(alone[ms] for alone in one if alone[ms]) / found[ms]
        rows.append(found)
    return rows if comm.rank == 0 else []


def measured(comm: dist.Communicator, model: m.Model, chunks: Chunks, samples: int, graph: bool) -> dict[str, Any]:
    """The times of a row; a collective."""
    way = chunks.replayed if graph else (lambda work: work)
    resident, launched = timed(comm, way(chunks.resident), samples)
    copied, _ = timed(comm, way(chunks.copied), samples)
    whole = len(chunks.parts) == 1 and not graph
    parts = by_function(model, chunks.parts[0], samples)[0] if whole else {}
    convolutions = sum(parts.get(name, 0.0) for name in CONVOLUTIONS)
    return {
        "ms": resident.ms, "spread": resident.spread, "launch_ms": launched.ms, "with_copies_ms": copied.ms,
        "convolutions_ms": max(comm.share(convolutions)) or None,
    }  # fmt: skip


def print_device(rows: Sequence[dict[str, Any]], ranks: int) -> None:
    def ms(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    cells = [
        [r["case"], r["arm"], r["dtype"], str(r["ranks"]), ms(r["ms"]), f"{r['spread']:.1%}", ms(r["with_copies_ms"]),
         ms(r["convolutions_ms"]), ms(r["launch_ms"]), ms(r.get("speedup")), ms(r.get("speedup_convolutions"))]
        for r in rows
    ]  # fmt: skip
    columns = ["case", "kernel", "type", "GPUs", "ms", "spread", "with copies", "convolutions", "launching"]
    columns += ["GPUs' gain", "convolutions' gain"]
    show("U-Net forward, after synchronisation", columns, cells)
    if ranks > 1:
        told = ", ".join(f"{what} {gain:.2f}x" for what, gain in PAPER.items())
        print(f"the paper's gains from a second GPU: {told}")


def main() -> None:
    a = arguments()
    comm = join(a.device)
    cpu = device_of(a.device, comm) == "cpu"
    rows: list[dict[str, Any]] = []
    for batch in a.batch:
        if cpu:
            rows += function_rows(a, network(a, "cpu", "fp32"), batch) if comm.rank == 0 else []
        else:
            rows += device_rows(a, comm, batch)
        if a.json and comm.rank == 0:  # what there is, in case that the rest takes too long
            write(a.json, result("bench_unet", rows, machine_record()))
    if comm.rank == 0:
        if not cpu:
            print_device(rows, comm.size)
        if a.json:
            print(f"wrote {a.json}")


if __name__ == "__main__":
    main()
