"""Norms and activations, element by element with counting numbers; see `tests.counted.windows`."""

from __future__ import annotations

import math

import numpy as np

import minidl as m
from tests.counting import Counter, numbers


def moments_of(counter, layer, state, x, size):
    """(means, 1/deviations) by channel: of the batch, counted, or the running ones."""
    channels, rows = x.shape[-1], x.size // x.shape[-1]
    running = [counter.operand(state[f"running_{name}"]).vector() for name in ("mean", "var")]
    if layer.training:
        x = counter.operand(x, size)
        mean, square = numbers(counter, (channels,)), numbers(counter, (channels,))
        for at in np.ndindex(*x.shape):
            mean[at[-1]] = mean[at[-1]] + x[at]
        mean = [float(v) / rows for v in mean]
        for at in np.ndindex(*x.shape):
            deviation = x[at] - mean[at[-1]]
            square[at[-1]] = square[at[-1]] + deviation * deviation
        variance = [float(v) / rows for v in square]
        for old, new in zip(running, (mean, variance), strict=True):
            counter.write([0.9 * a + 0.1 * b for a, b in zip(old, new, strict=True)])
    else:
        mean, variance = running
    rstd = [1 / math.sqrt(v + layer.eps) for v in variance]
    counter.write([mean, rstd])  # kept for backward
    return mean, rstd


def batch_norm(layer, state, x, dy, size):
    channels, rows = x.shape[-1], x.size // x.shape[-1]
    affine = "weight" in state
    forward, data, weight = Counter(), Counter(), Counter()
    mean, rstd = moments_of(forward, layer, state, x, size)
    scale = [r * g for r, g in zip(rstd, forward.operand(state["weight"]).vector(), strict=True)] if affine else rstd
    shift = forward.operand(state["bias"]).vector() if affine else None
    source, y = forward.operand(x, size), numbers(forward, x.shape)
    for at in np.ndindex(*x.shape):
        c = at[-1]
        y[at] = (source[at] - mean[c]) * scale[c]
        y[at] = y[at] + shift[c] if affine else y[at]

    # The sums: the parameters' gradients, and in training what the data gradient takes.
    totals, products = [0.0] * channels, [0.0] * channels
    if affine or layer.training:
        mean, rstd = weight.operand(mean).vector(), weight.operand(rstd).vector()
        totals, products = numbers(weight, (channels,)), numbers(weight, (channels,))
        source, gradient = weight.operand(x, size), weight.operand(dy, size)
        for at in np.ndindex(*x.shape):
            c = at[-1]
            totals[c] = totals[c] + gradient[at]
            products[c] = products[c] + gradient[at] * (source[at] - mean[c])
        totals = weight.write(totals)
        products = weight.write([float(v) * r for v, r in zip(products, rstd, strict=True)])

    rstd = data.operand(rstd).vector()
    slope = [r * g for r, g in zip(rstd, data.operand(state["weight"]).vector(), strict=True)] if affine else rstd
    gradient, dx = data.operand(dy, size), numbers(data, x.shape)
    if layer.training:
        mean, source = data.operand(mean).vector(), data.operand(x, size)
        a = [v / rows for v in data.operand(totals).vector()]
        b = [v * r / rows for v, r in zip(data.operand(products).vector(), rstd, strict=True)]
    for at in np.ndindex(*x.shape):
        c = at[-1]
        g = gradient[at]
        if layer.training:
            g = g - a[c] - (source[at] - mean[c]) * b[c]
        dx[at] = g * slope[c]
    grads = {"weight": products, "bias": totals} if affine else {}
    return forward.write(y, size), data.write(dx, size), grads, (forward, data, weight)


def relu(layer, state, x, dy, size):
    forward, data = Counter(), Counter()
    source, y, dx = forward.operand(x, size), numbers(forward, x.shape), numbers(data, x.shape)
    for at in np.ndindex(*x.shape):
        y[at] = source[at].maximum(0.0)
    y = forward.write(y, size)
    gradient, kept = data.operand(dy, size), data.operand(y, size)
    for at in np.ndindex(*x.shape):
        dx[at] = gradient[at].masked(kept[at])
    return y, data.write(dx, size), {}, (forward, data, Counter())


def logistic(v):
    return ((v * -1).exp() + 1).reciprocal()


def silu_gradient(g, x, _):
    s = logistic(x)
    return g * s * (x * (1 - s) + 1)


def gelu_gradient(g, x, layer):
    if layer.approximate == "none":
        below, density = ((x * 0.5**0.5).erf() + 1) * 0.5, (x * x * -0.5).exp() * (2 * math.pi) ** -0.5
        return g * (x * density + below)
    scale, cubic = math.sqrt(8 / math.pi), x * x * 0.044715
    s, inner = logistic((cubic * x + x) * scale), cubic * (3 * scale) + scale
    return g * (x * inner * (s * (1 - s)) + s)


