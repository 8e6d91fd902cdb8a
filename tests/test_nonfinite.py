"""The first NaN is told by layer, in the order of the backward pass, before sums spread it."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl.dist import SOLO
from minidl.nonfinite import GradientWatch
from minidl.step import EagerStep


def network():
    graph = m.Graph()
    x = graph.input((6, 6, 3))
    for i in range(3):
        x = m.ReLU(name=f"relu{i}")(m.Conv2d(3 if i == 0 else 4, 4, 3, padding=1, name=f"conv{i}")(x))
    return graph.output(m.Linear(144, 4, name="fc")(m.Flatten()(x)))


def planted(layer: str, value: float, slots: int, group_bytes: int, frozen=()):
    """What is said of a step in which the backward pass of ``layer`` makes ``value``."""
    model = m.Model(network(), group_bytes=group_bytes, frozen=frozen)
    optimizer = m.SGD(model, 0.1, 0.9)
    if slots:
        optimizer.update_in_backward(slots)
    watch = GradientWatch(model.arena)
    step = EagerStep(model, optimizer, m.SoftmaxCrossEntropy())
    batch = np.ones((2, 6, 6, 3), np.float32), np.arange(2, dtype=np.int32)
    step(*batch)
    watch.check(SOLO, 0)
    guilty = model.graph[layer].layer
    honest = guilty.backward_weight

    def spoilt(dy):
        honest(dy)
        for segment in model.arena.segments:
            if segment.layer == layer and segment.name == "bias":
                model.arena.gradient(segment.offset, segment.offset + segment.size)[-1] = value

    guilty.backward_weight = spoilt
    with np.errstate(all="ignore"):
        step(*batch)
    with pytest.raises(FloatingPointError) as error:
        watch.check(SOLO, 7)
    return str(error.value)


@pytest.mark.parametrize("slots", [0, 1, 3])
@pytest.mark.parametrize("group_bytes", [0, 1 << 20])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_layer_is_named(value, group_bytes, slots):
    for layer in ("fc", "conv2", "conv0"):
        said = planted(layer, value, slots, group_bytes)
        assert said == f"gradients of step 7 are not finite before they are summed: on rank 0: in layer {layer}"


def test_frozen_layers_have_none(cpu_ops):
    assert "in layer conv2" in planted("conv2", np.nan, 0, 0, frozen=["conv1.*"])


def test_what_a_nan_in_the_data_does_is_told_of_the_first_layer_of_the_backward_pass():
    model = m.Model(network())
    watch = GradientWatch(model.arena)
    x = np.ones((2, 6, 6, 3), np.float32)
    x[1, 2, 3, 0] = np.nan
    with np.errstate(all="ignore"):
        EagerStep(model, m.SGD(model, 0.1), m.SoftmaxCrossEntropy())(x, np.zeros(2, np.int32))
    with pytest.raises(FloatingPointError, match="in layer fc"):
        watch.check(SOLO, 0)
