"""A step by each fusion plan, batch norms synchronised, of shares of a batch: ``synchronised.py OUT DEVICE SIZES``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist, fusion
from tests.test_fusion import shifted, wide

PRECISIONS = "fp32", "bf16"


def network():
    graph = wide()
    for layer in graph.layers:
        if isinstance(layer, m.BatchNorm2d):
            layer.sync = True
    return graph


def step(comm, device: str, sizes: list[int], precision: str, how: str) -> dict[str, list[float]]:
    """Gradients and statistics after it."""
    model = m.Model(network(), device=device, comm=comm, precision=precision)
    fusion.fuse(model, how)
    rng = np.random.default_rng(0)
    shifted(model, rng)
    images = rng.standard_normal((sum(sizes), 6, 6, 3)).astype(model.precision.storage)
    labels = rng.integers(0, 5, sum(sizes))
    first = sum(sizes[: comm.rank])
    own = slice(first, first + sizes[comm.rank])
    loss = m.SoftmaxCrossEntropy(comm=comm)
    totals = loss.forward(model.forward(model.ops.from_host(images[own])), model.ops.from_host(labels[own]))
    model.backward(loss.backward())
    for _ in model.arena.finished():
        pass
    found = {"loss": np.array([totals.loss])}
    for layer in model.layers:
        of_layer = model.arena.layer(layer.name)
        found |= {f"{layer.name}.{spec.name}": of_layer.grad(spec.name).view for spec in layer.specs}
        found |= {f"{layer.name}.{name}": buffer for name, buffer in layer.buffers.items()}
    return {name: np.asarray(model.ops.to_host(value), np.float64).ravel().tolist() for name, value in found.items()}


def main(out: Path, device: str, *sizes: str) -> None:
    comm = dist.init(device)
    shares = list(map(int, sizes))
    answer = {
        precision: {how: step(comm, device, shares, precision, how) for how in fusion.PLANS} for precision in PRECISIONS
    }
    (out / f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
