"""Convolution and its two gradients on the operation tables: definition, adjointness, options, layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from minidl.precision import bfloat16, float16, float32
from tests.reference import conv2d as reference
from tests.tolerance import assert_close, draw, draw_integers


@dataclass(frozen=True)
class Case:
    """Image N, H, W, C; filters K, R, S; the options of the convolution."""

    name: str
    x: tuple[int, int, int, int]
    filters: tuple[int, int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    w: tuple[int, int, int, int] = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "w", (*self.filters, self.x[3] // self.groups))

    @property
    def options(self):
        return {
            "stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups,
        }  # fmt: skip

    @property
    def y(self):
        size = reference.output_size(self.x, self.w, self.stride, self.padding, self.dilation)
        return (self.x[0], *size, self.w[0])

    @property
    def terms(self):
        """Products summed into an output, a data gradient, a filter gradient; at most."""
        K, R, S, C = self.w
        return R * S * C, R * S * K // self.groups, self.y[0] * self.y[1] * self.y[2]


CASES = [
    Case("ones", (1, 1, 1, 1), (1, 1, 1)),
    Case("plain-3x3", (2, 9, 10, 16), (32, 3, 3), padding=(1, 1)),
    Case("primes", (3, 7, 11, 5), (13, 3, 5), padding=(1, 2)),
    Case("stem-7x7-stride-2", (2, 15, 17, 3), (16, 7, 7), stride=(2, 2), padding=(3, 3)),
    Case("stride-2", (3, 8, 8, 16), (33, 3, 3), stride=(2, 2), padding=(1, 1)),
    Case("stride-asymmetric", (2, 11, 13, 4), (6, 3, 2), stride=(3, 2), padding=(0, 1)),
    Case("stride-over-kernel", (2, 13, 12, 7), (9, 2, 1), stride=(3, 4)),
    Case("stride-unreached-border", (1, 8, 9, 2), (3, 3, 3), stride=(4, 4)),
    Case("dilation", (2, 12, 11, 6), (17, 3, 3), padding=(2, 3), dilation=(2, 3)),
    Case("dilation-stride", (2, 14, 15, 3), (5, 3, 3), stride=(2, 3), padding=(3, 1), dilation=(3, 2)),
    Case("dilation-beyond-image", (2, 5, 6, 8), (8, 3, 3), padding=(6, 7), dilation=(6, 7)),
    Case("kernel-over-image", (2, 3, 2, 5), (4, 5, 7), padding=(2, 3)),
    Case("one-pixel-3x3", (5, 1, 1, 19), (21, 3, 3), padding=(1, 1)),
    Case("wide-row", (1, 1, 70, 3), (2, 1, 3), padding=(0, 1)),
    Case("tall-column", (1, 70, 1, 2), (3, 3, 1), stride=(2, 1)),
    Case("1x1", (2, 6, 5, 24), (40, 1, 1)),
    Case("1x1-stride-2", (2, 7, 8, 12), (20, 1, 1), stride=(2, 2)),
    Case("1x1-padded", (2, 4, 3, 3), (5, 1, 1), padding=(2, 1), stride=(2, 2)),
    Case("1x1-many-channels", (2, 3, 5, 300), (40, 1, 1)),
    Case("1x1-stride-2-many-filters", (1, 5, 4, 33), (290, 1, 1), stride=(2, 2)),
    Case("few-channels", (2, 6, 9, 4), (18, 2, 9), stride=(1, 2), padding=(1, 11)),
    Case("few-channels-narrow", (3, 4, 1, 2), (5, 1, 4), stride=(2, 3), padding=(0, 3)),
    Case("linear", (7, 1, 1, 100), (31, 1, 1)),
    Case("linear-one-sample", (1, 1, 1, 257), (65, 1, 1)),
    Case("many-channels", (2, 4, 5, 67), (70, 3, 3), padding=(1, 1)),
    Case("groups", (2, 6, 7, 12), (18, 3, 3), padding=(1, 1), groups=3),
    Case("groups-wide", (1, 5, 5, 40), (72, 3, 3), stride=(2, 1), padding=(1, 1), groups=2),
    Case("groups-of-one", (2, 5, 6, 6), (12, 3, 3), padding=(1, 1), groups=6),
    Case("depthwise", (2, 9, 8, 37), (37, 3, 3), padding=(1, 1), groups=37),
    Case("depthwise-stride-2", (2, 9, 10, 16), (16, 5, 3), stride=(2, 2), padding=(2, 1), groups=16),
    Case("depthwise-dilated", (1, 11, 9, 3), (3, 3, 3), padding=(2, 2), dilation=(2, 2), groups=3),
    Case("empty-batch", (0, 6, 5, 4), (8, 3, 3), padding=(1, 1)),
    Case("empty-batch-linear", (0, 1, 1, 4), (8, 1, 1)),
]
SMALL = [case for case in CASES if case.name in ("primes", "stride-2", "linear", "groups", "depthwise-stride-2")]


def cases(some=CASES):
    return pytest.mark.parametrize("case", some, ids=[case.name for case in some])


def draws(rng, case, dtype):
    """x, w, dy"""
    return tuple(draw(rng, shape, dtype) for shape in (case.x, case.w, case.y))


def put(ops, *arrays):
    return [None if a is None else ops.from_host(a) for a in arrays]


def pitched(ops, host, before=3, after=2):
    """``host`` as a slice of the channels of a wider array."""
    wide = np.full((*host.shape[:-1], before + host.shape[-1] + after), np.nan, host.dtype)
    wide[..., before : before + host.shape[-1]] = host
    return ops.from_host(wide)[..., before : before + host.shape[-1]]


@cases([case for case in CASES if np.prod(case.y) * np.prod(case.w[1:]) < 20_000])
def test_the_reference_is_the_definition(case, rng):
    """Index by index: y[n, p, q, k] is the sum over r, s, c of x[n, h, i, g * channels + c] * w[k, r, s, c]."""
    x, w, dy = (draw_integers(rng, shape, np.float64) for shape in (case.x, case.w, case.y))
    y, dx, dw = np.zeros(case.y), np.zeros(case.x), np.zeros(case.w)
    stride, padding, dilation, groups = (case.options[o] for o in ("stride", "padding", "dilation", "groups"))
    for n, p, q, k in np.ndindex(*case.y):
        first = k // (case.w[0] // groups) * case.w[3]
        for r, s, c in np.ndindex(*case.w[1:]):
            h, i = p * stride[0] - padding[0] + r * dilation[0], q * stride[1] - padding[1] + s * dilation[1]
            if 0 <= h < case.x[1] and 0 <= i < case.x[2]:
                y[n, p, q, k] += x[n, h, i, first + c] * w[k, r, s, c]
                dx[n, h, i, first + c] += dy[n, p, q, k] * w[k, r, s, c]
                dw[k, r, s, c] += dy[n, p, q, k] * x[n, h, i, first + c]
    np.testing.assert_array_equal(reference.conv2d(x, w, **case.options), y)
    np.testing.assert_array_equal(reference.conv2d_backward_data(dy, w, case.x, **case.options), dx)
    np.testing.assert_array_equal(reference.conv2d_backward_weight(dy, x, case.w, **case.options), dw)


def weight_gradient(ops, dy, x, case, start=None, tf32=False):
    out = ops.from_host(np.full(case.w, np.nan, np.float32) if start is None else start)
    ops.conv2d_backward_weight(dy, x, **case.options, out=out, accumulate=start is not None, tf32=tf32)
    return ops.to_host(out)


@cases()
def test_forward_equals_definition(ops, case, dtype, rng):
    x, w, _ = draws(rng, case, dtype)
    y = ops.conv2d(*put(ops, x, w), **case.options)
    assert y.dtype == dtype
    assert_close(ops.to_host(y), reference.conv2d(x, w, **case.options), dtype, terms=case.terms[0], scale=4)


@cases()
def test_backward_data_equals_definition(ops, case, dtype, rng):
    _, w, dy = draws(rng, case, dtype)
    dx = ops.conv2d_backward_data(*put(ops, dy, w), case.x, **case.options)
    assert dx.dtype == dtype
    expected = reference.conv2d_backward_data(dy, w, case.x, **case.options)
    assert_close(ops.to_host(dx), expected, dtype, terms=case.terms[1], scale=4)


@cases()
def test_backward_weight_equals_definition(ops, case, dtype, rng):
    x, _, dy = draws(rng, case, dtype)
    dw = weight_gradient(ops, *put(ops, dy, x), case)
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    assert_close(dw, expected, terms=case.terms[2], scale=4)


@cases()
def test_backward_weight_accumulates(ops, case, dtype, rng):
    x, _, dy = draws(rng, case, dtype)
    start = draw(rng, case.w, np.float32)
    dw = weight_gradient(ops, *put(ops, dy, x), case, start=start)
    expected = start + reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    assert_close(dw, expected, terms=case.terms[2] + 1, scale=4)


@cases()
def test_bias_is_added_before_the_rounding(ops, case, dtype, rng):
    x, w, _ = draws(rng, case, dtype)
    bias = draw(rng, case.w[0], np.float32)
    y = ops.conv2d(*put(ops, x, w, bias), **case.options)
    assert_close(ops.to_host(y), reference.conv2d(x, w, bias, **case.options), dtype, terms=case.terms[0] + 1, scale=4)


@cases()
@pytest.mark.parametrize("with_bias", [False, True], ids=["add", "bias-add"])
def test_backward_data_adds_before_the_rounding(ops, case, dtype, rng, with_bias):
    x, w, dy = draws(rng, case, dtype)
    bias = draw(rng, case.x[3], np.float32) if with_bias else None
    add = draw(rng, case.x, dtype)
    for placed in (ops.from_host(add), pitched(ops, add)):
        host = ops.to_host(placed)
        dx = ops.conv2d_backward_data(
            *put(ops, dy, w), case.x, **case.options, bias=None if bias is None else ops.from_host(bias), add=placed
        )
        expected = reference.conv2d_backward_data(dy, w, case.x, **case.options, bias=bias, add=add)
        assert_close(ops.to_host(dx), expected, dtype, terms=case.terms[1] + 2, scale=4)
        assert (ops.to_host(placed) == host).all(), "an input was overwritten"


@cases()
def test_pitched_arrays_give_the_bits_of_dense_ones(ops, case, dtype, rng):
    x, w, dy = draws(rng, case, dtype)
    dense_x, dense_w, dense_dy = put(ops, x, w, dy)
    y = ops.conv2d(pitched(ops, x), dense_w, **case.options)
    assert (ops.to_host(y) == ops.to_host(ops.conv2d(dense_x, dense_w, **case.options))).all()
    dx = ops.conv2d_backward_data(pitched(ops, dy), dense_w, case.x, **case.options)
    assert (ops.to_host(dx) == ops.to_host(ops.conv2d_backward_data(dense_dy, dense_w, case.x, **case.options))).all()
    dw = weight_gradient(ops, pitched(ops, dy), pitched(ops, x), case)
    assert (dw == weight_gradient(ops, dense_dy, dense_x, case)).all()


@cases(SMALL)
def test_arrays_of_any_other_layout_are_read_correctly(ops, case, rng):
    """Transposed and cropped views are neither dense nor pitched."""
    x, w, dy = draws(rng, case, float32)
    transposed = ops.from_host(np.ascontiguousarray(x.transpose(0, 3, 1, 2))).transpose(0, 2, 3, 1)
    cropped = ops.from_host(np.pad(dy, ((0, 0), (1, 2), (2, 1), (0, 0))))[:, 1 : 1 + dy.shape[1], 2 : 2 + dy.shape[2]]
    (filters,) = put(ops, w)
    y = ops.conv2d(transposed, filters, **case.options)
    assert_close(ops.to_host(y), reference.conv2d(x, w, **case.options), terms=case.terms[0], scale=4)
    dx = ops.conv2d_backward_data(cropped, filters, case.x, **case.options)
    expected = reference.conv2d_backward_data(dy, w, case.x, **case.options)
    assert_close(ops.to_host(dx), expected, terms=case.terms[1], scale=4)
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    assert_close(weight_gradient(ops, cropped, transposed, case), expected, terms=case.terms[2], scale=4)


@cases()
def test_gradients_are_the_adjoints(ops, case, rng):
    """<conv(x, w), dy> == <x, data gradient> == <w, filter gradient>: convolution is bilinear."""
    x, w, dy = draws(rng, case, float32)
    placed_x, placed_w, placed_dy = put(ops, x, w, dy)
    y = ops.to_host(ops.conv2d(placed_x, placed_w, **case.options))
    dx = ops.to_host(ops.conv2d_backward_data(placed_dy, placed_w, case.x, **case.options))
    dw = weight_gradient(ops, placed_dy, placed_x, case)
    terms = np.asarray(y, np.float64) * dy
    # The rounding errors of independent elements add up like a random walk.
    bound = 8 * 2.0**-24 * max(case.terms) ** 0.5 * np.sqrt(np.sum(terms**2)) + 1e-30
    assert abs(np.vdot(x.astype(np.float64), dx) - terms.sum()) <= bound
    assert abs(np.vdot(w.astype(np.float64), dw) - terms.sum()) <= bound


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 7, 9, 37), (4099, 6), (3, 0, 2, 5), (0, 16)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_channel_sum(ops, shape, dtype, rng, accumulate):
    dy = draw(rng, shape, dtype, offset=1)
    start = draw(rng, shape[-1], np.float32)
    for placed in (ops.from_host(dy), pitched(ops, dy)):
        out = ops.from_host(start if accumulate else np.full(shape[-1], np.nan, np.float32))
        ops.channel_sum(placed, out=out, accumulate=accumulate)
        expected = reference.channel_sum(dy) + (start if accumulate else 0)
        assert_close(ops.to_host(out), expected, terms=int(np.prod(shape[:-1])) + 1)


@cases(SMALL)
def test_a_nan_stays_in_its_channels_and_neighbourhood(ops, case, rng):
    x, w, _ = draws(rng, case, float32)
    x[0, 0, 0, 0] = np.nan
    y = ops.to_host(ops.conv2d(*put(ops, x, w), **case.options))
    assert (np.isnan(y) == np.isnan(reference.conv2d(x, w, **case.options))).all()


def test_cpu_refuses_tf32(cpu_ops):
    x, w = np.zeros((1, 2, 2, 1), np.float32), np.zeros((1, 1, 1, 1), np.float32)
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, "tf32": True}
    with pytest.raises(ValueError, match="tf32"):
        cpu_ops.conv2d(x, w, **options)
    with pytest.raises(ValueError, match="tf32"):
        cpu_ops.conv2d_backward_data(x, w, x.shape, **options)
    with pytest.raises(ValueError, match="tf32"):
        cpu_ops.conv2d_backward_weight(x, x, out=w.copy(), **options)


@pytest.fixture(params=["baseline", "avx2", "avx512"])
def instruction_set(cpu_ops, request):
    """Runs the test on the kernels of one instruction set, as a wheel would on another processor."""
    from minidl.cpu import _conv2d

    usable = _conv2d.instruction_sets()
    if request.param not in usable:
        pytest.skip(f"this processor has no {request.param}")
    _conv2d.use_instruction_set(request.param)
    yield request.param
    _conv2d.use_instruction_set(usable[0])


@cases()
def test_every_instruction_set_equals_definition(cpu_ops, instruction_set, case, rng):
    x, w, dy = draws(rng, case, float32)
    assert_close(
        cpu_ops.conv2d(x, w, **case.options), reference.conv2d(x, w, **case.options), terms=case.terms[0], scale=4
    )
    expected = reference.conv2d_backward_data(dy, w, case.x, **case.options)
    assert_close(cpu_ops.conv2d_backward_data(dy, w, case.x, **case.options), expected, terms=case.terms[1], scale=4)
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    assert_close(weight_gradient(cpu_ops, dy, x, case), expected, terms=case.terms[2], scale=4)


@pytest.mark.parametrize("storage", [bfloat16, float16], ids=["bf16", "fp16"])
def test_kernels_convert_every_16_bit_pattern_like_numpy(cpu_ops, instruction_set, storage):
    """A 1x1 filter of one keeps all values; a bias moves them between the representable ones, where they round."""
    values = np.arange(1 << 16, dtype=np.uint16).view(storage).reshape(1, 16, 16, 256)
    one = np.ones((256, 1, 1, 1), storage)
    options = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 256}
    for size in (0.0, 2.0**-26, 2.0**-12, 1.0, 3e4):
        bias = np.linspace(-size, size, 256, dtype=np.float32)
        with np.errstate(over="ignore", invalid="ignore"):
            expected = (values.astype(np.float32) + bias).astype(storage)
        y = cpu_ops.conv2d(values, one, bias, **options)
        assert (np.isnan(y.astype(np.float32)) == np.isnan(expected.astype(np.float32))).all()
        finite = ~np.isnan(expected.astype(np.float32))
        assert (y[finite] == expected[finite]).all()


_HASHES = """
import hashlib, numpy as np
from minidl import backend
ops, rng = backend.get_ops("cpu"), np.random.default_rng(0)
options = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
def draw(*shape):
    return rng.standard_normal(shape, dtype=np.float32)
