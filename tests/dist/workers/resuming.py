"""Two ranks train, stop in the middle of an epoch and go on: ``resuming.py OUT FOLDER DEVICE``; all endings go to OUT.

Once from a checkpoint of the middle, once because the last rank, and only it, got a signal.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import minidl as m
from minidl import data, dist, models, stopping
from minidl.train import Trainer


def trainer(comm, output: Path, device: str) -> Trainer:
    model = m.Model(models.resnet20(num_classes=4, image_shape=(8, 8, 3)), device=device, comm=comm)
    loaders = [
        data.Loader(
            data.dataset("synthetic", None, split, n=30, shape=(8, 8, 3), num_classes=4),
            8,
            rank=comm.rank,
            size=comm.size,
            transfer=model.ops.uploader(),
        )
        for split in ("train", "test")
    ]  # fmt: skip
    loss = m.SoftmaxCrossEntropy(comm=comm)
    return Trainer(
        model, m.SGD(model, 0.05, 0.9), loss, *loaders, schedule=lambda step: 0.05, epochs=2, output=output
    )  # fmt: skip


def digest(run: Trainer, buffers: bool = True) -> str:
    state = {**run.model.state_dict(), **run.optimizer.state_dict()}
    state = {name: array for name, array in state.items() if buffers or "running_" not in name}
    return hashlib.sha256(b"".join(state[name].tobytes() for name in sorted(state))).hexdigest()


def main(out: Path, folder: Path, device: str) -> None:
    comm = dist.init(device)
    whole = trainer(comm, folder / "whole", device)
    for step, batch in enumerate(whole.train_loader, start=1):
        whole._train(batch)
        if step == 2:
            break
    middle = whole.save()
    if comm.rank == 0:
        shutil.copy(middle, folder / middle.name)  # the run goes on and removes its older checkpoints
    whole.fit()

    parts = trainer(comm, folder / "parts", device)
    comm.barrier()
    parts.resume(folder / middle.name)
    parts.fit()

    stopping.SECONDS = 0.0  # agree after every step
    stopped = trainer(comm, folder / "stopped", device)
    step = stopped._train

    def signalled(batch):
        if comm.rank == comm.size - 1 and stopped.step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
        return step(batch)

    stopped._train = signalled
    stopped.fit()
    again = trainer(comm, folder / "stopped", device)
    comm.barrier()
    again.resume(folder / "stopped")
    resumed = again.step
    again.fit()
    answer = {
        "rank": comm.rank, "whole": digest(whole), "parts": digest(parts), "step": parts.step,
        # A checkpoint averages running statistics, and this one was written after another step.
        "weights": [digest(run, buffers=False) for run in (whole, again)],
        "stopped": [stopped.stopped, stopped.step, resumed],
    }  # fmt: skip
    (out / f"{comm.rank}.json").write_text(json.dumps(answer))
    comm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
