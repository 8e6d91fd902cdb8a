"""Laws of kernels that take their place while the one before them ends (overlap.cuh, graph.py)."""

from __future__ import annotations

import re

import numpy as np
import pytest

from minidl.cuda import nvrtc
from minidl.cuda.capture import capture
from minidl.cuda.device import current_device
from minidl.precision import bfloat16
from tests.tolerance import draw_integers

WAITING = sorted(path for path in nvrtc.FOLDER.glob("*.cu") if '#include "overlap.cuh"' in path.read_text())
REPEATS = 30


def bodies(text):
    """The text of each kernel's body."""
    for match in re.finditer(r'extern "C" __global__', text):
        start = depth = 0
        for i in range(match.end(), len(text)):
            depth += {"(": 1, ")": -1}.get(text[i], 0)
            if text[i] == "{" and depth == 0:
                start = i + 1
                break
        depth = 1
        for i in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[i], 0)
            if depth == 0:
                yield text[start:i]
                break


@pytest.mark.parametrize("path", WAITING, ids=lambda path: path.stem)
def test_every_kernel_of_a_file_waits_before_it_can_leave(path):
    found = list(bodies(path.read_text()))
    assert found
    for body in found:
        before, _, after = body.partition("wait_for_inputs();")
        assert after and before.count("{") == before.count("}") and "return" not in before


def chain(ops, storage, rng):
    """Small and large kernels in turn, each reading what the one before it wrote, in memory that is used again."""
    x = ops.from_host(draw_integers(rng, (4, 14, 14, 64), storage))
    filters = [ops.from_host(draw_integers(rng, (64, k, k, 64), storage)) for k in (1, 3)]
    ones, gradient = ops.from_host(np.ones(64, np.float32)), ops.empty(filters[1].shape, np.dtype(np.float32))
    options = {"stride": (1, 1), "dilation": (1, 1), "groups": 1}

    def work():
        y = x
        for i in range(REPEATS):
            y, stats = ops.conv2d_stats(y, filters[i % 2], None, padding=(i % 2, i % 2), **options)
            moments, count = ops.batch_norm_finalize(stats, 1e-5)
            z = ops.batch_norm_apply(y, moments, ones, ones, relu=True)
            sums = ops.batch_norm_relu_backward_stats(z, y, moments, ones, ones)
            y = ops.batch_norm_relu_backward_apply(z, y, moments, ones, ones, sums, count, add=z)
        ops.conv2d_backward_weight(x, y, **options, padding=(1, 1), out=gradient)
        return y, gradient

    return work


@pytest.mark.gpu
def test_a_graph_of_waiting_kernels_gives_the_bits_of_kernels_one_by_one(cuda_ops, rng):
    import cupy

    work = chain(cuda_ops, bfloat16, rng)
    expected = [cuda_ops.to_host(array) for array in work()]
    graph, found = capture(work)
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(REPEATS):
        for array in found:
            array.fill(7)
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        for array, bits in zip(found, expected, strict=True):
            np.testing.assert_array_equal(cuda_ops.to_host(array), bits)
    several = 6 * REPEATS if current_device().arch >= (9, 0) else 0
    assert graph.overlapping >= several and (several or not graph.overlapping)
