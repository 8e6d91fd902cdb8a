"""``minidl tune``: what this machine is best told, measured once and kept.

``tune comm``: bytes of a message of gradients. ``tune conv``: the kernel of each pass of each convolution.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minidl import backend, checks, dist, models
from minidl.backend import get_ops
from minidl.bench import conv_tuning
from minidl.bench.conv_tuning import case, of_layer, of_network, spelt
from minidl.bench.setup import Setup, add_images, device_of, join, parse_layer, parse_shape
from minidl.config import Help
from minidl.cuda import nvrtc
from minidl.cuda.convolution.conv2d_tuned import NOTHING, Table, identity, install, question_of, table_path
from minidl.cuda.device import current_device
from minidl.precision import PRECISIONS
from minidl.profile import grouping
from minidl.profile.results import write
from minidl.profile.scaling import tuned_interference
from minidl.profile.tables import show


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl tune``."""
    what = p.add_subparsers(dest="what", required=True, metavar="WHAT")
    comm = what.add_parser("comm", help="how many bytes of gradients a message should carry, between these ranks")
    comm.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    conv = what.add_parser(
        "conv", help="which kernel each convolution should run on, on this GPU", formatter_class=Help
    )
    conv.add_argument("--model", default="resnet50", help=f"its convolutions: {models.CHOICES}")
    conv.add_argument("--layer", action="append", metavar="TEXT", help="these layers instead: 'Conv2d(64, 64, 3)'")
    conv.add_argument("--input", action="append", metavar="NxHxWxC", help="shape of a layer's input; once for each")
    conv.add_argument("--batch", nargs="+", type=int, default=[32], help="samples of each GPU")
    conv.add_argument("--precision", nargs="+", default=["bf16"], choices=PRECISIONS)
    add_images(conv)
    conv.add_argument("--output", metavar="PATH", help="keep the table here, for MINIDL_TUNED=PATH; default: the cache")
    conv.add_argument("--remeasure", action="store_true", help="also what an earlier run has measured")


def run(a: argparse.Namespace) -> int:
    """One of the two; the exit status."""
    return _comm(a) if a.what == "comm" else _conv(a)


def _comm(a: argparse.Namespace) -> int:
    """Measure, show on rank 0, and keep for `Model`."""
    comm = join(a.device)
    ops = get_ops(device_of(a.device, comm))
    record, path = grouping.tune(ops, comm, _tell)
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
        for kind, groups in record["beside"].items():
            exposed = ", ".join(f"{g['bytes'] >> 20}: {g['exposed_ms']:.2f}" for g in groups)
            notes.append(f"beside {kind} alone, MiB: exposed ms {exposed}")
        if record["beside"]:
            notes.append(f"for minidl simulate: --interference {tuned_interference(record)}")
        if grouping.disturbed(record):
            notes.append("other programs used this machine meanwhile: measure again when it is quiet")
        kibibytes = grouping.LAYER_BYTES[ops.name] >> 10
        title = f"{grouping.LAYERS} layers of {kibibytes:,} KiB, {comm.size} ranks ({comm.name})"
        show(title, ["KiB", "alone ms", "step ms", "exposed ms"], rows, notes=notes)
    return 0


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _conv(a: argparse.Namespace) -> int:
    """Measure what the table lacks, keep it, show what it gains."""
    if dist.launched_size() > 1:
        raise checks.bad_value("tune conv", "ranks", "1", dist.launched_size(), "start it without a launcher")
    _require_gpu()
    install(NOTHING)  # what is compared with runs untuned
    device, asked = current_device(), _questions(a)
    path = Path(a.output) if a.output else table_path()
    rows = _rows_at(path, bool(a.output))
    if a.remeasure:
        rows = [row for row in rows if question_of(row) not in asked]
    known = {question_of(row) for row in rows}
    todo = [question for question in asked if question not in known]
    kernels = conv_tuning.variants(todo, device)
    _tell(f"{len(asked)} passes of convolutions, {len(todo)} to be measured; compiling {len(kernels)} kernels")
    nvrtc.compile_all(kernels, nvrtc.target(device.arch))

    def save(some: list[conv_tuning.Row]) -> None:
        write(path, identity() | {"rows": some})

    found = conv_tuning.tune(asked, device, rows, save, progress=_tell)
    install(None)
    _show_gains(found, asked, path)
    return 0


