"""The CUDA operation table: hand-written kernels, compiled by NVRTC, launched through CuPy.

The same names with the same signatures as :mod:`minidl.cpu`, where each operation's contract stands. Importing it needs
neither a GPU nor CuPy; the first array does. Inside `minidl.cuda.launch.dry_run` the whole table runs without either.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

from minidl.cuda import array, device, prepared
from minidl.cuda.activation import activate, activate_backward, relu, relu_backward
from minidl.cuda.adaptive import (
    adam_advance,
    adamw_update,
    blend,
    clip_norm,
    clip_values,
    gradient_square,
    lamb_moments,
    lamb_update,
    lars_update,
    segment_norms,
)
from minidl.cuda.array import assign, cast, contiguous, copy_into, empty, from_host, synchronize, to_host, zeros
from minidl.cuda.beside import aside, rejoin
from minidl.cuda.convolution.conv2d import (
    channel_sum,
    conv2d,
    conv2d_adds_spaced,
    conv2d_backward_data,
    conv2d_backward_data_masked,
    conv2d_backward_data_summed,
    conv2d_backward_weight,
    conv2d_stats,
    conv2d_takes_pair,
)
from minidl.cuda.convolution.conv2d_both import conv2d_backward_both, conv2d_makes_both
from minidl.cuda.convolution.conv2d_join import conv2d_join, conv2d_makes_join
from minidl.cuda.convolution.conv2d_pooled import conv2d_backward_weight_pooled
from minidl.cuda.dropout import dropout
from minidl.cuda.image import normalise
from minidl.cuda.join import add, concat, gate_backward, gate_gradient, mul
from minidl.cuda.loss.loss import (
    count_labels,
    smoothed_cross_entropy,
    smoothed_cross_entropy_backward,
    softmax_cross_entropy,
    softmax_cross_entropy_backward,
)
from minidl.cuda.loss.pointwise_loss import pointwise_loss, pointwise_loss_backward
from minidl.cuda.loss.segmentation import confusion_counts, dice_backward, dice_sums
from minidl.cuda.loss.soft_loss import soft_cross_entropy, soft_cross_entropy_backward
from minidl.cuda.loss.softmax import softmax, softmax_backward
from minidl.cuda.norm.batch_norm import (
    batch_norm_activate,
    batch_norm_activate_backward_apply,
    batch_norm_activate_backward_stats,
    batch_norm_apply,
    batch_norm_backward_apply,
    batch_norm_backward_apply_stats,
    batch_norm_backward_stats,
    batch_norm_backward_sums,
    batch_norm_concat,
    batch_norm_eval_moments,
    batch_norm_finalize,
    batch_norm_join,
    batch_norm_join_backward_stats,
    batch_norm_merge,
    batch_norm_stats,
)
from minidl.cuda.norm.gated_norm import (
    batch_norm_gate,
    batch_norm_gate_backward_apply,
    batch_norm_gate_backward_stats,
    batch_norm_gate_gradient,
    batch_norm_means,
)
from minidl.cuda.norm.group_norm import (
    group_norm_apply,
    group_norm_backward_apply,
    group_norm_backward_stats,
    group_norm_stats,
)
from minidl.cuda.norm.layer_norm import layer_norm, layer_norm_backward_data, layer_norm_backward_weight
from minidl.cuda.norm.max_tiles import (
    batch_norm_max_tiles,
    batch_norm_max_tiles_backward_apply,
    batch_norm_max_tiles_backward_stats,
)
from minidl.cuda.optim import find_nonfinite, sgd_begin, sgd_update, update_loss_scale
from minidl.cuda.pad2d import pad2d
from minidl.cuda.pool2d import (
    adaptive_avg_pool2d,
    adaptive_avg_pool2d_backward,
    avg_pool2d,
    avg_pool2d_backward,
    batch_norm_max_pool2d,
    batch_norm_max_pool2d_backward,
    max_pool2d,
    max_pool2d_backward,
)
from minidl.cuda.sparse.csb import csb_expand, csb_matmul, csb_pick, csb_sampled
from minidl.cuda.sparse.csb_conv2d import csb_conv2d, csb_conv2d_backward_data, csb_conv2d_backward_weight
from minidl.cuda.transfer import from_dlpack, uploader
from minidl.cuda.upsample2d import upsample2d, upsample2d_backward

name = "cuda"

# The table is what is imported above.
__all__ = ["Array", "name", *(key for key, value in globals().items() if isinstance(value, FunctionType))]

# What is no work of kernels, or is told numbers that change. What a sparse product decides may lie in its arrays.
_AT_ONCE = {"assign", "empty", "from_dlpack", "from_host", "synchronize", "to_host", "uploader", "zeros"}

for _operation in __all__[2:]:
    if _operation not in _AT_ONCE and not _operation.startswith("csb_"):
        globals()[_operation] = prepared.prepared(globals()[_operation])


def require_device() -> None:
    """Return when kernels can run on the current device.

    Raises:
        ImportError: when CuPy is not installed, naming the extra that brings it.
        RuntimeError: when there is no usable GPU or driver.
    """
    device.current_device()


def __getattr__(attribute: str) -> Any:
    # Looked up anew each time: CuPy is imported only when someone asks, and a dry run answers with NumPy's class.
    if attribute == "Array":
        return array.array_type()
    raise AttributeError(f"module {__name__!r} has no attribute {attribute!r}")
