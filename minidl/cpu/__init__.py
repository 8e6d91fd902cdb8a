"""The CPU operation table: NumPy where one pass is enough, Cython with OpenMP where it is not.

The same names with the same signatures as :mod:`minidl.cuda`. Operations are pure: arrays and numbers in, arrays out
(or into ``out=``); they trust their callers for meaning, layers do the checking. Results do not depend on the number
of threads.
"""

from __future__ import annotations

from types import FunctionType

from minidl.cpu import openmp  # noqa: F401  (first: it decides how the runtime behaves that the others load)
from minidl.cpu.activation import activate, activate_backward, relu, relu_backward
from minidl.cpu.adaptive import (
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
from minidl.cpu.array import (
    Array,
    aside,
    assign,
    cast,
    contiguous,
    copy_into,
    empty,
    from_host,
    rejoin,
    synchronize,
    to_host,
    zeros,
)
from minidl.cpu.batch_norm import (
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
from minidl.cpu.conv2d import (
    channel_sum,
    conv2d,
    conv2d_adds_spaced,
    conv2d_backward_both,
    conv2d_backward_data,
    conv2d_backward_data_masked,
    conv2d_backward_data_summed,
    conv2d_backward_weight,
    conv2d_backward_weight_pooled,
    conv2d_join,
    conv2d_makes_both,
    conv2d_makes_join,
    conv2d_stats,
    conv2d_takes_pair,
)
from minidl.cpu.csb import csb_expand, csb_matmul, csb_pick, csb_sampled
from minidl.cpu.csb_conv2d import csb_conv2d, csb_conv2d_backward_data, csb_conv2d_backward_weight
from minidl.cpu.dropout import dropout
from minidl.cpu.gated_norm import (
    batch_norm_gate,
    batch_norm_gate_backward_apply,
    batch_norm_gate_backward_stats,
    batch_norm_gate_gradient,
    batch_norm_means,
)
from minidl.cpu.group_norm import (
    group_norm_apply,
    group_norm_backward_apply,
    group_norm_backward_stats,
    group_norm_stats,
)
from minidl.cpu.image import normalise
from minidl.cpu.join import add, concat, gate_backward, gate_gradient, mul
from minidl.cpu.layer_norm import layer_norm, layer_norm_backward_data, layer_norm_backward_weight
from minidl.cpu.loss import (
    count_labels,
    smoothed_cross_entropy,
    smoothed_cross_entropy_backward,
    softmax_cross_entropy,
    softmax_cross_entropy_backward,
)
from minidl.cpu.optim import find_nonfinite, sgd_begin, sgd_update, update_loss_scale
from minidl.cpu.pad2d import pad2d
from minidl.cpu.pointwise_loss import pointwise_loss, pointwise_loss_backward
from minidl.cpu.pool2d import (
    adaptive_avg_pool2d,
    adaptive_avg_pool2d_backward,
    avg_pool2d,
    avg_pool2d_backward,
    batch_norm_max_pool2d,
    batch_norm_max_pool2d_backward,
    batch_norm_max_tiles,
    batch_norm_max_tiles_backward_apply,
    batch_norm_max_tiles_backward_stats,
    max_pool2d,
    max_pool2d_backward,
)
from minidl.cpu.segmentation import confusion_counts, dice_backward, dice_sums
from minidl.cpu.soft_loss import soft_cross_entropy, soft_cross_entropy_backward
from minidl.cpu.softmax import softmax, softmax_backward
from minidl.cpu.transfer import from_dlpack, uploader
from minidl.cpu.upsample2d import upsample2d, upsample2d_backward

name = "cpu"

# The table is what is imported above.
__all__ = ["Array", "name", *(key for key, value in globals().items() if isinstance(value, FunctionType))]
