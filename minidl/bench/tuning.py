"""``minidl tune comm``: what this machine's ranks should send at once."""

from __future__ import annotations

import argparse
import sys

from minidl.backend import get_ops
from minidl.bench.setup import device_of, join
from minidl.profile import grouping
from minidl.profile.tables import show

__all__ = ["add_arguments", "run"]


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl tune``."""
    what = p.add_subparsers(dest="what", required=True, metavar="WHAT")
    comm = what.add_parser("comm", help="how many bytes of gradients a message should carry, between these ranks")
    comm.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])


def run(a: argparse.Namespace) -> int:
    """Measure, show on rank 0, and keep for `Model`."""
    comm = join(a.device)
    ops = get_ops(device_of(a.device, comm))
    record, path = grouping.tune(ops, comm, lambda text: print(text, file=sys.stderr, flush=True))
    if comm.rank == 0:
        rows = [
            [f"{g['bytes'] >> 10:,}", *(f"{g[key]:.2f}" for key in ("alone_ms", "step_ms", "exposed_ms"))]
            for g in record["groups"]
        ]
        notes = [
            f"alpha-beta: {record['latency_us']:.1f} us and {record['bus_gb_per_s']:.2f} GB/s on the wire of each rank",
            f"backward pass without messages: {record['compute_ms']:.2f} ms",
            f"messages of {record['group_bytes'] >> 10:,} KiB; kept in {path or 'no file, which cannot be written'}",
        ]
        if grouping.disturbed(record):
            notes.append("other programs used this machine meanwhile: measure again when it is quiet")
        kibibytes = grouping.LAYER_BYTES[ops.name] >> 10
        title = f"{grouping.LAYERS} layers of {kibibytes:,} KiB, {comm.size} ranks ({comm.name})"
        show(title, ["KiB", "alone ms", "step ms", "exposed ms"], rows, notes=notes)
    return 0
