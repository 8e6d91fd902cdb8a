"""What convolutions lose by the choice of a kernel without tuning, at shapes that no model of time was fitted to.

``python benchmarks/bench_conv_choice.py --json out.json`` measures every kernel that could do each pass, as
``minidl tune conv`` does, but keeps nothing: at layers of networks that are not in `bench_conv.py`, and at random
shapes (``--random 24 --seed 7``: so many, drawn from this seed; ``--kinds any thin groups``: of each kind).
Other shapes: ``--shape 8,27,27,96,192,3`` (images, height, width, channels, filters, kernel or ``1x7``; then stride,
groups and dilation where they are not 1; padding keeps the size), as often as wanted; ``--network resnet50`` takes
those of a network. ``--seconds`` ends it early: the
passes come in an order drawn from the seed, so that those it has reached are a fair sample.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.tuning import choices

from minidl import models
from minidl.bench.conv_tuning import DeviceContest, answer, case, of_network, spelt, variants
from minidl.cuda import nvrtc
from minidl.cuda.convolution.conv2d_choice import options
from minidl.cuda.convolution.conv2d_family import Question
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.convolution.conv2d_tuned import DTYPES, NOTHING, install
from minidl.cuda.device import current_device
from minidl.profile.cost import PASSES
from minidl.profile.results import machine_record, result, write

KINDS = ("any", "thin", "groups")
# As of --shape: layers of MobileNetV2, EfficientNet-B0, Inception-v3, ResNeXt, DenseNet and wide ResNets.
OTHERS = """
32,112,112,32,16,1      32,112,112,16,96,1      32,56,56,24,144,1       32,56,56,144,24,1       32,28,28,40,240,1
32,14,14,480,112,1      32,14,14,96,576,1       32,7,7,1152,320,1       32,7,7,320,1280,1       16,35,35,48,64,5
16,35,35,64,96,3        16,35,35,288,384,3,2    16,17,17,768,192,1      16,17,17,160,160,1x7    16,17,17,192,192,7x1
16,17,17,192,320,3,2    16,8,8,448,384,3        16,8,8,384,384,1x3      32,56,56,128,128,3,1,32 32,28,28,512,512,3,2,32
32,7,7,1024,1024,3,1,32 32,28,28,128,32,3       32,14,14,640,128,1      32,32,32,160,160,3      32,16,16,320,640,3,2
4,65,65,256,256,3,1,1,2
""".split()


def random_shapes(count: int, seed: int, kind: str = "any") -> list[str]:
    """Widths, sizes and filters drawn at random, as of --shape; what takes too long or nothing at all is drawn anew.

    ``kind``: "any"; "thin", 1x1 between few channels and many, on large images; or "groups" of few channels.
    """
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        if kind != "any":
            found.append(_thin(rng) if kind == "thin" else _in_groups(rng))
            continue
        images, size = int(2 ** rng.uniform(0, 6.5)), int(2 ** rng.uniform(2.5, 7))
        channels, filters = (8 * int(2 ** rng.uniform(1, 7.5)) for _ in range(2))
        kernel = rng.choice(["1", "1", "1", "3", "3", "3", "5", "1x5", "3x1"])
        stride, width = int(rng.choice([1, 1, 1, 2])), max(1, int(size * rng.uniform(0.7, 1.4)))
        flop = 2 * images * size * width * channels * filters * math.prod(_taps(kernel)) / stride**2
        if 2e8 < flop < 6e10 and images * size * width * max(channels, filters) < 1e8:
            found.append(f"{images},{size},{width},{channels},{filters},{kernel},{stride}")
    return found


def _thin(rng: np.random.Generator) -> str:
    few, wide, size = 8 * int(rng.integers(1, 5)), 8 * int(2 ** rng.uniform(1, 5.5)), int(2 ** rng.uniform(4, 7))
    images = max(1, int(2 ** rng.uniform(24, 27) / (size**2 * (few + wide))))
    return f"{images},{size},{size},{few},{wide},1" if rng.random() < 0.5 else f"{images},{size},{size},{wide},{few},1"


def _in_groups(rng: np.random.Generator) -> str:
    width, groups = int(rng.choice([16, 32, 32, 64, 64, 128, 192])), 2 ** int(rng.integers(1, 6))
    size, images = int(2 ** rng.uniform(2.7, 5)), int(2 ** rng.uniform(3, 7))
    stride = int(rng.choice([1, 1, 2]))
    while images > 1 and images * size**2 * width * groups > 3e7:
        images //= 2
    return f"{images},{size},{size},{width * groups},{width * groups},3,{stride},{groups}"


def questions_of(shape: str, dtype: str, passes: tuple[str, ...] = PASSES) -> list[Question]:
    """The passes of a shape as of --shape."""
    *sizes, kernel = (fields := shape.split(","))[:6]
    n, h, w, c, k = map(int, sizes)
    stride, groups, dilation = (*map(int, fields[6:]), *(1,) * (9 - len(fields)))
    taps = _taps(kernel)
    padding = tuple(dilation * (r // 2) for r in taps)
    pairs = (stride,) * 2, padding, (dilation,) * 2
    conv = convolution("shape", (n, h, w, c), (k, *taps, c // groups), *pairs, groups)
    return [Question(which, conv, *DTYPES[dtype]) for which in passes]


def _taps(kernel: str) -> tuple[int, int]:
    height, _, width = kernel.partition("x")
    return int(height), int(width or height)


def _row(question: Question) -> dict[str, Any]:
    row = answer(question, options(question, current_device()), DeviceContest(question))
    return {
        "case": case(row), "pass": row["pass"], "dtype": row["dtype"], "arm": "untuned", "ms": row["default_ms"],
        "spread": row["spread"], "floor_ms": None, "peers": {"tuned": row["ms"]}, "kernel": spelt(row["default"]),
        "tuned": spelt(row["choice"]), "candidates": row["candidates"],
    }  # fmt: skip


def _questions(a: argparse.Namespace) -> list[Question]:
    questions: list[Question] = []
    drawn = [shape for kind in a.kinds for shape in random_shapes(a.random, a.seed, kind)]
    shapes = a.shape or [*([] if a.drawn_alone else OTHERS), *drawn]
    for dtype in a.precision:
        if a.network:
            graph = models.build(a.network, (224, 224, 3), 1000)
            asked = of_network(graph, a.batch, dtype, current_device())
            questions += [question for question in asked if question.which in a.passes]
        else:
            questions += [question for shape in shapes for question in questions_of(shape, dtype, a.passes)]
    if a.seconds:
        np.random.default_rng(a.seed).shuffle(order := list(range(len(questions))))
        questions = [questions[i] for i in order]
    return questions


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shape", action="append", metavar="N,H,W,C,K,R,...", help="measure this instead")
    parser.add_argument("--random", type=int, default=24, metavar="N", help="random shapes beside others (default 24)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=["any"], help="of each of these (default any)")
    parser.add_argument("--drawn-alone", action="store_true", help="leave the layers of other networks out")
    parser.add_argument("--seed", type=int, default=7, help="that they are drawn from (default 7)")
    parser.add_argument("--network", choices=sorted(models.MODELS), help="the convolutions of a network instead")
    parser.add_argument("--batch", type=int, default=32, help="images of --network (default 32)")
    parser.add_argument("--pass", nargs="+", dest="passes", choices=PASSES, default=PASSES)
    parser.add_argument("--precision", nargs="+", choices=sorted(DTYPES), default=["bf16"])
    parser.add_argument("--seconds", type=float, help="begin no other pass so long after all is compiled")
    parser.add_argument("--json", metavar="PATH", help="write the result file here")
    return parser.parse_args()


def main() -> None:
    a = _arguments()
    install(NOTHING)
    device, machine, questions = current_device(), machine_record(), _questions(a)
    nvrtc.compile_all(variants(questions, device), nvrtc.target(device.arch))
    started = time.perf_counter()
    rows: list[dict[str, Any]] = []
    for i, question in enumerate(questions):
        if rows and a.seconds and time.perf_counter() - started > a.seconds:
            print(f"{len(questions) - i} of {len(questions)} passes left out: time is up", file=sys.stderr)
            break
        rows.append(_row(question))
        print(f"{i + 1} of {len(questions)}: {rows[-1]['case']} {rows[-1]['pass']}", file=sys.stderr, flush=True)
        rows.sort(key=lambda row: row["peers"]["tuned"] / row["ms"])
        content = result("bench_conv_choice", rows, machine)
        if a.json:  # what there is, in case that the rest takes too long
            write(a.json, content)
    print_tables(content, choices)


if __name__ == "__main__":
    main()
