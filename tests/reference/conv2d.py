"""Convolution by its definition, in float64: one loop per index that names a place, slow and obvious."""

from __future__ import annotations

import numpy as np

__all__ = ["channel_sum", "conv2d", "conv2d_backward_data", "conv2d_backward_weight"]


def _products(x_shape, w_shape, stride, padding, dilation, groups):
    """All (output pixel, input pixel, filter position, input channels, output channels) that meet."""
    _, H, W, C = x_shape
    K, R, S, channels = w_shape
    assert channels * groups == C
    P, Q = output_size(x_shape, w_shape, stride, padding, dilation)
    for p in range(P):
        for q in range(Q):
            for r in range(R):
                for s in range(S):
                    h = p * stride[0] - padding[0] + r * dilation[0]
                    w = q * stride[1] - padding[1] + s * dilation[1]
                    if not (0 <= h < H and 0 <= w < W):
                        continue
                    for g in range(groups):
                        c = slice(g * channels, (g + 1) * channels)
                        k = slice(g * (K // groups), (g + 1) * (K // groups))
                        yield (p, q), (h, w), (r, s), c, k


def output_size(x_shape, w_shape, stride, padding, dilation):
    return tuple(
        (x_shape[1 + i] + 2 * padding[i] - dilation[i] * (w_shape[1 + i] - 1) - 1) // stride[i] + 1 for i in range(2)
    )


def conv2d(x, w, bias=None, *, stride, padding, dilation, groups):
    """x (N, H, W, C), w (K, R, S, C/groups), bias (K,) -> y (N, P, Q, K)"""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y = np.zeros((x.shape[0], *output_size(x.shape, w.shape, stride, padding, dilation), w.shape[0]))
    for (p, q), (h, i), (r, s), c, k in _products(x.shape, w.shape, stride, padding, dilation, groups):
        y[:, p, q, k] += x[:, h, i, c] @ w[k, r, s].T
    return y if bias is None else y + np.asarray(bias, np.float64)


def conv2d_backward_data(dy, w, x_shape, *, stride, padding, dilation, groups, bias=None, add=None):
    """dy (N, P, Q, K), w (K, R, S, C/groups), bias (C,), add (N, H, W, C) -> dx (N, H, W, C)"""
    dy, w = np.asarray(dy, np.float64), np.asarray(w, np.float64)
    dx = np.zeros(x_shape)
    for (p, q), (h, i), (r, s), c, k in _products(x_shape, w.shape, stride, padding, dilation, groups):
        dx[:, h, i, c] += dy[:, p, q, k] @ w[k, r, s]
    if bias is not None:
        dx = dx + np.asarray(bias, np.float64)
    return dx if add is None else dx + np.asarray(add, np.float64)


def conv2d_backward_weight(dy, x, w_shape, *, stride, padding, dilation, groups):
    """dy (N, P, Q, K), x (N, H, W, C) -> dw (K, R, S, C/groups)"""
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    dw = np.zeros(w_shape)
    for (p, q), (h, i), (r, s), c, k in _products(x.shape, w_shape, stride, padding, dilation, groups):
        dw[k, r, s] += dy[:, p, q, k].T @ x[:, h, i, c]
    return dw


def channel_sum(dy):
    """dy (..., C) -> (C,)"""
    dy = np.asarray(dy, np.float64)
    return dy.reshape(-1, dy.shape[-1]).sum(axis=0)
