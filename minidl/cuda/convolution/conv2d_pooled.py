"""The weight gradient of a first convolution under a batch norm, a ReLU and a max pooling, as residual networks begin.

By kernels of their own the gradient of the batch norm's input, the largest array of such a network, is written and
read once, for the one product that it is needed for. The kernel, for 16-bit types on Hopper, is in
conv2d_stem_pooled.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minidl import checks
from minidl.cuda.convolution import conv2d_stem
from minidl.cuda.convolution.channel_sum import check_sum
from minidl.cuda.convolution.conv2d import conv2d_backward_weight
from minidl.cuda.convolution.conv2d_checks import check_types
from minidl.cuda.convolution.conv2d_family import forced_family
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import current_device
from minidl.cuda.pool2d import batch_norm_max_pool2d_backward
from minidl.shapes import Pair, pool_output_size

__all__ = ["conv2d_backward_weight_pooled"]


def conv2d_backward_weight_pooled(
    dz: Any, index: Any, y: Any, moments: Any, gamma: Any, sums: Any, count: Any, x: Any, *,
    pooling: Mapping[str, Pair], stride: Pair, padding: Pair, dilation: Pair, groups: int, out: Any,
    accumulate: bool = False, tf32: int = 0,
) -> None:  # fmt: skip
    """As `minidl.cpu.conv2d.conv2d_backward_weight_pooled`; in one kernel where `conv2d_stem.makes_pooled`."""
    who = "conv2d_backward_weight_pooled"
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    conv, code = convolution(who, x.shape, out.shape, **geometry), check_types(who, y, x, "x", tf32)
    check_types(who, y, dz, "dz", tf32)
    check_sum(who, out)
    if y.shape != conv.y_shape:
        raise checks.bad_shape(who, "y", str(conv.y_shape), y.shape)
    if dz.shape != index.shape or dz.shape[::3] != y.shape[::3]:
        raise checks.bad_shape(who, "dz", f"that of index, {index.shape}, of as many images and channels", dz.shape)
    for axis in (1, 2):
        window = [pooling[name][axis - 1] for name in ("kernel", "stride", "padding", "dilation")]
        counts = [pool_output_size(y.shape[axis], *window, ceil_mode) for ceil_mode in (False, True)]
        if dz.shape[axis] not in counts:
            raise checks.bad_shape(who, "dz", f"windows of {y.shape}, {counts[0]} along axis {axis}", dz.shape)
    above = moments, gamma, sums, count
    if forced_family() in (None, "stem") and conv2d_stem.makes_pooled(conv, code, pooling, current_device()):
        conv2d_stem.backward_weight_pooled(conv, dz, index, y, above, x, out, accumulate)
    else:
        dy = batch_norm_max_pool2d_backward(dz, index, y, *above, **pooling)
        conv2d_backward_weight(dy, x, **geometry, out=out, accumulate=accumulate, tf32=tf32)
