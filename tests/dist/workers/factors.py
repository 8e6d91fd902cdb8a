"""Trains with rows in the place of the gradients they make, and without: ``factors.py OUT DEVICE [ENGINE]``."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist
from minidl import model as models
from minidl.compile import CompiledStep
from minidl.params import Arena
from minidl.sharded import ShardedSGD
from minidl.step import EagerStep
from tests.dist.workers.sharded import off

STEPS = 5
MANY = 1 << 20  # rows: however many there are
# What goes with it: options of the model, micro-batches, whether factors travel.
WAYS = {
    "float32": ({}, 1, True),
    "bfloat16": ({"precision": "bf16"}, 1, True),
    "rounded": ({"message_dtype": "bf16"}, 1, True),
    "ring": ({}, 1, True),
    "sharded": ({}, 1, True),
    "frozen bias": ({"frozen": ["fc2.bias"]}, 1, True),
    "frozen weight": ({"frozen": ["fc1.weight", "fc2.weight"]}, 1, False),
    "micro-batches": ({}, 2, False),
    "in momentum": ({}, 1, False),
    "few rows": ({}, 1, False),
    "summed after all": ({}, 1, False),
}


def network():
    graph = m.Graph()
    x = m.ReLU(name="relu1")(m.Conv2d(3, 6, 3, padding=1, name="conv")(graph.input((4, 4, 3))))
    x = m.ReLU(name="relu2")(m.Linear(96, 40, name="fc1")(m.Flatten()(x)))
    return graph.output(m.Linear(40, 5, name="fc2")(x))


def build(way: str, comm, device: str, *, factors: bool):
    options, parts, _ = WAYS[way]
    model = m.Model(network(), device=device, comm=comm, seed=3, group_bytes=2000, factors=factors, **options)
    optimizer = (ShardedSGD if way == "sharded" else m.SGD)(model, 0.05, momentum=0.9, weight_decay=1e-3)
    if way == "ring":
        optimizer.update_in_backward(2)
    if way == "in momentum":
        optimizer.gradients_in_momentum()
    if way == "summed after all":
        model.arena.sum_all()
    return EagerStep(model, optimizer, m.SoftmaxCrossEntropy(comm=comm), accumulate=parts)


def train(step: EagerStep, take=None) -> list[list[float]]:
    """Uneven rows on the ranks, one more from step to step; the losses."""
    model, comm, losses = step.model, step.model.comm, []
    for number in range(STEPS):
        rows, rng = 3 + (comm.rank + number) % 2, np.random.default_rng([number, comm.rank])
        if take is not None:
            rows = 3 + comm.rank % 2  # as a captured step has them
        x = rng.standard_normal((rows, 4, 4, 3)).astype(model.precision.storage)
        labels = rng.integers(0, 5, rows).astype(np.int32)
        losses.append((take or step)(model.ops.from_host(x), model.ops.from_host(labels)).read())
    return losses


def digest(model) -> str:
    return hashlib.sha256(b"".join(value.tobytes() for _, value in sorted(model.state_dict().items()))).hexdigest()


def exact(comm, device: str, rows: int) -> list[float]:
    """Whole numbers, which float32 adds without rounding: how far gradients are from those of all ranks' rows."""
    graph = m.Graph()
    model = m.Model(graph.output(m.Linear(72, 33, name="fc")(graph.input((72,)))), device=device, comm=comm)
    rng = np.random.default_rng(comm.rank)
    x, dy = (rng.integers(-8, 9, (rows, n)).astype(np.float32) for n in (72, 33))
    model.forward(model.ops.from_host(x))
    model.backward(model.ops.from_host(dy))
    for _ in model.arena.finished():
        pass
    found = model.layers[0].params.gradients()
    every_x, every_dy = (np.concatenate(comm.share(a)).astype(np.float64) for a in (x, dy))
    wanted = {"weight": every_dy.T @ every_x, "bias": every_dy.sum(0)}
    return [float(np.abs(model.ops.to_host(found[name]) - value).max()) for name, value in wanted.items()]


def compiled(comm) -> list[object]:
    """Eager and captured steps: losses and weights."""
    found = []
    for kind in (EagerStep, CompiledStep):
        eager = build("bfloat16", comm, "cuda", factors=True)
        take = kind(eager.model, eager.optimizer, eager.loss)
        found.append([train(take, take), digest(eager.model)])
    return found


def main(out: Path, device: str, engine: str = "") -> None:
    comm = dist.init(device, engine)
    sent: list[str] = []
    decide = Arena.shares

    def seen(arena, layer, rows):
        found = decide(arena, layer, rows)
        sent.extend([layer] * (found is not None))
        return found

    Arena.shares = seen
    answer = {}
    for way in WAYS:
        most = 4 if way == "few rows" else MANY
        models.most_rows = lambda *args, most=most: most
        steps = [build(way, comm, device, factors=factors) for factors in (False, True)]
        losses, counts = [], []
        for step in steps:
            sent.clear()
            losses.append(train(step))
            counts.append(len(sent))
        answer[way] = {
            "losses": losses, "sent": counts, "weights": digest(steps[1].model),
            "off": off(*(step.model.state_dict() for step in steps)),
            "messages": [[message.layers for message in step.model.arena.messages] for step in steps],
        }  # fmt: skip
    answer["exact"] = [exact(comm, device, rows) for rows in (5, 3 + comm.rank, 2 * (comm.rank != 0))]
    if device == "cuda":
        answer["compiled"] = compiled(comm)
    Path(out, f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
