"""Arrays: laws of both tables, and of the CPU table's memory and threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minidl.cpu import _array
from minidl.precision import bfloat16, float16, float32
from tests.conftest import CUDA
from tests.layouts import LAYOUTS, place
from tests.tolerance import draw

STORAGE = [float32, bfloat16, float16]
LARGE = (64, 1024)  # 256 KiB of float32: such arrays come from the pool


@pytest.mark.parametrize("shape", [(), (3,), (0, 4), (2, 3, 5), LARGE])
@pytest.mark.parametrize("kind", [*STORAGE, np.float64, np.int64, np.uint8, np.uint32])
def test_host_round_trip(ops, rng, shape, kind):
    host = rng.integers(0, 100, shape).astype(kind)
    x = ops.from_host(host)
    assert x.shape == shape and x.dtype == kind and isinstance(x, ops.Array)
    back = ops.to_host(x)
    assert isinstance(back, np.ndarray) and back.dtype == kind
    np.testing.assert_array_equal(back, host)


def test_both_ways_copy(ops):
    host = np.zeros(LARGE, np.float32)
    x = ops.from_host(host)
    host[:] = 1
    back = ops.to_host(x)
    assert not back.any()
    back[:] = 2
    assert not ops.to_host(x).any()


def test_from_host_takes_lists_scalars_and_views_and_converts(ops):
    assert ops.to_host(ops.from_host([[1, 2], [3, 4]], np.float32)).tolist() == [[1, 2], [3, 4]]
    assert ops.to_host(ops.from_host(2.5, float32)).shape == ()
    x = ops.from_host(np.arange(12.0).reshape(3, 4).T, bfloat16)
    assert x.dtype == bfloat16 and x.flags.c_contiguous
    np.testing.assert_array_equal(ops.to_host(x).astype(np.float64), np.arange(12.0).reshape(3, 4).T)


@pytest.mark.parametrize("shape", [(), 5, (0, 3), (2, 3), LARGE])
def test_new_arrays(ops, dtype, shape):
    for x in (ops.empty(shape, dtype), ops.zeros(shape, dtype)):
        assert x.dtype == dtype and x.shape == ((shape,) if isinstance(shape, int) else shape) and x.flags.c_contiguous
    assert not ops.to_host(ops.zeros(shape, dtype)).astype(np.float32).any()


def test_zeros_are_zeros_again_after_reuse(ops):
    for _ in range(3):
        x = ops.zeros(LARGE, float32)
        assert not ops.to_host(x).any()
        ops.copy_into(x, ops.from_host(np.ones(LARGE, np.float32)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_contiguous(ops, rng, dtype, layout):
    host = draw(rng, (3, 5, 6), dtype)
    x = place(ops, host, layout)
    dense = ops.contiguous(x)
    assert dense.flags.c_contiguous and (dense is x) == (layout == "dense")
    np.testing.assert_array_equal(ops.to_host(dense), host)
    np.testing.assert_array_equal(ops.to_host(ops.contiguous(ops.from_host(host).T)), host.T)


@pytest.mark.parametrize("layout", ["dense", "pitched"])
@pytest.mark.parametrize("target", STORAGE)
@pytest.mark.parametrize("shape", [(1,), (0, 4), (3, 5, 7), LARGE])
def test_cast_rounds_to_nearest_even(ops, rng, dtype, target, shape, layout):
    host = draw(rng, shape, dtype)
    out = ops.cast(place(ops, host, layout), target)
    assert out.dtype == target and out.flags.c_contiguous
    np.testing.assert_array_equal(ops.to_host(out), host.astype(target))


def test_cast_of_ties_and_values_out_of_range(ops):
    ulp = 2.0**-7
    x = np.float32([1 + ulp / 2, 1 + 3 * ulp / 2, 1 + ulp / 2 + 2**-20, np.inf, -np.inf, np.nan, 3.4e38, -0.0])
    expected = np.array([1, 1 + 2 * ulp, 1 + ulp, np.inf, -np.inf, np.nan, np.inf, -0.0])
    np.testing.assert_array_equal(ops.to_host(ops.cast(ops.from_host(x), bfloat16)).astype(np.float64), expected)
    half = ops.to_host(ops.cast(ops.from_host(np.float32([65504, 65520, -1e6, 2**-25, 3 * 2**-25])), float16))
    np.testing.assert_array_equal(half.astype(np.float64), [65504, np.inf, -np.inf, 0, 2**-23])


def test_cast_is_a_copy_even_without_a_change(ops):
    x = ops.zeros((4, 4), float32)
    y = ops.cast(x, float32)
    ops.copy_into(x, ops.from_host(np.ones((4, 4), np.float32)))
    assert not ops.to_host(y).any()


@pytest.mark.parametrize("source", ["dense", "pitched"])
@pytest.mark.parametrize("target", STORAGE)
@pytest.mark.parametrize("channels", [1, 3, 8, 31])
def test_copy_into_a_slice_writes_the_slice_only(ops, rng, dtype, channels, target, source):
    host = draw(rng, (2, 5, 3, channels), dtype)
    wide = ops.from_host(np.full((2, 5, 3, channels + 7), 9, target))
    ops.copy_into(wide[..., 3 : 3 + channels], place(ops, host, source))
    after = ops.to_host(wide)
    np.testing.assert_array_equal(after[..., 3 : 3 + channels], host.astype(target))
    np.testing.assert_array_equal(np.delete(after, np.r_[3 : 3 + channels], axis=-1).astype(np.float32), 9)


def test_synchronize_returns(ops):
    assert ops.synchronize() is None


# -------------------------------------------------------------- memory of the CPU table


@pytest.fixture
def pool():
    gc.collect()
    _array.release_idle()
    return _array.pool_bytes


def test_memory_of_a_dead_array_is_used_again(cpu_ops, pool):
    x = cpu_ops.empty(LARGE, float32)
    address = x.ctypes.data
    assert address % 256 == 0
    used = pool()[0]
    del x
    assert pool()[0] == used - 4 * 64 * 1024
    assert cpu_ops.empty((1024, 64), float32).ctypes.data == address


def test_a_view_keeps_the_memory(cpu_ops, pool):
    view = cpu_ops.zeros(LARGE, float32)[3:, ::2].T
    other = cpu_ops.empty(LARGE, float32)
    other.fill(1)
    assert not np.shares_memory(view, other) and not view.any()


def test_idle_memory_never_exceeds_what_was_in_use(cpu_ops, pool):
    for _ in range(2):
        for n in range(1, 40):
            keep = [cpu_ops.empty(20_000 * n + 977 * i, float32) for i in range(3)]
            del keep[::2]
            _, idle, peak = pool()
            assert idle <= peak
    del keep
    _array.release_idle()
    assert pool()[1] == 0


# -------------------------------------------------------------- threads of the CPU table

ALL_OPERATIONS = """
import hashlib
import numpy as np
import minidl.cpu as ops