def _require_gpu() -> None:
    try:
        backend.open_device("cuda")
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"tune conv needs a GPU: {error}") from error


def _questions(a: argparse.Namespace) -> Counter:
    """How often a step asks each question, over all that is to be tuned."""
    found: Counter = Counter()
    if a.layer or a.input:
        if len(a.layer or ()) != len(a.input or ()):
            raise checks.bad_value("tune conv", "--input", "once for each --layer", len(a.input or ()))
        for text, shape in zip(a.layer, a.input, strict=True):
            for precision in a.precision:
                found += of_layer(parse_layer(text), parse_shape(shape), precision, current_device())
        return found
    for batch in a.batch:
        for precision in a.precision:
            setup = Setup(a.model, batch, precision, "cuda", 1, a.image_size, a.classes)
            found += of_network(setup.graph(), batch, precision, current_device())
    return found


def _rows_at(path: Path, named: bool) -> list[dict[str, Any]]:
    """What an earlier run kept for this GPU, driver and version.

    Raises:
        ValueError: when the user ``named`` a file that is something else, and would be overwritten.
    """
    if not path.exists():
        return []
    try:
        record = json.loads(path.read_text())
        if all(record.get(key) == value for key, value in identity().items()):
            return list(Table.of(record).record["rows"])
        problem = "a table of another GPU, driver or version"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if named:
        raise checks.bad_value("tune conv", "--output", "a new file, or a table of this machine", str(path), problem)
    return []


def _show_gains(rows: Sequence[Mapping[str, Any]], asked: Counter, path: Path) -> None:
    """What tuning gains: the passes that gain most, in time of a step, first."""
    counts = [asked[question_of(row)] for row in rows]
    order = sorted(zip(rows, counts, strict=True), key=lambda pair: pair[1] * (pair[0]["ms"] - pair[0]["default_ms"]))
    cells = [
        [
            f"{case(row)} {row['pass']}", row["dtype"], f"{row['default_ms'] * 1e3:.1f}", f"{row['ms'] * 1e3:.1f}",
            f"{row['spread']:.1%}", f"{row['default_ms'] / row['ms'] - 1:.1%}", str(count), spelt(row["default"]),
            spelt(row["choice"]) if row["choice"] != row["default"] else "the same",
        ]
        for row, count in order
    ]  # fmt: skip
    columns = ["convolution and pass", "type", "us", "tuned us", "spread", "gain", "count", "kernel", "tuned kernel"]
    show("what tuning gains, most first", columns, cells, notes=[*_sums(rows, counts), f"kept in {path}"])


def _sums(rows: Sequence[Mapping[str, Any]], counts: Sequence[int]) -> list[str]:
    """The step's convolutions together, and how far the untuned choice is behind."""
    if not rows:
        return ["nothing to choose: one kernel can do each"]
    before, after = (sum(n * row[key] for row, n in zip(rows, counts, strict=True)) for key in ("default_ms", "ms"))
    behind = [row["default_ms"] / row["ms"] for row in rows]
    mean = math.exp(sum(map(math.log, behind)) / len(behind)) - 1
    return [
        f"all together: {before:.3f} ms untuned, {after:.3f} ms tuned, {before / after:.3f} times as fast",
        f"untuned is behind by {mean:.1%} (geometric mean), {max(behind) - 1:.1%} at most, by over 10 % in "
        f"{sum(loss > 1.1 for loss in behind)} of {len(rows)}",
    ]
