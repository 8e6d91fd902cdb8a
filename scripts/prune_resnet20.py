#!/usr/bin/env python3
"""ResNet-20 pruned in every granularity: accuracy, parameters, FLOP, measured step, and a compressed file.

    python scripts/prune_resnet20.py                                             # the digits, on the CPU
    python scripts/prune_resnet20.py --data cifar10 --data-path DIR --epochs 160 --prune-epochs 80
    python scripts/prune_resnet20.py --data digits32 --epochs 15 --prune-epochs 20   # enlarged to CIFAR's 32x32x3
    python scripts/prune_resnet20.py --data synthetic --samples 2048             # made up, of that shape, too

A dense network is trained once; every arm goes on from it for as many epochs, the sparsity rising by the cubic schedule
over the first half of them. The arm "dense" goes on without pruning, so that no arm gains by training longer. What a
step takes is measured at the end, the arms in turn, the least of the rounds: of the masked network, and of what is made
of it (filters and layers are cut out; weights run as Compressed Sparse Blocks where such a layer exists). The last arm
shares the weights of the first and writes them to a compressed file, which is read back before its accuracy is taken.
"""

from __future__ import annotations

import argparse
import lzma
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from minidl import data, models, schedule
from minidl.bench.setup import device_of
from minidl.compile import CompiledStep
from minidl.dist.communicator import SOLO
from minidl.loss import SoftmaxCrossEntropy
from minidl.model import Model
from minidl.optim import SGD
from minidl.profile.results import result, write
from minidl.profile.tables import show
from minidl.pruning import accuracy
from minidl.sparse import (
    CubicSchedule,
    Granularity,
    PrunedSGD,
    Pruning,
    SharedSGD,
    load_compressed,
    save_compressed,
    share_weights,
    shrink,
    sparse_state,
    to_sparse,
)
from minidl.step import EagerStep
from minidl.train import Trainer

ARMS = (
    ("weight", 0.9, "layer"), ("weight", 0.9, "global"), ("kernel", 0.7, "layer"), ("block:4x4", 0.75, "layer"),
    ("2:4", 0.5, "layer"), ("filter", 0.3, "layer"), ("filter:8", 0.3, "layer"), ("filter:8", 0.5, "layer"),
    ("layer", 0.4, "global"),
)  # fmt: skip
DECAY = {"weight_decay": 5e-4, "decay_norm_and_bias": False}
SHARED_RATE = 5e-4


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--data", default="digits", choices=["digits", "digits32", "cifar10", "synthetic"])
    p.add_argument("--data-path", help="folder of CIFAR-10's binary files")
    p.add_argument("--samples", type=int, default=2048, help="of synthetic data")
    p.add_argument("--classes", type=int, default=10, help="of synthetic data")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--precision", default="fp32", help="fp32, tf32 (GPU), bf16 or fp16")
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--workers", type=int, default=1, help="threads that prepare batches")
    p.add_argument("--epochs", type=int, default=30, help="of the dense network")
    p.add_argument("--prune-epochs", type=int, default=40, help="of each arm")
    p.add_argument("--share-epochs", type=int, default=2)
    p.add_argument("--clusters", type=int, default=32, help="values that the weights of a layer share; 0: no file")
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--seeds", type=int, nargs="+", default=[0], help="of weights and order; steps are measured once")
    p.add_argument("--only", nargs="+", metavar="GRANULARITY", help="arms of these granularities")
    p.add_argument("--rounds", type=int, default=50, help="of measuring steps; 0: none")
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    return p.parse_args()


