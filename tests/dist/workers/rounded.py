"""One backward pass with messages rounded to bfloat16, beside the exact sums: ``rounded.py OUT DEVICE [ENGINE]``.

How far the sums are off, in units of the bound that `minidl.params.Arena.connect` states, goes to OUT.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

import minidl as m
from minidl import dist

U = 2.0**-8


def network():
    graph = m.Graph()
    x = m.ReLU(name="relu")(m.Conv2d(3, 32, 3, padding=1, name="conv1")(graph.input((9, 7, 3))))
    return graph.output(m.Linear(9 * 7 * 32, 5, name="fc")(m.Flatten()(x)))


def main(out: Path, device: str, engine: str = "") -> None:
    comm = dist.init(device, engine)
    model = m.Model(network(), device=device, comm=comm, message_dtype="bf16", group_bytes=4000)
    ops, rng = model.ops, np.random.default_rng(comm.rank)
    x = ops.from_host(rng.standard_normal((4, 9, 7, 3)).astype("float32"))
    dy = ops.from_host(rng.standard_normal((4, 5)).astype("float32"))
    model.forward(x)
    model.backward(dy, send=False)
    every = np.stack(comm.share(ops.to_host(model.arena.grad))).astype("float64")
    model.forward(x)
    model.backward(dy)
    for _ in model.arena.finished():
        pass
    found = ops.to_host(model.arena.grad).astype("float64")
    exact, bound = every.sum(0), U * (np.abs(every).sum(0) + np.abs(every.sum(0))) * (1 + 2 * U)
    off = np.abs(found - exact)
    answer = {"worst": float(np.max(off / np.maximum(bound, 1e-30))), "differ": int((off > 0).sum())}
    answer["bytes"] = str(model.arena.wire.dtype)
    Path(out, f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
