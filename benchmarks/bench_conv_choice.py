"""What convolutions lose by the choice of a kernel without tuning, at shapes that no model of time was fitted to.

``python benchmarks/bench_conv_choice.py --json out.json`` measures every kernel that could do each pass, as
``minidl tune conv`` does, but keeps nothing. Other shapes: ``--shape 8,27,27,96,192,3`` (images, height, width,
channels, filters, kernel; then stride, groups and dilation where they are not 1; padding keeps the size), as often as
wanted; ``--network resnet50`` takes those of a network.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidl import models
from minidl.bench.conv_tuning import DeviceContest, answer, case, of_network, spelt, variants
from minidl.cuda import nvrtc
from minidl.cuda.convolution.conv2d import options
from minidl.cuda.convolution.conv2d_family import Question
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.convolution.conv2d_tuned import DTYPES, NOTHING, install
from minidl.cuda.device import current_device
from minidl.profile.results import machine_record, result, write
from minidl.profile.tables import show

__all__ = ["SHAPES", "main", "questions_of"]

# (images, height, width, channels, filters, kernel, stride, groups, dilation): widths and sizes between the usual ones,
# few images, widths of ResNeXt and of inverted bottlenecks, wide filters, narrow images.
SHAPES = [
    (1, 13, 13, 960, 320, 3), (1, 27, 27, 192, 320, 3), (1, 28, 28, 128, 256, 3, 2), (1, 60, 60, 48, 192, 1),
    (1, 100, 100, 64, 128, 3, 2), (1, 128, 128, 32, 64, 3), (8, 13, 13, 320, 1280, 1), (8, 14, 14, 512, 512, 3),
    (8, 27, 27, 48, 96, 5), (8, 27, 27, 192, 96, 1), (8, 27, 27, 320, 320, 3, 2), (8, 30, 30, 144, 32, 1),
    (8, 33, 47, 96, 96, 3), (8, 40, 40, 192, 192, 3), (8, 56, 56, 256, 256, 3), (8, 60, 60, 24, 144, 1),
    (8, 60, 60, 192, 192, 3), (8, 80, 80, 80, 80, 3), (24, 7, 7, 160, 320, 3), (24, 7, 7, 832, 384, 1),
    (24, 13, 13, 96, 192, 3), (24, 13, 13, 320, 192, 1), (24, 15, 15, 480, 192, 5), (24, 20, 20, 112, 672, 1),
    (24, 20, 20, 672, 112, 1), (24, 27, 27, 320, 192, 3), (24, 30, 30, 192, 192, 3, 1, 1, 2), (24, 60, 60, 48, 96, 3),
    (24, 60, 60, 96, 48, 1), (24, 60, 60, 320, 96, 1), (8, 28, 28, 512, 512, 3, 2, 32),
    (24, 56, 56, 128, 128, 3, 1, 32),
]  # fmt: skip


def questions_of(shape: tuple[int, ...], dtype: str) -> list[Question]:
    """The three passes."""
    n, h, w, c, k, r, stride, groups, dilation = (*shape, *(1,) * (9 - len(shape)))
    padding = dilation * (r // 2)
    filters = k, r, r, c // groups
    conv = convolution("shape", (n, h, w, c), filters, (stride,) * 2, (padding,) * 2, (dilation,) * 2, groups)
    passes = ("forward", "backward_data", "backward_weight")
    return [Question(which, conv, *DTYPES[dtype]) for which in passes]


def _row(question: Question) -> dict[str, Any]:
    row = answer(question, options(question, current_device()), DeviceContest(question))
    return {
        "case": case(row), "pass": row["pass"], "dtype": row["dtype"], "arm": "untuned", "ms": row["default_ms"],
        "spread": row["spread"], "floor_ms": None, "peers": {"tuned": row["ms"]}, "kernel": spelt(row["default"]),
        "tuned": spelt(row["choice"]), "candidates": row["candidates"],
    }  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    ms, tuned = row["ms"], row["peers"]["tuned"]
    loss, spread = f"{ms / tuned - 1:+.1%}", f"{row['spread']:.1%}"
    return [
        f"{row['case']} {row['pass']}", row["dtype"], f"{ms * 1e3:.1f}", f"{tuned * 1e3:.1f}", spread, loss,
        row["kernel"], row["tuned"],
    ]  # fmt: skip


def _means(rows: list[dict[str, Any]]) -> list[str]:
    notes = []
    for (dtype, which), some in itertools.groupby(rows, lambda row: (row["dtype"], row["pass"])):
        losses = [row["ms"] / row["peers"]["tuned"] for row in some]
        mean = math.exp(sum(map(math.log, losses)) / len(losses)) - 1
        far = sum(loss > 1.1 for loss in losses)
        notes.append(f"{dtype} {which}: geometric mean of the loss {mean:.1%}, over 10 % in {far} of {len(losses)}")
    return notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", action="append", metavar="N,H,W,C,K,R,...", help="measure this instead")
    parser.add_argument("--network", choices=sorted(models.MODELS), help="the convolutions of a network instead")
    parser.add_argument("--batch", type=int, default=32, help="images of --network (default 32)")
    parser.add_argument("--precision", nargs="+", choices=sorted(DTYPES), default=["bf16"])
    parser.add_argument("--json", metavar="PATH", help="write the result file here")
    a = parser.parse_args()
    install(NOTHING)
    device, questions = current_device(), []
    for dtype in a.precision:
        if a.network:
            questions += of_network(models.build(a.network, (224, 224, 3), 1000), a.batch, dtype, device)
        else:
            shapes = [tuple(map(int, shape.split(","))) for shape in a.shape or ()] or SHAPES
            questions += [question for shape in shapes for question in questions_of(shape, dtype)]
    nvrtc.compile_all(variants(questions, device), nvrtc.target(device.arch))
    rows = []
    for i, question in enumerate(questions):
        rows.append(_row(question))
        print(f"{i + 1} of {len(questions)}: {' '.join(_cells(rows[-1]))}", file=sys.stderr, flush=True)
    notes = _means(sorted(rows, key=lambda row: (row["dtype"], row["pass"])))
    rows.sort(key=lambda row: row["peers"]["tuned"] / row["ms"])
    columns = ["convolution and pass", "type", "us", "tuned us", "spread", "loss", "kernel", "tuned kernel"]
    show("kernels chosen without tuning, worst first", columns, list(map(_cells, rows)), notes=notes)
    if a.json:
        write(a.json, result("bench_conv_choice", rows, machine_record()))


if __name__ == "__main__":
    main()
