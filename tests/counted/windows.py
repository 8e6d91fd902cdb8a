"""Layers that read windows, element by element with counting numbers: convolutions, pools, padding, upsampling.

Each function gives what the layer gives, and what it counted meanwhile: (output, input gradient, parameter gradients,
counters of forward, backward_data and backward_weight).
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from tests.counting import Counter, numbers
from tests.reference.upsample2d import matrix


def taps(layer, image, out):
    """((n, p, q), (r, s), (n, h, w)) of every tap of every window over ``image``, also those outside."""
    (R, S), (u, v), (top, left), (dh, dw) = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    for n, p, q, r, s in product(range(out[0]), range(out[1]), range(out[2]), range(R), range(S)):
        yield (n, p, q), (r, s), (n, p * u - top + r * dh, q * v - left + s * dw)


def inside(image, at):
    return 0 <= at[1] < image[1] and 0 <= at[2] < image[2]


def window_channels(groups, out_channels, in_channels):
    """(output channel, input channel, its number within the group)."""
    for k, c in product(range(out_channels), range(in_channels // groups)):
        yield k, k // (out_channels // groups) * (in_channels // groups) + c, c


def gather(counter, layer, x, w, out):
    """Σ x·w over the windows: a convolution, or the data gradient of a transposed one."""
    y = numbers(counter, out)
    for (n, p, q), (r, s), at in taps(layer, x.shape, out):
        for k, c, i in window_channels(layer.groups, out[3], x.shape[3]):
            y[n, p, q, k] = y[n, p, q, k] + x.padded((*at, c)) * w[k, r, s, i]
    return y


def scatter(counter, layer, dy, w, image):
    """Each element times its filter, added where it lands: a transposed convolution, or a data gradient."""
    dx, nowhere = numbers(counter, image), counter.zero()
    for (n, p, q), (r, s), at in taps(layer, image, dy.shape):
        for k, c, i in window_channels(layer.groups, dy.shape[3], image[3]):
            term = dy[n, p, q, k] * w[k, r, s, i]
            if inside(image, at):
                dx[(*at, c)] = dx[(*at, c)] + term
            else:
                nowhere = nowhere + term
    return dx


def correlate(counter, layer, dy, x, w_shape):
    """The weight gradient."""
    dw = numbers(counter, w_shape)
    for (n, p, q), (r, s), at in taps(layer, x.shape, dy.shape):
        for k, c, i in window_channels(layer.groups, dy.shape[3], x.shape[3]):
            dw[k, r, s, i] = dw[k, r, s, i] + dy[n, p, q, k] * x.padded((*at, c))
    return dw


def add_bias(counter, y, bias):
    """``y`` plus its channel's element: float32, read once each."""
    if bias is None:
        return y
    bias = counter.operand(bias)
    for at in np.ndindex(*y.shape):
        y[at] = y[at] + bias[at[-1]]
    return y


def channel_sum(counter, dy, bias):
    if bias is None:
        return {}
    total = numbers(counter, bias.shape)
    for at in np.ndindex(*dy.shape):
        total[at[-1]] = total[at[-1]] + dy[at]
    return {"bias": counter.write(total)}


def convolution(layer, state, x, dy, size):
    return windowed(layer, state, x, dy, size, gather, scatter, lambda image, out: (out, image))


def transposed(layer, state, x, dy, size):
    """A convolution that goes the other way: its input is what windows are multiplied into."""
    return windowed(layer, state, x, dy, size, scatter, gather, lambda image, out: (image, out))


def windowed(layer, state, x, dy, size, there, back, roles):
    w, bias = state["weight"], state.get("bias")
    forward, data, weight = Counter(), Counter(), Counter()
    y = there(forward, layer, forward.operand(x, size), forward.operand(w, size), dy.shape)
    y = forward.write(add_bias(forward, y, bias), size)
    dx = data.write(back(data, layer, data.operand(dy, size), data.operand(w, size), x.shape), size)
    image, gradient = weight.operand(x, size), weight.operand(dy, size)
    dw = weight.write(correlate(weight, layer, *roles(image, gradient), w.shape))
    return y, dx, {"weight": dw, **channel_sum(weight, gradient, bias)}, (forward, data, weight)


class Point:
    """The geometry of a 1x1 convolution."""

    kernel_size, stride, padding, dilation, groups = (1, 1), (1, 1), (0, 0), (1, 1), 1


def linear(layer, state, x, dy, size):
    state = {**state, "weight": state["weight"][:, None, None]}
    y, dx, grads, counters = convolution(Point, state, x[:, None, None], dy[:, None, None], size)
    return y.reshape(dy.shape), dx.reshape(x.shape), grads | {"weight": grads["weight"][:, 0, 0]}, counters


