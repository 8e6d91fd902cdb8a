"""Ranks that write checkpoints while something goes wrong on rank 0: ``saving.py OUT FOLDER WAY DEVICE``.

The first run writes one in good order, then another one ``full`` (files may not become as large) or ``killed`` (in the
midst of it); ``resume`` goes on from what is there.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

import minidl as m
from minidl import checkpoint, data, dist, models
from minidl.train import Trainer

SMALL = 1000  # bytes


def trainer(comm, folder: Path, device: str) -> Trainer:
    samples = data.dataset("synthetic", None, "train", n=16, shape=(4, 4, 1), num_classes=3)
    model = m.Model(models.mlp(3, (4, 4, 1)), device=device, comm=comm)
    loader = data.Loader(samples, 8, rank=comm.rank, size=comm.size, transfer=model.ops.uploader())
    loss = m.SoftmaxCrossEntropy(comm=comm)
    return Trainer(model, m.SGD(model, 0.1), loss, loader, schedule=lambda step: 0.1, epochs=1, output=folder)


def killed_in_the_midst(descriptor: int) -> None:
    """Written, and not yet on the disk under its name."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(out: Path, folder: Path, way: str, device: str) -> None:
    comm = dist.init(device)
    run = trainer(comm, folder, device)
    if way == "resume":
        run.resume(folder)
    else:
        run.fit()
        (out / f"{comm.rank}.at").touch()
        if comm.rank == 0 and way == "full":
            resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))
        if comm.rank == 0 and way == "killed":
            checkpoint.os.fsync = killed_in_the_midst
        run.save(checkpoint.step_path(folder, 99))
    (out / f"{comm.rank}.json").write_text(json.dumps({"step": run.step}))
    comm.close()


main(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:])
