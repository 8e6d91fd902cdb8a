"""Every tile that could do a layer, forward and data gradient in bfloat16, on a Hopper GPU: what the choice loses.

``python benchmarks/bench_conv_tiles.py --json out.json`` takes the layers of bench_conv.py, ``--shape 32,20,64,64,3,1``
(batch, size, channels, filters, kernel, stride; as often as wanted) others. All tiles give the same bits, which is
checked. The constants of the tiles in conv2d_hopper.py and conv2d_halo.py were fitted to such measurements.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bench_conv import NETWORKS, PRECISIONS, Layer, floor_ms
from minidl import cuda as ops
from minidl.cuda import conv2d_hopper, nvrtc
from minidl.cuda.conv2d_plan import Convolution, convolution
from minidl.cuda.device import current_device
from minidl.precision import bfloat16
from minidl.profile.device_ceilings import copy_bandwidth
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, DeviceTimer, input_sets

CODE = 1  # the macro DTYPE of bfloat16
PRECISION = PRECISIONS["bf16"]


def _convolution(layer: Layer) -> Convolution:
    x = layer.batch, layer.size, layer.size, layer.channels
    w = layer.filters, layer.kernel, layer.kernel, layer.channels
    return convolution("bench_conv_tiles", x, w, (layer.stride,) * 2, (layer.padding,) * 2, (1, 1), 1)


def _plans(conv: Convolution, backward: bool) -> dict[str, list[Any]]:
    """The launches with each tile, by name; the chosen one is called so."""
    device, pitch = current_device(), (conv.out_channels if backward else conv.channels, 0)
    plans = {"chosen": conv2d_hopper.plan(conv, CODE, backward, pitch, False, device)}
    for tile in conv2d_hopper.candidates(conv, backward, device):
        rounds = -(-conv2d_hopper.work(conv, backward, tile)[0] // (device.multiprocessors * tile.resident))
        plans[str(tile)] = conv2d_hopper.plan(conv, CODE, backward, pitch, False, device, (tile, rounds))
    return plans


def _draw(*shape: int) -> Any:
    import cupy

    return ops.cast(cupy.random.standard_normal(shape, "float32"), bfloat16)


def _calls(planned: list[Any], w: Any, sources: list[Any], shape: tuple[int, ...]) -> list[Callable[[], Any]]:
    def run(source: Any) -> Any:
        output = ops.empty(shape, bfloat16)
        for one in planned:
            conv2d_hopper.start(one, w, source, output)
        return output

    return [partial(run, source) for source in sources]


def _measure(layer: Layer, backward: bool, bandwidth: float, budget: Budget) -> dict[str, Any]:
    conv, device = _convolution(layer), current_device()
    shapes = (conv.y_shape, conv.x_shape) if backward else (conv.x_shape, conv.y_shape)
    sources = [_draw(*shapes[0]) for _ in range(min(8, input_sets(layer.bytes(2), device.l2_bytes)))]
    w, expected, times = _draw(layer.filters, layer.kernel, layer.kernel, layer.channels), None, {}
    for name, planned in _plans(conv, backward).items():
        calls = _calls(planned, w, sources, shapes[1])
        found = calls[0]().view("uint16")
        expected = found if expected is None else expected
        if not (found == expected).all():
            raise AssertionError(f"{layer.name}, backward={backward}: {name} gives other bits than the chosen tile")
        times[name] = DeviceTimer().replayed(calls, budget)
    chosen = times.pop("chosen")
    return {
        "case": layer.name, "pass": "backward_data" if backward else "forward", "dtype": "bf16", "arm": "chosen",
        "ms": chosen.ms, "spread": chosen.spread, "floor_ms": floor_ms(layer, PRECISION, bandwidth), "peers": {},
        "tile": str(conv2d_hopper.choose(conv, backward, device)), "tiles_ms": {k: t.ms for k, t in times.items()},
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    best = min(row["tiles_ms"], key=row["tiles_ms"].get)
    loss = row["ms"] / row["tiles_ms"][best] - 1
    return [f"{row['case']} {row['pass']}", f"{row['ms']:.3f}", f"{row['tiles_ms'][best]:.3f}", f"{loss:+.1%}", best]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", action="append", metavar="N,H,C,K,R,S", help="measure this instead of the networks")
    parser.add_argument("--samples", type=int, default=5, help="timed samples per measurement (default 5)")
    parser.add_argument("--json", metavar="PATH", help="write the result file here")
    options = parser.parse_args()
    shapes = [tuple(map(int, shape.split(","))) for shape in options.shape or ()]
    layers = [Layer("shape", *shape, 1) for shape in shapes]
    layers = layers or [layer for network in NETWORKS.values() for layer in network() if layer.channels % 8 == 0]
    jobs = [(layer, backward) for layer in layers for backward in (False, True)]
    plans = [planned for job in jobs for some in _plans(_convolution(job[0]), job[1]).values() for planned in some]
    nvrtc.compile_all({(one.stem, tuple(one.defines.items())) for one in plans}, nvrtc.target(current_device().arch))
    bandwidth, budget = copy_bandwidth(ops, DeviceTimer()) * 1e9, Budget(options.samples, math.inf, sample_ms=1.0)
    rows = [_measure(layer, backward, bandwidth, budget) for layer, backward in jobs]
    rows.sort(key=lambda row: min(row["tiles_ms"].values()) / row["ms"])
    show("chosen tiles, worst first", ["layer and pass", "ms", "best ms", "loss", "best tile"], map(_cells, rows))
    losses = [row["ms"] / min(row["tiles_ms"].values()) for row in rows]
    print(f"geometric mean of the loss: {math.exp(sum(map(math.log, losses)) / len(losses)) - 1:.1%}")
    if options.json:
        write(options.json, result("bench_conv_tiles", rows, machine_record()))


if __name__ == "__main__":
    main()
