"""A convolution that takes the statistics of its output: those of the values as stored, whatever kernel took them."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_hopper, depthwise_strip
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run, observed
from minidl.precision import bfloat16, float32
from tests.convolutions import SIXTEEN, each_tile, plan_of, poison
from tests.reference import batch_norm as reference
from tests.test_batch_norm_ops import assert_stats
from tests.test_conv2d_families import CASES, CUT, FEW
from tests.test_conv2d_ops import CASES as ALL
from tests.test_conv2d_ops import Case, cases, pitched, put
from tests.tolerance import draw


def operands(rng, case, storage, ratio=0.0):
    """x, w and a bias that moves every channel so many deviations of the others from zero."""
    w = draw(rng, case.w, storage, scale=(case.terms[0]) ** -0.5)
    return draw(rng, case.x, storage), w, (ratio + draw(rng, case.w[0], float32)).astype(np.float32)


def check(ops, case, x, w, bias):
    """Output and statistics of one call, as host arrays, checked against each other and against `conv2d`."""
    x, w, bias = put(ops, x, w, bias)
    merged = set()
    with observed(lambda stem, name, defines: nullcontext(merged.add(defines.get("SUMS")))):
        y, stats = ops.conv2d_stats(x, w, bias, **case.options)
    y, stats, expected = (ops.to_host(array) for array in (y, stats, ops.conv2d(x, w, bias, **case.options)))
    assert y.tobytes() == expected.tobytes()
    (assert_sums if 1 in merged else assert_stats)(stats, y)
    return y, stats


def assert_sums(stats, y):
    """As of sums and sums of squares that tensor cores take, which cut off what they cannot hold (`CUT`); of values of
    one binade, as are those far from zero, nothing is lost."""
    expected, channels = reference.stats(y), y.shape[-1]
    assert stats.shape == expected.shape and stats.dtype == np.float64 and stats[0] == expected[0]
    size = np.abs(y.astype(np.float64)).reshape(-1, channels)
    exact = np.frexp(size.max(0))[1] == np.frexp(size.min(0))[1]
    unit = np.where(exact, 2.0**-48, CUT * 2.0**-24)
    found, expected = stats[1:].reshape(2, channels), expected[1:].reshape(2, channels)
    assert (np.abs(found - expected) <= unit * [size.mean(0), (size**2).sum(0)]).all()


@cases(ALL)
def test_statistics_are_those_of_the_output(ops, case, dtype, rng):
    check(ops, case, *operands(rng, case, dtype))


DEPTHWISE = [
    Case("tall", (2, 150, 11, 6), (6, 3, 3), padding=(1, 1), groups=6),
    Case("odd", (3, 7, 7, 5), (5, 3, 3), padding=(1, 1), groups=5),
    Case("strided", (2, 15, 18, 12), (12, 3, 3), stride=(2, 2), padding=(1, 1), groups=12),
    Case("5x5", (2, 70, 9, 8), (8, 5, 5), padding=(2, 2), groups=8),
    Case("many", (300, 14, 14, 16), (16, 3, 3), padding=(1, 1), groups=16),
]


@pytest.mark.parametrize("ratio", [0.0, 1e3])
@cases(DEPTHWISE)
def test_of_depthwise_convolutions(cuda_ops, case, ratio, rng, monkeypatch):
    """In bfloat16 on the way, in sums of few enough values; wherever the input lies, and on entries all written."""
    x, w, bias = operands(rng, case, bfloat16, ratio)
    y, stats = check(cuda_ops, case, x, w, bias)
    with observed(lambda stem, name, defines: pytest.fail("a pass of its own") if "stats" in name else nullcontext()):
        for before, after in ((8, 8), (1, 0), (3, 2)):
            placed = pitched(cuda_ops, x, before, after), *put(cuda_ops, w, bias)
            found = [cuda_ops.to_host(array) for array in cuda_ops.conv2d_stats(*placed, **case.options)]
            assert found[0].tobytes() == y.tobytes() and found[1].tobytes() == stats.tobytes()


@cases(DEPTHWISE)
def test_runs_of_a_depthwise_strip_are_short_enough(case):
    conv = plan_of(case)
    planned = depthwise_strip.plan(conv, 1, False, (64, 64), 1, 2, True)
    facts = {name: int(planned.problem[name][0]) for name in ("items", "strips", "runs", "run")}
    assert facts["run"] * planned.defines["COLUMNS"] <= depthwise_strip.MOST_SUMMED
    assert facts["items"] == conv.images * facts["strips"] * facts["runs"]
    assert facts["run"] * facts["runs"] >= conv.out_height


@SIXTEEN
@pytest.mark.parametrize("ratio", [0.0, 1e3])
@cases(CASES)
def test_in_each_family(forced_ops, case, storage, ratio, rng):
    check(forced_ops, case, *operands(rng, case, storage, ratio))


@cases([case for case in CASES if case.stride == (1, 1)])
@pytest.mark.parametrize("share", [1, 3])
def test_of_every_tile(hopper, case, share, rng, monkeypatch):
    """Each entry that is read has been written, and no matter by which block."""
    hosts, outputs, found = operands(rng, case, bfloat16, 3.0), set(), {}
    poison(monkeypatch, "conv2d_hopper")
    for tile in each_tile(monkeypatch, case, False, share):
        y, stats = check(hopper, case, *hosts)
        outputs.add(y.tobytes())
        found.setdefault(tile, set()).add(stats.tobytes())
    assert len(outputs) == 1 and all(len(statistics) == 1 for statistics in found.values())


@cases(FEW)
def test_a_nan_stays_in_its_channel(forced_ops, case, rng):
    x, w, bias = operands(rng, case, bfloat16)
    w[3, ..., 0] = np.nan
    _, stats = forced_ops.conv2d_stats(*put(forced_ops, x, w, bias), **case.options)
    channels = case.w[0]
    wrong = np.isnan(forced_ops.to_host(stats)[1:].reshape(2, channels))
    assert wrong[:, 3].all() and wrong.sum() == 2


@cases(FEW)
def test_constant_channels_have_no_variance(forced_ops, case):
    x, w = np.ones(case.x, bfloat16), np.zeros(case.w, bfloat16)
    bias = np.linspace(-1e3, 1e3, case.w[0]).astype(bfloat16).astype(np.float32)
    _, stats = forced_ops.conv2d_stats(*put(forced_ops, x, w, bias), **case.options)
    mean, squares = forced_ops.to_host(stats)[1:].reshape(2, -1)
    np.testing.assert_allclose(mean, bias.astype(np.float64), rtol=2.0**-52)
    assert not squares.any()


@cases(FEW)
def test_batches_beyond_a_launch_are_read_again(forced_ops, case, rng, monkeypatch):
    monkeypatch.setattr(conv2d_hopper, "ROW_LIMIT", case.x[1] * case.x[2])
    check(forced_ops, case, *operands(rng, case, bfloat16))


@pytest.mark.parametrize("device", ["A100", "H200"])
def test_only_where_the_kernel_cannot_is_the_output_read_again(device):
    from minidl import cuda as ops

    with dry_run(BUILT_IN[device]) as log:
        x, w = ops.empty((2, 14, 14, 64), bfloat16), ops.empty((72, 3, 3, 64), bfloat16)
        ops.conv2d_stats(x, w, stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1)
    names = [launch.name for launch in log.launches]
    assert ("batch_norm_stats_kernel" in names) == (device == "A100")
    assert names[-1] == "batch_norm_merge_kernel"


def test_statistics_need_no_module_state():
    """The cached plans of both kinds of forward pass live side by side."""
    from minidl import cuda as ops

    options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1}
    with dry_run() as log:
        x, w = ops.empty((2, 14, 14, 64), bfloat16), ops.empty((72, 3, 3, 64), bfloat16)
        for _ in range(2):
            ops.conv2d_stats(x, w, **options)
            ops.conv2d(x, w, **options)
    found = [dict(launch.defines).get("STATISTICS") for launch in log.launches if "STATISTICS" in dict(launch.defines)]
    assert found == [1, 0, 1, 0]


@SIXTEEN
@cases(FEW)
def test_unfinished_statistics_become_the_same_moments(forced_ops, case, storage, rng):
    ops, channels = forced_ops, case.w[0]
    arrays = put(ops, *operands(rng, case, storage))
    found = []
    for finish in (True, False):
        y, stats = ops.conv2d_stats(*arrays, **case.options, finish=finish)
        running = {name: ops.from_host(np.full(channels, 0.7, np.float32)) for name in ("running_mean", "running_var")}
        moments, count = ops.batch_norm_finalize(stats, 1e-5, **running, momentum=0.3)
        beside = ops.batch_norm_merge(ops.batch_norm_concat([ops.batch_norm_stats(y), stats]))
        arrays_of = moments, count, *running.values(), ops.batch_norm_merge(stats), beside
        found.append([ops.to_host(array).tobytes() for array in arrays_of])
    assert found[0] == found[1]
