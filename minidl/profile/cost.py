"""Least work of a layer's passes: model FLOP and least bytes, the batch included, whatever algorithm computes them.

FLOP are the arithmetic operations of the layer's formula, one each for an addition, multiplication, division,
comparison, square root, exponential, logarithm, hyperbolic tangent or error function; a multiply-add counts 2 and a
sum of M terms M.

* Windows count whole: a convolution's filter and a pool's window at every output position, taps on the padding or
  beyond the image included, as is usual; so the three products of a convolution count the same. A transposed
  convolution counts its filter at every input position, those of its taps that padding cuts off included.
* What is constant in a channel is computed once a channel and not counted, and neither is anything else of that size.
  Integers do not count: indices, labels, random numbers.

Bytes are the fewest that must pass through device memory: every element that the pass needs is read once, every
element that it makes is written once. Operands are inputs, parameters (read in the storage type by products, float32
otherwise), buffers, gradients (of parameters: float32) and what the forward pass keeps for the backward pass beyond its
input and output; single numbers do not count. An element of the input that no window covers (strides beyond the
kernel, cropping) is not read; input gradients are written whole.

Some things take two steps, of which the second needs the end of the first, so that their operand is read twice: batch
normalisation in training and group normalisation (statistics, then normalising), and an update with loss scaling (test,
then update); a row of a softmax or a layer norm is kept and read once. An operand
that stays in the cache between them, or from one pass to the next, can beat these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

PASSES = ("forward", "backward_data", "backward_weight")


@dataclass(frozen=True)
class PassCost:
    """One pass: floating-point operations and the fewest bytes it must move through device memory."""

    flop: int = 0
    bytes: int = 0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP per byte; 0 for a pass that moves nothing."""
        return self.flop / self.bytes if self.bytes else 0.0

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(self.flop + other.flop, self.bytes + other.bytes)

    def __sub__(self, other: PassCost) -> PassCost:
        return PassCost(self.flop - other.flop, self.bytes - other.bytes)


@dataclass(frozen=True)
class Cost:
    """The three passes of a layer."""

    forward: PassCost = field(default_factory=PassCost)
    backward_data: PassCost = field(default_factory=PassCost)
    backward_weight: PassCost = field(default_factory=PassCost)

    @property
    def total(self) -> PassCost:
        return self.forward + self.backward_data + self.backward_weight


def gradient_sum(backward_data: PassCost, elements: int, itemsize: int) -> PassCost:
    """``backward_data`` plus the work of adding the gradient of another reader of the same input (a fan-out).

    It is one operand more for the pass that makes an input gradient of ``elements``; where that is a view of ``dy`` and
    the pass does nothing, both must be read and their sum written.
    """
    arrays = 1 if backward_data.bytes else 3
    return backward_data + PassCost(elements, arrays * elements * itemsize)


def covered(
    sizes: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> int:
    """How many pixels of an image of ``sizes`` (height, width) lie under any of its ``out`` windows."""
    pixels = 1
    for size, windows, k, s, p, d in zip(sizes, out, kernel, stride, padding, dilation, strict=True):
        touched = {window * s - p + tap * d for window in range(windows) for tap in range(k)}
        pixels *= sum(0 <= at < size for at in touched)
    return pixels
