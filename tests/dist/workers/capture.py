"""A step with both kinds of all-reduce, captured in a CUDA graph and replayed: ``capture.py OUT``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import cupy
import numpy as np

from minidl.dist import init

REPLAYS = 6

comm = init("cuda")
stream = cupy.cuda.Stream(non_blocking=True)
step, stats = cupy.zeros(1, "float32"), cupy.zeros(64, "float64")
layers = [cupy.zeros(100_003 + i, "float32") for i in range(4)]
wrong = cupy.zeros(1, "int64")


def train_step():
    """Gradients of value (rank + 1) * step + layer leave backwards; statistics go in between; all are checked."""
    step.__iadd__(1)
    works = []
    for i, gradient in enumerate(layers):
        gradient[...] = step * (comm.rank + 1) + i
        works.append(comm.start_all_reduce(gradient))
        stats[...] = step.astype("float64")
        comm.all_reduce(stats)
        wrong.__iadd__((stats != step * comm.size).sum())
    for i, (gradient, work) in enumerate(zip(layers, works, strict=True)):
        work.wait()
        wrong.__iadd__((gradient != step * (comm.size * (comm.size + 1) // 2) + i * comm.size).sum())


with stream:
    train_step()  # compiles CuPy's kernels
    stream.synchronize()
    stream.begin_capture()
    train_step()
    graph = stream.end_capture()
    for replay in range(REPLAYS):
        if replay == REPLAYS // 2:
            train_step()  # eager and captured steps mix
        graph.launch(stream)
    stream.synchronize()
answer = {"steps": int(step.get()[0]), "expected": REPLAYS + 2, "wrong": int(wrong.get()[0])}
answer["name"], answer["devices"] = comm.name, comm.share(int(cupy.cuda.Device().id))
answer["nvls"] = np.unique(comm.share(os.environ["NCCL_NVLS_ENABLE"])).tolist()
Path(sys.argv[1], f"{comm.rank}.json").write_text(json.dumps(answer))
