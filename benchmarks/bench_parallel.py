"""Convolutions, and a U-Net, on several ranks: shared by images, by rows of the images, or by output channels.

``python benchmarks/bench_parallel.py --ranks 2 --device cpu --json out.json``, or under mpiexec. A step is forward,
backward and the sums of the gradients, of one batch however it is shared out, on GPUs as a CUDA graph; beside it the
same batch on one rank alone, and on a GPU by PyTorch. Time saved is 1 - t / t(alone), the figure of Yadan et al.,
"Multi-GPU Training of ConvNets" (arXiv 1312.5853): 0.37 for model and 0.33 for data parallelism on two GPUs, 0.54 for
both on four. The arms run in turn; the slowest rank's time counts. A case whose batch has fewer images than ranks has
no arm that shares out images.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.ranks import shared_layers

import minidl as m
from benchmarks.device import wait
from minidl import dist, launch, models
from minidl.bench.setup import device_of
from minidl.cuda.capture import Room
from minidl.layers import ChannelParallelConv2d, RowParallelConv2d
from minidl.layers.row_plan import share
from minidl.profile.results import machine_record, result, write
from minidl.profile.timing import Timing

DEPTH = 4
TORCH = "torch-eager"


class Case(NamedTuple):
    """Images of one batch, their side, and the channels of every layer; or a U-Net, whose first layer has so many."""

    batch: int
    side: int
    channels: int
    unet: bool = False

    def __str__(self) -> str:
        if self.unet:
            return f"unet {self.channels} @{self.side}/b{self.batch}"
        return f"{DEPTH} x 3x3 {self.channels}-{self.channels} @{self.side}/b{self.batch}"


CASES = {
    "cuda": (Case(32, 256, 64), Case(32, 28, 512), Case(1, 512, 64), Case(16, 256, 64, True), Case(1, 512, 64, True)),
    "cpu": (Case(8, 64, 32), Case(4, 28, 128), Case(1, 256, 32), Case(2, 128, 16, True), Case(1, 256, 16, True)),
}


class Arm(NamedTuple):
    """Ranks that share the images of a step in ``images`` parts, and each part as the layers of ``way`` do."""

    way: str
    images: int


def arms(case: Case, ranks: int) -> dict[str, Arm]:
    """What can be compared on so many ranks, ``alone`` first."""
    found = {"alone": Arm("data", 1)}
    if case.batch >= ranks:
        found["data"] = Arm("data", ranks)
    found |= {"rows": Arm("rows", 1)} if case.unet else {"rows": Arm("rows", 1), "channels": Arm("channels", 1)}
    if ranks >= 4 and ranks % 2 == 0 and case.batch >= ranks // 2:
        found |= {f"data+{way}": Arm(way, ranks // 2) for way in ("rows", "channels") if way in found}
    return found


def network(case: Case, way: str, group: dist.Communicator) -> m.Graph:
    """The network; with SOLO as group, that of one rank."""
    if case.unet:
        return models.by_rows(models.unet(2, (case.side, case.side, 3), case.channels), group)
    graph = m.Graph()
    rows = share(case.side, group.size, group.rank).count if way == "rows" else case.side
    x = graph.input((rows, case.side, case.channels))
    for i in range(DEPTH):
        sizes = (case.channels, case.channels, 3)
        if way == "rows":
            conv = RowParallelConv2d(*sizes, padding=1, height=case.side, group=group, name=f"conv{i}")
        else:
            conv = ChannelParallelConv2d(*sizes, padding=1, group=group, name=f"conv{i}")
        x = m.ReLU(name=f"relu{i}")(conv(x))
    return graph.output(x)


class Splits(dict):
    """(ranks that share images, ranks of the same place) for each number of ranks that share images; made once."""

    def __init__(self, comm: dist.Communicator) -> None:
        self.comm = comm

    def __missing__(self, ranks: int) -> tuple[dist.Communicator, dist.Communicator]:
        comm = self.comm
        self[ranks] = comm.split(comm.rank // ranks), comm.split(comm.rank % ranks)
        return self[ranks]


def step_of(splits: Splits, case: Case, arm: Arm, alone: bool, device: str, precision: str) -> Callable[[], None]:
    """One step of this rank's share; a collective. ``alone``: of everything."""
    comm = splits.comm
    ranks = 1 if alone or arm.way == "data" else comm.size // arm.images
    group, peers = splits[ranks]
    joint = dist.SOLO if alone else peers if arm.way == "channels" else comm
    way, group = ("rows", dist.SOLO) if arm.way == "data" else (arm.way, group)
    model = m.Model(network(case, way, group), device=device, precision=precision, comm=joint)
    images = case.batch if alone else share(case.batch, arm.images, comm.rank // ranks).count
    x, dy = (drawn(model, images, node.shape) for node in (model.graph.nodes[0], model.graph.output_node))

    def step() -> None:
        model.forward(x)
        model.backward(dy)
        for _ in model.arena.finished():
            pass

    return step if device == "cpu" else captured(step)


def drawn(model: m.Model, images: int, shape: tuple[int, ...]) -> Any:
    """Equal images of random values from -0.5 to 0.5, in the model's storage type."""
    values = np.random.default_rng(0).random((1, *shape), np.float32) - np.float32(0.5)
    one, batch = (model.ops.empty((n, *shape), model.precision.storage) for n in (1, images))
    model.ops.copy_into(one, model.ops.from_host(values))
    for i in range(images):
        model.ops.copy_into(batch[i : i + 1], one)
    return batch


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a CUDA graph, so that no launch is waited for; a collective."""
    room = Room()
    with room.entered():
        step()  # what the first one keeps is there while the second one asks for memory
    launch, _ = room.capture(step)
    return lambda kept=step: launch()  # whose arrays the graph reads


def torch_step(case: Case) -> Callable[[], None] | None:
    """The same stack by PyTorch on one GPU, eager, channels last, bfloat16; None without PyTorch."""
    try:
        import torch
    except ImportError:
        return None
    torch.backends.cudnn.benchmark = True
    layers = []
    for _ in range(DEPTH):
        layers += [torch.nn.Conv2d(case.channels, case.channels, 3, padding=1), torch.nn.ReLU()]
    stack = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16, memory_format=torch.channels_last)
    shape = (case.batch, case.channels, case.side, case.side)
    x, dy = (
        torch.rand(shape, device="cuda", dtype=torch.bfloat16).sub_(0.5).to(memory_format=torch.channels_last)
        for _ in range(2)
    )

    def step() -> None:
        stack.zero_grad(set_to_none=True)
        stack(x.requires_grad_()).backward(dy)
        x.grad = None

    return step


def sample(comm: dist.Communicator, device: str, step: Callable[[], None] | None, calls: int) -> tuple[float, float]:
    """Milliseconds of a step on this rank, and of processor time in it; None: it only waits for the others."""
    wait(device)
    comm.barrier()
    started, busy = time.perf_counter(), time.process_time()
    for _ in range(calls if step else 0):
        step()
    wait(device)
    found = (time.perf_counter() - started) * 1e3 / calls, (time.process_time() - busy) * 1e3 / calls
    comm.barrier()
    return found


def measure(
    splits: Splits, case: Case, device: str, precision: str, samples: int, calls: int
) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds and processor time of each arm, sample by sample; a collective. Alone, only rank 0 computes."""
    comm = splits.comm
    steps: dict[str, Any] = {}
    for name, arm in arms(case, comm.size).items():
        step = step_of(splits, case, arm, name == "alone", device, precision)
        steps[name] = step if name != "alone" or comm.rank == 0 else None
        sample(comm, device, steps[name], 2)
    if device == "cuda":
        step = torch_step(case) if comm.rank == 0 and not case.unet else None
        if comm.share(step is not None)[0]:
            steps[TORCH] = step
            sample(comm, device, step, 3)
    own: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(samples):
        for name, step in steps.items():
            own[name].append(sample(comm, device, step, calls))
    slowest = lambda times: tuple(map(max, zip(*times, strict=True)))  # noqa: E731  (of the ranks, each figure)
    return {name: list(map(slowest, zip(*comm.share(own[name]), strict=True))) for name in steps}


def rows_of(
    case: Case, ranks: int, precision: str, device: str, samples: dict[str, list[tuple[float, float]]]
) -> list[dict]:
    """Rows of the result file, each with the rank alone beside it; least saved first.

    On CPUs ``busy_ms`` is the processor time of the busiest rank: on a machine that others use as well, what the step
    would take with cores to itself but for waiting.
    """
    times = {name: Timing(tuple(ms for ms, _ in found)) for name, found in samples.items()}
    busy = {name: statistics.median(ms for _, ms in found) for name, found in samples.items()}
    peers = {name: times[name].ms for name in ("alone", TORCH) if name in times}
    rows = []
    for name, its in times.items():
        rows.append({
            "case": str(case), "pass": "step", "dtype": precision, "arm": name, "ms": its.ms, "min_ms": its.min_ms,
            "spread": its.spread, "floor_ms": None, "ranks": ranks, "saved": 1 - its.ms / peers["alone"],
            "peers": peers,
        })  # fmt: skip
        if device == "cpu":
            rows[-1] |= {"busy_ms": busy[name], "busy_saved": 1 - busy[name] / busy["alone"]}
    return sorted(rows, key=lambda row: (row["arm"] != "alone", row["saved"]))


def main() -> None:
    """Measure all cases and show them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="where no launcher started it")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--precision", help="default: bf16 on GPUs, fp32 on CPUs")
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--calls", type=int, default=3, help="steps of a sample")
    parser.add_argument("--json", help="result file")
    options = parser.parse_args()
    if dist.launched_size() == 1:
        sys.exit(launch.main(["-n", str(options.ranks), *sys.argv]))
    comm = dist.init(options.device)
    device = device_of(options.device, comm)
    precision = options.precision or ("bf16" if device == "cuda" else "fp32")
    rows, splits = [], Splits(comm)
    for case in CASES[device]:
        times = measure(splits, case, device, precision, options.samples, options.calls)
        rows += rows_of(case, comm.size, precision, device, times)
        content = result("bench_parallel", rows, machine_record())
        if comm.rank == 0 and options.json:
            write(Path(options.json), content)
    if comm.rank == 0:
        print_tables(content, shared_layers)
    comm.close()


if __name__ == "__main__":
    main()
