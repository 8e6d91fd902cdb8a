"""Trains beside each other with momentum on all ranks and shared out: ``sharded.py OUT DEVICE [ENGINE]``.

Losses, differences of weights and momentum, and elements of momentum on this rank go to OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist
from minidl.sharded import ShardedSGD

STEPS = 5


def network():
    graph = m.Graph()
    x = m.Conv2d(3, 6, 3, padding=1, name="conv1")(graph.input((8, 8, 3)))
    x = m.MaxPool2d(2, name="pool")(m.ReLU(name="relu")(m.BatchNorm2d(6, sync=True, name="bn1")(x)))
    x = m.Conv2d(6, 12, 3, padding=1, bias=False, name="conv2")(x)
    return graph.output(m.Linear(192, 4, name="fc")(m.Flatten()(x)))


def train(optimizer, loss, comm, precision, first=0):
    model, losses = optimizer.model, []
    for step in range(first, first + STEPS):
        rng = np.random.default_rng(100 * step + comm.rank)
        x = rng.standard_normal((3, 8, 8, 3)).astype("float32")
        labels = (x.mean((1, 2)) @ rng.standard_normal((3, 4))).argmax(-1).astype("int32")
        out = model.forward(model.ops.from_host(x, model.precision.storage))
        losses.append(loss.forward(out, model.ops.from_host(labels)).loss)
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()
    return losses


def off(one, other) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def main(out: Path, device: str, engine: str = "") -> None:
    comm = dist.init(device, engine)
    answer = {}
    for precision, message in (("fp32", "fp32"), ("bf16", "fp32"), ("fp32", "bf16")):
        options = {"device": device, "precision": precision, "comm": comm, "seed": 3, "group_bytes": 1000}
        models = [m.Model(network(), message_dtype=message, frozen=["bn1.bias"], **options) for _ in range(2)]
        whole = m.SGD(models[0], 0.05, momentum=0.9, weight_decay=1e-3)
        parts = ShardedSGD(models[1], 0.05, momentum=0.9, weight_decay=1e-3)
        loss = m.SoftmaxCrossEntropy(comm=comm)
        losses = [train(each, loss, comm, precision) for each in (whole, parts)]
        parts.collect()
        again = ShardedSGD(
            m.Model(network(), message_dtype=message, frozen=["bn1.bias"], **options), 0.05, momentum=0.9
        )
        again.load_state_dict(parts.state_dict())
        again.collect()
        answer[f"{precision} {message}"] = {
            "losses": losses, "weights": off(models[0].state_dict(), models[1].state_dict()),
            "momentum": off(whole.state_dict(), parts.state_dict()),
            "loaded": off(parts.state_dict(), again.state_dict()),
            "working": float(models[1].ops.to_host(models[1].arena.working).astype("float64").sum()),
            "kept": int(parts.velocity.size), "all": int(whole.velocity.size),
        }  # fmt: skip
    Path(out, f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
