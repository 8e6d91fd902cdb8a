"""Convolution and its two gradients on the operation tables: definition, adjointness, options, layouts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minidl.precision import bfloat16, float16, float32
from tests.convolutions import (
    CASES,
    SMALL,
    bits_of_dense_arrays,
    both,
    cases,
    drawn,
    equals_definition,
    exact_weight_gradient,
    pitched,
    put,
    three,
    weight_gradient,
)
from tests.reference import conv2d as reference
from tests.tolerance import assert_close, draw, draw_integers


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


@cases()
def test_equals_definition(ops, case, dtype, rng):
    """Biases and a further gradient are added before the rounding."""
    equals_definition(ops, case, dtype, rng, both)


@cases()
def test_backward_weight_equals_definition(ops, case, dtype, rng):
    x, _, dy = drawn(rng, case, dtype)
    dw = weight_gradient(ops, case, *put(ops, dy, x))
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    assert_close(dw, expected, terms=case.terms[2], scale=4)


@cases()
def test_weight_gradients_of_whole_numbers_are_exact(ops, case, dtype, rng):
    exact_weight_gradient(ops, case, dtype, rng)


@cases()
def test_pitched_arrays_give_the_bits_of_dense_ones(ops, case, dtype, rng):
    bits_of_dense_arrays(ops, case, dtype, rng, three, ((3, 2),))


@cases(SMALL)
def test_arrays_of_any_other_layout_are_read_correctly(ops, case, rng):
    """Transposed and cropped views are neither dense nor pitched."""
    x, w, dy = drawn(rng, case, float32)
    transposed = ops.from_host(np.ascontiguousarray(x.transpose(0, 3, 1, 2))).transpose(0, 2, 3, 1)
    cropped = ops.from_host(np.pad(dy, ((0, 0), (1, 2), (2, 1), (0, 0))))[:, 1 : 1 + dy.shape[1], 2 : 2 + dy.shape[2]]
    (filters,) = put(ops, w)
    y = ops.conv2d(transposed, filters, **case.options)
    assert_close(ops.to_host(y), reference.conv2d(x, w, **case.options), terms=case.terms[0], scale=4)
    dx = ops.conv2d_backward_data(cropped, filters, case.x, **case.options)
    expected = reference.conv2d_backward_data(dy, w, case.x, **case.options)
    assert_close(ops.to_host(dx), expected, terms=case.terms[1], scale=4)
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    assert_close(weight_gradient(ops, case, cropped, transposed), expected, terms=case.terms[2], scale=4)


@cases()
def test_gradients_are_the_adjoints(ops, case, rng):
    """<conv(x, w), dy> == <x, data gradient> == <w, filter gradient>: convolution is bilinear."""
    x, w, dy = drawn(rng, case, float32)
    placed_x, placed_w, placed_dy = put(ops, x, w, dy)
    y = ops.to_host(ops.conv2d(placed_x, placed_w, **case.options))
    dx = ops.to_host(ops.conv2d_backward_data(placed_dy, placed_w, case.x, **case.options))
    dw = weight_gradient(ops, case, placed_dy, placed_x)
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
    x, w, _ = drawn(rng, case, float32)
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
    equals_definition(cpu_ops, case, float32, rng, three)


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
    """Of ours: a product that goes to BLAS has the bits that BLAS gives with its own number of threads."""
    hashes = []
    for threads in ("1", "2", "3"):
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": "2"}
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
