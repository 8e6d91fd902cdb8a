"""Convolutions that ranks compute together, beside one alone: ``parallel.py OUT DEVICE RANKS_OF_A_GROUP``.

All draw the same whole numbers; what differs from the layer alone goes to OUT. Groups see batches of their own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist
from minidl.backend import get_ops
from minidl.layers import ChannelParallelConv2d, RowParallelConv2d
from minidl.layers.row_plan import share
from tests.tolerance import draw_integers

# (batch, height, width, channels, filters, kernel), options
CASES = [
    ((2, 8, 5, 4, 8, 3), {"padding": 1}),
    ((1, 13, 7, 3, 5, 3), {"padding": 1, "bias": False}),
    ((3, 11, 6, 4, 7, 1), {}),
    ((2, 16, 9, 8, 8, 3), {"stride": 2, "padding": 1}),
    ((2, 16, 4, 8, 16, 2), {"stride": 2}),
    ((2, 15, 6, 2, 4, 3), {"stride": 2}),
    ((1, 17, 5, 3, 4, 5), {"padding": 2}),
    ((2, 9, 8, 4, 4, 3), {"padding": (4, 1), "dilation": (4, 1)}),
    ((1, 6, 5, 2, 4, (5, 1)), {"padding": (2, 0)}),
    ((2, 14, 14, 3, 6, 3), {}),
    ((1, 12, 3, 2, 5, 1), {"stride": 3}),
    ((1, 10, 3, 2, 4, 4), {"stride": 3, "padding": 2}),
]
GROUPED = ((2, 10, 6, 6, 4, 3), {"padding": 1, "groups": 2})


def single(case, options, seed, ops, dtype):
    """The whole problem and its results, from the layer alone."""
    n, h, w, c, k, kernel = case
    rng = np.random.default_rng(seed)
    layer = m.Conv2d(c, k, kernel, **options).to(ops.name, precision=dtype)
    state = {name: draw_integers(rng, value.shape, "float32") for name, value in layer.state_dict().items()}
    layer.load_state_dict(state)
    x = ops.from_host(draw_integers(rng, (n, h, w, c), "float32", limit=2), layer.precision.storage)
    y = layer.forward(x)
    dy = ops.from_host(draw_integers(rng, y.shape, "float32", limit=1), y.dtype)
    dx = layer.backward(dy)
    return state, x, y, dy, dx, layer.params.gradients()


def wrong(found, expected, ops) -> float:
    return float((ops.to_host(found).astype("float64") != ops.to_host(expected).astype("float64")).sum())


def by_rows(case, options, seed, comm, group, ops, dtype):
    """Differences of output, input gradient and parameter gradients of this rank."""
    state, x, y, dy, dx, gradients = single(case, options, seed, ops, dtype)
    n, h, w, c, k, kernel = case
    layer = RowParallelConv2d(c, k, kernel, **options, height=h, group=group).to(ops.name, precision=dtype)
    layer.load_state_dict(state)
    rows, out = share(h, group.size, group.rank), share(y.shape[1], group.size, group.rank)
    part = lambda array, own: ops.contiguous(array[:, own.begin : own.end])  # noqa: E731
    answer = {"y": wrong(layer.forward(part(x, rows)), part(y, out), ops)}
    answer["dx"] = wrong(layer.backward(part(dy, out)), part(dx, rows), ops)
    for name, view in sorted(layer.params.gradients().items()):
        group.all_reduce(view)
        answer[name] = wrong(view, gradients[name], ops)
    return answer


def by_channels(case, options, seed, comm, group, ops, dtype):
    state, x, y, dy, dx, gradients = single(case, options, seed, ops, dtype)
    _, _, _, c, k, kernel = case
    own = share(k, group.size, group.rank)
    layer = ChannelParallelConv2d(c, k, kernel, **options, group=group).to(ops.name, precision=dtype)
    layer.load_state_dict({name: value[own.begin : own.end] for name, value in state.items()})
    answer = {"y": wrong(layer.forward(x), y, ops), "dx": wrong(layer.backward(dy), dx, ops)}
    for name, view in sorted(layer.params.gradients().items()):
        answer[name] = wrong(view, gradients[name][own.begin : own.end], ops)
    return answer


def main(out: Path, device: str, ranks: int) -> None:
    comm = dist.init(device)
    ops = get_ops(device)
    group = comm.split(comm.rank // ranks)
    seed = 1 + comm.rank // ranks
    found = {}
    for dtype in ("fp32", "bf16"):
        for number, (case, options) in enumerate([*CASES, GROUPED]):
            for way in (by_rows, by_channels):
                if way is by_channels and (case, options) == GROUPED:
                    continue
                found[f"{way.__name__} {dtype} {case} {options}"] = way(
                    case, options, 100 * number + seed, comm, group, ops, dtype
                )
    Path(out, f"{comm.rank}.json").write_text(json.dumps({"engine": group.name, "size": group.size, "found": found}))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
