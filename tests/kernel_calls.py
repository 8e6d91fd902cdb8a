"""Calls of operations that reach every variant of their kernels: dtypes, widths of vectors, layouts, every option.

For dry runs on shapes. Convolutions and sparse products are in test_cuda_compile.py, which compiles what these launch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np

from minidl import cuda as ops
from minidl.cuda import all_reduce, ceiling
from minidl.cuda.norm.statistics import Parts
from minidl.cuda.spin import spin
from minidl.precision import bfloat16, float16, float32

STORAGE = (float32, bfloat16, float16)
PROCESSES = 1 if "PYTEST_XDIST_WORKER" in os.environ else None  # that compile: as many as cores, in all
ACTIVATIONS = ("relu6", "leaky_relu", "sigmoid", "tanh", "silu", "gelu", "gelu_tanh", "hardswish")


def parameters(*sizes: int) -> Iterator[np.ndarray]:
    return (ops.empty(size, np.float32) for size in sizes)


def activations(dtype) -> Iterator[np.ndarray]:
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
        for x in activations(source):
            ops.cast(x, target)
    for dtype in (*STORAGE, np.dtype(np.uint8), np.dtype(np.int64), np.dtype(np.float64)):
        for x in activations(dtype):
            ops.contiguous(x)
            ops.copy_into(ops.empty(x.shape, dtype), x)
            ops.to_host(x)
    ops.from_host([1, 2, 3], np.float32)
    ops.zeros((), np.float32)
    ops.assign(ops.empty(3, np.float32), [1, 2, 3])
    ops.synchronize()


def call_image() -> None:
    (scale, shift) = parameters(3, 3)
    for dtype in STORAGE:
        for source in (np.uint8, np.float32):
            for batch in (2, 3):  # in vectors, and not
                assert ops.normalise(ops.empty((batch, 4, 5, 3), source), scale, shift, dtype).dtype == dtype


def call_batch_norm() -> None:
    for dtype in STORAGE:
        for x in activations(dtype):
            channels = x.shape[-1]
            gamma, beta, mean, var, dgamma, dbeta = parameters(*[channels] * 6)
            stats = ops.batch_norm_stats(x)
            assert stats.shape == (1 + 2 * channels,)
            assert ops.batch_norm_merge(stats) is stats
            assert ops.batch_norm_concat([stats, stats]).shape == (1 + 4 * channels,)
            moments, count = ops.batch_norm_finalize(stats, 1e-5, running_mean=mean, running_var=var, momentum=0.1)
            ops.batch_norm_finalize(ops.empty((4, 1 + 2 * channels), np.float64), 1e-5)
            ops.batch_norm_finalize(ops.batch_norm_stats(x, finish=False), 1e-5, running_mean=mean)
            ops.batch_norm_eval_moments(mean, var, 1e-5)
            sums = ops.batch_norm_backward_stats(x, x, moments, dgamma=dgamma, dbeta=dbeta, accumulate=True)
            ops.batch_norm_backward_stats(ops.empty(x.shape, dtype), x, moments)
            for add in (None, x):
                assert ops.batch_norm_apply(x, moments, gamma, beta, add=add, relu=True).shape == x.shape
                ops.batch_norm_apply(x, moments, add=add)
                ops.batch_norm_backward_apply(x, x, moments, gamma, sums, count, add=add)
                ops.batch_norm_backward_apply(x, x, moments, None, None, None, add=add)
                for known in ((sums, count), (None, None)):
                    ops.batch_norm_activate_backward_apply(x, x, moments, gamma, beta, *known, add=add)
            ops.batch_norm_apply(x, moments, add=x, add_moments=moments, add_gamma=gamma, relu=True)
            assert (
                ops.batch_norm_backward_apply_stats(x, x, moments, gamma, sums, count, x, moments)[0].shape == x.shape
            )
            ops.batch_norm_activate_backward_stats(x, x, moments, gamma, beta, dgamma=dgamma)
            ops.batch_norm_join_backward_stats(x, x, x, moments, dbeta=dbeta)
            for other in ({}, {"add_moments": moments, "add_gamma": gamma, "add_beta": beta}):
                y, signs = ops.batch_norm_join(x, moments, gamma, beta, x, **other)
                assert y.shape == x.shape
            if signs is not None:
                ops.batch_norm_join_backward_stats(x, signs, x, moments, dgamma=dgamma)
                for add in (None, x):
                    assert ops.relu_backward(x, signs, add=add).shape == x.shape
        for count in (5, 600, 5000):
            sums, squares = ops.empty((count, 2, 24), float32), ops.empty((count, 24), float32)
            means = ops.empty((count, 24), np.float64)
            for parts in (Parts(sums, count), Parts(means, 10 * count, squares, 10)):
                assert ops.batch_norm_finalize(parts, 1e-5)[0].shape == (2, 24)
                assert ops.batch_norm_merge(parts).shape == (49,)
                both = ops.batch_norm_concat([ops.empty(17, np.float64), parts])
                assert ops.batch_norm_finalize(both, 1e-5)[0].shape == (2, 32)
            assert ops.batch_norm_backward_sums(sums, ops.empty((2, 24), float32)).shape == (2, 24)
        wide, moments = ops.empty((600, 2, 512), float32), ops.empty((2, 512), float32)
        ops.batch_norm_finalize(Parts(wide, 600), 1e-5)
        ops.batch_norm_merge(Parts(wide, 600))
        ops.batch_norm_backward_sums(wide, moments)
        # Every function with the widest vectors; the other widths with a ReLU above: they do not meet in the kernels.
        x = next(activations(dtype))
        moments, gamma, beta = ops.empty((2, x.shape[-1]), np.float32), *parameters(*[x.shape[-1]] * 2)
        sums, count = ops.empty((2, x.shape[-1]), np.float64), ops.empty(1, np.float64)
        for function in ACTIVATIONS:
            assert ops.batch_norm_activate(x, moments, gamma, beta, function, 0.1).shape == x.shape
            ops.batch_norm_activate_backward_stats(x, x, moments, gamma, beta, function, 0.1)
            ops.batch_norm_activate_backward_apply(x, x, moments, gamma, beta, sums, count, function, 0.1)
            ops.batch_norm_activate_backward_apply(x, x, moments, gamma, beta, None, None, function, 0.1, add=x)


def call_gated_norm() -> None:
    for dtype in STORAGE:
        arrays = list(activations(dtype))
        # Every function with some vectors, every width of vectors with one.
        few = ops.empty((2, 33, 41, 24), dtype)  # whose pixels are cut into chunks
        for x, function in [*((x, "silu") for x in (*arrays, few)), *((arrays[0], f) for f in ACTIVATIONS)]:
            n, channels = x.shape[0], x.shape[-1]
            gamma, beta, dgamma, dbeta = parameters(*[channels] * 4)
            moments, count = ops.empty((2, channels), np.float32), ops.empty(1, np.float64)
            gate = ops.batch_norm_means(x, moments, gamma, beta, function, 0.1)
            assert gate.shape == (n, 1, 1, channels)
            assert ops.batch_norm_gate(x, moments, gamma, beta, gate, function, 0.1).shape == x.shape
            dgate, parts = ops.batch_norm_gate_gradient(x, x, moments, gamma, beta, function, 0.1)
            options = {"dgamma": dgamma, "dbeta": dbeta, "accumulate": True}
            sums = ops.batch_norm_gate_backward_stats(parts, gate, dgate, 35, moments, **options)
            for known in ((sums, count), (None, None)):
                facts = gate, dgate, x, moments, gamma, beta
                assert ops.batch_norm_gate_backward_apply(x, *facts, *known, function, 0.1).shape == x.shape


def call_activation() -> None:
    for dtype in STORAGE:
        arrays = list(activations(dtype))
        for x in arrays:
            y = ops.relu(x)
            ops.relu_backward(x, y)
            ops.relu_backward(x, y, add=x)
        # Every vector width with one function, every function with some: the two do not meet in the kernels.
        for x, function in itertools.product(arrays[::6], ACTIVATIONS):
            ops.activate_backward(x, ops.activate(x, function, 0.1), function, 0.1, add=x)


def call_join() -> None:
    for dtype in STORAGE:
        for x in activations(dtype):
            ops.add(x, x)
            assert ops.concat([x, x[..., :1], x]).shape[-1] == 2 * x.shape[-1] + 1
            gate = ops.gate_gradient(x, x)
            assert ops.mul(ops.mul(x, x), gate).shape == x.shape == ops.gate_backward(x, gate, gate).shape
            assert gate.shape == (x.shape[0], 1, 1, x.shape[-1])


def call_group_norm() -> None:
    for dtype in STORAGE:
        for x in activations(dtype):
            gamma, beta, dgamma, dbeta = parameters(*[x.shape[-1]] * 4)
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
        for x in (*activations(dtype), ops.empty((3, 10000), dtype)):
            gamma, beta, dgamma, dbeta = parameters(*[x.shape[-1]] * 4)
            y, moments = ops.layer_norm(x, gamma, beta, eps=1e-5)
            ops.layer_norm_backward_weight(x, x, moments, dgamma=dgamma, dbeta=dbeta)
            for add in (None, x):
                assert ops.layer_norm_backward_data(y, x, moments, gamma, add=add).shape == x.shape


def call_softmax() -> None:
    for dtype in STORAGE:
        for x in (*activations(dtype), ops.empty((3, 10000), dtype)):
            assert ops.softmax_backward(x, ops.softmax(x)).shape == x.shape


def call_upsample2d() -> None:
    for dtype, mode in itertools.product(STORAGE, ("nearest", "bilinear")):
        for x in activations(dtype):
            for size in ((2 * x.shape[1], x.shape[2] + 1), (6 * x.shape[1], 6 * x.shape[2])):
                y = ops.upsample2d(x, size, mode)
                assert ops.upsample2d_backward(y, x.shape, mode).shape == x.shape


def call_channel_sum() -> None:
    for dtype in STORAGE:
        for x in activations(dtype):
            ops.channel_sum(x, out=ops.empty(x.shape[-1], np.float32), accumulate=True)


def call_pool2d() -> None:
    windows = [((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((3, 2), (1, 3), (1, 0)), ((17, 17), (1, 1), (8, 8))]
    for dtype in STORAGE:
        arrays = list(activations(dtype))
        # Every vector width with one window, every window with some: the two do not meet in the kernels.
        pairs = [(x, windows[0]) for x in arrays] + [(x, window) for x in arrays[::4] for window in windows[1:]]
        for x, (kernel, stride, padding) in pairs:
            window = {"kernel": kernel, "stride": stride, "padding": padding}
            y, index = ops.max_pool2d(x, dilation=(1, 1), ceil_mode=True, **window)
            assert index.dtype == (np.uint16 if kernel[0] * kernel[1] > 256 else np.uint8)
            for add in (None, x):
                ops.max_pool2d_backward(y, index, x.shape, dilation=(1, 1), **window, add=add)
            y = ops.avg_pool2d(x, ceil_mode=True, count_include_pad=False, **window)
            ops.avg_pool2d_backward(y, x.shape, ceil_mode=True, count_include_pad=False, **window)
        for x, (kernel, stride, padding) in itertools.product(arrays[::4], windows[:3]):
            window = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": (1, 1)}
            gamma, moments = ops.empty(x.shape[-1], np.float32), ops.empty((2, x.shape[-1]), np.float32)
            y, index, _ = ops.batch_norm_max_pool2d(x, moments, gamma, gamma, ceil_mode=True, **window)
            sums = ops.empty((2, x.shape[-1]), np.float64), ops.empty(1, np.float64)
            for given in (sums, (None, None)):
                ops.batch_norm_max_pool2d_backward(y, index, x, moments, gamma, *given, **window)
        # Every vector width with one size of tiles, ragged and not, the dense arrays with others.
        even = [ops.empty((2, 6, 8, x.shape[-1]), dtype) for x in arrays[:5]]
        for x, kernel in [(x, (2, 2)) for x in arrays + even] + [(arrays[0], kernel) for kernel in ((1, 3), (4, 1))]:
            gamma, moments = ops.empty(x.shape[-1], np.float32), ops.empty((2, x.shape[-1]), np.float32)
            norm = x, moments, gamma, gamma
            y, pooled = ops.batch_norm_max_tiles(*norm, kernel=kernel, ceil_mode=True)
            for add in (None, y):
                sums = ops.batch_norm_max_tiles_backward_stats(pooled, add, *norm, kernel=kernel)
                for given in ((sums, ops.empty(1, np.float64)), (None, None)):
                    ops.batch_norm_max_tiles_backward_apply(pooled, add, *norm, *given, kernel=kernel)
        for x, size in itertools.product(activations(dtype), [(1, 1), (3, 2), (7, 5)]):
            assert ops.adaptive_avg_pool2d_backward(ops.adaptive_avg_pool2d(x, size), x.shape).shape == x.shape
        ops.adaptive_avg_pool2d(ops.empty((1, 224, 224, 8), dtype), (1, 1))  # blocks share the pixels of a cell


def call_pad2d() -> None:
    for dtype in STORAGE:
        for x in activations(dtype):
            ops.pad2d(x, (1, 2, 0, 3), 1.5)
            ops.pad2d(x, (-1, 0, 2, -2))


def call_dropout() -> None:
    key = ops.zeros(4, np.uint32)
    for dtype in STORAGE:
        for x in activations(dtype):
            for whole in (False, True):
                ops.dropout(x, 0.5, key, 3, whole=whole)
        ops.dropout(ops.empty((6, 4099), dtype), 0.1, key, 0)


def call_loss() -> None:
    scale = ops.empty(1, np.float32)
    shapes = [(512, 1000), (6, 3), (0, 10), (2, 9, 9, 21), (4, 32000), (1, 1), (64, 64, 64, 2)]
    kinds = [(dtype, np.int32) for dtype in STORAGE] + [(bfloat16, np.int64), (bfloat16, np.uint8)]
    for (dtype, label), shape in itertools.product(kinds, shapes):
        logits, labels = ops.empty(shape, dtype), ops.empty(shape[:-1], label)
        totals, lse = ops.softmax_cross_entropy(logits, labels, ignore_index=255)
        for weights in (None, ops.empty(shape[-1], np.float32)):
            ops.count_labels(labels, shape[-1], weights, ignore_index=255)
        for factor in (None, scale):
            ops.softmax_cross_entropy_backward(logits, labels, lse, totals, factor, ignore_index=255)


def call_smoothed_loss() -> None:
    scale, kinds = ops.empty(1, np.float32), [(dtype, np.int32) for dtype in STORAGE]
    kinds += [(bfloat16, np.int64), (bfloat16, np.uint8)]
    shapes = [(512, 1000), (6, 3), (2, 9, 9, 21), (5, 62), (5, 63), (4, 32000), (0, 10)]
    for (dtype, label), shape in itertools.product(kinds, shapes):
        if label == np.uint8 and shape[-1] > 21:  # no more than int32 asks of shared memory and registers
            continue
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
            for b in (0.0, 2.0, 2.5) if loss == "focal" else (0.0,):
                ops.pointwise_loss_backward(x, x, ops.pointwise_loss(x, x, loss, 0.25, b), None, loss, 0.25, b)


def call_optim() -> None:
    control, segments = ops.zeros(8, np.float32), ops.empty((3, 4), np.float32)
    for n in (64, 64 * 1001, 25_600_000):
        master, grad, momentum = parameters(n, n, n)
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
        master, grad, first, second = parameters(n, n, n, n)
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