def gelu(x, layer):
    if layer.approximate == "none":
        return ((x * 0.5**0.5).erf() + 1) * 0.5 * x
    return logistic((x * x * x * 0.044715 + x) * math.sqrt(8 / math.pi)) * x


# value(x, layer); gradient(dy, what was kept, layer)
ELEMENTWISE = {
    m.ReLU6: (lambda x, _: x.maximum(0.0).minimum(6.0), lambda g, y, _: g.masked(y).masked(6 - float(y))),
    m.LeakyReLU: (
        lambda x, la: (x * la.slope).maximum(x), lambda g, y, la: g.masked(1.0) * (1.0 if float(y) > 0 else la.slope),
    ),
    m.Sigmoid: (lambda x, _: logistic(x), lambda g, y, _: g * y * (1 - y)),
    m.Tanh: (lambda x, _: x.tanh(), lambda g, y, _: g * (1 - y * y)),
    m.SiLU: (lambda x, _: x * logistic(x), silu_gradient),
    m.GELU: (gelu, gelu_gradient),
}  # fmt: skip


def elementwise(layer, state, x, dy, size):
    value, slope = ELEMENTWISE[type(layer)]
    forward, data = Counter(), Counter()
    source, y, dx = forward.operand(x, size), numbers(forward, x.shape), numbers(data, x.shape)
    for at in np.ndindex(*x.shape):
        y[at] = value(source[at], layer)
    y = forward.write(y, size)
    gradient, kept = data.operand(dy, size), data.operand(y if layer.keeps_output else x, size)
    for at in np.ndindex(*x.shape):
        dx[at] = slope(gradient[at], kept[at], layer)
    return y, data.write(dx, size), {}, (forward, data, Counter())


def hardswish(layer, state, x, dy, size):
    forward, data = Counter(), Counter()
    source, y, dx = forward.operand(x, size), numbers(forward, x.shape), numbers(data, x.shape)
    gradient, kept = data.operand(dy, size), data.operand(x, size)
    for at in np.ndindex(*x.shape):
        y[at] = (source[at] + 3).maximum(0.0).minimum(6.0) * (1 / 6) * source[at]
        slope = kept[at] * (1 / 3) + 0.5
        # Two comparisons choose among the three pieces.
        slope = slope.masked(x[at] + 3).where(x[at] < 3, 1.0)
        dx[at] = gradient[at] * slope
    return forward.write(y, size), data.write(dx, size), {}, (forward, data, Counter())


def softmax(layer, state, x, dy, size):
    forward, data = Counter(), Counter()
    source, y, dx = forward.operand(x, size), numbers(forward, x.shape), numbers(data, x.shape)
    for row in np.ndindex(*x.shape[:-1]):
        peak, total = source[*row, 0].maximum(-math.inf), forward.zero()
        for c in range(1, x.shape[-1]):
            peak = source[*row, c].maximum(peak)
        for c in range(x.shape[-1]):
            y[*row, c] = (source[*row, c] - float(peak)).exp()
            total = total + y[*row, c]
        for c in range(x.shape[-1]):
            y[*row, c] = y[*row, c] * (1 / float(total))
    y = forward.write(y, size)
    gradient, kept = data.operand(dy, size), data.operand(y, size)
    for row in np.ndindex(*x.shape[:-1]):
        total = data.zero()
        for c in range(x.shape[-1]):
            total = total + gradient[*row, c] * kept[*row, c]
        for c in range(x.shape[-1]):
            dx[*row, c] = kept[*row, c] * (gradient[*row, c] - float(total))
    return y, data.write(dx, size), {}, (forward, data, Counter())


def moments(counter, source, members, eps):
    """The mean and 1/deviation of each group of places, which backward reads again."""
    mean, rstd = {}, {}
    for group, places in members.items():
        total, square = counter.zero(), counter.zero()
        for at in places:
            total = total + source[at]
        mean[group] = float(total) / len(places)
        for at in places:
            deviation = source[at] - mean[group]
            square = square + deviation * deviation
        rstd[group] = 1 / math.sqrt(float(square) / len(places) + eps)
    counter.write([list(mean.values()), list(rstd.values())])
    return mean, rstd


def parameters(counter, state, channels):
    """(scale, shift) of each channel as plain floats, read once if there are any."""
    if "weight" not in state:
        return [1.0] * channels, [0.0] * channels
    return tuple(counter.operand(state[name]).vector() for name in ("weight", "bias"))


