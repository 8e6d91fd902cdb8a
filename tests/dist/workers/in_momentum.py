"""Trains with gradients apart and added to the momentum, beside each other: ``in_momentum.py OUT DEVICE [ENGINE]``."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import minidl as m
from minidl import dist
from tests.dist.workers.sharded import network, off, train


def main(out: Path, device: str, engine: str = "") -> None:
    comm = dist.init(device, engine)
    answer = {}
    for precision in ("fp32", "bf16"):
        losses, optimizers = [], []
        for added in (False, True):
            options = {"device": device, "precision": precision, "comm": comm, "seed": 3, "group_bytes": 1000}
            model = m.Model(network(), frozen=["bn1.bias"], **options)
            optimizer = m.SGD(model, 0.05, momentum=0.9, weight_decay=1e-3)
            if added:
                optimizer.gradients_in_momentum()
            losses.append(train(optimizer, m.SoftmaxCrossEntropy(comm=comm), comm, precision))
            optimizers.append(optimizer)
        apart, added = (optimizer.model.state_dict() | optimizer.state_dict() for optimizer in optimizers)
        answer[precision] = {
            "losses": losses,
            "off": off(apart, added),
            "state": hashlib.sha256(b"".join(value.tobytes() for value in added.values())).hexdigest(),
        }
    Path(out, f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
