"""Dropout with counter-based random numbers.

N. Srivastava et al., "Dropout", JMLR 15 (2014) 1929-1958; the numbers are those of Philox4x32-10, J. K. Salmon et al.,
SC 2011.
"""

from __future__ import annotations

from math import ceil, prod

import numpy as np

from minidl.cpu import _dropout
from minidl.cpu.array import Array, empty, flat_float32, stored
from minidl.precision import float32


def dropout(x: Array, p: float, key: Array, stream: int, *, whole: bool = False) -> Array:
    """Zero each element of ``x`` (N, ...) with probability ``p`` and scale the others by ``1 / (1 - p)``.

    Element e of sample n is kept when word ``e % 4`` of the Philox counter ``(e // 4, first_sample + n, step, stream)``
    under the key ``(seed_low, seed_high)`` is at least ``ceil(p * 2**32)``. So the mask depends on the global index of
    a sample, not on how samples are spread over ranks, and the backward pass is the same function applied to ``dy``.

    Args:
        p: in [0, 1].
        key: (4,) uint32 ``[seed_low, seed_high, step, first_sample]``.
        stream: 32-bit number of the layer.
        whole: element 0 of a sample decides for all of it.
    """
    n, size = x.shape[0], prod(x.shape[1:])
    if whole:
        factor = dropout(np.ones((n, 1), float32), p, key, stream)
        kept = np.where(factor > 0, flat_float32(x).reshape(n, size), np.float32(0))
        return stored(kept * factor, x.shape, x.dtype)
    assert size <= 2**34, "a sample has more elements than its counters can number"
    scale = 1.0 / (1.0 - p) if p < 1.0 else 0.0
    y = empty((n, size), float32)
    if y.size:
        _dropout.dropout(flat_float32(x).reshape(n, size), ceil(p * 2.0**32), np.float32(scale), key, stream, y)
    return stored(y, x.shape, x.dtype)
