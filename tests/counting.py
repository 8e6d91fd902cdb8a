"""Counts what a formula does while plain Python computes it, element by element: the slow reference of `cost`.

A `Number` counts every operation on it; an `Operand` counts the distinct elements that are read from it. What is
constant in a channel is computed on plain floats, which count nothing (see `minidl.profile.cost`).
"""

from __future__ import annotations

import math

import numpy as np


class Counter:
    """FLOP and bytes of one pass."""

    def __init__(self):
        self.flop = self.bytes = 0

    def operand(self, array, itemsize=4):
        return Operand(self, np.asarray(array), itemsize)

    def zero(self):
        return Number(self, 0.0)

    def write(self, values, itemsize=4):
        """``values`` (an object array of numbers, or floats) as a result in memory."""
        values = np.asarray(values)
        self.bytes += values.size * itemsize
        return np.array([float(v) for v in values.ravel()]).reshape(values.shape)

    @property
    def counts(self):
        return self.flop, self.bytes


class Operand:
    """An array of which each element's first reading counts."""

    def __init__(self, counter, array, itemsize):
        self.counter, self.array, self.itemsize, self.read = counter, array, itemsize, set()
        self.shape = array.shape

    def __getitem__(self, at):
        at = at if isinstance(at, tuple) else (at,)
        assert len(at) == self.array.ndim and all(0 <= i < n for i, n in zip(at, self.shape, strict=True)), at
        if at not in self.read:
            self.read.add(at)
            self.counter.bytes += self.itemsize
        return Number(self.counter, float(self.array[at]))

    def padded(self, at):
        """The element at (n, h, w, c), or the zero around the image, which is not in memory."""
        inside = 0 <= at[1] < self.shape[1] and 0 <= at[2] < self.shape[2]
        return self[at] if inside else self.counter.zero()

    def vector(self):
        """All elements as plain floats: read once, their operations once a channel and not counted."""
        return [float(self[i]) for i in range(self.shape[0])]


def _counted(operation):
    def method(self, other=0.0):
        self.counter.flop += 1
        return Number(self.counter, operation(self.value, float(other)))

    return method


class Number:
    """A float that counts: one for each operation."""

    def __init__(self, counter, value):
        self.counter, self.value = counter, value

    def __float__(self):
        return self.value

    def where(self, condition, other):
        """Itself or a float: one comparison."""
        self.counter.flop += 1
        return self if condition else Number(self.counter, other)

    __add__ = __radd__ = _counted(lambda a, b: a + b)
    __mul__ = __rmul__ = _counted(lambda a, b: a * b)
    __sub__ = _counted(lambda a, b: a - b)
    maximum = _counted(max)
    masked = _counted(lambda a, b: a if b > 0 else 0.0)
    __rsub__ = _counted(lambda a, b: b - a)
    minimum = _counted(min)
    reciprocal = _counted(lambda a, _: 1 / a)
    tanh = _counted(lambda a, _: math.tanh(a))
    erf = _counted(lambda a, _: math.erf(a))
    exp = _counted(lambda a, _: math.exp(a))
    log = _counted(lambda a, _: math.log(a))


def numbers(counter, shape):
    """An object array of zeros that count."""
    values = np.empty(shape, object)
    for at in np.ndindex(*shape):
        values[at] = counter.zero()
    return values


def costs(cost):
    """(FLOP, bytes) of the three passes of a `minidl.profile.Cost`."""
    return [(p.flop, p.bytes) for p in (cost.forward, cost.backward_data, cost.backward_weight)]
