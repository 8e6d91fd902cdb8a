"""Data gradients of few rows in TF32 on Hopper, those of fully connected layers, which take the filters as they lie.

    dx[n, c] = sum_k dy[n, k] w[k, c]

A warpgroup's products want what is summed over innermost in operands of float32. Here that is so of dy alone, and to
turn the filters takes twice the traffic of all else. The kernel of the weight gradient sums over the rows of both its
operands: with the filters for x, and dy turned, its product is this one.
"""

from __future__ import annotations

import functools
from typing import Any

from minidl.cuda.array import as_rows, contiguous, copy_into
from minidl.cuda.convolution import conv2d_weight_hopper
from minidl.cuda.convolution.conv2d_divided import divided
from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_hopper import turned
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.device import DeviceRecord


def _turned(conv: Convolution) -> Convolution:
    """The convolution whose weight gradient, of as many filters as there are rows, is the data gradient."""
    return conv._replace(images=conv.out_channels, out_channels=conv.images)


@functools.lru_cache(maxsize=4096)
def fits(conv: Convolution, code: int, choice: Choice, device: DeviceRecord) -> bool:
    """Whether a data gradient that `conv2d_hopper` could do should be done so: of few rows, no tile being asked for."""
    few = code == 0 and not choice.tile and divided(None, conv, True, code) is not None
    return few and conv2d_weight_hopper.applies(_turned(conv), code, device, 1)


def backward_data(conv: Convolution, dy: Any, w: Any, add: Any, output: Any) -> None:
    """Into ``output``, dense; with ``add``, added to that. ``w``: dense filters (K, 1, 1, C)."""
    if add is not None:
        copy_into(output, add)
    rows = turned(contiguous(dy))
    sums = output.reshape(conv.images, 1, 1, conv.channels)
    conv2d_weight_hopper.backward_weight(_turned(conv), 0, rows, as_rows(w), sums, add is not None, tf32=1)
