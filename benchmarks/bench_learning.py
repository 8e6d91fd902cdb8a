"""Networks learn: a few hundred steps of training on synthetic images, through the whole path, loss by loss.

    python benchmarks/bench_learning.py --model resnet50 --precision bf16 tf32 --batch 64 [--json PATH]
    mpirun -n 2 python benchmarks/bench_learning.py --model resnet50 --precision bf16 --batch 128 [--json PATH]
    python benchmarks/bench_learning.py --fusion none bnff auto --steps 120 --lr 0.01 [--json PATH]
    python benchmarks/bench_learning.py --recipe scripts/resnet20_cifar10.toml --data-path DIR --epochs 20

Each row holds the mean training loss of every tenth of the run and the accuracy on unseen images after it. The images
carry a class-dependent pattern under noise (`minidl.data.synthetic`), so a network that computes right learns them. Or
a recipe says what is learnt; what follows it are options of `minidl train`. Of several plans of batch-norm fusion the
curves must coincide: nowhere may their tenths lie apart by more than a twentieth of the first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.speed import learning

from minidl import cli, dist, training
from minidl.bench.setup import device_of
from minidl.profile.results import result, write

TENTHS = 10
APART = 0.05  # curves of plans, at most, of the loss in the first tenth


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", default="resnet50")
    p.add_argument("--precision", nargs="+", default=["bf16"])
    p.add_argument("--fusion", nargs="+", default=[None], metavar="PLAN", help="as minidl train takes it")
    p.add_argument("--device", default="auto")
    p.add_argument("--image-size", type=int, default=224)
    p.add_argument("--classes", type=int, default=10)
    p.add_argument("--batch", type=int, default=64, help="over all ranks")
    p.add_argument("--steps", type=int, default=300)
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--workers", type=int, default=8)
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    rest = "a recipe and options of minidl train, in the place of synthetic images; the last option"
    p.add_argument("--recipe", nargs=argparse.REMAINDER, default=[], metavar="FILE", help=rest)
    return p.parse_args()


def learn(a: argparse.Namespace, mode: str, plan: str | None, folder: Path) -> dict[str, Any] | None:
    """Train once; the row, on rank 0."""
    images = f"{a.image_size}x{a.image_size}"
    if a.recipe:
        path, *options = a.recipe
        words = tomllib.loads(Path(path).read_text())  # as on the command line
        what, images = [*(f"--{name}={value}" for name, value in words.items()), *options], Path(path).stem
    else:
        what = [
            "--model", a.model, "--data", "synthetic", "--image-size", str(a.image_size), "--classes", str(a.classes),
            "--samples", str(a.steps * a.batch), "--epochs", "1", "--batch", str(a.batch), "--lr", str(a.lr),
            "--warmup", "0.1",
        ]  # fmt: skip
    where = ["--device", a.device, "--workers", str(a.workers), "--output", str(folder)]
    where += ["--fusion", plan] if plan else []
    parsed = cli.parser().parse_args(["train", *what, "--precision", mode, *where])
    row = training.train(parsed)
    if dist.world().rank != 0:
        return None
    reports = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    losses = [report["loss"] for report in reports]
    cut = [losses[i * len(losses) // TENTHS : (i + 1) * len(losses) // TENTHS] for i in range(TENTHS)]
    tenths = [round(sum(part) / len(part), 4) for part in cut if part]
    if not tenths[-1] < tenths[0]:
        raise AssertionError(f"{parsed.model} in {mode} does not learn: {tenths}")
    return {
        "case": f"{parsed.model}/{images}/b{parsed.batch}",
        "pass": "train",
        "dtype": mode,
        "arm": ("compiled" if device_of(a.device, dist.world()) == "cuda" else "eager") + (f", {plan}" if plan else ""),
        "ms": 1e3 * parsed.batch / row["images_per_s"],
        "spread": None,
        "floor_ms": None,
        "peers": {},
        "ranks": dist.world().size,
        "steps": reports[-1]["step"],
        "losses_by_tenth": tenths,
        "test_accuracy": row["test_accuracy"],
        "images_per_s": row["images_per_s"],
    }


def apart(one: dict[str, Any], other: dict[str, Any]) -> float:
    """How far two curves lie apart where they do most, over the first one's loss in the first tenth."""
    first, second = one["losses_by_tenth"], other["losses_by_tenth"]
    return max(abs(a - b) for a, b in zip(first, second, strict=True)) / first[0]


def main() -> None:
    a = arguments()
    dist.init(a.device)
    rows = []
    for mode, (i, plan) in itertools.product(a.precision, enumerate(a.fusion)):
        with tempfile.TemporaryDirectory() as folder:
            row = learn(a, mode, plan, Path(folder))
        if row is not None:
            rows.append({**row, "apart": apart(rows[-i], row) if i else None})
            content = result("bench_learning", rows)
            if a.json:
                write(a.json, content)
    if dist.world().rank != 0:
        return
    print_tables(content, learning)
    if any((row["apart"] or 0) > APART for row in rows):
        raise SystemExit(f"plans learn differently: curves lie apart by more than {APART:.0%} of the first tenth")


if __name__ == "__main__":
    main()
