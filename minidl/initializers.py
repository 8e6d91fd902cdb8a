"""Starting weights: host arrays drawn from a generator keyed by seed and name, so that all ranks and devices agree."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from math import prod, sqrt

import numpy as np

Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def generator(seed: int, name: str) -> np.random.Generator:
    """The generator of one parameter: a function of the run's seed and the parameter's full name only."""
    return np.random.Generator(np.random.Philox(key=[seed, zlib.crc32(name.encode())]))


def _fan_in(shape: tuple[int, ...]) -> int:
    """Terms summed into one output: filters are (out, ..., in), so everything but the first axis."""
    return max(prod(shape[1:]), 1)


def constant(value: float) -> Initializer:
    """Every element is ``value``."""
    return lambda rng, shape: np.full(shape, value, np.float32)


zeros: Initializer = constant(0.0)
ones: Initializer = constant(1.0)


def kaiming_uniform(a: float = sqrt(5.0)) -> Initializer:
    """Uniform in ±sqrt(6 / ((1 + a²) fan_in)) (He et al. 2015); the default ``a`` is that of torch.nn's layers."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        bound = sqrt(6.0 / ((1.0 + a * a) * _fan_in(shape)))
        return rng.uniform(-bound, bound, shape).astype(np.float32)

    return draw


def kaiming_normal(fan: str = "out") -> Initializer:
    """Normal with variance 2 / fan (He et al. 2015); ``fan`` is ``"in"`` or ``"out"``, as in torchvision's ResNets."""

    def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        terms = _fan_in(shape) if fan == "in" else shape[0] * prod(shape[1:-1])
        return (rng.standard_normal(shape) * sqrt(2.0 / terms)).astype(np.float32)

    return draw


def uniform_fan_in(terms: int) -> Initializer:
    """Uniform in ±1/sqrt(terms): torch.nn's rule for biases, where ``terms`` is the fan-in of the weight."""
    bound = 1.0 / sqrt(max(terms, 1))
    return lambda rng, shape: rng.uniform(-bound, bound, shape).astype(np.float32)