def group_norm(layer, state, x, dy, size):
    """The scale of a channel in a sample is a constant, as are the sums of the data gradient, which the other takes."""
    shape, channels, affine = x.shape, x.shape[-1], "weight" in state
    x, dy = (a.reshape(shape[0], -1, channels) for a in (x, dy))
    group = lambda at: (at[0], at[2] * layer.num_groups // channels)  # noqa: E731
    members = {}
    for at in np.ndindex(*x.shape):
        members.setdefault(group(at), []).append(at)
    forward, data, weight = Counter(), Counter(), Counter()
    gamma, beta = parameters(forward, state, channels)
    mean, rstd = moments(forward, forward.operand(x, size), members, layer.eps)
    source, y = forward.operand(x, size), numbers(forward, x.shape)
    for at in np.ndindex(*x.shape):
        y[at] = (source[at] - mean[group(at)]) * (rstd[group(at)] * gamma[at[2]])
        y[at] = y[at] + beta[at[2]] if affine else y[at]

    dgamma, dbeta = np.zeros(channels), np.zeros(channels)
    first, second = dict.fromkeys(members, 0.0), dict.fromkeys(members, 0.0)
    source, gradient = weight.operand(x, size), weight.operand(dy, size)
    for at in np.ndindex(*x.shape):
        c, g = at[2], group(at)
        product = float((source[at] - mean[g]) * gradient[at] + 0.0) * rstd[g]
        dbeta[c] += float(gradient[at] + 0.0)
        dgamma[c] += product
        first[g] += dy[at] * gamma[c] / len(members[g])
        second[g] += product * gamma[c] / len(members[g])
    read_again(weight, mean, rstd)
    read_again(data, mean, rstd, first, second)
    weight.write([list(first.values()), list(second.values())])
    if affine:
        weight.write([dgamma, dbeta])
        for counter in (weight, data):
            counter.operand(state["weight"]).vector()
    source, gradient, dx = data.operand(x, size), data.operand(dy, size), numbers(data, x.shape)
    for at in np.ndindex(*x.shape):
        g = group(at)
        a, b = first[g] * rstd[g], second[g] * rstd[g] ** 2
        dx[at] = gradient[at] * (rstd[g] * gamma[at[2]]) - a - (source[at] - mean[g]) * b
    y, dx = forward.write(y, size).reshape(shape), data.write(dx, size).reshape(shape)
    return y, dx, {"weight": dgamma, "bias": dbeta} if affine else {}, (forward, data, weight)


def layer_norm(layer, state, x, dy, size):
    """No scale is a channel's alone, and each row's sums are its own: all is counted."""
    shape, channels, affine = x.shape, x.shape[-1], "weight" in state
    x, dy = (a.reshape(-1, channels) for a in (x, dy))
    members = {row: [(row, c) for c in range(channels)] for row in range(len(x))}
    forward, data, weight = Counter(), Counter(), Counter()
    gamma, beta = parameters(forward, state, channels)
    source, y = forward.operand(x, size), numbers(forward, x.shape)
    mean, rstd = moments(forward, source, members, layer.eps)
    for row, c in np.ndindex(*x.shape):
        y[row, c] = (source[row, c] - mean[row]) * rstd[row]
        y[row, c] = y[row, c] * gamma[c] + beta[c] if affine else y[row, c]

    dgamma, dbeta = np.zeros(channels), np.zeros(channels)
    if affine:
        read_again(weight, mean, rstd)
        source, gradient = weight.operand(x, size), weight.operand(dy, size)
        for row, c in np.ndindex(*x.shape):
            dbeta[c] += float(gradient[row, c] + 0.0)
            dgamma[c] += float(gradient[row, c] * ((source[row, c] - mean[row]) * rstd[row]) + 0.0)
        weight.write([dgamma, dbeta])
        data.operand(state["weight"]).vector()
    read_again(data, mean, rstd)
    source, gradient, dx = data.operand(x, size), data.operand(dy, size), numbers(data, x.shape)
    for row, places in members.items():
        hats, slopes, a, b = {}, {}, data.zero(), data.zero()
        for at in places:
            hats[at] = (source[at] - mean[row]) * rstd[row]
            slopes[at] = gradient[at] * gamma[at[1]] if affine else gradient[at]
            a, b = a + slopes[at], b + slopes[at] * hats[at]
        a, b = float(a) / channels, float(b) / channels
        for at in places:
            dx[at] = (slopes[at] - a - hats[at] * b) * rstd[row]
    y, dx = forward.write(y, size).reshape(shape), data.write(dx, size).reshape(shape)
    return y, dx, {"weight": dgamma, "bias": dbeta} if affine else {}, (forward, data, weight)


def read_again(counter, *tables):
    """Small tables of float32 from memory."""
    for table in tables:
        counter.operand(list(table.values())).vector()