class Recipe:
    """The data, and training from given weights."""

    def __init__(self, a: argparse.Namespace, seed: int):
        self.a, self.seed, self.device = a, seed, device_of(a.device, SOLO)
        options = [{}, {}]
        if a.data == "synthetic":
            shape = {"shape": (32, 32, 3), "num_classes": a.classes}
            options = [{"n": a.samples, **shape}, {"n": max(a.samples // 4, 1), **shape}]
        splits = zip(("train", "test"), options, strict=True)
        name = "digits" if a.data == "digits32" else a.data
        self.train_set, self.test_set = (data.dataset(name, a.data_path, s, **o) for s, o in splits)
        if a.data == "digits32":
            self.train_set, self.test_set = map(enlarged, (self.train_set, self.test_set))

    def build(self) -> Any:
        return models.resnet20(self.train_set.num_classes, tuple(self.train_set[0][0].shape))

    def model(self, graph: Any = None, state: Any = None) -> Model:
        model = Model(graph or self.build(), device=self.device, precision=self.a.precision, seed=self.seed)
        if state is not None:
            model.load_state_dict(state)
        return model

    def loader(self, model: Model, dataset: Any, **options: Any) -> data.Loader:
        return data.Loader(
            dataset, self.a.batch, seed=self.seed, dtype=model.precision.storage, workers=self.a.workers,
            transfer=model.ops.uploader(), **options,
        )  # fmt: skip

    def accuracy(self, model: Model) -> float:
        return accuracy(model, self.loader(model, self.test_set, shuffle=False))

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.train_set) // self.a.batch)

    def train(
        self, model: Model, optimizer: SGD, epochs: int, rate: str, lr: float, warmup: float | None = 0.0
    ) -> float:
        """Train for some epochs; the accuracy on the test set."""
        loader = self.loader(model, self.train_set, augment=getattr(self.train_set, "augment", None))
        at = schedule.parse(rate, lr=lr, epochs=epochs, steps_per_epoch=self.steps_per_epoch, warmup=warmup)
        Trainer(model, optimizer, SoftmaxCrossEntropy(), loader, schedule=at, epochs=epochs).fit()
        return self.accuracy(model)


def enlarged(digits: data.ArrayDataset) -> data.ArrayDataset:
    """8x8 grey images as 32x32 ones in three equal colours, each pixel four by four."""
    images = digits.images.repeat(4, axis=1).repeat(4, axis=2).repeat(3, axis=3)
    normal = {"mean": digits.mean * 3, "std": digits.std * 3}
    return data.ArrayDataset(images, digits.labels, digits.num_classes, **normal, augment=data.RandomCrop(4))


@dataclass
class Arm:
    """What became of the network in one way: the model as trained, and the one to run."""

    name: str
    model: Model
    optimizer: SGD
    accuracy: float
    runs: Model
    kind: str


def pruned_arm(recipe: Recipe, start: dict[str, Any], granularity: str, sparsity: float, scope: str) -> Arm:
    a, model = recipe.a, recipe.model(state=start)
    last = a.prune_epochs * recipe.steps_per_epoch // 2
    changes = CubicSchedule(sparsity, 1, last, frequency=max(last // 50, 1))
    optimizer = PrunedSGD(
        model, a.lr, 0.9, **DECAY, pruning=Pruning(changes, exclude=["fc.*"], granularity=granularity, scope=scope)
    )
    reached = recipe.train(model, optimizer, a.prune_epochs, "cosine", a.lr / 2)
    state, masks = model.state_dict(), {k: v for k, v in optimizer.masks().items() if v.ndim > 1}
    if Granularity.parse(granularity).kind in ("filter", "layer"):
        graph, cut = shrink(recipe.build(), state)
        runs, kind = recipe.model(graph, cut.state(state)), "shrunk"
    else:
        graph = recipe.build()
        kind = f"{len(to_sparse(graph, state, masks))} layers sparse"
        runs = recipe.model(graph, sparse_state(graph, state))
    own = recipe.accuracy(runs)
    assert abs(own - reached) <= 2 / len(recipe.test_set), f"{granularity}: {own} after conversion, {reached} before"
    name = f"{granularity} {sparsity:.0%}" + (" global" if scope == "global" else "")
    return Arm(name, model, optimizer, reached, runs, kind)


def compressed_arm(recipe: Recipe, arm: Arm, folder: Path) -> dict[str, Any]:
    """Share the weights of a pruned network, train what they share, write, read back."""
    a, masks = recipe.a, arm.optimizer.masks()
    model = recipe.model(state=arm.model.state_dict())
    weights = {name: value for name, value in model.state_dict().items() if value.ndim > 1}
    optimizer = SharedSGD(model, SHARED_RATE, 0.9, **DECAY, shared=share_weights(weights, a.clusters))
    at_once = recipe.accuracy(model)
    recipe.train(model, optimizer, a.share_epochs, "constant", SHARED_RATE)
    report = save_compressed(folder / "resnet20.mdz", model.state_dict())
    general = len(lzma.compress(b"".join(value.tobytes() for value in model.state_dict().values()), preset=9))
    back = recipe.accuracy(recipe.model(state=load_compressed(folder / "resnet20.mdz")))
    return {
        "arm": f"{arm.name}, {a.clusters} shared values, Huffman", "ms": None, "spread": None, "pass": "file",
        "accuracy": back, "accuracy_before_training": at_once, "bytes": report.file, "bytes_before": report.before,
        "ratio": report.ratio, "lzma_bytes": general, "nonzeros": sum(int(m.sum()) for m in masks.values()),
        "parts": {k: getattr(report, k) for k in ("header", "values", "gaps", "plain")},
    }  # fmt: skip


def step_times(recipe: Recipe, arms: list[Arm]) -> dict[str, list[float]]:
    """Milliseconds of training steps, all arms in turn in each round: as they run, and masked."""
    calls: dict[str, Callable[[], Any]] = {}
    batch = next(iter(recipe.loader(arms[0].model, recipe.train_set)))
    for arm in arms:
        optimizer = SGD(arm.runs, 0.0, 0.9, **DECAY)
        calls[arm.name] = _step(arm.runs.train(), optimizer, batch)
        if isinstance(arm.optimizer, PrunedSGD):
            calls[f"{arm.name} masked"] = _step(arm.model.train(), arm.optimizer, batch)
            arm.optimizer.set_lr(0.0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    unmeasured = 4 if arms[0].model.ops.name == "cuda" else 1  # steps in which a compiled one is recorded and captured
    for number in range(recipe.a.rounds + unmeasured):
        for name, call in calls.items():
            begin = time.perf_counter()
            call().read()
            if number >= unmeasured:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def _step(model: Model, optimizer: SGD, batch: Any) -> Callable[[], Any]:
    """A step as `Trainer` would run it: on a GPU as a CUDA graph."""
    step = (CompiledStep if model.ops.name == "cuda" else EagerStep)(model, optimizer, SoftmaxCrossEntropy())
    return lambda: step(batch.images, batch.labels)


def flop(model: Model) -> int:
    return sum(cost.forward.flop for _, cost in model.graph.costs(1))


def rows_of(a: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """Everything for one seed."""
    recipe = Recipe(a, seed)
    dense = recipe.model()
    before = recipe.train(dense, SGD(dense, a.lr, 0.9, **DECAY), a.epochs, "cosine", a.lr, warmup=None)
    start = dense.state_dict()
    model = recipe.model(state=start)
    optimizer = SGD(model, a.lr, 0.9, **DECAY)
    reached = recipe.train(model, optimizer, a.prune_epochs, "cosine", a.lr / 2)
    arms = [Arm("dense", model, optimizer, reached, model, "dense")]
    for granularity, sparsity, scope in ARMS:
        if not a.only or granularity.partition(":")[0] in a.only:
            arms.append(pruned_arm(recipe, start, granularity, sparsity, scope))
    times = step_times(recipe, arms) if a.rounds and seed == a.seeds[0] else {}
    rows = [row_of(arm, arms[0], times) for arm in arms]
    with tempfile.TemporaryDirectory() as folder:
        chosen = [arm for arm in arms if arm.name == "weight 90%" and a.clusters]
        rows += [compressed_arm(recipe, arm, Path(folder)) for arm in chosen]
    image = "x".join(map(str, dense.graph.nodes[0].shape))
    facts = {
        "case": f"resnet20/{a.data} {image}/b{a.batch}", "dtype": a.precision, "floor_ms": None, "seed": seed,
        "accuracy_dense": before, "accuracy_dense_trained_on": reached, "test_images": len(recipe.test_set),
    }  # fmt: skip
    return [{"pass": "step", "peers": {}} | facts | row for row in rows]


def main() -> None:
    a = arguments()
    rows = [row for seed in a.seeds for row in rows_of(a, seed)]
    if a.json:
        threads = os.environ.get("OMP_NUM_THREADS", "all")
        write(a.json, result("prune_resnet20", rows, threads=threads, statistic="least of interleaved rounds"))
    tell(rows)


def row_of(arm: Arm, dense: Arm, times: dict[str, list[float]]) -> dict[str, Any]:
    least = {name: min(own) for name, own in times.items()}
    own = times.get(arm.name)
    masks = arm.optimizer.masks() if isinstance(arm.optimizer, PrunedSGD) else {}
    left = sum(int((~m).sum()) for m in masks.values())
    return {
        "arm": arm.name, "runs_as": arm.kind, "ms": least.get(arm.name),
        "spread": statistics.median(own) / min(own) - 1 if own else None,
        "peers": {"dense": least.get("dense")} | ({"masked": least.get(f"{arm.name} masked")} if masks else {}),
        "accuracy": arm.accuracy, "sparsity": left / dense.model.num_parameters,
        "parameters": arm.runs.num_parameters, "flop_ratio": flop(arm.runs) / flop(dense.model),
    }  # fmt: skip


def tell(rows: list[dict[str, Any]]) -> None:
    """A line for each arm; accuracies are means over the seeds, with the least and the greatest."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_arm.setdefault(row["arm"], []).append(row)
    number = lambda value, form: "" if value is None else f"{value:{form}}"  # noqa: E731
    table, notes = [], []
    for arm, own in by_arm.items():
        r, found = own[0], [row["accuracy"] for row in own]
        reached = f"{statistics.mean(found):.4f} ({min(found):.4f} to {max(found):.4f})"
        if r["pass"] == "file":
            notes.append(
                f"{arm}: {r['bytes_before']:,} to {r['bytes']:,} bytes, {r['ratio']:.1f} times smaller, {reached}"
            )
            continue
        table.append([
            arm, r["runs_as"], reached, f"{r['sparsity']:.3f}", f"{r['flop_ratio']:.2f}", number(r["ms"], ".1f"),
            number(r["peers"].get("masked"), ".1f"), number(r["peers"]["dense"] / r["ms"] if r["ms"] else None, ".2f"),
        ])  # fmt: skip
    head = ["arm", "runs as", "accuracy", "sparsity", "FLOP", "step ms", "masked ms", "dense / step"]
    before = statistics.mean(row["accuracy_dense"] for row in rows)
    show(f"{rows[0]['case']}: dense {before:.4f} before the arms", head, table, notes=notes)


if __name__ == "__main__":
    main()
