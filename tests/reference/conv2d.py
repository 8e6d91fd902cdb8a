"""Convolution by its definition, in float64: a loop over the filter's places, all pixels that meet one at once."""

from __future__ import annotations

import math

import numpy as np


def output_size(x_shape, w_shape, stride, padding, dilation):
    """Height and width of the output."""
    return tuple(
        (x_shape[1 + i] + 2 * padding[i] - dilation[i] * (w_shape[1 + i] - 1) - 1) // stride[i] + 1 for i in range(2)
    )


def _meetings(x_shape, w_shape, stride, padding, dilation, groups):
    """For each place of the filter: the place, output pixels and the input pixels they read there, as indices of
    (N, P, Q, K) and (N, H, W, C).
    """
    assert w_shape[3] * groups == x_shape[3]
    out = output_size(x_shape, w_shape, stride, padding, dilation)

    def along(axis, tap):
        places = np.arange(out[axis])
        sources = places * stride[axis] - padding[axis] + tap * dilation[axis]
        inside = (0 <= sources) & (sources < x_shape[1 + axis])
        return places[inside], sources[inside]

    for r in range(w_shape[1]):
        for s in range(w_shape[2]):
            (p, h), (q, w) = along(0, r), along(1, s)
            yield (r, s), (slice(None), p[:, None], q), (slice(None), h[:, None], w)


def _grouped(pixels, groups):
    """(N, P, Q, C) -> (groups, N * P * Q, C / groups)"""
    *places, channels = pixels.shape
    return np.moveaxis(pixels.reshape(math.prod(places), groups, channels // groups), 1, 0)


def _joined(products, shape):
    """(groups, N * P * Q, C / groups) -> (N, P, Q, C) of a shape"""
    return np.moveaxis(products, 0, 1).reshape(shape)


def _filters(w, groups):
    """(K, R, S, C / groups) -> (groups, K / groups, R, S, C / groups)"""
    return w.reshape(groups, w.shape[0] // groups, *w.shape[1:])


def conv2d(x, w, bias=None, *, stride, padding, dilation, groups):
    """x (N, H, W, C), w (K, R, S, C/groups), bias (K,) -> y (N, P, Q, K)"""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y = np.zeros((x.shape[0], *output_size(x.shape, w.shape, stride, padding, dilation), w.shape[0]))
    filters = _filters(w, groups)
    for (r, s), out, source in _meetings(x.shape, w.shape, stride, padding, dilation, groups):
        products = _grouped(x[source], groups) @ filters[:, :, r, s].swapaxes(1, 2)
        y[out] += _joined(products, y[out].shape)
    return y if bias is None else y + np.asarray(bias, np.float64)


def conv2d_backward_data(dy, w, x_shape, *, stride, padding, dilation, groups, bias=None, add=None):
    """dy (N, P, Q, K), w (K, R, S, C/groups), bias (C,), add (N, H, W, C) -> dx (N, H, W, C)"""
    dy, w = np.asarray(dy, np.float64), np.asarray(w, np.float64)
    dx = np.zeros(x_shape)
    filters = _filters(w, groups)
    for (r, s), out, source in _meetings(x_shape, w.shape, stride, padding, dilation, groups):
        products = _grouped(dy[out], groups) @ filters[:, :, r, s]
        dx[source] += _joined(products, dx[source].shape)
    if bias is not None:
        dx = dx + np.asarray(bias, np.float64)
    return dx if add is None else dx + np.asarray(add, np.float64)


def conv2d_backward_weight(dy, x, w_shape, *, stride, padding, dilation, groups):
    """dy (N, P, Q, K), x (N, H, W, C) -> dw (K, R, S, C/groups)"""
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    dw = np.zeros(w_shape)
    filters = _filters(dw, groups)
    for (r, s), out, source in _meetings(x.shape, w_shape, stride, padding, dilation, groups):
        filters[:, :, r, s] = _grouped(dy[out], groups).swapaxes(1, 2) @ _grouped(x[source], groups)
    return dw


def channel_sum(dy):
    """dy (..., C) -> (C,)"""
    dy = np.asarray(dy, np.float64)
    return dy.reshape(-1, dy.shape[-1]).sum(axis=0)