def max_pool(layer, state, x, dy, size):
    forward, data = Counter(), Counter()
    source, best, where = forward.operand(x, size), {}, {}
    for window, _, at in taps(layer, x.shape, dy.shape):
        for c in range(x.shape[3]):
            known = best.get((*window, c))
            value = source[(*at, c)] if inside(x.shape, at) else forward.zero()
            value.value = value.value if inside(x.shape, at) else -math.inf
            if known is None or value.value > known.value:
                where[(*window, c)] = (*at, c)
            best[(*window, c)] = value.maximum(-math.inf if known is None else known)
    y = np.empty(dy.shape, object)
    for at in np.ndindex(*dy.shape):
        y[at] = best[at]
    index = 1 if math.prod(layer.kernel_size) <= 256 else 2
    forward.write(np.zeros(dy.shape), index)
    gradient, kept, dx = data.operand(dy, size), data.operand(np.zeros(dy.shape), index), numbers(data, x.shape)
    for at in np.ndindex(*dy.shape):
        kept[at]
        dx[where[at]] = dx[where[at]] + gradient[at]
    return forward.write(y, size), data.write(dx, size), {}, (forward, data, Counter())


def means(windows, x, dy, size):
    """Averages over ``windows``: (output position, input positions with those outside as None, divisor)."""
    forward, data = Counter(), Counter()
    source, gradient = forward.operand(x, size), data.operand(dy, size)
    y, dx, nowhere = numbers(forward, dy.shape), numbers(data, x.shape), data.zero()
    for (n, p, q), positions, divisor in windows:
        for c in range(x.shape[3]):
            share = gradient[n, p, q, c] * (1 / divisor)
            for at in positions:
                y[n, p, q, c] = y[n, p, q, c] + (forward.zero() if at is None else source[n, *at, c])
                if at is None:
                    nowhere = nowhere + share
                else:
                    dx[n, *at, c] = dx[n, *at, c] + share
            y[n, p, q, c] = y[n, p, q, c] * (1 / divisor)
    return forward.write(y, size), data.write(dx, size), {}, (forward, data, Counter())


def avg_pool(layer, state, x, dy, size):
    windows: dict = {}
    for window, _, at in taps(layer, x.shape, dy.shape):
        windows.setdefault(window, []).append(at[1:])
    found = []
    for window, positions in windows.items():
        valid = [inside(x.shape, (0, *at)) for at in positions]
        limits = [x.shape[1 + i] + layer.padding[i] for i in (0, 1)]
        padded = sum(at[0] < limits[0] and at[1] < limits[1] for at in positions)
        divisor = padded if layer.count_include_pad else sum(valid)
        found.append((window, [at if v else None for at, v in zip(positions, valid, strict=True)], divisor))
    return means(found, x, dy, size)


def adaptive_pool(layer, state, x, dy, size):
    def bins(axis):
        size, out = x.shape[1 + axis], layer.output_size[axis]
        return [range(math.floor(i * size / out), math.ceil((i + 1) * size / out)) for i in range(out)]

    found = [
        ((n, p, q), list(product(rows, columns)), len(rows) * len(columns))
        for n in range(x.shape[0])
        for p, rows in enumerate(bins(0))
        for q, columns in enumerate(bins(1))
    ]
    return means(found, x, dy, size)


def pad(layer, state, x, dy, size):
    left, _, top, _ = layer.padding
    forward, data = Counter(), Counter()
    source, gradient = forward.operand(x, size), data.operand(dy, size)
    y, dx = np.full(dy.shape, layer.value, object), np.zeros(x.shape, object)
    for n, h, w, c in np.ndindex(*dy.shape):
        if inside(x.shape, (n, h - top, w - left)):
            y[n, h, w, c] = source[n, h - top, w - left, c]
            dx[n, h - top, w - left, c] = gradient[n, h, w, c]
    return forward.write(y, size), data.write(dx, size), {}, (forward, data, Counter())


def upsample(layer, state, x, dy, size):
    forward, data = Counter(), Counter()
    source, gradient = forward.operand(x, size), data.operand(dy, size)
    y, dx, bilinear = numbers(forward, dy.shape), numbers(data, x.shape), layer.mode == "bilinear"
    rows, columns = (matrix(x.shape[i], dy.shape[i], layer.mode, layer.align_corners) for i in (1, 2))

    def read(weights):
        low = int(np.flatnonzero(weights)[0])
        high = min(low + 1, len(weights) - 1)
        return [(low, weights[low]), (high, weights[high] if high > low else 0.0)][: 2 if bilinear else 1]

    for n, p, q, c in np.ndindex(*dy.shape):
        for (h, down), (w, across) in product(read(rows[p]), read(columns[q])):
            value, g = source[n, h, w, c], gradient[n, p, q, c]
            if bilinear:
                y[n, p, q, c] = y[n, p, q, c] + value * (down * across)
                dx[n, h, w, c] = dx[n, h, w, c] + g * (down * across)
            else:
                y[n, p, q, c] = value
                dx[n, h, w, c] = dx[n, h, w, c] + g
    return forward.write(y, size), data.write(dx, size), {}, (forward, data, Counter())
