"""``minidl warm``: compiles every kernel of a network's training step ahead, on all cores, into the kernel cache."""

from __future__ import annotations

import argparse
import time
from functools import partial

from minidl import checks, models
from minidl.bench.setup import Setup, add_images
from minidl.bench.step import TrainingStep
from minidl.cuda import ahead, nvrtc
from minidl.cuda.ahead import Built
from minidl.cuda.convolution import conv2d_tuned
from minidl.cuda.device import BUILT_IN, DeviceRecord, current_device
from minidl.dist.communicator import Communicator
from minidl.fusion import CHOICES, PLANS, fuse
from minidl.graph import Graph
from minidl.memory.record import blank
from minidl.precision import PRECISIONS


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl warm``."""
    p.add_argument("--model", default="resnet50", help=models.CHOICES)
    p.add_argument("--batch", type=int, default=32, help="samples of each GPU")
    p.add_argument("--precision", default="bf16", choices=PRECISIONS)
    add_images(p)
    p.add_argument("--fusion", default="auto", metavar="PLAN", help=f"{', '.join(CHOICES)}, or a file of minidl fuse")
    p.add_argument(
        "--gpu", default="auto", choices=["auto", *BUILT_IN], help="auto: this machine's; others need no GPU"
    )
    p.add_argument("--processes", type=int, help="that compile; default: one for each core")
    p.add_argument("--step", action="store_true", help="then run two steps on this machine's GPU, and time them")


def run(a: argparse.Namespace) -> int:
    """Walk the step on shapes, compile what the cache lacks, tell how long it took; the exit status.

    Raises:
        ValueError: for an option that cannot be.
    """
    if a.processes is not None:
        checks.at_least("", "--processes", a.processes, 1)
    if a.step and a.gpu != "auto":
        raise checks.bad_value("", "--step", "without --gpu", f"--gpu {a.gpu}")
    setup = Setup(a.model, a.batch, a.precision, "cuda", 1, a.image_size, a.classes, a.fusion)
    device = _device(a.gpu)
    built = compile_ahead(setup.graph(), setup.batch, setup.precision, setup.fusion, device, a.processes)
    print(
        f"{setup.title} {a.precision}, {device.name}: {built.kernels} kernels, found in {built.walk_s:.1f} s; "
        f"{built.missing} compiled in {built.compile_s:.1f} s, into {nvrtc.cache_directory()}"
    )
    if a.step:
        _time_steps(setup)
    return 0


def compile_ahead(
    graph: Graph, batch: int, precision: str, fusion: str, device: DeviceRecord, processes: int | None = None
) -> Built:
    """Compile the kernels of a training step that the cache lacks, on all cores; the graph is used up.

    Args:
        batch: samples of each GPU.
        fusion: as `minidl.fusion.fuse` takes it.
        device, processes: as `minidl.cuda.ahead.compile_ahead` takes them.
    """
    return ahead.compile_ahead(partial(walk, graph, batch, precision, fusion), device, processes)


def compile_for_ranks(graph: Graph, batch: int, precision: str, fusion: str, comm: Communicator) -> Built | None:
    """`compile_ahead` for this machine's GPU, by one rank of each host: when steps launch them first, kernels are
    compiled one by one, which takes minutes. None on the other ranks; a collective.
    """
    built = None
    if comm.local_rank == 0:
        built = compile_ahead(graph, batch, precision, fusion, this_gpu())
    comm.barrier()
    return built


def walk(graph: Graph, batch: int, precision: str, fusion: str) -> None:
    """A training step and an evaluation, for a dry run to see."""
    step = TrainingStep(blank(graph), batch=batch, device="cuda", precision=precision)
    for how in PLANS if fusion == "adaptive" else (fusion,):  # one of these, or between them
        fuse(step.model, how)
        step()
    step.model.eval()
    step.model.forward(step.x)


def this_gpu() -> DeviceRecord:
    """This machine's GPU, with its table of tuned kernels read: a walk on shapes then finds what will run."""
    device = current_device()
    conv2d_tuned.current()
    return device


def _device(name: str) -> DeviceRecord:
    if name != "auto":
        return BUILT_IN[name]
    try:
        return this_gpu()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"--gpu auto: {error}; name the GPU to compile for: --gpu H200") from error


def _time_steps(setup: Setup) -> None:
    """What a program waits for before it trains, all kernels being in the cache."""
    started = time.perf_counter()
    step = TrainingStep(blank(setup.graph()), batch=setup.batch, device="cuda", precision=setup.precision)
    fuse(step.model, setup.fusion, batch=setup.batch)
    step.ops.synchronize()
    marks = [time.perf_counter()]
    for _ in range(2):
        step()
        step.ops.synchronize()
        marks.append(time.perf_counter())
    ready, first, second = (b - a for a, b in zip([started, *marks], marks, strict=False))
    print(f"model and batch on the GPU in {ready:.2f} s, first step in {first:.2f} s, second in {second * 1e3:.1f} ms")
