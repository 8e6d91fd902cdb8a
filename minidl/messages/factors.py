"""When the rows whose product a gradient is travel in its place: one rule, for messages sent and for those simulated.

The gradient of a fully connected layer's weights is dyᵀ·x. Ranks that give each other their rows of x and dy can each
compute the sum of all gradients ("sufficient factors": Xie et al., "Lighter-Communication Distributed Machine Learning
via Sufficient Factor Broadcasting", UAI 2016). For the first one of VGG-16 and 128 samples these are 7 MB beside 411.
"""

from __future__ import annotations

from minidl.shapes import round_up

_LEAST_BYTES = 8 << 20  # of a gradient that is worth a message to itself
_ALIGN = 64  # elements
_TIMES_FEWER = 4  # bytes, as every rank multiplies the rows of all


def most_rows(inputs: int, outputs: int, itemsize: int, sent_itemsize: int, device: str) -> int:
    """Samples, over all ranks, up to which factors travel; 0: the gradient always does.

    On a CPU, whose products are slow beside its memory, the sum of gradients takes less.

    Args:
        itemsize, sent_itemsize: bytes of an element of the factors, and of the gradient as it would be sent.
    """
    elements = inputs * outputs
    if device == "cpu" or 4 * elements < _LEAST_BYTES:
        return 0
    return elements * sent_itemsize // (_TIMES_FEWER * (inputs + outputs) * itemsize)


def pitch(inputs: int, outputs: int) -> int:
    """Elements from one sample's factors to those of the next: x, then dy, then what aligns them."""
    return round_up(inputs + outputs, _ALIGN)


def row_bytes(inputs: int, outputs: int, itemsize: int) -> int:
    """Of one sample's factors on their way."""
    return pitch(inputs, outputs) * itemsize
