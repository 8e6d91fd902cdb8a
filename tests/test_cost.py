"""FLOP and bytes of every layer: by hand, and counted while plain Python computes the layer's formula.

The counted formulas are held to the layers' own results, so that what is counted is what the layer computes.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.profile import Cost, PassCost
from minidl.profile.cost import covered, gradient_sum
from tests.counting import Counter, numbers
from tests.parts import Part
from tests.reference.upsample2d import matrix

STORAGE = {2: "float16", 4: "float32"}


def costs(cost: Cost):
    return [(p.flop, p.bytes) for p in (cost.forward, cost.backward_data, cost.backward_weight)]


# -- by hand --------------------------------------------------------------------------------------------------------

BY_HAND = {
    # 2*32*112*112*64*(7*7*3) FLOP; x 32*224*224*3 = 4816896, y 32*112*112*64 = 25690112, w 9408 elements of 4 bytes.
    "ResNet-50 stem": (
        m.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), (32, 224, 224, 3), 4,
        [(7552892928, 122065664), (7552892928, 122065664), (7552892928, 122065664)],
    ),
    # 3x3 over 32*14*14 pixels of 256 channels: x = y = 1605632, w 589824; bf16 but for the weight gradient.
    "stage 3": (
        m.Conv2d(256, 256, 3, padding=1, bias=False), (32, 14, 14, 256), 2,
        [(7398752256, 7602176), (7398752256, 7602176), (7398752256, 8781824)],
    ),
    # The same by rows, 7 of 14 on this rank: x = y = 802816, all filters; by filters, 128 of 256: w 294912, y 802816.
    "stage 3, half of the rows": (
        m.layers.RowParallelConv2d(256, 256, 3, padding=1, bias=False, height=14, group=Part(0, 2)),
        (32, 7, 14, 256), 2,
        [(3699376128, 4390912), (3699376128, 4390912), (3699376128, 5570560)],
    ),
    "stage 3, half of the filters": (
        m.layers.ChannelParallelConv2d(256, 256, 3, padding=1, bias=False, group=Part(0, 2)), (32, 14, 14, 256), 2,
        [(3699376128, 5406720), (3699376128, 5406720), (3699376128, 5996544)],
    ),
    # A 1x1 convolution of stride 2 reads a quarter of x (2*4*4*3 = 96) but writes all of dx: y = 2*2*2*5 = 40, w = 15,
    # b = 5. FLOP 2*40*3 = 240, + 40 additions of the bias; backward 40 more for its sum.
    "strided point": (
        m.Conv2d(3, 5, 1, stride=2), (2, 4, 4, 3), 4,
        [(280, 4 * (24 + 15 + 40 + 5)), (240, 4 * (40 + 15 + 96)), (280, 4 * (24 + 40 + 15 + 5))],
    ),
    # The U-Net's upsampling: 2x2 of stride 2, y = 4 times the pixels: 2*(1*3*3*8)*(2*2*4) FLOP, y = 1*6*6*4 = 144.
    "upsampling": (
        m.ConvTranspose2d(8, 4, 2, stride=2), (1, 3, 3, 8), 2,
        [(2304 + 144, 2 * (72 + 128 + 144) + 16), (2304, 2 * (144 + 128 + 72)),
         (2304 + 144, 2 * (72 + 144) + 4 * 128 + 16)],
    ),
    # fc of ResNet-50 at 32: 2*32*2048*1000 + 32*1000 for the bias; x 65536, w 2048000, y 32000, b 1000.
    "classifier": (
        m.Linear(2048, 1000), (32, 2048), 4,
        [(131104000, 4 * (65536 + 2048000 + 32000 + 1000)), (131072000, 4 * (32000 + 2048000 + 65536)),
         (131104000, 4 * (65536 + 32000 + 2048000 + 1000))],
    ),
    # 32*56*56*256 = 25690112 elements, 256 channels of float32: forward x twice and y, gamma, beta, both running
    # statistics read and written, both moments kept: 8 vectors. Backward: sums, slope and moments: 5; moments, sums: 4.
    "batch norm": (
        m.BatchNorm2d(256), (32, 56, 56, 256), 2,
        [(7 * 25690112, 6 * 25690112 + 8 * 1024), (5 * 25690112, 6 * 25690112 + 5 * 1024),
         (4 * 25690112, 4 * 25690112 + 4 * 1024)],
    ),
    "ReLU": (m.ReLU(), (2, 3, 3, 4), 2, [(72, 288), (72, 432), (0, 0)]),
    # 2*2*2 windows of 9 taps; the index is a byte.
    "max pool": (
        m.MaxPool2d(3, 2, 1), (2, 4, 4, 1), 4, [(72, 4 * (32 + 8) + 8), (8, 4 * (8 + 32) + 8), (0, 0)],
    ),
    "average pool": (m.AvgPool2d(2), (1, 4, 4, 3), 4, [(12 * 5, 4 * 60), (12 * 5, 4 * 60), (0, 0)]),
    "global average": (m.AdaptiveAvgPool2d(1), (2, 7, 7, 8), 2, [(784 + 16, 1600), (784 + 16, 1600), (0, 0)]),
    "dropout": (m.Dropout(0.3), (5, 7), 2, [(35, 140), (35, 140), (0, 0)]),
    "stochastic depth": (m.StochasticDepth(0.3), (5, 7), 2, [(35, 140), (35, 140), (0, 0)]),
    "flatten": (m.Flatten(), (2, 3, 3, 4), 4, [(0, 0), (0, 0), (0, 0)]),
    "ReLU6": (m.ReLU6(), (2, 3, 3, 4), 2, [(144, 288), (144, 432), (0, 0)]),
    "LeakyReLU": (m.LeakyReLU(), (2, 3, 3, 4), 2, [(144, 288), (144, 432), (0, 0)]),
    "Sigmoid": (m.Sigmoid(), (2, 3, 3, 4), 4, [(288, 576), (216, 864), (0, 0)]),
    "Tanh": (m.Tanh(), (2, 3, 3, 4), 4, [(72, 576), (216, 864), (0, 0)]),
    "SiLU": (m.SiLU(), (2, 3, 3, 4), 4, [(360, 576), (648, 864), (0, 0)]),
    "GELU": (m.GELU(), (2, 3, 3, 4), 4, [(360, 576), (792, 864), (0, 0)]),
    "Hardswish": (m.Hardswish(), (2, 3, 3, 4), 4, [(360, 576), (360, 864), (0, 0)]),
    "Softmax": (m.Softmax(), (8, 10), 4, [(400, 640), (320, 960), (0, 0)]),
    # 2*3*3*4 = 72 elements, two groups for each of two images: moments and sums of 2*2*2 floats; gamma, beta of 4.
    "group norm": (
        m.GroupNorm(2, 4), (2, 3, 3, 4), 4,
        [(7 * 72, 3 * 288 + 32 + 32), (5 * 72, 3 * 288 + 64 + 16), (4 * 72, 2 * 288 + 64 + 48)],
    ),
    # Eighteen rows: moments of 2*18 floats.
    "layer norm": (
        m.LayerNorm(4), (2, 3, 3, 4), 4,
        [(8 * 72, 2 * 288 + 144 + 32), (10 * 72, 3 * 288 + 144 + 16), (5 * 72, 2 * 288 + 144 + 32)],
    ),
    # 2*2*2*3 = 24 elements become 96.
    "upsample": (
        m.Upsample(scale_factor=2, mode="bilinear"), (2, 2, 2, 3), 4, [(768, 480), (768, 480), (0, 0)],
    ),
    # One pixel around 2x2: 16 elements written, 4 read; backward 4 and 4.
    "pad": (m.Pad(1), (1, 2, 2, 1), 4, [(0, 80), (0, 32), (0, 0)]),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_cost_is_the_one_computed_by_hand(name):
    layer, shape, itemsize, expected = BY_HAND[name]
    assert costs(layer.cost(shape, itemsize=itemsize)) == expected


def test_joins_by_hand():
    shape = (2, 3, 3, 4)
    assert costs(m.Add().cost(shape, shape, itemsize=2)) == [(72, 432), (0, 0), (0, 0)]
    assert costs(m.Concat().cost(shape, (2, 3, 3, 1), itemsize=4)) == [(0, 720), (0, 0), (0, 0)]
    assert costs(m.Mul().cost(shape, shape, itemsize=2)) == [(72, 432), (144, 720), (0, 0)]
    assert costs(m.Mul().cost(shape, (2, 1, 1, 4), itemsize=2)) == [(72, 304), (216, 464), (0, 0)]


def test_intensity_of_the_stem_is_the_published_one():
    """FLOP per byte of the first convolution of ResNet-50 in float32, batch 32: 61.9."""
    layer, shape, itemsize, _ = BY_HAND["ResNet-50 stem"]
    assert layer.cost(shape, itemsize=itemsize).forward.intensity == pytest.approx(61.9, abs=0.05)


def test_a_fan_outs_gradient_is_one_operand_more_or_a_pass_of_its_own():
    conv = m.Conv2d(3, 5, 1, bias=False).cost((2, 4, 4, 3)).backward_data
    assert gradient_sum(conv, 96, 4) == conv + PassCost(96, 4 * 96)
    assert gradient_sum(m.Flatten().cost((2, 4, 4, 3)).backward_data, 96, 2) == PassCost(96, 3 * 2 * 96)


# -- counted --------------------------------------------------------------------------------------------------------


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
    w, bias = state["weight"], state.get("bias")
    forward, data, weight = Counter(), Counter(), Counter()
    y = gather(forward, layer, forward.operand(x, size), forward.operand(w, size), dy.shape)
    y = forward.write(add_bias(forward, y, bias), size)
    dx = data.write(scatter(data, layer, data.operand(dy, size), data.operand(w, size), x.shape), size)
    gradient = weight.operand(dy, size)
    dw = weight.write(correlate(weight, layer, gradient, weight.operand(x, size), w.shape))
    return y, dx, {"weight": dw, **channel_sum(weight, gradient, bias)}, (forward, data, weight)


def transposed(layer, state, x, dy, size):
    w, bias = state["weight"], state.get("bias")
    forward, data, weight = Counter(), Counter(), Counter()
    y = scatter(forward, layer, forward.operand(x, size), forward.operand(w, size), dy.shape)
    y = forward.write(add_bias(forward, y, bias), size)
    dx = data.write(gather(data, layer, data.operand(dy, size), data.operand(w, size), x.shape), size)
    gradient = weight.operand(dy, size)
    dw = weight.write(correlate(weight, layer, weight.operand(x, size), gradient, w.shape))
    return y, dx, {"weight": dw, **channel_sum(weight, gradient, bias)}, (forward, data, weight)


class Point:
    """The geometry of a 1x1 convolution."""

    kernel_size, stride, padding, dilation, groups = (1, 1), (1, 1), (0, 0), (1, 1), 1


def linear(layer, state, x, dy, size):
    state = {**state, "weight": state["weight"][:, None, None]}
    y, dx, grads, counters = convolution(Point, state, x[:, None, None], dy[:, None, None], size)
    return y.reshape(dy.shape), dx.reshape(x.shape), grads | {"weight": grads["weight"][:, 0, 0]}, counters


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


def sample_norm(layer, state, x, dy, size):
    """Group norm, and layer norm as one of rows with one group."""
    shape, per_row = x.shape, isinstance(layer, m.LayerNorm)
    channels, affine = shape[-1], "weight" in state
    groups = 1 if per_row else layer.num_groups
    x, dy = (a.reshape(-1, 1, channels) if per_row else a.reshape(shape[0], -1, channels) for a in (x, dy))
    forward, data, weight = Counter(), Counter(), Counter()
    gamma = forward.operand(state["weight"]).vector() if affine else [1.0] * channels
    beta = forward.operand(state["bias"]).vector() if affine else [0.0] * channels
    source, y = forward.operand(x, size), numbers(forward, x.shape)
    again = source if per_row else forward.operand(x, size)
    mean, rstd = np.zeros((2, len(x), groups))
    group = lambda at: (at[0], at[2] * groups // channels)  # noqa: E731
    members = {}
    for at in np.ndindex(*x.shape):
        members.setdefault(group(at), []).append(at)
    for g, found in members.items():
        total, square = forward.zero(), forward.zero()
        for at in found:
            total = total + source[at]
        mean[g] = float(total) / len(found)
        for at in found:
            deviation = source[at] - mean[g]
            square = square + deviation * deviation
        rstd[g] = 1 / math.sqrt(float(square) / len(found) + layer.eps)
    forward.write([mean, rstd])
    for at in np.ndindex(*x.shape):
        c, g = at[2], group(at)
        if per_row:  # a row's scale is no constant of a channel
            y[at] = (again[at] - mean[g]) * rstd[g]
            y[at] = y[at] * gamma[c] + beta[c] if affine else y[at]
        else:
            y[at] = (again[at] - mean[g]) * (rstd[g] * gamma[c])
            y[at] = y[at] + beta[c] if affine else y[at]

    dgamma, dbeta, first, second = np.zeros(channels), np.zeros(channels), np.zeros(mean.shape), np.zeros(mean.shape)
    gradient, source, dx = data.operand(dy, size), data.operand(x, size), numbers(data, x.shape)
    for values in (mean, rstd):
        data.operand(values.ravel()).vector()
        if affine or not per_row:
            weight.operand(values.ravel()).vector()
    if affine:
        data.operand(state["weight"]).vector()
    if affine or not per_row:
        g_weight, x_weight = weight.operand(dy, size), weight.operand(x, size)
        for at in np.ndindex(*x.shape):
            c, g = at[2], group(at)
            if per_row:
                xhat = (x_weight[at] - mean[g]) * rstd[g]
                product = g_weight[at] * xhat + 0.0
            else:
                product = (x_weight[at] - mean[g]) * g_weight[at] + 0.0
                product.value *= float(rstd[g])
            dbeta[c] += float(g_weight[at] + 0.0)
            dgamma[c] += float(product)
            first[g] += dy[at] * gamma[c] / len(members[g])
            second[g] += float(product) * gamma[c] / len(members[g])
        if affine:
            weight.write([dgamma, dbeta])
    if not per_row:
        if affine:
            weight.operand(state["weight"]).vector()
        weight.write([first, second])
        for values in (first, second):
            data.operand(values.ravel()).vector()
    for g, found in members.items():
        if per_row:
            hats, slopes, a, b = {}, {}, data.zero(), data.zero()
            for at in found:
                hats[at] = (source[at] - mean[g]) * rstd[g]
                slopes[at] = gradient[at] * gamma[at[2]] if affine else gradient[at]
                a, b = a + slopes[at], b + slopes[at] * hats[at]
            a, b = float(a) / channels, float(b) / channels
        for at in found:
            if per_row:
                dx[at] = (slopes[at] - a - hats[at] * b) * rstd[g]
            else:
                a, b = first[g] * rstd[g], second[g] * rstd[g] ** 2
                dx[at] = gradient[at] * (rstd[g] * gamma[at[2]]) - a - (source[at] - mean[g]) * b
    y, dx = forward.write(y, size).reshape(shape), data.write(dx, size).reshape(shape)
    return y, dx, {"weight": dgamma, "bias": dbeta} if affine else {}, (forward, data, weight)


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


CASES = [
    (convolution, lambda: m.Conv2d(2, 3, 3, padding=1), (2, 4, 5, 2)),
    (convolution, lambda: m.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 2), bias=False), (1, 5, 4, 2)),
    (convolution, lambda: m.Conv2d(4, 6, 2, dilation=(2, 3), groups=2), (1, 6, 7, 4)),
    (convolution, lambda: m.Conv2d(3, 3, 3, stride=2, padding=1, groups=3, bias=False), (1, 5, 5, 3)),
    (convolution, lambda: m.Conv2d(3, 2, 1, stride=2), (2, 5, 4, 3)),
    (convolution, lambda: m.Conv2d(1, 2, 2, stride=3, padding=3), (1, 4, 7, 1)),
    (transposed, lambda: m.ConvTranspose2d(3, 2, 2, stride=2), (1, 3, 2, 3)),
    (transposed, lambda: m.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1, bias=False), (1, 3, 3, 2)),
    (transposed, lambda: m.ConvTranspose2d(2, 3, 1, stride=3, output_padding=2, bias=False), (2, 2, 3, 2)),
    (convolution, lambda: m.layers.RowParallelConv2d(2, 3, 3, padding=1, height=4), (2, 4, 5, 2)),
    (convolution, lambda: m.layers.ChannelParallelConv2d(2, 3, 3, padding=1), (2, 4, 5, 2)),
    (transposed, lambda: m.ConvTranspose2d(4, 6, (3, 2), padding=(2, 0), groups=2, dilation=2), (1, 4, 3, 4)),
    (linear, lambda: m.Linear(5, 3), (4, 5)),
    (linear, lambda: m.Linear(3, 7, bias=False), (2, 3)),
    (batch_norm, lambda: m.BatchNorm2d(3), (2, 3, 4, 3)),
    (batch_norm, lambda: m.BatchNorm2d(5, affine=False), (6, 5)),
    (relu, lambda: m.ReLU(), (2, 3, 5)),
    (max_pool, lambda: m.MaxPool2d(3, 2, 1), (1, 5, 4, 2)),
    (max_pool, lambda: m.MaxPool2d((2, 3), (1, 2), (1, 0), ceil_mode=True), (1, 4, 6, 1)),
    (max_pool, lambda: m.MaxPool2d(2, 3, dilation=2), (2, 7, 8, 1)),
    (max_pool, lambda: m.MaxPool2d(17, 1), (1, 18, 17, 1)),
    (avg_pool, lambda: m.AvgPool2d(2), (2, 4, 5, 3)),
    (avg_pool, lambda: m.AvgPool2d(3, 2, 1, ceil_mode=True), (1, 4, 6, 2)),
    (avg_pool, lambda: m.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 6, 4, 1)),
    (avg_pool, lambda: m.AvgPool2d(1, 3), (1, 7, 5, 2)),
    (adaptive_pool, lambda: m.AdaptiveAvgPool2d(1), (2, 3, 4, 2)),
    (adaptive_pool, lambda: m.AdaptiveAvgPool2d((4, 5)), (1, 7, 3, 2)),
    (elementwise, lambda: m.ReLU6(), (2, 3, 50)),
    (elementwise, lambda: m.LeakyReLU(0.2), (2, 3, 5)),
    (elementwise, lambda: m.Sigmoid(), (2, 3, 5)),
    (elementwise, lambda: m.Tanh(), (2, 3, 5)),
    (elementwise, lambda: m.SiLU(), (2, 3, 5)),
    (elementwise, lambda: m.GELU(), (2, 3, 5)),
    (elementwise, lambda: m.GELU("tanh"), (2, 3, 5)),
    (hardswish, lambda: m.Hardswish(), (2, 3, 9)),
    (softmax, lambda: m.Softmax(), (3, 2, 5)),
    (sample_norm, lambda: m.GroupNorm(2, 6), (2, 2, 3, 6)),
    (sample_norm, lambda: m.GroupNorm(3, 6, affine=False), (3, 6)),
    (sample_norm, lambda: m.LayerNorm(5), (2, 2, 3, 5)),
    (sample_norm, lambda: m.LayerNorm(4, elementwise_affine=False), (3, 4)),
    (upsample, lambda: m.Upsample(scale_factor=2), (1, 2, 3, 2)),
    (upsample, lambda: m.Upsample(size=(2, 3)), (1, 5, 4, 1)),
    (upsample, lambda: m.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 2, 1)),
    (upsample, lambda: m.Upsample(size=(3, 2), mode="bilinear", align_corners=True), (1, 7, 5, 1)),
    (pad, lambda: m.Pad((1, 2, 0, 3), value=0.5), (2, 2, 3, 2)),
    (pad, lambda: m.Pad((-1, 2, -2, -1)), (1, 5, 4, 2)),
]  # fmt: skip


def test_every_layer_is_computed_by_hand_and_counted():
    every = {getattr(m.layers, name) for name in m.layers.__all__}
    assert {type(layer) for layer, *_ in BY_HAND.values()} | {m.Add, m.Mul, m.Concat} == every
    own_tests = {m.Dropout, m.StochasticDepth, m.Flatten, m.Add, m.Mul, m.Concat}  # below: random, a view, joins
    assert {type(make()) for _, make, _ in CASES} | own_tests == every


def run(layer, x, dy, training):
    """(output, input gradient, parameter gradients) of the layer itself, float64."""
    layer.training = training
    y, dx = layer.forward(x), layer.backward(dy)
    grads = layer.params.gradients() if layer.specs else {}
    return np.asarray(y, np.float64), np.asarray(dx, np.float64), {k: v.copy() for k, v in grads.items()}


def drawn(rng, layer, shape):
    """(x, dy) without equal elements, so that no maximum is tied."""
    x = rng.permutation(math.prod(shape)).reshape(shape).astype(np.float32) / 8 - 2
    return x, rng.standard_normal(layer.output_shape(shape)).astype(np.float32)


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("count, make, shape", CASES, ids=[f"{c.__name__}{i}" for i, (c, _, _) in enumerate(CASES)])
def test_cost_is_what_the_formula_does(count, make, shape, itemsize, rng):
    layer = make()
    x, dy = drawn(rng, layer, shape)
    state = layer.state_dict()
    y, dx, grads, counters = count(layer, state, x, dy, itemsize)
    found = run(layer, x, dy, training=True)
    np.testing.assert_allclose(found[0], y, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(found[1], dx, rtol=1e-4, atol=1e-4)
    assert found[2].keys() == grads.keys()
    for name, values in grads.items():
        np.testing.assert_allclose(found[2][name], values, rtol=1e-4, atol=1e-3)
    assert costs(layer.cost(shape, itemsize=itemsize)) == [counter.counts for counter in counters]


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_evaluation_mode_is_one_multiply_per_gradient(affine, rng):
    layer, shape = m.BatchNorm2d(3, affine=affine), (2, 3, 2, 3)
    x, dy = drawn(rng, layer, shape)
    run(layer, x, dy, training=True)  # the running statistics are then no longer trivial
    layer.training = False
    state = layer.state_dict()
    y, dx, grads, counters = batch_norm(layer, state, x, dy, 4)
    found = run(layer, x, dy, training=False)
    np.testing.assert_allclose(found[0], y, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found[1], dx, rtol=1e-4, atol=1e-5)
    assert costs(layer.cost(shape)) == [counter.counts for counter in counters]
    assert counters[1].flop == x.size


@pytest.mark.parametrize("kind", [m.Dropout, m.StochasticDepth])
@pytest.mark.parametrize("itemsize", [4, 2])
def test_dropout_multiplies_what_it_keeps_and_stores_no_mask(itemsize, kind, rng):
    layer, shape = kind(0.4), (3, 5, 2)
    x, dy = drawn(rng, layer, shape)
    kept = (run(layer, np.ones(shape, np.float32), dy, training=True)[0] > 0).astype(float)
    counters = Counter(), Counter()
    results = []
    for counter, values in zip(counters, (np.ones(shape), dy), strict=True):
        source, out = counter.operand(values, itemsize), numbers(counter, shape)
        for at in np.ndindex(*shape):
            out[at] = source[at] * (kept[at] / 0.6)  # random numbers and their comparison are integers
        results.append(counter.write(out, itemsize))
    found = run(kind(0.4), np.ones(shape, np.float32), dy, training=True)
    np.testing.assert_allclose(found[0], results[0], rtol=1e-6)
    np.testing.assert_allclose(found[1], results[1], rtol=1e-6)
    assert costs(layer.cost(shape, itemsize=itemsize)) == [c.counts for c in counters] + [(0, 0)]
    layer.training = False
    assert layer.cost(shape) == kind(0.0).cost(shape) == Cost()
    assert layer.forward(x) is x, "in evaluation nothing is computed"


def test_joins_read_their_inputs_once_and_hand_back_views(rng):
    shapes = [(2, 2, 3, 2), (2, 2, 3, 2), (2, 2, 3, 1)]
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    counter = Counter()
    left, right, total = counter.operand(a), counter.operand(b), numbers(counter, a.shape)
    for at in np.ndindex(*a.shape):
        total[at] = left[at] + right[at]
    layer = m.Add()
    np.testing.assert_allclose(layer.forward(a, b), counter.write(total), rtol=1e-6)
    assert costs(layer.cost(a.shape, b.shape)) == [counter.counts, (0, 0), (0, 0)]
    assert all(np.shares_memory(part, a) for part in layer.backward(a))

    counter, joined = Counter(), []
    for part in map(counter.operand, (a, b, c)):
        joined.append(np.array([part[at] for at in np.ndindex(*part.shape)], object).reshape(part.shape))
    layer = m.Concat()
    y = layer.forward(a, b, c)
    np.testing.assert_allclose(y, counter.write(np.concatenate(joined, -1)), rtol=1e-6)
    assert costs(layer.cost(*shapes)) == [counter.counts, (0, 0), (0, 0)]
    assert all(np.shares_memory(part, y) for part in layer.backward(y))


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_reads_its_inputs_once_each_way(gated, rng):
    a, dy = (rng.standard_normal((2, 2, 3, 2)).astype(np.float32) for _ in range(2))
    b = rng.standard_normal((2, 1, 1, 2) if gated else a.shape).astype(np.float32)
    forward, data = Counter(), Counter()
    left, right, y = forward.operand(a), forward.operand(b), numbers(forward, a.shape)
    gradient, kept_a, kept_b = data.operand(dy), data.operand(a), data.operand(b)
    da, db = numbers(data, a.shape), numbers(data, b.shape)
    for at in np.ndindex(*a.shape):
        where = (at[0], 0, 0, at[3]) if gated else at
        y[at] = left[at] * right[where]
        da[at] = gradient[at] * kept_b[where]
        product_ = gradient[at] * kept_a[at]
        db[where] = db[where] + product_ if gated else product_
    layer = m.Mul()
    np.testing.assert_allclose(layer.forward(a, b), forward.write(y), rtol=1e-6)
    for found, expected in zip(layer.backward(dy), (data.write(da), data.write(db)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert costs(layer.cost(a.shape, b.shape)) == [forward.counts, data.counts, (0, 0)]


def test_flatten_is_a_view(rng):
    layer, x = m.Flatten(), rng.standard_normal((2, 3, 2, 2)).astype(np.float32)
    y = layer.forward(x)
    assert np.shares_memory(x, y) and np.shares_memory(y, layer.backward(y)) and layer.cost(x.shape) == Cost()


def test_covered_counts_pixels_under_windows():
    assert covered((5, 4), (3, 2), (1, 1), (2, 2), (0, 0), (1, 1)) == 3 * 2
    assert covered((5, 4), (3, 2), (3, 3), (2, 2), (1, 1), (1, 1)) == 5 * 4
    assert covered((7, 1), (2, 1), (2, 1), (1, 1), (0, 0), (3, 1)) == 4  # taps 0, 3 and 1, 4
    assert covered((3, 3), (1, 1), (1, 1), (1, 1), (2, 2), (1, 1)) == 0  # on the padding alone


# -- loss and optimizer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("itemsize, label_type", [(4, np.int32), (2, np.int64), (4, np.uint8)])
def test_loss_cost_is_what_its_formula_does(itemsize, label_type, rng):
    shape = (2, 2, 3, 5)
    logits = rng.standard_normal(shape).astype(STORAGE[itemsize])
    labels = rng.integers(0, 5, shape[:-1]).astype(label_type)
    rows, count = labels.size, labels.size
    forward, backward = Counter(), Counter()
    x, wanted = forward.operand(logits.reshape(rows, 5), itemsize), forward.operand(labels.ravel(), labels.itemsize)
    total, kept = forward.zero(), []
    for row in range(rows):
        values = [x[row, k] for k in range(5)]
        top, exponentials = forward.zero(), forward.zero()
        top.value = -math.inf
        for value in values:
            top = value.maximum(top)
        for value in values:
            exponentials = exponentials + (value - top).exp()
        kept.append(exponentials.log() + top)
        total = total + (kept[-1] - values[int(float(wanted[row]))])
    kept = forward.write(kept)

    x, wanted = backward.operand(logits.reshape(rows, 5), itemsize), backward.operand(labels.ravel(), labels.itemsize)
    lse, gradient = backward.operand(kept), numbers(backward, (rows, 5))
    for row in range(rows):
        for k in range(5):
            gradient[row, k] = (x[row, k] - lse[row]).exp()
        label = int(float(wanted[row]))
        gradient[row, label] = gradient[row, label] - 1.0
        for k in range(5):
            gradient[row, k] = gradient[row, k] * (1 / count)
    gradient = backward.write(gradient, itemsize)

    loss = m.SoftmaxCrossEntropy()
    tolerance = 1e-5 if itemsize == 4 else 2e-3
    assert loss.forward(logits, labels).loss == pytest.approx(float(total) / count, rel=tolerance)
    np.testing.assert_allclose(loss.backward().reshape(rows, 5), gradient, rtol=tolerance, atol=tolerance)
    cost = loss.cost(shape, itemsize=itemsize, label_itemsize=labels.itemsize)
    assert costs(cost) == [forward.counts, backward.counts, (0, 0)]


def network():
    graph = m.Graph()
    x = m.BatchNorm2d(3)(m.Conv2d(2, 3, 1)(graph.input((2, 2, 2))))
    return graph.output(m.Linear(12, 2, bias=False)(m.Flatten()(x)))


def test_update_cost_by_hand():
    """Weights of products 6 + 24 = 30, other parameters 3 + 3 + 3 = 9; float32 each, without the arena's padding."""
    plain = m.SGD(m.Model(network()), 0.1).cost()
    assert (plain.flop, plain.bytes) == (2 * 39, 39 * 12)  # w -= lr*g: read g and w, write w
    heavy = m.SGD(m.Model(network()), 0.1, momentum=0.9, weight_decay=1e-4, nesterov=True).cost()
    assert (heavy.flop, heavy.bytes) == (8 * 39, 39 * 20)
    exempt = m.SGD(m.Model(network()), 0.1, weight_decay=1e-4, decay_norm_and_bias=False).cost()
    assert (exempt.flop, exempt.bytes) == (2 * 39 + 2 * 30, 39 * 12)
    rounded = m.SGD(m.Model(network(), precision="bf16"), 0.1, momentum=0.9).cost()
    assert (rounded.flop, rounded.bytes) == (4 * 39, 39 * 20 + 30 * 2)
    scaled = m.SGD(m.Model(network(), precision="fp16"), 0.1, momentum=0.9).cost()
    assert (scaled.flop, scaled.bytes) == (6 * 39, 39 * 24 + 30 * 2)
    frozen = m.SGD(m.Model(network(), frozen=["conv2d.*"]), 0.1).cost()
    assert (frozen.flop, frozen.bytes) == (2 * 30, 30 * 12)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "momentum, decay, nesterov", [(0, 0, False), (0.9, 0, False), (0.9, 0.1, True), (0, 0.1, False)]
)
def test_update_cost_is_what_its_formula_does(precision, momentum, decay, nesterov, rng):
    model = m.Model(network(), precision=precision)
    optimizer = m.SGD(model, 0.1, momentum, decay, nesterov)
    x = rng.standard_normal((4, 2, 2, 2)).astype(model.precision.storage)
    loss, labels = m.SoftmaxCrossEntropy(), np.array([0, 1, 1, 0], np.int32)
    counter, expected = Counter(), {}
    for _ in range(2):  # the second with momentum
        loss.forward(model.forward(x), labels)
        model.backward(loss.backward(optimizer.loss_scale))
        counter, velocity = Counter(), optimizer.state_dict()
        scale = float(optimizer.loss_scale[0]) if optimizer.scales_loss else None
        for s in model.arena.segments:
            part = slice(s.offset, s.offset + s.size)
            weight = counter.operand(model.arena.master[part])
            old = velocity.get(f"momentum.{s.full_name}")
            copied = 2 if precision == "fp16" and s.product else 0
            expected[s.full_name] = updated(
                counter, weight, model.arena.grad[part], old, 0.1, momentum, decay, nesterov, scale, copied
            )
        optimizer.step()
    assert optimizer.skipped_steps == 0
    for name, values in expected.items():
        np.testing.assert_allclose(model.state_dict()[name].ravel(), values, rtol=1e-5, atol=1e-6)
    assert (optimizer.cost().flop, optimizer.cost().bytes) == counter.counts


