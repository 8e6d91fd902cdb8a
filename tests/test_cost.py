"""FLOP and bytes of every layer: by hand, and of convolutions by the windows of the definition."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest

import minidl as m
from minidl.profile import Cost, PassCost
from minidl.profile.cost import covered, gradient_sum
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
    # Options. One window of 3x3 in two is beyond the image's edge: all are counted, 20 + 5 pixels of 2 channels.
    "max pool beyond the edge": (
        m.MaxPool2d((2, 3), (1, 2), (1, 0), ceil_mode=True), (1, 4, 6, 1), 2,
        [(6 * 15, 2 * (24 + 15) + 15), (15, 2 * (24 + 15) + 15), (0, 0)],
    ),
    # Windows at 0 and 3, taps 0 and 2 of each: 4 of 7 rows and 4 of 8 columns are read.
    "max pool that leaves pixels out": (
        m.MaxPool2d(2, 3, dilation=2), (2, 7, 8, 1), 4, [(32, 4 * (32 + 8) + 8), (8, 4 * (112 + 8) + 8), (0, 0)],
    ),
    # 289 taps: an index of two bytes.
    "large max pool": (
        m.MaxPool2d(17, 1), (1, 18, 17, 1), 4, [(578, 4 * (306 + 2) + 4), (2, 4 * (306 + 2) + 4), (0, 0)],
    ),
    "average pool beyond the edge": (
        m.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 6, 4, 1), 4,
        [(12 * 10, 4 * (24 + 12)), (12 * 10, 4 * (24 + 12)), (0, 0)],
    ),
    "average pool that leaves pixels out": (
        m.AvgPool2d(1, 3), (1, 7, 5, 2), 4, [(12 * 2, 4 * (12 + 12)), (12 * 2, 4 * (12 + 70)), (0, 0)],
    ),
    # Rows 0-1, 1-3, 3-5, 5-6: 10 of bins that overlap; columns 0, 0-1, 1, 1-2, 2: 7. Both channels.
    "bins that overlap": (
        m.AdaptiveAvgPool2d((4, 5)), (1, 7, 3, 2), 4,
        [(2 * 10 * 7 + 40, 4 * (42 + 40)), (2 * 10 * 7 + 40, 4 * (42 + 40)), (0, 0)],
    ),
    "GELU by tanh": (m.GELU("tanh"), (2, 3, 5), 4, [(300, 240), (510, 360), (0, 0)]),
    "batch norm without parameters": (
        m.BatchNorm2d(5, affine=False), (6, 5), 4,
        [(6 * 30, 3 * 120 + 6 * 20), (5 * 30, 3 * 120 + 4 * 20), (4 * 30, 2 * 120 + 4 * 20)],
    ),
    "group norm without parameters": (
        m.GroupNorm(3, 6, affine=False), (3, 6), 4,
        [(6 * 18, 3 * 72 + 72), (5 * 18, 3 * 72 + 144), (4 * 18, 2 * 72 + 144)],
    ),
    "layer norm without parameters": (
        m.LayerNorm(4, elementwise_affine=False), (3, 4), 4, [(6 * 12, 2 * 48 + 24), (9 * 12, 3 * 48 + 24), (0, 0)],
    ),
    # Rows 0 and 2 of five, columns 0, 1 and 2 of four: one of each output's, of which there are six.
    "upsample that leaves pixels out": (
        m.Upsample(size=(2, 3)), (1, 5, 4, 1), 4, [(0, 4 * (6 + 6)), (6, 4 * (20 + 6)), (0, 0)],
    ),
    # Rows 0, 3 and 6 with those behind them: 6 of 7; columns 0 and 4: 3 of 5 with the one behind the first.
    "upsample between corners": (
        m.Upsample(size=(3, 2), mode="bilinear", align_corners=True), (1, 7, 5, 1), 2,
        [(8 * 6, 2 * (15 + 6)), (8 * 6, 2 * (35 + 6)), (0, 0)],
    ),
    # A column cut off, two added; two rows and one cut off: 2x3 of 5x4 are left, 2x5 are written.
    "pad that cuts": (m.Pad((-1, 2, -2, -1)), (1, 5, 4, 2), 4, [(0, 4 * (12 + 20)), (0, 4 * (12 + 40)), (0, 0)]),
    "pad that cuts all columns": (m.Pad((4, -3, 0, 0)), (1, 5, 2, 1), 4, [(0, 4 * 15), (0, 4 * 10), (0, 0)]),
    "pad that cuts all rows": (m.Pad((0, 0, -6, 8)), (1, 5, 2, 1), 4, [(0, 4 * 14), (0, 4 * 10), (0, 0)]),
}  # fmt: skip


def costs(cost):
    """(FLOP, bytes) of the three passes."""
    return [(p.flop, p.bytes) for p in (cost.forward, cost.backward_data, cost.backward_weight)]


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


def test_every_layer_is_computed_by_hand():
    every = {getattr(m.layers, name) for name in m.layers.__all__}
    assert {type(layer) for layer, *_ in BY_HAND.values()} | {m.Add, m.Mul, m.Concat} == every


@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_evaluation_mode_is_one_multiply_per_gradient(affine):
    layer, shape, n, vector = m.BatchNorm2d(3, affine=affine), (2, 3, 2, 3), 36, 12
    layer.training = False
    expected = [(3 * n, 8 * n + 6 * vector), (n, 8 * n + 2 * vector), (4 * n, 8 * n + 4 * vector)]
    if not affine:
        expected = [(2 * n, 8 * n + 4 * vector), (n, 8 * n + vector), (0, 0)]
    assert costs(layer.cost(shape)) == expected


@pytest.mark.parametrize("kind", [m.Dropout, m.StochasticDepth])
def test_dropout_costs_nothing_in_evaluation(kind, rng):
    layer, x = kind(0.4), rng.standard_normal((3, 5, 2)).astype(np.float32)
    layer.training = False
    assert layer.cost(x.shape) == kind(0.0).cost(x.shape) == Cost()
    assert layer.forward(x) is x, "nothing is computed"


@pytest.mark.parametrize("kind", [m.Add, m.Concat])
def test_gradients_of_sums_and_concatenations_are_views(kind, rng):
    parts = rng.standard_normal((2, 2, 2, 3, 2)).astype(np.float32)
    dy = kind()
    y = dy.forward(*parts)
    assert all(np.shares_memory(part, y) for part in dy.backward(y))


def test_flatten_is_a_view(rng):
    layer, x = m.Flatten(), rng.standard_normal((2, 3, 2, 2)).astype(np.float32)
    y = layer.forward(x)
    assert np.shares_memory(x, y) and np.shares_memory(y, layer.backward(y)) and layer.cost(x.shape) == Cost()


# -- windows --------------------------------------------------------------------------------------------------------

WINDOWS = [
    (m.Conv2d(2, 3, 3, padding=1), (2, 4, 5, 2)),
    (m.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(0, 2), bias=False), (1, 5, 4, 2)),
    (m.Conv2d(4, 6, 2, dilation=(2, 3), groups=2), (1, 6, 7, 4)),
    (m.Conv2d(3, 3, 3, stride=2, padding=1, groups=3, bias=False), (1, 5, 5, 3)),
    (m.Conv2d(3, 2, 1, stride=2), (2, 5, 4, 3)),
    (m.Conv2d(1, 2, 2, stride=3, padding=3), (1, 4, 7, 1)),
    (m.layers.RowParallelConv2d(2, 3, 3, padding=1, height=4), (2, 4, 5, 2)),
    (m.layers.ChannelParallelConv2d(2, 3, 3, padding=1), (2, 4, 5, 2)),
    (m.ConvTranspose2d(3, 2, 2, stride=2), (1, 3, 2, 3)),
    (m.ConvTranspose2d(2, 3, 3, stride=2, padding=1, output_padding=1, bias=False), (1, 3, 3, 2)),
    (m.ConvTranspose2d(2, 3, 1, stride=3, output_padding=2, bias=False), (2, 2, 3, 2)),
    (m.ConvTranspose2d(2, 3, 1, stride=3, output_padding=2), (2, 2, 3, 2)),
    (m.ConvTranspose2d(4, 6, (3, 2), padding=(2, 0), groups=2, dilation=2), (1, 4, 3, 4)),
]


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize(
    "layer, shape", WINDOWS, ids=[f"{type(layer).__name__}{i}" for i, (layer, _) in enumerate(WINDOWS)]
)
def test_windows_count_whole_and_pixels_that_none_covers_are_not_read(layer, shape, itemsize):
    """Of a transposed convolution windows are where the input is, and the output is what they lie over."""
    out, turned = layer.output_shape(shape), isinstance(layer, m.ConvTranspose2d)
    image, windows = (out, shape) if turned else (shape, out)
    under = set()
    for places in product(*(range(n) for n in (*windows[1:3], *layer.kernel_size))):
        place, tap = places[:2], places[2:]
        axes = zip(place, tap, layer.stride, layer.padding, layer.dilation, strict=True)
        under.add(tuple(p * s - pad + t * d for p, t, s, pad, d in axes))
    seen = sum(0 <= h < image[1] and 0 <= w < image[2] for h, w in under) * image[0] * image[3]
    w = prod(layer.kernel_size) * shape[3] * out[3] // layer.groups
    product_flop, biased = 2 * prod(windows[:3]) * w, len(layer.specs) == 2
    bias = (prod(out), 4 * out[3]) if biased else (0, 0)
    x, y = (prod(shape), seen) if turned else (seen, prod(out))
    moved = [
        (prod(out) + w + x) * itemsize + bias[1],
        (prod(shape) + w + y) * itemsize,
        (x + (prod(out) if biased else y)) * itemsize + 4 * w + bias[1],
    ]
    flop = product_flop + bias[0], product_flop, product_flop + bias[0]
    assert costs(layer.cost(shape, itemsize=itemsize)) == list(zip(flop, moved, strict=True))


def test_covered_counts_pixels_under_windows():
    assert covered((5, 4), (3, 2), (1, 1), (2, 2), (0, 0), (1, 1)) == 3 * 2
    assert covered((5, 4), (3, 2), (3, 3), (2, 2), (1, 1), (1, 1)) == 5 * 4
    assert covered((7, 1), (2, 1), (2, 1), (1, 1), (0, 0), (3, 1)) == 4  # taps 0, 3 and 1, 4
    assert covered((3, 3), (1, 1), (1, 1), (1, 1), (2, 2), (1, 1)) == 0  # on the padding alone
