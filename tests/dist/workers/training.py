"""Trains a small network on this rank's shards, case by case: ``training.py OUT DEVICE CASE ...``.

A case is ``group_bytes=N``, ``parts=N``, ``slots=N``, ``recipe=NAME``, with commas between them, or ``plain``. The
network has what could depend on the number of ranks: synchronised batch norm, dropout, ignored labels; the batch of 7
samples does not divide by any number of ranks but one. Steps cut into ``parts`` micro-batches have no batch norm, whose
statistics are those of a micro-batch. With ``slots``, updates run within the backward pass.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import data, dist
from minidl.callbacks import EarlyStop
from minidl.train import Trainer

IGNORED = 3
# Optimizer and options of the loss by recipe.
RECIPES = {
    "sgd": (lambda model: m.SGD(model, 0.05, momentum=0.9, weight_decay=1e-3), {}),
    "waits": (lambda model: m.SGD(model, 0.05, momentum=0.9, weight_decay=1e-3), {}),  # as between GPUs of a host
    "lamb": (
        lambda model: m.LAMB(model, 0.05, weight_decay=1e-3, clip_norm=0.5),
        {"label_smoothing": 0.1, "weight": [1.0, 2.0, 0.5, 1.0]},
    ),
    "mixed": (lambda model: m.SGD(model, 0.05, momentum=0.9), {"label_smoothing": 0.1}),  # images, in pairs
    "lars": (lambda model: m.LARS(model, 0.05, trust_coefficient=0.5, clip_value=0.05), {"label_smoothing": 0.2}),
}


def network(normed: bool, bias: bool):
    """``bias``: of convolutions, whose gradients a batch norm cancels to rounding errors, which Adam enlarges."""

    def norm(name, x):
        return m.BatchNorm2d(6, sync=True, name=name)(x) if normed else x

    graph = m.Graph()
    x = m.Conv2d(3, 6, 3, padding=1, bias=bias, name="conv1")(graph.input((8, 8, 3)))
    x = m.MaxPool2d(2, name="pool")(m.ReLU(name="relu")(norm("bn1", x)))
    branch = m.StochasticDepth(0.2)(m.Conv2d(6, 6, 3, padding=1, bias=bias, name="conv2")(x))
    x = norm("bn2", m.Add()(branch, x))
    x = m.Dropout(0.2)(m.Flatten()(x))
    return graph.output(m.Linear(96, 4, name="fc")(x))


def metrics(model, loader, comm):
    """Top-1, top-2 and the confusion matrix over the test set."""
    top, confusion = m.TopK(2, ignore_index=IGNORED, comm=comm), m.Confusion(ignore_index=IGNORED, comm=comm)
    model.eval()
    for batch in loader:
        logits = model.forward(batch.images, grad=False)
        for metric in (top, confusion):
            metric.update(logits, batch.labels)
    return [*top.read(), confusion.read().tolist()]


def train(comm, device: str, group_bytes: int = 0, parts: int = 0, slots: int = 0, recipe: str = "sgd") -> dict:
    graph = network(not parts, bias=recipe in ("sgd", "mixed", "waits"))
    model = m.Model(graph, device=device, comm=comm, seed=3, group_bytes=group_bytes)
    if recipe == "waits":
        model.arena.departures = model.departures(math.inf)
        model.arena.connect(comm, group_bytes)
        model.arena.settle()
    options = {"shape": (8, 8, 3), "num_classes": 4, "n": 23}
    loaders = [
        data.Loader(
            data.dataset("synthetic", None, split, **options), 7, rank=comm.rank, size=comm.size,
            transfer=model.ops.uploader(), mix=data.MixUp(4, 1.0) if (recipe, split) == ("mixed", "train") else None,
        )
        for split in ("train", "test")
    ]  # fmt: skip
    make, options = RECIPES[recipe]
    optimizer = make(model)
    if slots:
        optimizer.update_in_backward(slots)
    loss = m.SoftmaxCrossEntropy(ignore_index=IGNORED, comm=comm, **options)
    top = m.TopK(2, ignore_index=IGNORED, comm=comm)
    run = Trainer(
        model, optimizer, loss, *loaders, schedule=lambda step: 0.05, epochs=3, accumulate=parts or 1,
        metrics={"top2": top}, callbacks=[EarlyStop("test_top2", patience=3)],
    )  # fmt: skip
    losses, train = [], run._train

    def recorded(batch):
        totals = train(batch)
        losses.append([totals.loss, totals.read()[1]])
        return totals

    run._train = recorded
    row = run.fit()
    weights = np.concatenate([v.ravel() for _, v in sorted(model.state_dict().items())])
    return {
        "losses": losses, "weights": weights.tolist(), "test": [row["test_loss"], row["test_accuracy"]],
        "top2": row["test_top2"], "metrics": metrics(model, loaders[1], comm),
        "waiting": sum(bool(each.before) for each in model.arena.messages),
    }  # fmt: skip


def main(out: Path, device: str, *cases: str) -> None:
    comm, answer = dist.init(device), {}
    for case in cases:
        told = dict(pair.split("=") for pair in case.split(",") if case != "plain")
        answer[case] = train(comm, device, **{key: int(v) if v.isdigit() else v for key, v in told.items()})
    (out / f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
