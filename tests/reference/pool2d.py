"""Pooling in plain float64, window by window."""

from __future__ import annotations

import itertools
import math

import numpy as np


def output_size(size, kernel, stride, padding, dilation, ceil_mode):
    """How many windows start at -padding, -padding + stride, ... and fit into the padded input; with ``ceil_mode`` one
    more that overhangs at the end, if it starts within the input or the padding before it."""
    reach = dilation * (kernel - 1) + 1
    count = (size + 2 * padding - reach) // stride + 1
    overhangs = (size + 2 * padding - reach) % stride != 0
    if ceil_mode and overhangs and count * stride - padding < size:
        count += 1
    return count


def max_windows(x_shape, kernel, stride, padding, dilation, ceil_mode):
    """((n, p, q), [(position, h, w) of the window within the input, in row order]) of all windows."""
    n, height, width, _ = x_shape
    out_h = output_size(height, kernel[0], stride[0], padding[0], dilation[0], ceil_mode)
    out_w = output_size(width, kernel[1], stride[1], padding[1], dilation[1], ceil_mode)
    for i, p, q in itertools.product(range(n), range(out_h), range(out_w)):
        taps = []
        for r, s in itertools.product(range(kernel[0]), range(kernel[1])):
            h, w = p * stride[0] - padding[0] + r * dilation[0], q * stride[1] - padding[1] + s * dilation[1]
            if 0 <= h < height and 0 <= w < width:
                taps.append((r * kernel[1] + s, h, w))
        yield (i, p, q), taps


def max_pool2d(x, *, kernel, stride, padding, dilation, ceil_mode):
    """y and index: the position of the first maximum, or of the last NaN."""
    x = np.asarray(x, np.float64)
    out = [output_size(x.shape[1 + a], kernel[a], stride[a], padding[a], dilation[a], ceil_mode) for a in (0, 1)]
    y = np.full((x.shape[0], *out, x.shape[3]), -np.inf)
    index = np.zeros(y.shape, np.int64)
    for (i, p, q), taps in max_windows(x.shape, kernel, stride, padding, dilation, ceil_mode):
        for c in range(x.shape[3]):
            for number, (position, h, w) in enumerate(taps):
                v = x[i, h, w, c]
                if number == 0 or v > y[i, p, q, c] or math.isnan(v):
                    y[i, p, q, c], index[i, p, q, c] = v, position
    return y, index


def max_pool2d_backward(dy, index, x_shape, *, kernel, stride, padding, dilation, ceil_mode=False):
    dx = np.zeros(x_shape)
    for (i, p, q), taps in max_windows(x_shape, kernel, stride, padding, dilation, ceil_mode):
        for position, h, w in taps:
            for c in range(x_shape[3]):
                if index[i, p, q, c] == position:
                    dx[i, h, w, c] += float(dy[i, p, q, c])
    return dx


def avg_windows(x_shape, kernel, stride, padding, ceil_mode, count_include_pad):
    """((p, q), (rows), (columns), divisor) of all windows of average pooling."""
    _, height, width, _ = x_shape
    out_h = output_size(height, kernel[0], stride[0], padding[0], 1, ceil_mode)
    out_w = output_size(width, kernel[1], stride[1], padding[1], 1, ceil_mode)
    for p, q in itertools.product(range(out_h), range(out_w)):
        rows = range(p * stride[0] - padding[0], p * stride[0] - padding[0] + kernel[0])
        columns = range(q * stride[1] - padding[1], q * stride[1] - padding[1] + kernel[1])
        padded = sum(h < height + padding[0] for h in rows) * sum(w < width + padding[1] for w in columns)
        rows = [h for h in rows if 0 <= h < height]
        columns = [w for w in columns if 0 <= w < width]
        yield (p, q), rows, columns, padded if count_include_pad else len(rows) * len(columns)


def adaptive_windows(x_shape, output_size):
    _, height, width, _ = x_shape
    for p, q in itertools.product(range(output_size[0]), range(output_size[1])):
        rows = range(math.floor(p * height / output_size[0]), math.ceil((p + 1) * height / output_size[0]))
        columns = range(math.floor(q * width / output_size[1]), math.ceil((q + 1) * width / output_size[1]))
        yield (p, q), rows, columns, len(rows) * len(columns)


def mean_pool2d(x, windows):
    """Average pooling over windows of either kind."""
    x, windows = np.asarray(x, np.float64), list(windows)
    y = np.zeros((x.shape[0], windows[-1][0][0] + 1, windows[-1][0][1] + 1, x.shape[3]))
    for (p, q), rows, columns, divisor in windows:
        for h, w in itertools.product(rows, columns):
            y[:, p, q] += x[:, h, w] / divisor
    return y


def mean_pool2d_backward(dy, x_shape, windows):
    dx = np.zeros(x_shape)
    for (p, q), rows, columns, divisor in windows:
        for h, w in itertools.product(rows, columns):
            dx[:, h, w] += np.asarray(dy[:, p, q], np.float64) / divisor
    return dx
