"""What parts of a batch norm's rows left, merged on a GPU: for any number of them what float64 makes of them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from minidl.cuda.device import BUILT_IN, current_device
from minidl.cuda.launch import dry_run
from minidl.cuda.norm import merge_lanes
from minidl.cuda.norm.statistics import Parts
from minidl.precision import float32
from minidl.shapes import ceil_div
from tests.tolerance import assert_close

EPS = 1e-5
# Around the numbers at which clusters of more blocks take over; some loads of a lane, and parts of one.
COUNTS = [1, 31, 33, 256, 257, 512, 513, 1025, 2049, 8195, 20_001]
CHANNELS = [1, 7, 8, 13, 64, 300]


def running(ops, channels):
    return {name: ops.from_host(np.full(channels, 0.7, np.float32)) for name in ("running_mean", "running_var")}


def found(ops, parts, channels):
    """Moments, count, running statistics and merged statistics of ``parts``, on the host."""
    kept = running(ops, channels)
    arrays = *ops.batch_norm_finalize(parts, EPS, **kept, momentum=0.3), *kept.values(), ops.batch_norm_merge(parts)
    return [ops.to_host(array) for array in arrays]


def assert_same(one, other, bits):
    """To the bit, or as sums in float64 that were added up in another order."""
    for first, second in zip(one, other, strict=True):
        if bits:
            assert first.tobytes() == second.tobytes()
        else:
            np.testing.assert_allclose(first, second, rtol=2.0**-23 if first.dtype == np.float32 else 1e-13, atol=1e-15)


def assert_found(arrays, mean, variance, rows):
    """As float64 has them: nothing but the result is rounded, of sums of squares some thousand times in double."""
    moments, count, running_mean, running_var, stats = arrays
    channels, deviation = mean.size, np.sqrt(variance + EPS)
    assert count.tolist() == [rows] and stats[0] == rows
    np.testing.assert_allclose(stats[1 : 1 + channels], mean, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(stats[1 + channels :], variance * rows, rtol=1e-9)
    assert_close(moments[0], mean, float32)
    assert_close(moments[1], 1 / deviation, float32)
    assert_close(running_mean, 0.7 * np.float32(0.7).astype(np.float64) + 0.3 * mean, float32, scale=1.0)
    unbiased = variance * rows / max(rows - 1, 1)
    assert_close(running_var, 0.7 * np.float32(0.7).astype(np.float64) + 0.3 * unbiased, float32, scale=1.0)


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("count", COUNTS)
def test_sums_of_patches(cuda_ops, rng, count, channels):
    rows = 64 * count
    values = rng.standard_normal((count, channels)).astype(np.float32)
    first = np.stack([64 * values, 64 * values**2 + 64 * rng.random((count, channels))], axis=1).astype(np.float32)
    arrays = found(cuda_ops, Parts(cuda_ops.from_host(first), rows), channels)
    total = first.astype(np.float64).sum(0)
    mean = total[0] / rows
    assert_found(arrays, mean, total[1] / rows - mean**2, rows)


@pytest.mark.parametrize("ratio", [0.0, 1e4])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("count", COUNTS)
def test_means_of_chunks(cuda_ops, rng, count, channels, ratio):
    chunk_rows, last = 10, 3
    rows, sizes = chunk_rows * (count - 1) + last, np.full((count, 1), chunk_rows)
    sizes[-1] = last
    means = ratio + rng.standard_normal((count, channels))
    squares = (10 * rng.random((count, channels))).astype(np.float32)
    arrays = found(cuda_ops, Parts(cuda_ops.from_host(means), rows, cuda_ops.from_host(squares), chunk_rows), channels)
    mean = (sizes * means).sum(0) / rows
    m2 = squares.astype(np.float64).sum(0) + (sizes * (means - mean) ** 2).sum(0)
    assert_found(arrays, mean, m2 / rows, rows)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("count", COUNTS)
def test_sums_of_the_backward_pass(cuda_ops, rng, count, channels, accumulate):
    parts, moments = (rng.standard_normal((n, 2, channels)).astype(np.float32) for n in (count, 1))
    old = rng.standard_normal((2, channels)).astype(np.float32)
    dgamma, dbeta = map(cuda_ops.from_host, old)
    gradients = {"dgamma": dgamma, "dbeta": dbeta, "accumulate": accumulate}
    sums = cuda_ops.batch_norm_backward_sums(*map(cuda_ops.from_host, (parts, moments[0])), **gradients)
    expected = parts.astype(np.float64).sum(0)
    expected[1] *= moments[0, 1]
    np.testing.assert_allclose(cuda_ops.to_host(sums), expected, rtol=1e-9, atol=1e-9)
    expected = (old[::-1] if accumulate else 0) + cuda_ops.to_host(sums).astype(np.float32)
    assert np.stack([cuda_ops.to_host(dbeta), cuda_ops.to_host(dgamma)]).tobytes() == expected.tobytes()


@pytest.mark.parametrize("count", COUNTS)
def test_the_same_bits_with_and_without_clusters_and_beside_itself(cuda_ops, rng, count, monkeypatch):
    """On a device that has none a block adds up what a cluster does, in its order."""
    import cupy

    channels, results = 24, []
    parts, moments = (rng.standard_normal((n, 2, channels)).astype(np.float32) for n in (count, 1))
    first, moments = cuda_ops.from_host(parts), cuda_ops.from_host(moments[0])
    cuda_ops.synchronize()
    old = dataclasses.replace(current_device(), arch=(8, 0))
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(4)]
    for device in (current_device(), old):
        monkeypatch.setattr(merge_lanes, "current_device", lambda device=device: device)
        for stream in streams:
            with stream:
                kept = running(cuda_ops, channels)
                arrays = cuda_ops.batch_norm_finalize(Parts(first, 64 * count), EPS, **kept, momentum=0.3)
                results.append((*arrays, *kept.values(), cuda_ops.batch_norm_backward_sums(first, moments)))
    for stream in streams:
        stream.synchronize()
    assert len({b"".join(cuda_ops.to_host(array).tobytes() for array in arrays) for arrays in results}) == 1


@pytest.mark.parametrize("channels", [(8, 8), (5, 13), (64, 32), (300, 1)])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("summed", [False, True])
def test_parts_beside_known_channels(cuda_ops, rng, count, channels, summed):
    """As if all were merged and then put together, to the bit where as many blocks share them; and each merged once."""
    known, own = channels
    rows = 64 * count
    first = rng.standard_normal((count, 2, own)).astype(np.float32) ** 2
    parts = Parts(cuda_ops.from_host(first), rows)
    if not summed:
        means = cuda_ops.from_host(rng.standard_normal((count, own)))
        parts = Parts(means, rows, cuda_ops.from_host(np.ascontiguousarray(first[:, 0])), 64)
    before = cuda_ops.from_host(np.concatenate([[rows], rng.standard_normal(known), rng.random(known)]))
    apart = found(cuda_ops, cuda_ops.batch_norm_concat([before, cuda_ops.batch_norm_merge(parts)]), known + own)
    alike = len({merge_lanes.shares_of(count, ceil_div(n, merge_lanes.GROUP)) for n in (own, known + own)}) == 1
    joined = cuda_ops.batch_norm_concat([before, parts])
    results = [found(cuda_ops, joined, known + own) for _ in range(2)]  # with the moments, and afterwards
    assert_same(*results, bits=True)
    assert_same(apart, results[0], bits=alike)
    joined = cuda_ops.batch_norm_concat([before, parts])  # before
    assert_same(results[0][-1:], [cuda_ops.to_host(cuda_ops.batch_norm_merge(joined))], bits=True)
    twice = cuda_ops.batch_norm_concat([joined, parts])
    assert cuda_ops.to_host(cuda_ops.batch_norm_merge(twice)).size == 1 + 2 * (known + 2 * own)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("count", COUNTS)
def test_what_is_not_finite_stays_in_its_channel(cuda_ops, rng, count, value):
    first = rng.random((count, 2, 20)).astype(np.float32)
    first[count // 2, :, 11] = value
    arrays = found(cuda_ops, Parts(cuda_ops.from_host(first), 64 * count), 20)
    for array in (*arrays[0], *arrays[2:4], *arrays[4][1:].reshape(2, 20)):
        assert not np.isfinite(array[11]) or (array is arrays[0][1] and array[11] == 0)
        assert np.isfinite(np.delete(array, 11)).all()


@pytest.mark.parametrize("device", ["A100", "H200"])
@pytest.mark.parametrize("finish", [False, True])
def test_one_kernel_merges(device, finish):
    """Whatever the number of parts, and whether or not running statistics and moments follow."""
    from minidl import cuda as ops

    for count in COUNTS:
        with dry_run(BUILT_IN[device]) as log:
            parts = Parts(ops.empty((count, 2, 40), float32), 64 * count)
            ops.batch_norm_merge(parts) if finish else ops.batch_norm_finalize(parts, EPS)
            ops.batch_norm_backward_sums(parts.first, ops.empty((2, 40), float32))
        assert len(log.launches) == 2
        with dry_run(BUILT_IN[device]) as joined:
            stats = ops.batch_norm_concat([ops.empty(17, np.float64), Parts(ops.empty((count, 2, 40), float32), count)])
            for _ in range(2):
                ops.batch_norm_merge(stats) if finish else ops.batch_norm_finalize(stats, EPS)
        assert len(joined.launches) == (1 if finish else 2)
        assert {dict(launch.defines)["CLUSTER"] > 1 for launch in log.launches} == {device == "H200" and count > 512}
