"""Starting weights have the distributions that papers and torch.nn give them, and follow from seed and name alone."""

from __future__ import annotations

from math import prod, sqrt

import numpy as np
import pytest

import minidl as m
from minidl import initializers, models
from minidl.random import RandomCounter

SHAPES = {"filters": (96, 3, 5, 40), "grouped": (256, 3, 3, 16), "dense": (300, 200)}


def drawn(init, shape, seed=1):
    values = init(initializers.generator(seed, "layer.weight"), shape)
    assert values.shape == shape and values.dtype == np.float32
    return values.astype(np.float64)


def assert_uniform(values, bound):
    """Of many values: all of the interval, and its variance; five deviations of what chance makes of these."""
    assert np.abs(values).max() <= bound * (1 + 1e-6) and np.abs(values).max() > 0.99 * bound
    assert abs(values.mean()) < 5 * bound / sqrt(3 * values.size)
    assert np.mean(values**2) == pytest.approx(bound**2 / 3, rel=5 / sqrt(values.size))


def assert_normal(values, variance):
    assert abs(values.mean()) < 5 * sqrt(variance / values.size)
    assert np.mean(values**2) == pytest.approx(variance, rel=5 * sqrt(2 / values.size))
    assert np.mean(values**4) == pytest.approx(3 * variance**2, rel=5 * sqrt(96 / values.size))


@pytest.mark.parametrize("name", SHAPES)
def test_draws_have_their_distribution(name):
    shape = SHAPES[name]
    fan_in, fan_out = prod(shape[1:]), prod(shape[:-1])
    assert_uniform(drawn(initializers.kaiming_uniform(), shape), 1 / sqrt(fan_in))
    assert_uniform(drawn(initializers.kaiming_uniform(a=0.0), shape), sqrt(6 / fan_in))
    assert_normal(drawn(initializers.kaiming_normal(), shape), 2 / fan_out)
    assert_normal(drawn(initializers.kaiming_normal("in"), shape), 2 / fan_in)
    assert_uniform(drawn(initializers.uniform_fan_in(fan_in), shape), 1 / sqrt(fan_in))
    assert (drawn(initializers.constant(0.5), shape) == 0.5).all()


def test_vectors_are_a_sum_of_one_term():
    assert_uniform(drawn(initializers.kaiming_uniform(a=0.0), (4000,)), sqrt(6))
    assert_uniform(drawn(initializers.uniform_fan_in(0), (4000,)), 1.0)


# a layer, and the terms of its sums as torch.nn counts them
LAYERS = {
    "conv": (m.Conv2d(40, 500, 3), 9 * 40),
    "grouped": (m.Conv2d(40, 500, (3, 1), groups=4), 3 * 10),
    "transposed": (m.ConvTranspose2d(64, 600, 2, groups=2), 4 * 300),
    "linear": (m.Linear(200, 900), 200),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_begin_as_in_torch(name):
    layer, terms = LAYERS[name]
    for spec in layer.specs:
        assert_uniform(drawn(spec.init, spec.shape), 1 / sqrt(terms))


def test_norms_begin_as_the_identity_and_residual_networks_as_published():
    for layer in (m.BatchNorm2d(5), m.GroupNorm(1, 5), m.LayerNorm(5)):
        weight, bias = layer.specs
        assert (drawn(weight.init, weight.shape) == 1).all() and not drawn(bias.init, bias.shape).any()
    layers = {layer.name: layer for layer in models.resnet18(num_classes=3, image_shape=(32, 32, 3)).layers}
    for name in ("layer3.0.conv1", "layer4.0.downsample.0"):
        (weight,) = layers[name].specs
        assert_normal(drawn(weight.init, weight.shape), 2 / prod(weight.shape[:-1]))


def test_a_draw_is_a_function_of_seed_and_name():
    first = [initializers.generator(seed, name).random() for seed in (0, 1) for name in ("a.weight", "b.weight")]
    again = [initializers.generator(seed, name).random() for seed in (0, 1) for name in ("a.weight", "b.weight")]
    assert first == again and len(set(first)) == 4


def test_the_key_of_a_step_is_seed_step_and_first_sample_in_one_place(ops):
    random = RandomCounter(seed=(7 << 32) + 5)
    key = random.key(ops)

    def words():
        return ops.to_host(random.key(ops)).tolist()

    assert words() == [5, 7, 0, 0] and random.key(ops) is key
    random.advance(32)
    assert words() == [5, 7, 1, 32]
    random.advance(48, new_step=False)
    assert words() == [5, 7, 1, 48] and random.key(ops) is key
    random.advance(0)
    assert ops.to_host(key).tolist() == [5, 7, 1, 48], "brought up to date where somebody draws"
    with random.hold():
        assert ops.to_host(key).tolist() == [5, 7, 2, 0], "and before a capture"
        random.advance(16)
        assert words() == [5, 7, 2, 0]
    random.advance(16)
    random.write()
    assert ops.to_host(key).tolist() == [5, 7, 3, 16]
