"""Ranks train within a limit of memory and without: ``limited.py OUT``; what both came to goes to OUT."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist
from minidl.compile import CompiledStep
from minidl.memory import limit_memory
from minidl.step import EagerStep

SAMPLES = 16
WAYS = {
    "keep": lambda optimizer: None,
    "ring": lambda optimizer: optimizer.update_in_backward(2),
    "momentum": lambda optimizer: optimizer.gradients_in_momentum(),
}


def network():
    graph = m.Graph()
    x = graph.input((32, 32, 3))
    for i in range(4):
        x = m.Conv2d(x.shape[-1], 32, 3, padding=1, bias=False, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(32, sync=True, name=f"norm{i}")(x))
    x = m.Linear(2048, 300, name="fc1")(m.Flatten(name="flat")(m.MaxPool2d(4, name="pool")(x)))
    return graph.output(m.Linear(300, 10, name="fc2")(m.ReLU(name="relu")(x)))


def run(comm, way: str, precision: str, kind, limit: str | None, engine=None) -> dict[str, object]:
    """Losses and a digest of all that training changes; bytes that the limit moved and made again."""
    model = m.Model(network(), device="cuda", precision=precision, comm=comm, seed=3, group_bytes=50_000, factors=False)
    optimizer, away = m.SGD(model, 0.05, 0.9, 1e-3), 0
    WAYS[way](optimizer)
    if limit is not None:
        plan = limit_memory(model, SAMPLES, limit, least=2048, engine=engine).script.plan
        away = plan.moved_bytes + plan.rebuilt_bytes
    step = kind(model, optimizer, m.SoftmaxCrossEntropy(comm=comm))
    rng, losses = np.random.default_rng(comm.rank), []
    for number in range(5):
        samples = SAMPLES - 3 * (number == 4)
        x = rng.standard_normal((samples, 32, 32, 3)).astype(model.precision.storage)
        labels = rng.integers(0, 10, samples).astype(np.int32)
        batch = model.ops.from_host(x), model.ops.from_host(labels)
        losses.append(step(*batch, SAMPLES * (number * comm.size + comm.rank)).read())
    state = {**model.state_dict(), **optimizer.state_dict()}
    digest = hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
    return {"result": [losses, digest], "away": away}


def main(out: Path) -> None:
    comm = dist.init("cuda")
    found = {}
    for precision in ("fp32", "bf16"):
        for way in WAYS:
            free = run(comm, way, precision, EagerStep, None)
            limited = [run(comm, way, precision, kind, "70%") for kind in (EagerStep, CompiledStep)]
            found[f"{way}, {precision}"] = {"free": free, "limited": limited}
    (out / f"{comm.rank}.json").write_text(json.dumps({"rank": comm.rank, "found": found}))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
