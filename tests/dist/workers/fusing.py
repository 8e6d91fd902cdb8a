"""Ranks that would choose different fusion plans, and take a step: ``fusing.py OUT DEVICE``."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist, fusion
from minidl.profile.timing import Timing


def network():
    graph = m.Graph()
    x = graph.input((6, 6, 3))
    for i in range(4):
        x = m.Conv2d(x.shape[-1], 8, 3, padding=1, bias=False, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(8, sync=True, name=f"bn{i}")(x))
    return graph.output(m.Linear(288, 4, name="fc")(m.Flatten()(x)))


class Even:
    """A clock by which all ways take as long; it runs no whole network, whose batch norms would wait for others."""

    def __init__(self):
        self.timed = 0

    def __call__(self, cut, which, variants):
        self.timed += 1
        return [Timing((1.0, 1.0)) for _ in variants]

    def whole(self, graph, batch, variants):
        return None


def main(out: Path, device: str) -> None:
    comm = dist.init(device)
    model, clock = m.Model(network(), device=device, comm=comm), Even()
    fusion.fuse(model, "adaptive", batch=4, clock=clock)
    own = fusion.choose(fusion.find_sites(model.graph), "elementwise")
    mixed = {name: "elementwise" if i % (comm.rank + 2) else "none" for i, name in enumerate(own.sites)}
    plan = fusion.fuse(model, dataclasses.replace(own, sites=mixed))
    loss = m.SoftmaxCrossEntropy(comm=comm)
    rng = np.random.default_rng(comm.rank)
    images = rng.standard_normal((4, 6, 6, 3)).astype(np.float32)
    totals = loss.forward(model.forward(model.ops.from_host(images)), model.ops.from_host(rng.integers(0, 4, 4)))
    model.backward(loss.backward())
    deferred = [layer.name for layer in model.layers if getattr(layer, "deferred", False)]
    answer = {"plan": plan.sites, "timed": clock.timed, "deferred": deferred, "loss": totals.loss}
    (out / f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
