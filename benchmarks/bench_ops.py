"""Every memory-bound operation of the CUDA table on large tensors, against a device-to-device copy and against PyTorch.

    python benchmarks/bench_ops.py [--only NAME ...] [--json PATH]    on a GPU
    python benchmarks/bench_ops.py --dry-run                          anywhere: launchers and least bytes, no times

The rows are those of operations/. The floor of one is its least bytes (each input read once, each output written once)
at the copy's bandwidth, measured in the same run; its share is floor over time. Rows are printed worst share first.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from operations.case import ACTIVATIONS, BATCH, DTYPES, Case
from operations.elementwise import batch_norm, elementwise, images
from operations.losses import loss, segmentation, whole_losses
from operations.pooling import pooled_norms, pooling
from operations.samples import within_samples
from operations.updates import optimizer

from benchmarks.device import clean
from minidl import cuda as ops
from minidl.cuda.device import current_device
from minidl.cuda.launch import dry_run
from minidl.profile.device_ceilings import copy_bandwidth
from minidl.profile.results import result, write
from minidl.profile.tables import show
from minidl.profile.timing import Budget, DeviceTimer, input_sets

BUDGET = Budget(samples=11, seconds=math.inf, sample_ms=1.0)
SAVED = 50  # rows are written at a time


def cases(dtypes: list[str], only: list[str]) -> list[Case]:
    found = []
    for dtype in dtypes:
        for label, size in ACTIVATIONS.items():
            found += elementwise(label, (BATCH, *size), dtype)
            found += batch_norm(label, (BATCH, *size), dtype)
        for label in ("64@56", "256@56"):
            found += within_samples(label, (BATCH, *ACTIVATIONS[label]), dtype)
        found += [
            *images(dtype),
            *pooling(dtype),
            *pooled_norms(dtype),
            *loss(dtype),
            *whole_losses(dtype),
            *segmentation(dtype),
        ]
        found += optimizer(dtype)
    return [case for case in found if not only or any(name in case.name for name in only)]


def measure(case: Case, bandwidth: float, peers: bool) -> dict[str, Any]:
    """One row of the result file."""
    if peers:
        from minidl.bench.torch_calls import time_calls
    sets = input_sets(case.least_bytes, current_device().l2_bytes)
    timing = DeviceTimer().replayed([case.make() for _ in range(sets)], BUDGET)
    row = {
        "case": case.name, "pass": case.direction, "dtype": case.dtype, "arm": "minidl",
        "ms": timing.ms, "spread": timing.spread, "floor_ms": case.least_bytes / bandwidth * 1e3,
        "least_bytes": case.least_bytes, "tb_per_s": case.least_bytes / timing.ms * 1e-9, "peers": {},
    }  # fmt: skip
    row["share"] = row["floor_ms"] / row["ms"]
    for name, make in case.peers.items() if peers else ():
        try:
            row["peers"][name] = time_calls([make() for _ in range(sets)], BUDGET, "replayed", "cuda").ms
        except RuntimeError as error:  # a peer that cannot do this leaves a gap in its column, not in ours
            print(f"{case.name} {case.direction}: {name} failed: {str(error).splitlines()[0]}", file=sys.stderr)
        clean("cuda")
    clean("cuda")
    return row


def has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def report(rows: list[dict[str, Any]], bandwidth: float) -> None:
    columns = ["case", "pass", "dtype", "ms", "spread", "TB/s", "floor ms", "share", "torch ms", "torch / ours"]
    lines = []
    for row in sorted(rows, key=lambda row: row["share"]):
        peer = row["peers"].get("torch-eager")
        beside = [f"{peer:.4f}", f"{peer / row['ms']:.2f}"] if peer else ["", ""]
        times = [f"{row['ms']:.4f}", f"{row['spread']:.1%}", f"{row['tb_per_s']:.2f}", f"{row['floor_ms']:.4f}"]
        lines.append([row["case"], row["pass"], row["dtype"], *times, f"{row['share']:.1%}", *beside])
    show(f"device copy {bandwidth * 1e-12:.2f} TB/s, worst share first", columns, lines)


def rehearse(found: list[Case]) -> None:
    """Every launcher once, without a GPU."""
    lines = []
    for case in found:
        with dry_run() as log:
            case.make()
            setup = len(log.launches)
            case.make()()
        kernels = sorted({launch.name for launch in log.launches[2 * setup :]})
        lines.append([case.name, case.direction, case.dtype, f"{case.least_bytes / 1e6:.1f}", ", ".join(kernels)])
    show("dry run", ["case", "pass", "dtype", "least MB", "kernels"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="cases whose name contains one of these")
    parser.add_argument("--dtype", choices=[*DTYPES], action="append", help="default: all")
    parser.add_argument("--no-peers", action="store_true", help="without PyTorch")
    parser.add_argument("--dry-run", action="store_true", help="call every launcher without a GPU")
    parser.add_argument("--json", metavar="PATH", help="write the result file here")
    options = parser.parse_args()
    if options.dry_run:
        with dry_run():
            found = cases(options.dtype or [*DTYPES], options.only)
        rehearse(found)
        return
    ops.require_device()
    peers = not options.no_peers and has_torch()
    bandwidth = copy_bandwidth(ops, DeviceTimer()) * 1e9
    found, rows = cases(options.dtype or [*DTYPES], options.only), []
    for case in found:
        rows.append(measure(case, bandwidth, peers))
        if options.json and (len(rows) % SAVED == 0 or len(rows) == len(found)):
            write(options.json, result("bench_ops", rows, copy_bytes_per_s=bandwidth))
    report(rows, bandwidth)


if __name__ == "__main__":
    main()
