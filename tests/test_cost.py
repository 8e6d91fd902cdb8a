"""FLOP and bytes of every layer: by hand, and counted while plain Python computes the layer's formula.

The counted formulas are held to the layers' own results, so that what is counted is what the layer computes.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

import minidl as m
from minidl.profile import Cost, PassCost
from minidl.profile.cost import covered, gradient_sum
from tests.counted.values import batch_norm, elementwise, group_norm, hardswish, layer_norm, relu, softmax
from tests.counted.windows import adaptive_pool, avg_pool, convolution, linear, max_pool, pad, transposed, upsample
from tests.counting import Counter, costs, numbers
from tests.parts import Part

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
    further = m.Concat()
    further.continues = True  # the buffer of the first input
    assert costs(further.cost(shape, (2, 3, 3, 1), itemsize=4)) == [(0, 2 * 18 * 4), (0, 0), (0, 0)]
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
    (group_norm, lambda: m.GroupNorm(2, 6), (2, 2, 3, 6)),
    (group_norm, lambda: m.GroupNorm(3, 6, affine=False), (3, 6)),
    (layer_norm, lambda: m.LayerNorm(5), (2, 2, 3, 5)),
    (layer_norm, lambda: m.LayerNorm(4, elementwise_affine=False), (3, 4)),
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
