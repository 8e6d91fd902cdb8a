"""The ways of bench_unet.py on a GPU: what is timed computes the network."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import bench_unet


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_chunks_give_the_bits_of_each_alone(cuda_ops, count, graph):
    """Also when replayed again with other images: nothing is left from the time of capture."""
    a = Namespace(image=(32, 47), width=8)
    model = bench_unet.network(a, "cuda", "fp32")
    host = bench_unet.images(a, 5)
    chunks = bench_unet.Chunks(model, host, count)
    run = chunks.replayed(chunks.copied) if graph else chunks.copied
    for x in (host, host[::-1] * 2):
        for pinned, part in zip(chunks.hosts, np.array_split(x, count), strict=True):
            pinned[...] = part
        run()
        for stream in chunks.streams:
            stream.synchronize()
        if graph:
            chunks._room.stream.synchronize()
        for out, part in zip(chunks.outputs, np.array_split(x, count), strict=True):
            alone = model.forward(cuda_ops.from_host(np.ascontiguousarray(part)), grad=False)
            assert (out == cuda_ops.to_host(alone)).all()
