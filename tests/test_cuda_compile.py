"""Every kernel that the CUDA table would launch compiles for every architecture minidl claims, and fits it.

Each operation runs in a dry run, for an imagined device, over dtypes and shapes that reach its variants: large and
small, odd channel counts, pitched and misaligned arrays, every option. No GPU is needed.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from minidl import cuda as ops
from minidl.cuda import all_reduce, ceiling, conv2d_hopper, conv2d_hopper_tiles, nvrtc
from minidl.cuda.conv2d_family import TEXTBOOK, family
from minidl.cuda.conv2d_halo import HALO_TILES
from minidl.cuda.conv2d_plan import convolution
from minidl.cuda.csb_routes import route
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.cuda.spin import spin
from minidl.precision import bfloat16, float16, float32

STORAGE = (float32, bfloat16, float16)
REGISTERS = 65536  # of a multiprocessor, on every architecture claimed
ARCHITECTURES = [
    pytest.param("A100", id="sm_80"),
    # Same instruction set as sm_80; what differs, the limits, is also checked by the test of launches below.
    pytest.param("RTX 3090", id="sm_86", marks=pytest.mark.slow),
    pytest.param("L40", id="sm_89", marks=pytest.mark.slow),
    pytest.param("H200", id="sm_90"),
]

ACTIVATIONS = ("relu6", "leaky_relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "hardswish")

# (stem, kernel) -> why its spills are accepted. Empty is the aim.
ACCEPTED_SPILLS: dict[tuple[str, str], str] = {}


def _parameters(*sizes: int) -> Iterator[np.ndarray]:
    return (ops.empty(size, np.float32) for size in sizes)


def _activations(dtype) -> Iterator[np.ndarray]:
    """(N, H, W, C) arrays that reach every vector width: dense, pitched, misaligned, large, empty."""
    for channels in (64, 12, 6, 3, 1, 200, 2048, 4100):
        yield ops.empty((2, 7, 5, channels), dtype)
    wide = ops.empty((2, 7, 5, 96), dtype)
    for start in (0, 4, 2, 1):
        yield wide[..., start : start + 32]
    yield ops.empty((256, 56, 56, 64), dtype)
    yield ops.empty((0, 7, 7, 16), dtype)


def call_array() -> None:
    for source, target in itertools.product((*STORAGE, np.dtype(np.uint8)), STORAGE):
        for x in _activations(source):
            ops.cast(x, target)
    for dtype in (*STORAGE, np.dtype(np.uint8), np.dtype(np.int64), np.dtype(np.float64)):
        for x in _activations(dtype):
            ops.contiguous(x)
            ops.copy_into(ops.empty(x.shape, dtype), x)
            ops.to_host(x)
    ops.from_host([1, 2, 3], np.float32)
    ops.zeros((), np.float32)
    ops.assign(ops.empty(3, np.float32), [1, 2, 3])
    ops.synchronize()


def call_image() -> None:
    (scale, shift) = _parameters(3, 3)
    for dtype in STORAGE:
        for source in (np.uint8, np.float32):
            for batch in (2, 3):  # in vectors, and not
                assert ops.normalise(ops.empty((batch, 4, 5, 3), source), scale, shift, dtype).dtype == dtype


def call_batch_norm() -> None:
    for dtype in STORAGE:
        for x in _activations(dtype):
            channels = x.shape[-1]
            gamma, beta, mean, var, dgamma, dbeta = _parameters(*[channels] * 6)
            stats = ops.batch_norm_stats(x)
            assert stats.shape == (1 + 2 * channels,)
            assert ops.batch_norm_merge(stats) is stats
            assert ops.batch_norm_concat([stats, stats]).shape == (1 + 4 * channels,)
            moments, count = ops.batch_norm_finalize(stats, 1e-5, running_mean=mean, running_var=var, momentum=0.1)
            ops.batch_norm_finalize(ops.empty((4, 1 + 2 * channels), np.float64), 1e-5)
            ops.batch_norm_eval_moments(mean, var, 1e-5)
            sums = ops.batch_norm_backward_stats(x, x, moments, dgamma=dgamma, dbeta=dbeta, accumulate=True)
            ops.batch_norm_backward_stats(ops.empty(x.shape, dtype), x, moments)
            for add in (None, x):
                assert ops.batch_norm_apply(x, moments, gamma, beta, add=add, relu=True).shape == x.shape
                ops.batch_norm_apply(x, moments, add=add)
                ops.batch_norm_backward_apply(x, x, moments, gamma, sums, count, add=add)
                ops.batch_norm_backward_apply(x, x, moments, None, None, None, add=add)
                for known in ((sums, count), (None, None)):
                    ops.batch_norm_relu_backward_apply(x, x, moments, gamma, beta, *known, add=add)
            ops.batch_norm_apply(x, moments, add=x, add_moments=moments, add_gamma=gamma, relu=True)
            ops.batch_norm_relu_backward_stats(x, x, moments, gamma, beta, dgamma=dgamma)
            ops.batch_norm_join_backward_stats(x, x, x, moments, dbeta=dbeta)


def call_activation() -> None:
    for dtype in STORAGE:
        arrays = list(_activations(dtype))
        for x in arrays:
            y = ops.relu(x)
            ops.relu_backward(x, y)
            ops.relu_backward(x, y, add=x)
        # Every vector width with one function, every function with some: the two do not meet in the kernels.
        for x, function in itertools.product(arrays[::6], ACTIVATIONS):
            ops.activate_backward(x, ops.activate(x, function, 0.1), function, 0.1, add=x)


def call_join() -> None:
    for dtype in STORAGE:
        for x in _activations(dtype):
            ops.add(x, x)
            assert ops.concat([x, x[..., :1], x]).shape[-1] == 2 * x.shape[-1] + 1
            gate = ops.gate_gradient(x, x)
            assert ops.mul(ops.mul(x, x), gate).shape == x.shape and gate.shape == (x.shape[0], 1, 1, x.shape[-1])


def call_group_norm() -> None:
    for dtype in STORAGE:
        for x in _activations(dtype):
            gamma, beta, dgamma, dbeta = _parameters(*[x.shape[-1]] * 4)
            for groups in {1, x.shape[-1] // 2 or 1, x.shape[-1]}:
                if x.shape[-1] % groups:
                    continue
                moments = ops.group_norm_stats(x, groups, eps=1e-5)
                ops.group_norm_apply(x, moments, gamma, beta)
                sums = ops.group_norm_backward_stats(x, x, moments, gamma, dgamma=dgamma, dbeta=dbeta, accumulate=True)
                assert sums.shape == moments.shape == (2, x.shape[0], groups)
                for add in (None, x):
                    ops.group_norm_backward_apply(x, x, moments, gamma, sums, add=add)


def call_layer_norm() -> None:
    for dtype in STORAGE:
        for x in (*_activations(dtype), ops.empty((3, 10000), dtype)):
            gamma, beta, dgamma, dbeta = _parameters(*[x.shape[-1]] * 4)
            y, moments = ops.layer_norm(x, gamma, beta, eps=1e-5)
            ops.layer_norm_backward_weight(x, x, moments, dgamma=dgamma, dbeta=dbeta)
            for add in (None, x):
                assert ops.layer_norm_backward_data(y, x, moments, gamma, add=add).shape == x.shape


def call_softmax() -> None:
    for dtype in STORAGE:
        for x in (*_activations(dtype), ops.empty((3, 10000), dtype)):
            assert ops.softmax_backward(x, ops.softmax(x)).shape == x.shape


def call_upsample2d() -> None:
    for dtype, mode in itertools.product(STORAGE, ("nearest", "bilinear")):
        for x in _activations(dtype):
            for size in ((2 * x.shape[1], x.shape[2] + 1), (6 * x.shape[1], 6 * x.shape[2])):
                y = ops.upsample2d(x, size, mode)
                assert ops.upsample2d_backward(y, x.shape, mode).shape == x.shape


# (N, H, W, C), K, kernel, stride, padding, dilation, groups
CONVOLUTIONS = [
    ((256, 224, 224, 3), 64, (7, 7), (2, 2), (3, 3), (1, 1), 1),
    ((256, 56, 56, 64), 64, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((256, 56, 56, 64), 256, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((256, 56, 56, 256), 512, (1, 1), (2, 2), (0, 0), (1, 1), 1),
    ((256, 28, 28, 128), 128, (3, 3), (2, 2), (1, 1), (1, 1), 1),
    ((256, 7, 7, 2048), 512, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((32, 7, 7, 512), 512, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((2, 9, 11, 12), 20, (3, 2), (1, 2), (2, 0), (2, 1), 1),
    ((1, 5, 5, 7), 13, (3, 3), (1, 1), (1, 1), (1, 1), 1),
    ((4, 14, 14, 6), 10, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((8, 14, 14, 128), 128, (3, 3), (1, 1), (1, 1), (1, 1), 32),
    ((8, 14, 14, 9), 15, (3, 3), (1, 1), (1, 1), (1, 1), 3),
    ((8, 28, 28, 96), 96, (3, 3), (1, 1), (1, 1), (1, 1), 96),
    ((8, 28, 28, 96), 192, (5, 5), (2, 2), (2, 2), (1, 1), 96),
    ((8, 28, 28, 7), 7, (3, 3), (2, 2), (1, 1), (1, 1), 7),
    ((512, 1, 1, 2048), 1000, (1, 1), (1, 1), (0, 0), (1, 1), 1),
    ((0, 8, 8, 16), 16, (3, 3), (1, 1), (1, 1), (1, 1), 1),
]


def _convolve(x, filters, kernel, stride, padding, dilation, groups, tf32=False) -> None:
    where = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "tf32": tf32}
    w = ops.empty((filters, *kernel, x.shape[-1] // groups), x.dtype)
    bias, input_bias, db = _parameters(filters, x.shape[-1], filters)
    y = ops.conv2d(x, w, bias, **where)
    assert ops.conv2d_stats(x, w, bias, **where)[1].shape == (1 + 2 * filters,)
    dy = ops.empty(y.shape, y.dtype)
    dx = ops.conv2d_backward_data(dy, w, x.shape, **where)
    assert dx.shape == x.shape
    ops.conv2d_backward_data(dy, w, x.shape, bias=input_bias, add=x, **where)
    moments = ops.empty((2, x.shape[-1]), np.float32)
    for y_below, add in ((None, None), (x, x)):
        masked, parts = ops.conv2d_backward_data_masked(dy, w, x, moments, input_bias, y=y_below, add=add, **where)
        assert masked.shape == x.shape
        if parts is not None:
            assert ops.batch_norm_backward_sums(parts, moments, dbeta=input_bias).shape == moments.shape
    ops.conv2d_backward_weight(dy, x, out=ops.empty(w.shape, np.float32), **where)
    ops.conv2d_backward_weight(dy, x, out=ops.empty(w.shape, np.float32), accumulate=True, **where)
    norm = moments, input_bias, input_bias
    ops.conv2d(x, w, bias, norm=norm, **where)
    ops.conv2d_stats(x, w, norm=norm, **where)
    ops.conv2d_backward_weight(dy, x, norm=norm, out=ops.empty(w.shape, np.float32), **where)
    ops.channel_sum(dy, out=db)


def call_conv2d() -> None:
    for dtype, tf32 in ((float32, False), (float32, True), (bfloat16, False), (float16, False)):
        for shape, *rest in CONVOLUTIONS:
            _convolve(ops.empty(shape, dtype), *rest, tf32=tf32)
            with family("generic"):
                _convolve(ops.empty(shape, dtype), *rest, tf32=tf32)
        wide = ops.empty((2, 8, 8, 96), dtype)
        for start in (0, 4, 2, 1):
            _convolve(wide[..., start : start + 32], 48, (3, 3), (1, 1), (1, 1), (1, 1), 1, tf32=tf32)
    for name in TEXTBOOK:
        with family(name):
            _convolve(ops.empty((2, 9, 11, 12), float32), 20, (3, 2), (1, 2), (2, 0), (2, 1), 1, tf32=False)


# (N, H, W, C), K, kernel, stride, padding of images with few channels
STEMS = [
    ((256, 224, 224, 3), 64, (7, 7), (2, 2), (3, 3)),
    ((64, 224, 224, 3), 64, (3, 3), (1, 1), (1, 1)),
    ((64, 224, 224, 3), 32, (3, 3), (2, 2), (1, 1)),
    ((64, 227, 227, 3), 96, (11, 11), (4, 4), (0, 0)),
    ((16, 128, 191, 3), 40, (5, 5), (1, 1), (2, 2)),
    ((4, 64, 64, 4), 64, (11, 11), (1, 1), (5, 5)),
    ((4, 64, 64, 4), 130, (7, 7), (2, 2), (3, 3)),
    ((512, 28, 28, 1), 20, (5, 5), (1, 1), (0, 0)),
    ((2, 15, 31, 2), 9, (2, 3), (3, 4), (1, 0)),
]


def call_conv2d_stem() -> None:
    for dtype, (shape, filters, kernel, stride, padding) in zip(itertools.cycle((bfloat16, float16)), STEMS):
        where = {"stride": stride, "padding": padding, "dilation": (1, 1), "groups": 1}
        x, w = ops.empty(shape, dtype), ops.empty((filters, *kernel, shape[-1]), dtype)
        y = ops.conv2d(x, w, *_parameters(filters), **where)
        ops.conv2d_backward_weight(y, x, out=ops.empty(w.shape, np.float32), **where)
        moved = ops.empty(x.size + 1, dtype)[1:].reshape(shape)
        pitched = ops.empty((*y.shape[:-1], filters + 1), dtype)[..., 1:]
        ops.conv2d(moved, w, **where)
        ops.conv2d_backward_weight(pitched, moved, out=ops.empty(w.shape, np.float32), accumulate=True, **where)


def call_channel_sum() -> None:
    for dtype in STORAGE:
        for x in _activations(dtype):
            ops.channel_sum(x, out=ops.empty(x.shape[-1], np.float32), accumulate=True)


def call_pool2d() -> None:
    windows = [((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((3, 2), (1, 3), (1, 0)), ((17, 17), (1, 1), (8, 8))]
    for dtype in STORAGE:
        arrays = list(_activations(dtype))
        # Every vector width with one window, every window with some: the two do not meet in the kernels.
        pairs = [(x, windows[0]) for x in arrays] + [(x, window) for x in arrays[::4] for window in windows[1:]]
        for x, (kernel, stride, padding) in pairs:
            window = {"kernel": kernel, "stride": stride, "padding": padding}
            y, index = ops.max_pool2d(x, dilation=(1, 1), ceil_mode=True, **window)
            assert index.dtype == (np.uint16 if kernel[0] * kernel[1] > 256 else np.uint8)
            ops.max_pool2d_backward(y, index, x.shape, dilation=(1, 1), **window)
            y = ops.avg_pool2d(x, ceil_mode=True, count_include_pad=False, **window)
            ops.avg_pool2d_backward(y, x.shape, ceil_mode=True, count_include_pad=False, **window)
        for x, (kernel, stride, padding) in itertools.product(arrays[::4], windows[:3]):
            window = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": (1, 1)}
            gamma, moments = ops.empty(x.shape[-1], np.float32), ops.empty((2, x.shape[-1]), np.float32)
            y, index, _ = ops.batch_norm_max_pool2d(x, moments, gamma, gamma, ceil_mode=True, **window)
            sums = ops.empty((2, x.shape[-1]), np.float64), ops.empty(1, np.float64)
            for given in (sums, (None, None)):
                ops.batch_norm_max_pool2d_backward(y, index, x, moments, gamma, *given, **window)
        for x, size in itertools.product(_activations(dtype), [(1, 1), (3, 2), (7, 5)]):
            assert ops.adaptive_avg_pool2d_backward(ops.adaptive_avg_pool2d(x, size), x.shape).shape == x.shape


def call_pad2d() -> None:
    for dtype in STORAGE:
        for x in _activations(dtype):
            ops.pad2d(x, (1, 2, 0, 3), 1.5)
            ops.pad2d(x, (-1, 0, 2, -2))


def call_dropout() -> None:
    key = ops.zeros(4, np.uint32)
    for dtype in STORAGE:
        for x in _activations(dtype):
            for whole in (False, True):
                ops.dropout(x, 0.5, key, 3, whole=whole)
        ops.dropout(ops.empty((6, 4099), dtype), 0.1, key, 0)


# (M, K), side of a block, samples
SPARSE = [
    ((2048, 2048), 64, 4096), ((256, 2304), 128, 784), ((1000, 2048), 256, 50), ((37, 53), 2, 9), ((20, 30), 64, 0),
    ((4096, 4096), 64, 16), ((4096, 4096), 64, 32), ((4096, 4096), 64, 64), ((256, 2304), 64, 12544),
]  # fmt: skip


def call_csb() -> None:
    _sparse_products()
    with route("generic"):
        _sparse_products()


def _sparse_products() -> None:
    for dtype, ((m, k), side, n), last in itertools.product(STORAGE, SPARSE, (False, True)):
        indptr = ops.empty(-(-m // side) * -(-k // side) + 1, np.int32)
        indices, values = ops.empty(m * k // 10, np.uint16), ops.empty(m * k // 10, dtype)
        pattern, where = (indptr, indices), ((m, k), side)
        x, dy = (ops.empty((n, f) if last else (f, n), dtype) for f in (k, m))
        y = ops.csb_matmul(*pattern, values, x, *where, features_last=last, bias=ops.empty(m, np.float32), relu=True)
        assert y.shape == dy.shape and y.dtype == dtype
        assert ops.csb_matmul(*pattern, values, dy, *where, features_last=last, transposed=True).shape == x.shape
        assert ops.csb_pick(*pattern, ops.csb_expand(*pattern, values, *where), *where).shape == values.shape
        wide = ops.empty((x.shape[0], x.shape[1] + 3), dtype)[:, 1 : 1 + x.shape[1]]
        ops.csb_matmul(*pattern, values, wide, *where, features_last=last)
        if dtype == float32:
            for split in ("tf32x3", "bf16x3"):
                ops.csb_matmul(*pattern, values, wide, *where, features_last=last, split=split)
            few = ops.empty(m * k // 50, np.uint16), ops.empty(m * k // 50, dtype)
            ops.csb_matmul(indptr, *few, dy, *where, features_last=last, transposed=True, split="tf32x3")


def call_csb_conv2d() -> None:
    cases = itertools.product(STORAGE, [(64, 64, 3, 1), (70, 40, 3, 2), (8, 300, 5, 1)], (8, 64, 256))
    for dtype, (c, k, size, stride), side in cases:
        shape = k, size * size * (-(-c // side) * side)
        indptr = ops.empty(-(-k // side) * (shape[1] // side) + 1, np.int32)
        pattern, values = (indptr, ops.empty(1000, np.uint16)), ops.empty(1000, dtype)
        geometry = {"kernel": (size, size), "stride": (stride, stride), "padding": (1, 1), "dilation": (1, 1)}
        x = ops.empty((16, 28, 28, c), dtype)
        dy = ops.csb_conv2d(*pattern, values, x, shape, side, **geometry, bias=ops.empty(k, np.float32))
        dx = ops.csb_conv2d_backward_data(*pattern, values, dy, x.shape, shape, side, **geometry)
        assert dy.shape[3] == k and dx.shape == x.shape
        out = ops.empty(1000, np.float32)
        ops.csb_conv2d_backward_weight(*pattern, dy, x, shape, side, **geometry, out=out)


def call_csb_sampled() -> None:
    for dtype, ((m, k), side, n), last in itertools.product(STORAGE, SPARSE, (False, True)):
        indptr = ops.empty(-(-m // side) * -(-k // side) + 1, np.int32)
        indices, out = ops.empty(m * k // 10, np.uint16), ops.empty(m * k // 10, np.float32)
        x, dy = (ops.empty((n, f) if last else (f, n), dtype) for f in (k, m))
        wide = ops.empty((x.shape[0], x.shape[1] + 3), dtype)[:, 1 : 1 + x.shape[1]]
        for operand, accumulate in ((x, False), (wide, True)):
            ops.csb_sampled(
                indptr, indices, dy, operand, (m, k), side, features_last=last, out=out, accumulate=accumulate
            )


def call_loss() -> None:
    scale = ops.empty(1, np.float32)
    shapes = [(512, 1000), (6, 3), (0, 10), (2, 9, 9, 21), (4, 32000), (1, 1), (64, 64, 64, 2)]
    kinds = [(dtype, np.int32) for dtype in STORAGE] + [(bfloat16, np.int64), (bfloat16, np.uint8)]
    for (dtype, label), shape in itertools.product(kinds, shapes):
        logits, labels = ops.empty(shape, dtype), ops.empty(shape[:-1], label)
        totals, lse = ops.softmax_cross_entropy(logits, labels, ignore_index=255)
        ops.count_labels(labels, shape[-1], ignore_index=255)
        for factor in (None, scale):
            ops.softmax_cross_entropy_backward(logits, labels, lse, totals, factor, ignore_index=255)


def call_smoothed_loss() -> None:
    scale, kinds = ops.empty(1, np.float32), [(dtype, np.int32) for dtype in STORAGE]
    kinds += [(bfloat16, np.int64), (bfloat16, np.uint8)]
    shapes = [(512, 1000), (6, 3), (2, 9, 9, 21), (5, 62), (5, 63), (4, 32000), (0, 10)]
    for (dtype, label), shape in itertools.product(kinds, shapes):
        logits, labels = ops.empty(shape, dtype), ops.empty(shape[:-1], label)
        options = {"smoothing": 0.1, "ignore_index": 255}
        for weights in (None, ops.empty(shape[-1], np.float32)):
            totals, lse = ops.smoothed_cross_entropy(logits, labels, weights, **options)
            ops.smoothed_cross_entropy_backward(logits, labels, lse, totals, weights, scale, **options)
        sums = ops.dice_sums(logits, labels, ignore_index=255)
        ops.dice_backward(logits, labels, sums, scale, smooth=1.0, ignore_index=255)
        if shape[-1] <= 1000:
            ops.confusion_counts(logits, labels, ignore_index=255)


def call_soft_loss() -> None:
    scale = ops.empty(1, np.float32)
    for dtype, shape in itertools.product(STORAGE, [(512, 1000), (6, 3), (9, 64), (5, 256), (5, 512), (4, 32000)]):
        logits, targets, weights = (
            ops.empty(shape, dtype),
            ops.empty(shape, np.float32),
            ops.empty(shape[-1], np.float32),
        )
        totals, lse = ops.soft_cross_entropy(logits, targets, weights, smoothing=0.1)
        ops.soft_cross_entropy_backward(logits, targets, lse, totals, weights, scale, smoothing=0.1)


def call_pointwise_loss() -> None:
    for dtype, loss in itertools.product(STORAGE, ("mse", "bce_with_logits", "focal")):
        for x in (ops.empty((4, 100, 100, 8), dtype), ops.empty(7, dtype), ops.empty((0, 3), dtype)):
            ops.pointwise_loss_backward(x, x, ops.pointwise_loss(x, x, loss), None, loss)


def call_optim() -> None:
    control, segments = ops.zeros(8, np.float32), ops.empty((3, 4), np.float32)
    for n in (64, 64 * 1001, 25_600_000):
        master, grad, momentum = _parameters(n, n, n)
        segment_of = ops.empty(n // 64, np.int32)
        for working, buffer, nesterov in itertools.product(
            (None, *(ops.empty(n, dtype) for dtype in STORAGE)), (None, momentum), (False, True)
        ):
            if buffer is not None or not nesterov:
                ops.sgd_update(master, grad, buffer, working, segment_of, segments, control, nesterov=nesterov)
            if buffer is not None and not nesterov:
                ops.sgd_update(master, None, buffer, working, segment_of, segments, control, nesterov=False)
        ops.sgd_begin(master, momentum, segment_of, segments, control)
        ops.find_nonfinite(grad, control)
    ops.update_loss_scale(control)


def call_adaptive() -> None:
    control, record, segments = ops.zeros(8, np.float32), ops.zeros(8, np.float32), ops.empty((3, 4), np.float32)
    bounds = ops.empty(4, np.int32)
    for n in (64, 64 * 1001, 25_600_000):
        master, grad, first, second = _parameters(n, n, n, n)
        tables = ops.empty(n // 64, np.int32), segments
        ops.adam_advance(control, record)
        for working in (None, *(ops.empty(n, dtype) for dtype in STORAGE)):
            ops.adamw_update(master, grad, first, second, working, *tables, control, record)
            norms = ops.segment_norms(master, grad, bounds, control)
            ops.lars_update(master, grad, first, working, *tables, norms, control, record)
            norms = ops.lamb_moments(master, grad, first, second, *tables, bounds, control, record)
            ops.lamb_update(master, first, second, working, *tables, norms, control, record)
        ops.clip_values(grad, 1.0, control)
        ops.clip_norm(grad, ops.gradient_square(grad), 1.0, control)
        ops.blend(master, grad, 0.9)


def call_spin() -> None:
    spin(1e-3)


def call_all_reduce() -> None:
    variants = [*itertools.product((3, 4, 8), (float32, bfloat16)), *((2, dtype) for dtype in all_reduce.SUMMED)]
    for (ranks, dtype), size in itertools.product(variants, (7, 1024)):
        channel = all_reduce.Channel(ranks - 1, ranks, all_reduce.addresses([0] * ranks), 0, 0, 1)
        array = ops.empty(size, dtype)
        all_reduce.flagged(array, channel)
        all_reduce.gather(array, ops.empty((ranks, size), dtype), channel)
        all_reduce.one_shot(array, channel)
        all_reduce.one_shot(ops.empty(size + 1, dtype)[1:], channel)
        all_reduce.two_shot([0] * ranks, array.nbytes, dtype, channel)


def call_ceiling() -> None:
    ceiling.fused_multiply_adds(ceiling.fma_output(), steps=64)
    size = ceiling.l2_copy_bytes(1)
    ceiling.l2_copy(ops.empty(size, np.uint8), ops.empty(size, np.uint8), repeats=2)


CALLS: dict[str, Callable[[], None]] = {
    name.removeprefix("call_"): function for name, function in globals().items() if name.startswith("call_")
}


def _nvrtc_reason() -> str | None:
    try:
        nvrtc.version()
    except ImportError as error:
        return str(error)
    return None


_SERIALISED = re.compile(r"\(C75\d\d\)[^\n]*")  # ptxas waits for each product of a warpgroup, or ignores setmaxnreg


def _problems(launch, kernel, device) -> Iterator[str]:
    """What would keep this launch from running on this device, or from running as it is meant to."""
    threads = int(np.prod(launch.block))
    if kernel.spill_bytes and (launch.stem, launch.name) not in ACCEPTED_SPILLS:
        yield f"spills {kernel.spill_bytes} bytes with {kernel.registers} registers"
    if kernel.shared_bytes + launch.shared > device.shared_per_block:
        yield f"wants {kernel.shared_bytes} + {launch.shared} bytes of shared memory of {device.shared_per_block}"
    # Registers are given to whole warps, in units of eight per thread.
    if -(-threads // 32) * 32 * (-(-kernel.registers // 8) * 8) > REGISTERS:
        yield f"wants {kernel.registers} registers for each of {threads} threads"


@pytest.mark.parametrize("stem", CALLS)
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.skipif(_nvrtc_reason() is not None, reason=f"needs NVRTC: {_nvrtc_reason()}")
def test_every_variant_compiles_and_fits(stem, name):
    device = BUILT_IN[name]
    with dry_run(device) as log:
        CALLS[stem]()
    variants = log.variants
    compiled = dict(zip(variants, nvrtc.compile_all(variants, nvrtc.target(device.arch)), strict=True))
    problems = {note for report in compiled.values() for note in _SERIALISED.findall(report.log)}
    for launch in log.launches:
        kernels = {kernel.name: kernel for kernel in compiled[launch.stem, launch.defines].kernels}
        for problem in _problems(launch, kernels[launch.name], device):
            problems.add(f"{launch.stem}.cu {launch.name} {dict(launch.defines)} {launch.block}: {problem}")
    assert not problems, "\n".join(sorted(problems))


@pytest.mark.parametrize("tile", (*conv2d_hopper_tiles.TILES, conv2d_hopper_tiles.IN_PLACE, *HALO_TILES), ids=str)
@pytest.mark.skipif(_nvrtc_reason() is not None, reason=f"needs NVRTC: {_nvrtc_reason()}")
def test_every_tile_of_hopper_compiles_and_fits(tile):
    """Whichever tile sizes or a tuner choose: with and without strides, both directions, both types."""
    device, variants = BUILT_IN["H200"], set()
    for code, backward, (kernel, stride) in itertools.product((1, 2), (False, True), ((1, 1), (3, 1), (3, 2))):
        shape, filters, pair = (4, 16, 16, 64), (64, kernel, kernel, 64), (stride, stride)
        conv = convolution("test", shape, filters, pair, (kernel // 2,) * 2, (1, 1), 1)
        launches = []
        if tile in conv2d_hopper_tiles.candidates(conv, backward, device):
            launches += conv2d_hopper.plan(conv, code, backward, (64, 64), True, device, (tile, 1))
        if not backward and tile in conv2d_hopper_tiles.candidates(conv, False, device, normalized=True):
            for how in (1, 2):
                launches += conv2d_hopper.plan(conv, code, False, (64, 0), False, device, (tile, 1), normalized=how)
        for launch in launches:
            variants.add((launch.stem, tuple(launch.defines.items())))
            assert launch.shared <= device.shared_per_block and launch.block == tile.threads
    assert len(variants) >= 4
    for report in nvrtc.compile_all(sorted(variants), nvrtc.target(device.arch)):
        (kernel,) = report.kernels
        assert not kernel.spill_bytes and not _SERIALISED.findall(report.log), report.log
        assert kernel.registers * tile.threads * tile.resident <= REGISTERS


@pytest.mark.parametrize("stem", CALLS)
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_launch_keeps_to_the_limits_of_the_device(stem, name):
    """Grid, block and dynamic shared memory; the dry run itself asserts them."""
    with dry_run(BUILT_IN[name]) as log:
        CALLS[stem]()
    assert log.launches and all(0 not in launch.grid for launch in log.launches)


SERVICES = {"Array", "name", "require_device", "from_dlpack", "uploader"}  # of the table, but without a kernel


def test_every_operation_of_the_table_is_called():
    """A new operation joins this test, or this test fails."""
    text = "".join(inspect.getsource(function) for function in (*CALLS.values(), _convolve, _sparse_products))
    for name in ops.__all__:
        if name not in SERVICES:
            assert f"ops.{name}(" in text, f"no dry run calls {name}"
