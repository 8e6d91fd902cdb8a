"""Convolutions alone and beside a running all-reduce, minidl's and PyTorch's, on several GPUs.

    mpirun -n 2 python benchmarks/bench_conv_beside.py --network resnet50 --json out.json

In training, layers compute while gradients travel: NCCL's kernels take multiprocessors and memory bandwidth. Here
all-reduces of ``--message`` MiB follow one another without a pause for as long as a graph of calls runs. The layers,
operands and checks are those of bench_conv.py; of each sample the slowest rank's time is taken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.bench_conv import PRECISIONS, Arrays, checked, compile_ahead, passes_of, row_of
from benchmarks.beside import Run, Traffic
from benchmarks.conv_layers import NETWORKS, Layer
from benchmarks.device import clean
from minidl import dist
from minidl.cuda.device import current_device
from minidl.profile.cost import PASSES
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show
from minidl.profile.timing import DeviceTimer, input_sets


def _measure(layer: Layer, name: str, wanted: list[str], traffic: Traffic, samples: int) -> Iterator[dict[str, Any]]:
    """Rows of a layer's passes; a collective."""
    import cupy
    import torch

    from minidl.bench.torch_calls import captured

    itemsize, cache, side = PRECISIONS[name].dtype.itemsize, current_device().l2_bytes, torch.cuda.Stream()
    arrays = Arrays(layer, PRECISIONS[name], min(8, input_sets(layer.bytes(itemsize), cache)), "cuda")
    for which in passes_of(layer, wanted):
        ours, peer = arrays.ours(which), arrays.peer(which)
        errors = checked(arrays, name, which, ours[-1](), peer[-1]())
        with DeviceTimer().captured(ours) as (launch, stream), captured(peer) as replay, torch.cuda.stream(side):
            theirs = Run(replay, cupy.cuda.Stream.from_external(side), len(peer))
            alone, beside = zip(*traffic.measure([Run(launch, stream, len(ours)), theirs], samples), strict=True)
        row = row_of(layer, name, which, errors, beside[0], {"cudnn": beside[1]})
        row |= {"alone_ms": alone[0].ms, "peers_alone": {"cudnn": alone[1].ms}, "message_bytes": traffic.nbytes}
        yield row | {"alone_spread": alone[0].spread, "peer_alone_spread": alone[1].spread}
        del ours, peer, launch, replay, theirs
        clean("cuda")


def _cells(row: dict[str, Any]) -> list[str]:
    ours, theirs = (row["alone_ms"], row["ms"]), (row["peers_alone"]["cudnn"], row["peers"]["cudnn"])
    return [
        f"{row['case']} {row['pass']}", row["dtype"], *(f"{ms:.3f}" for ms in ours), f"{row['spread']:.1%}",
        f"{ours[1] / ours[0]:.2f}", *(f"{ms:.3f}" for ms in theirs), f"{row['peer_spread']:.1%}",
        f"{theirs[1] / theirs[0]:.2f}", f"{theirs[0] / ours[0]:.2f}", f"{theirs[1] / ours[1]:.2f}",
    ]  # fmt: skip


def _totals(rows: list[dict[str, Any]]) -> list[str]:
    """The sums over all layers, weighted by how often each occurs."""
    notes = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        some = [row for row in rows if row["dtype"] == dtype]
        pairs = [(row["alone_ms"], row["ms"], row["peers_alone"]["cudnn"], row["peers"]["cudnn"]) for row in some]
        sums = [sum(row["count"] * ms[i] for row, ms in zip(some, pairs, strict=True)) for i in range(4)]
        ours, theirs = f"{sums[0]:.2f} ms alone, {sums[1]:.2f} beside", f"{sums[2]:.2f} and {sums[3]:.2f}"
        notes.append(f"{dtype}, all layers by count: {ours}; cudnn {theirs}")
    return notes


def main() -> None:
    """Measure all layers, and show on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--message", type=float, default=64.0, metavar="MIB", help="size of an all-reduce (default 64)")
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["bf16"])
    parser.add_argument("--network", nargs="+", choices=NETWORKS, default=["resnet50"])
    parser.add_argument("--pass", nargs="+", dest="passes", choices=PASSES, default=list(PASSES))
    parser.add_argument("--batch", type=int, help="images of each GPU (default: of a training step)")
    parser.add_argument("--samples", type=int, default=7, help="timed samples per measurement (default 7)")
    parser.add_argument("--json", metavar="PATH", help="write the result file here")
    a = parser.parse_args()
    comm = dist.init("cuda")
    import cupy
    import torch

    torch.cuda.set_device(cupy.cuda.runtime.getDevice())
    torch.backends.cudnn.benchmark = True
    layers = [layer for network in a.network for layer in NETWORKS[network](*([a.batch] if a.batch else []))]
    if comm.rank == 0:
        compile_ahead(layers, a.precision, a.passes)
    comm.barrier()
    traffic, rows = Traffic(comm, int(a.message * 2**20)), []
    for name, layer in product(a.precision, layers):
        torch.backends.cudnn.allow_tf32 = PRECISIONS[name].tf32 == 1
        for row in _measure(layer, name, a.passes, traffic, a.samples):
            rows.append(row)
            if comm.rank == 0 and a.json:
                write(a.json, result("bench_conv_beside", rows, machine_record(), all_reduce_ms=traffic.ms))
    if comm.rank == 0:
        rows.sort(key=lambda row: row["peers"]["cudnn"] / row["ms"])
        columns = ["layer and pass", "type", "alone ms", "beside ms", "spread", "ratio", "cudnn alone ms"]
        columns += ["cudnn beside ms", "its spread", "its ratio", "speed alone", "speed beside"]
        title = f"beside all-reduces of {a.message:g} MiB ({traffic.ms:.3f} ms) on {comm.size} GPUs, worst first"
        show(title, columns, list(map(_cells, rows)), notes=_totals(rows))
    comm.close()


if __name__ == "__main__":
    main()