for x, w, groups, padding in [
    (draw(9, 17, 19, 40), draw(72, 3, 3, 40), 1, (1, 1)),
    (draw(2, 30, 31, 64), draw(64, 3, 3, 1), 64, (1, 1)),
    (draw(3, 40, 41, 3), draw(100, 5, 5, 3), 1, (2, 2)),
    (draw(5, 9, 11, 300), draw(200, 1, 1, 300), 1, (0, 0)),
    (draw(33, 1, 1, 512), draw(384, 1, 1, 512), 1, (0, 0)),
    (draw(1, 1, 1, 4096), draw(1024, 1, 1, 4096), 1, (0, 0)),
]:
    options.update(groups=groups, padding=padding)
    y = ops.conv2d(x, w, **options)
    dx, dw = ops.conv2d_backward_data(y, w, x.shape, **options), np.empty_like(w)
    ops.conv2d_backward_weight(y, x, out=dw, **options)
    db = np.empty(w.shape[0], np.float32)
    ops.channel_sum(y, out=db)
    print(*(hashlib.sha256(a).hexdigest() for a in (y, dx, dw, db)))
"""


def test_same_bits_with_any_number_of_threads(cpu_ops):
    hashes = []
    for threads in ("1", "2", "3"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        run = subprocess.run([sys.executable, "-c", _HASHES], env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        hashes.append(run.stdout)
    assert hashes[0] and hashes[1] == hashes[0] and hashes[2] == hashes[0]


@pytest.mark.parametrize("threads", [1, 2, 64])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward_data"])
@pytest.mark.parametrize(
    ("size", "channels", "filters", "kernel", "stride", "groups"),
    [
        (224, 3, 64, 7, 2, 1), (224, 64, 64, 3, 1, 1), (112, 512, 512, 3, 1, 1), (56, 64, 128, 1, 2, 1),
        (7, 512, 512, 3, 1, 1), (7, 2048, 2048, 3, 1, 1), (16, 1024, 1024, 5, 2, 1), (56, 4096, 4096, 3, 1, 32),
        (112, 960, 960, 5, 2, 960), (1024, 3, 16, 11, 4, 1),
    ],
)  # fmt: skip
def test_a_thread_works_in_less_than_4_mb(cpu_ops, size, channels, filters, kernel, stride, groups, backward, threads):
    """No matrix of all patches: work space does not grow with the batch, and not without bound with the layer."""
    from minidl.cpu.conv2d_plan import apply_tasks, make_plan, reduce_tasks

    shape = filters, kernel, kernel, channels // groups
    options = (stride,) * 2, (kernel // 2,) * 2, (1, 1), groups
    plan = make_plan((size, size), shape, *options, 32, backward)
    for images in (1, 8, 256):
        assert 4 * apply_tasks(plan, images, threads).scratch_floats <= 4 << 20
        assert backward or 4 * reduce_tasks(plan, images, threads).scratch_floats <= 4 << 20