def updated(counter, weight, grad, old, lr, momentum, decay, nesterov, scale, copied):
    """One parameter after a step, as `m.SGD` documents it."""
    gradient, new, moved = counter.operand(grad), [], []
    if scale is not None:
        tested = counter.operand(grad)
        assert all(tested[i].masked(1.0).value < math.inf for i in range(weight.shape[0]))
    buffer = counter.operand(old.ravel()) if old is not None else None
    for i in range(weight.shape[0]):
        g, w = gradient[i], weight[i]
        g = g * (1 / scale) if scale is not None else g
        g = g + w * decay if decay else g
        if buffer is not None:
            moved.append(buffer[i] * momentum + g)
            g = g + moved[-1] * momentum if nesterov else moved[-1]
        new.append(w - g * lr)
    counter.write(moved)
    if copied:
        counter.write(new, copied)
    return counter.write(new)


@pytest.mark.parametrize(
    "make, flop, moved",
    [(lambda model: m.AdamW(model), 16, 28), (lambda model: m.LAMB(model), 27, 40),
     (lambda model: m.LARS(model, 0.1), 11, 28)],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adaptive_update_cost_by_hand(make, flop, moved, precision):
    """28 bytes of AdamW: weight, two moments read and written, the gradient. Products read a rounded copy in bf16."""
    model = m.Model(models.mlp(3, (4, 4, 2), (5,)), precision=precision)
    n, products = model.num_parameters, 32 * 5 + 5 * 3
    copies = 2 * products if precision == "bf16" else 0
    assert make(model).cost() == PassCost(flop * n, moved * n + copies)


def test_smoothing_costs_three_operations_more():
    plain, smoothed = m.SoftmaxCrossEntropy().cost((8, 10)), m.SoftmaxCrossEntropy(label_smoothing=0.1).cost((8, 10))
    assert (smoothed.forward - plain.forward, smoothed.backward_data - plain.backward_data) == (
        PassCost(2 * 80), PassCost(80)
    )  # fmt: skip
