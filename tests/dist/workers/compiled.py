"""Ranks train eagerly and compiled, from the same weights: ``compiled.py OUT``; what both came to goes to OUT."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist, fusion
from minidl.compile import CompiledStep
from minidl.step import EagerStep

STEPS = 6
SAMPLES = 5  # of the first rank; the others have one less


def network():
    graph = m.Graph()
    x = m.Conv2d(3, 8, 3, padding=1, name="conv1")(graph.input((8, 8, 3)))
    x = m.ReLU(name="relu")(m.BatchNorm2d(8, sync=True, name="bn1")(x))
    x = m.Dropout(0.2, name="drop")(m.Flatten(name="flat")(m.Conv2d(8, 8, 3, name="conv2")(x)))
    return graph.output(m.Linear(288, 4, name="fc")(x))


def run(comm, kind, precision: str, accumulate: int) -> dict[str, object]:
    """Losses and a digest of all that training changes."""
    model = m.Model(network(), device="cuda", precision=precision, comm=comm, seed=3, group_bytes=3000)
    fusion.fuse_by_default(model)
    optimizer = m.SGD(model, 0.05, 0.9, 1e-3)
    step = kind(model, optimizer, m.SoftmaxCrossEntropy(ignore_index=3, comm=comm), accumulate=accumulate)
    samples, rng, losses = SAMPLES - (comm.rank > 0), np.random.default_rng(comm.rank), []
    for number in range(STEPS):
        x = rng.standard_normal((samples, 8, 8, 3)).astype(model.precision.storage)
        labels = rng.integers(0, 4, samples).astype(np.int32)
        optimizer.set_lr(0.05 / (1 + number))
        batch = model.ops.from_host(x), model.ops.from_host(labels)
        losses.append(step(*batch, SAMPLES * (number * comm.size + comm.rank), eager=number == 4).read())
    state = {**model.state_dict(), **optimizer.state_dict()}
    parameters = hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()
    return {"losses": losses, "state": parameters}


def main(out: Path) -> None:
    comm = dist.init("cuda")
    found = {
        f"{precision}, {accumulate}": [run(comm, kind, precision, accumulate) for kind in (EagerStep, CompiledStep)]
        for precision in ("fp32", "bf16", "fp16")
        for accumulate in (1, 2)
    }
    (out / f"{comm.rank}.json").write_text(json.dumps({"rank": comm.rank, "name": comm.name, "found": found}))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
