"""What a layer's constructor takes: told by `describe`, and how parameters begin."""

from __future__ import annotations

import inspect
from functools import partial

import numpy as np
import pytest

import minidl as m
from minidl.initializers import constant

# Of each kind a layer, and another value for each of its constructor's arguments, but how its parameters begin.
DESCRIBED = [
    (m.Conv2d, (4, 6, 3), {"in_channels": 2, "out_channels": 4, "kernel_size": 2, "stride": 2, "padding": 1,
                           "dilation": 2, "groups": 2, "bias": False}),
    (m.ConvTranspose2d, (4, 6, 3, 2), {"in_channels": 2, "out_channels": 4, "kernel_size": 2, "stride": 3, "padding": 1,
                                       "output_padding": 1, "dilation": 2, "groups": 2, "bias": False}),
    (m.layers.ChannelParallelConv2d, (4, 6, 3), {"in_channels": 2, "out_channels": 4, "kernel_size": 2, "stride": 2,
                                                 "padding": 1, "dilation": 2, "bias": False}),
    (m.Linear, (4, 6), {"in_features": 2, "out_features": 4, "bias": False}),
    (m.BatchNorm2d, (4,), {"num_features": 2, "eps": 1e-3, "momentum": 0.2, "affine": False, "sync": True}),
    (m.GroupNorm, (2, 4), {"num_groups": 4, "num_channels": 6, "eps": 1e-3, "affine": False}),
    (m.LayerNorm, (4,), {"normalized_shape": 2, "eps": 1e-3, "elementwise_affine": False}),
    (m.MaxPool2d, (3,), {"kernel_size": 2, "stride": 1, "padding": 1, "dilation": 2, "ceil_mode": True}),
    (m.AvgPool2d, (3,), {"kernel_size": 2, "stride": 1, "padding": 1, "ceil_mode": True, "count_include_pad": False}),
    (m.AdaptiveAvgPool2d, (1,), {"output_size": 2}),
    (m.Upsample, (None, 2), {"scale_factor": 3, "mode": "bilinear"}),
    (m.Upsample, (4, None, "bilinear"), {"size": 5, "align_corners": True}),
    (m.Pad, (1,), {"padding": 2, "value": 1.0}),
    (m.Dropout, (), {"p": 0.1}),
    (m.StochasticDepth, (0.5,), {"p": 0.1}),
    (m.LeakyReLU, (), {"negative_slope": 0.1}),
    (m.GELU, (), {"approximate": "tanh"}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "args", "others"), DESCRIBED, ids=lambda value: getattr(value, "__name__", ""))
def test_layers_that_describe_themselves_alike_do_the_same(kind, args, others):
    """By it a table of times knows which layers it has timed already."""
    given = inspect.signature(kind).bind(*args).arguments
    words = [kind(*args).describe(), *(kind(**{**given, name: value}).describe() for name, value in others.items())]
    assert len(set(words)) == len(words), words
    beginnings = {"name", "weight_init", "bias_init", "group"}
    same = [d for k, _, d in DESCRIBED if k is kind]
    assert {*inspect.signature(kind).parameters} - beginnings == {name for d in same for name in d}


def test_every_layer_with_arguments_is_among_them():
    kinds = {getattr(m.layers, name) for name in m.layers.__all__}
    takes = {k for k in kinds if inspect.isclass(k) and {*inspect.signature(k).parameters} - {"unknown", "name"}}
    assert takes - {m.layers.RowParallelConv2d} == {kind for kind, _, _ in DESCRIBED}


BEGINNING = pytest.mark.parametrize(
    "make",
    [
        partial(m.Conv2d, 4, 6, 3), partial(m.ConvTranspose2d, 4, 6, 3), partial(m.Linear, 4, 6),
        partial(m.BatchNorm2d, 6), partial(m.GroupNorm, 2, 6), partial(m.LayerNorm, 6),
    ],
)  # fmt: skip


@BEGINNING
def test_parameters_begin_as_they_are_told(make):
    names = {"weight_init", "bias_init"} & {*inspect.signature(make.func).parameters}
    state = make(**{name: constant(3.0) for name in names}).state_dict()
    assert all((state[name.removesuffix("_init")] == 3).all() for name in names)
    assert len(names) == (2 if make.func in (m.Conv2d, m.ConvTranspose2d, m.Linear) else 1)


@BEGINNING
@pytest.mark.parametrize("given", [np.ones((6, 4), np.float32), "zeros"])
def test_arrays_are_no_beginnings(make, given):
    with pytest.raises(TypeError, match=r"weight: initializer must be a function .*.*load_state_dict takes arrays$"):
        make(weight_init=given).state_dict()