rng = np.random.default_rng(0)
x, dy = (rng.standard_normal((5, 37, 41, 24)).astype(np.float32) for _ in range(2))
gamma, beta = rng.standard_normal((2, 24)).astype(np.float32)
results = []
stats = ops.batch_norm_stats(x)
moments, count = ops.batch_norm_finalize(stats, 1e-5)
sums = ops.batch_norm_backward_stats(dy, x, moments)
results += [stats, sums, ops.batch_norm_apply(x, moments, gamma, beta, add=dy, relu=True)]
results += [ops.batch_norm_backward_apply(dy, x, moments, gamma, sums, count, add=x)]
results += [ops.relu(x), ops.relu_backward(dy, x, add=x), ops.add(x, dy), ops.concat([x, dy])]
window = dict(kernel=(3, 3), stride=(2, 2), padding=(1, 1))
y, index = ops.max_pool2d(x, **window, dilation=(1, 1), ceil_mode=False)
results += [y, index, ops.max_pool2d_backward(y, index, x.shape, **window, dilation=(1, 1))]
window = dict(window, ceil_mode=False, count_include_pad=True)
results += [ops.avg_pool2d(x, **window), ops.avg_pool2d_backward(y, x.shape, **window)]
results += [ops.adaptive_avg_pool2d(x, (1, 3)), ops.adaptive_avg_pool2d_backward(y, x.shape)]
results += [ops.dropout(x, 0.3, np.array([1, 2, 3, 4], np.uint32), 5)]
labels = rng.integers(0, 24, x.shape[:-1])
totals, lse = ops.softmax_cross_entropy(x, labels, ignore_index=3)
results += [totals, lse, ops.softmax_cross_entropy_backward(x, labels, lse, totals, ignore_index=3)]
master, grad, momentum = rng.standard_normal((3, 64 * 1500)).astype(np.float32)
segments, segment_of = np.float32([[1, 1e-4, 1, 0]]), np.zeros(1500, np.int32)
control = np.float32([0.1, 0.9, 1, 0, 0, 0, 10, 0])
ops.sgd_update(master, grad, momentum, None, segment_of, segments, control, nesterov=True)
results += [master, momentum]
print(hashlib.sha256(b"".join(np.ascontiguousarray(r).tobytes() for r in results)).hexdigest())
"""


def test_bits_do_not_depend_on_the_number_of_threads():
    def run(threads):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(Path(__file__).parents[1])}
        return subprocess.run(
            [sys.executable, "-c", ALL_OPERATIONS], env=environment, check=True, capture_output=True, text=True
        ).stdout

    digests = [run(threads) for threads in (1, 2, 3)]
    assert len(digests[0]) == 65 and len(set(digests)) == 1


# -- a loader's arrays ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ops", ["cpu", CUDA], indirect=True)
def test_an_uploader_brings_arrays_of_any_size_in_turn(ops, rng):
    upload = ops.uploader()
    hosts = [rng.integers(0, 256, 1 + 977 * i).astype(np.uint8) for i in range(20)] + [np.zeros((0, 3), np.float32)]
    placed = [upload(host) for host in hosts]
    for array, host in zip(placed, hosts, strict=True):
        assert array.dtype == host.dtype
        np.testing.assert_array_equal(ops.to_host(array), host)


def test_copies_run_beside_later_work_and_are_waited_for(cuda_ops, rng):
    """While the device is kept busy: what is read after `wait` is there, though nobody waited on the host."""
    upload, busy = cuda_ops.uploader(), cuda_ops.zeros(1 << 26, np.float32)
    hosts = [rng.standard_normal(1 << 20).astype(np.float32) for _ in range(8)]
    sums, ahead = [], upload.start(hosts[0])
    for host in [*hosts[1:], None]:
        upload.wait()
        array, ahead = ahead, None if host is None else upload.start(host)
        busy = cuda_ops.add(busy, busy)
        sums.append(cuda_ops.add(array, array))
    for host, twice in zip(hosts, sums, strict=True):
        np.testing.assert_array_equal(cuda_ops.to_host(twice), host + host)
