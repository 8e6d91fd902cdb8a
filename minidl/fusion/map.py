"""The best way of a batch norm over sizes of feature maps and channels, measured: what Hwang (2023) found to matter.

At each point a batch norm and its ReLU stand between two convolutions that keep the size and the channels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from minidl.fusion.clock import Clock
from minidl.fusion.cost import Machine
from minidl.fusion.groups import groups
from minidl.fusion.measure import compile_ahead, measure
from minidl.graph import Graph
from minidl.layers import BatchNorm2d, Conv2d, ReLU
from minidl.precision import Precision
from minidl.profile.plots.fusion import fastest

KERNELS, SIZES, CHANNELS = (1, 3), (7, 14, 28, 56, 112), (64, 128, 256, 512, 1024)
MOST_BYTES = 1 << 30  # of one tensor
MOST_FLOP = 1e12  # of one convolution

Row = dict[str, Any]
Point = tuple[int, int, int]


def points(batch: int, itemsize: int) -> Iterator[Point]:
    """(filter, size, channels) of the points whose tensors are no larger than networks have them."""
    for kernel, size, channels in itertools.product(KERNELS, SIZES, CHANNELS):
        elements = batch * size**2 * channels
        if elements * itemsize <= MOST_BYTES and 2 * elements * channels * kernel**2 <= MOST_FLOP:
            yield kernel, size, channels


def between(kernel: int, size: int, channels: int) -> Graph:
    """A batch norm and a ReLU between two convolutions with filters of this size."""
    graph = Graph()
    below = Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False, name="below")
    x = below(graph.input((size, size, channels)))
    x = ReLU(name="relu")(BatchNorm2d(channels, name="bn")(x))
    return graph.output(Conv2d(channels, channels, kernel, padding=kernel // 2, bias=False, name="above")(x))


def compile_map(batch: int, precision: Precision, machine: Machine, where: Sequence[Point] | None = None) -> None:
    """Compile what `measure_map` will launch on the current GPU."""
    for point in points(batch, precision.storage.itemsize) if where is None else where:
        graph = between(*point)
        compile_ahead(graph, batch, precision, groups(graph, batch, precision, machine, everything=True))


def measure_map(
    ops: ModuleType,
    batch: int,
    precision: Precision,
    machine: Machine,
    clock: Clock,
    *,
    where: Sequence[Point] | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """A row for each way at each point: case, arm (the way), kernel, size, channels, ms, forward_ms, backward_ms.

    Args:
        where: (filter, size, channels) of points; default: `points`.
    """
    chosen = list(points(batch, precision.storage.itemsize) if where is None else where)
    if ops.name == "cuda":
        compile_map(batch, precision, machine, chosen)
    graphs = [between(*point) for point in chosen]
    found = [groups(graph, batch, precision, machine, everything=True) for graph in graphs]
    rows = []
    for point, graph, some in zip(chosen, graphs, found, strict=True):
        (record,) = measure(graph, batch, some, clock).evidence
        facts = dict(zip(("kernel", "size", "channels"), point, strict=True))
        rows += [
            {
                "case": f"map/b{batch}", "pass": "step", "dtype": precision.name, "arm": row["ways"][0],
                "ms": row["ms"], "spread": row["spread"], "floor_ms": None, "peers": {},
                "forward_ms": row["forward_ms"], "backward_ms": row["backward_ms"], **facts,
            }
            for row in record["rows"]
        ]  # fmt: skip
        best = fastest(rows)[point]
        progress(f"{point[0]}x{point[0]} filters, {point[2]} channels at {point[1]}x{point[1]}: {best['arm']}")
    return rows
