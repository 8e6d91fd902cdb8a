"""Trains a network with sparse layers on this rank's shards: ``sparse.py OUT DEVICE GRANULARITY``.

Its other layers are pruned meanwhile, unless GRANULARITY is "none".
Losses, weights, masks and the elements sent in a step go to OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import data, dist
from minidl.sparse import CSBConv2d, CSBLinear, CubicSchedule, PrunedSGD, Pruning
from minidl.train import Trainer


def network():
    rng = np.random.default_rng(5)
    weight = rng.standard_normal((64, 192)).astype(np.float32) / 8
    filters = rng.standard_normal((12, 3, 3, 3)).astype(np.float32) / 4
    graph = m.Graph()
    conv = CSBConv2d.from_dense(filters, stride=2, padding=1, mask=rng.random(filters.shape) < 0.4, name="conv")
    x = m.Flatten()(m.ReLU(name="relu0")(conv(graph.input((8, 8, 3)))))
    x = m.ReLU(name="relu1")(CSBLinear.from_dense(weight, mask=rng.random((64, 192)) < 0.2, name="sparse")(x))
    x = m.ReLU(name="relu2")(m.Linear(64, 48, name="fc1")(x))
    return graph.output(m.Linear(48, 4, name="fc2")(x))


def main(out: Path, device: str, granularity: str) -> None:
    comm = dist.init(device)
    model = m.Model(network(), device=device, comm=comm, seed=3, group_bytes=0)
    options = {"shape": (8, 8, 3), "num_classes": 4, "n": 23}
    loader = data.Loader(
        data.dataset("synthetic", None, "train", **options), 7, rank=comm.rank, size=comm.size,
        transfer=model.ops.uploader(),
    )  # fmt: skip
    if granularity == "none":
        optimizer = m.SGD(model, 0.05, 0.9, weight_decay=1e-3)
    else:
        schedule = CubicSchedule(0.5 if granularity == "2:4" else 0.8, begin=2, end=8, frequency=2)
        pruning = Pruning(schedule, granularity=granularity)
        optimizer = PrunedSGD(model, 0.05, 0.9, weight_decay=1e-3, pruning=pruning)
    run = Trainer(model, optimizer, m.SoftmaxCrossEntropy(comm=comm), loader, schedule=lambda step: 0.05, epochs=3)
    first = model.state_dict()["sparse.weight"].tolist()
    row = run.fit()
    answer = {
        "loss": row["train_loss"],
        "first": first,
        "weights": {name: value.ravel().tolist() for name, value in model.state_dict().items()},
        "masks": {} if granularity == "none" else {n: mask.ravel().tolist() for n, mask in optimizer.masks().items()},
        "sent": {message.name: message.end - message.begin for message in model.arena.messages},
    }
    (out / f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
