"""Convolution and its two gradients on the GPU.

Shapes: x (N, H, W, C), dy (N, P, Q, K), dense or pitched; w (K, R, S, C / groups). Sums in float32, one rounding.
With ``tf32`` products of float32 arrays round their operands to TF32 (nearest, ties away from zero) on tensor cores;
with ``tf32=3`` each is three products of operands split in two, near to float32's accuracy (an infinite operand gives
NaN); without it they are exact float32 multiply-adds.

Several families of kernels share the work; the sizes, the storage type and the device say which one (conv2d_family.py),
or a table of what was measured (conv2d_tuned.py). Every result has the same bits on every run, and on every device that
runs the same family by the same table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from minidl import checks
from minidl.cuda import activation
from minidl.cuda.array import as_rows, contiguous, copy_into, empty
from minidl.cuda.convolution import (
    conv2d_choice,
    conv2d_generic,
    conv2d_grouped,
    conv2d_hopper,
    conv2d_small,
    conv2d_stem,
    conv2d_stem_lines,
    conv2d_textbook,
    conv2d_thin,
    conv2d_turned,
    conv2d_weight_hopper,
    depthwise,
)
from minidl.cuda.convolution.channel_sum import channel_sum, check_sum, sum_partials
from minidl.cuda.convolution.conv2d_checks import check_alike, check_operands, check_types
from minidl.cuda.convolution.conv2d_choice import widened
from minidl.cuda.convolution.conv2d_family import Choice, Question, forced_family, textbook
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.convolution.conv2d_tuned import chosen
from minidl.cuda.convolution.widen import narrow, widen
from minidl.cuda.device import current_device
from minidl.cuda.norm.batch_norm import batch_norm_apply, batch_norm_merge, batch_norm_stats
from minidl.cuda.norm.signs import check_signs
from minidl.cuda.rows import DTYPE, dtype_code
from minidl.precision import float32
from minidl.shapes import Pair

__all__ = [
    "channel_sum",
    "conv2d",
    "conv2d_adds_spaced",
    "conv2d_backward_data",
    "conv2d_backward_data_masked",
    "conv2d_backward_data_summed",
    "conv2d_backward_weight",
    "conv2d_stats",
]

STORAGE = {code: dtype for dtype, code in DTYPE.items()}
Norm = tuple[Any, Any, Any]  # moments, gamma, beta
_ANY_CHANNELS = ("small", "thin")  # families that read rows of any number of channels as they are


def conv2d(
    x: Any,
    w: Any,
    bias: Any | None = None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    norm: Norm | None = None,
    relu: bool = False,
    tf32: int = 0,
    packed: bool = False,
    out: Any = None,
) -> Any:
    """Cross-correlation of x (N, H, W, C) with w (K, R, S, C / groups): y (N, P, Q, K) in the dtype of x.

    Args:
        bias: (K,) float32 or None, added before the one rounding.
        stride, padding, dilation: (height, width).
        groups: output channel k sees the input channels of its own group, k // (K / groups), only.
        norm: (moments, gamma, beta) (2, C), (C,), (C,) float32, or None: the input is
            ``batch_norm_apply(x, *norm, relu=True)``, which a kernel that can do so makes as it reads ``x``; the same
            bits either way.
        relu: the result is ``relu`` of that, in the kernel where it can; the same bits either way.
        tf32: 1 or True: round float32 operands to TF32; 3: three TF32 products for each, near to float32's accuracy.
        packed: a kernel that makes the input as it reads ``x`` may do so in packed 16-bit arithmetic, relu(x*s + t)
            with s = rstd*gamma and t = beta - mean*s rounded to the dtype of x: before its one rounding off by at most
            u (|s*x| + |t|), u = 2^-8 of bfloat16, 2^-11 of float16. Only for means that are small beside deviations.
        out: where the result is to lie, dense or pitched, or None: a new array.
    """
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return _forward("conv2d", x, w, bias, geometry, norm, tf32, packed, relu=relu, out=out)[0]


def conv2d_stats(
    x: Any,
    w: Any,
    bias: Any | None = None,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    norm: Norm | None = None,
    tf32: int = 0,
    packed: bool = False,
    finish: bool = True,
    out: Any = None,
) -> tuple[Any, Any]:
    """`conv2d`, and ``batch_norm_stats`` of its result, taken on the way where the kernel can.

    The order of their sums is a function of the sizes and of the kernel's tile. Without ``finish`` they may be left as
    they come, for ``batch_norm_finalize`` or ``batch_norm_merge``.
    """
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    y, stats = _forward("conv2d_stats", x, w, bias, geometry, norm, tf32, packed, statistics=True, out=out)
    if stats is None:
        return y, batch_norm_stats(y, finish=finish)
    return y, batch_norm_merge(stats) if finish else stats


def _forward(
    who: str,
    x: Any,
    w: Any,
    bias: Any,
    geometry: dict,
    norm: Norm | None,
    tf32: int,
    packed: bool,
    statistics: bool = False,
    relu: bool = False,
    out: Any = None,
) -> tuple[Any, Any]:
    """(y, its statistics where they are asked for and the kernel takes them)"""
    conv = convolution(who, x.shape, w.shape, **geometry)
    if out is not None and not _writes_at_a_pitch(who, Question("forward", conv, dtype_code(x, who), tf32), x, out):
        y, stats = _forward(who, x, w, bias, geometry, norm, tf32, packed, statistics, relu)
        copy_into(out, y)
        return out, stats
    y = empty(conv.y_shape, x.dtype) if out is None else out
    code = check_operands(who, x, w, bias, None, y, tf32)
    if y.size == 0:
        return y, None
    question = Question("forward", conv, code, tf32)
    if norm is not None and not _normalizes(question, statistics, packed):
        x, norm = batch_norm_apply(x, *norm, relu=True), None
    if (name := textbook()) is not None:
        conv2d_textbook.forward(name, conv, x, w, bias, y)
        return _rectified(y, relu), None
    choice = _choose(who, question)
    if choice.family == "stem":
        lines = choice.tile != "registers" and conv2d_stem_lines.applies(conv, code, current_device())
        return y, (conv2d_stem_lines if lines else conv2d_stem).forward(conv, x, w, bias, y, relu, statistics)
    wide = conv if choice.family in _ANY_CHANNELS else widened(conv, code)
    if wide is not conv:
        x, w = widen(x, wide.channels), widen(w, wide.channels)
    if norm is None:
        able = choice.family in ("hopper", "thin") and not (conv.depthwise and depthwise.fits(conv, False))
        wider = question if wide is conv else question._replace(conv=wide)
        stats = _gather(wider, choice, x, w, bias, None, y, statistics, relu and able)
        return _rectified(y, relu and not able), stats
    x, w, bias = as_rows(x), contiguous(w), _given(contiguous, bias)
    if choice.family == "thin":
        conv2d_thin.gather(conv, code, tf32, False, x, w, bias, None, y, relu, norm)
        return y, None
    known = statistics and conv2d_hopper.takes_statistics(conv, code, choice)
    below = conv2d_hopper.Below(x, *norm)
    return y, conv2d_hopper.forward_fused(conv, code, x, w, bias, y, choice, known, below, packed, relu)


def _writes_at_a_pitch(who: str, question: Question, source: Any, out: Any) -> bool:
    """Whether the kernel that is chosen writes its result where ``out`` lies: the copy engine's, as far as that can."""
    conv, backward = question.conv, question.which == "backward_data"
    shape = conv.x_shape if backward else conv.y_shape
    if out.shape != shape or out.dtype != source.dtype:
        raise checks.bad_shape(who, "out", f"{source.dtype} {shape}", checks.describe(out))
    if not out.size or textbook() is not None or conv.depthwise or widened(conv, question.code) is not conv:
        return False
    choice = _choose(who, question)
    return choice.family == "hopper" and conv2d_hopper.writes(conv, question.code, backward, out, choice)


def _rectified(y: Any, relu: bool) -> Any:
    return activation.relu(y) if relu else y


def _normalizes(question: Question, statistics: bool, packed: bool) -> bool:
    """Whether the kernel that is chosen for a forward pass can normalise its input."""
    conv, code = question.conv, question.code
    if textbook() is not None or conv.depthwise:
        return False
    choice = _choose("conv2d", question)
    if choice.family == "thin":
        return not statistics and conv2d_thin.normalizes(conv, code)
    able = choice.family == "hopper" and widened(conv, code) is conv
    return able and conv2d_hopper.normalizes(conv, code, statistics, choice, packed)


def conv2d_backward_data(
    dy: Any,
    w: Any,
    x_shape: tuple[int, int, int, int],
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    bias: Any | None = None,
    add: Any | None = None,
    tf32: int = 0,
    out: Any = None,
) -> Any:
    """Gradient of `conv2d` with respect to x: dx of shape ``x_shape`` in the dtype of dy.

    Args:
        bias: (C,) float32 or None: makes this the forward pass of a transposed convolution.
        add: of shape ``x_shape`` and dy's dtype, or None: added in float32 before the one rounding. Where
            `conv2d_adds_spaced`, also of every second pixel of every second line alone.
        stride, padding, dilation, groups, tf32, out: as in `conv2d`.
    """
    who = "conv2d_backward_data"
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    question = _of_data(who, dy, w, x_shape, tf32, **geometry)
    if out is not None and not _writes_at_a_pitch(who, question, dy, out):
        copy_into(out, conv2d_backward_data(dy, w, x_shape, **geometry, bias=bias, add=add, tf32=tf32))
        return out
    dx = empty(x_shape, dy.dtype) if out is None else out
    check_operands(who, dy, w, bias, _full(question, add), dx, tf32)
    if dx.size:
        _gather(question, _choose(who, question), dy, w, bias, add, dx)
    return dx


def conv2d_backward_data_summed(
    dy: Any,
    w: Any,
    x_shape: tuple[int, int, int, int],
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    add: Any | None = None,
    mask: Any | None = None,
    tf32: int = 0,
) -> tuple[Any, Any]:
    """`conv2d_backward_data`, and on the way what the bias of the layer below is to have of it.

    Args:
        mask: of ``x_shape`` and dy's dtype, or None: the output of a ReLU whose gradient this is. The result counts
            where it is positive, else is 0; in the kernel where it can, the same bits either way.
        stride, padding, dilation, groups, add, tf32: as in `conv2d_backward_data`.

    Returns:
        dx; parts of its sums (R, C) float32, whose `channel_sum` is that of dx, or None where no kernel takes them.
    """
    who = "conv2d_backward_data_summed"
    question = _of_data(who, dy, w, x_shape, tf32, stride=stride, padding=padding, dilation=dilation, groups=groups)
    conv, dx = question.conv, empty(x_shape, dy.dtype)
    code = check_operands(who, dy, w, None, _full(question, add), dx, tf32)
    check_alike(who, dx, mask=mask)
    if not dx.size:
        return dx, None
    choice = _choose(who, question)
    together = add is None and conv.stride == (1, 1)  # else a masking kernel alone has the sums
    if _masks(question, choice) and (mask is not None or together):
        below = conv2d_hopper.NOTHING._replace(y=mask)
        arrays = as_rows(dy), contiguous(w), _given(as_rows, add), below, dx
        return dx, conv2d_hopper.masked_gradient(conv, code, *arrays, choice)
    _gather(question, choice, dy, w, None, add, dx)
    return dx if mask is None else activation.relu_backward(dx, mask), None


def _of_data(
    who: str, dy: Any, w: Any, x_shape: tuple[int, int, int, int], tf32: int, **geometry: Pair | int
) -> Question:
    conv = convolution(who, x_shape, w.shape, **geometry)
    if dy.shape != conv.y_shape:
        raise checks.bad_shape(who, "dy", str(conv.y_shape), dy.shape)
    return Question("backward_data", conv, dtype_code(dy, who), tf32)


def conv2d_adds_spaced(
    x_shape: tuple[int, int, int, int], w: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    tf32: int = 0,
) -> bool:  # fmt: skip
    """Whether the data gradient can add an array (N, ⌈H/2⌉, ⌈W/2⌉, C) to every second pixel of every second line."""
    conv = convolution("conv2d_adds_spaced", x_shape, w.shape, stride, padding, dilation, groups)
    return _adds_spaced(Question("backward_data", conv, dtype_code(w, "conv2d_adds_spaced"), tf32))


def _adds_spaced(question: Question) -> bool:
    conv, choice = question.conv, _choose("conv2d_adds_spaced", question)
    usual = question.which == "backward_data" and choice.family == "hopper" and conv.images and not conv.depthwise
    return bool(usual) and conv2d_hopper.adds_spaced(conv, question.code, choice)


def _full(question: Question, add: Any) -> Any:
    """``add`` where it has to be as large as the result; None where it is of every second pixel, and may be."""
    spaced = conv2d_hopper.is_spaced(question.conv, add) and DTYPE.get(add.dtype) == question.code
    return None if spaced and _adds_spaced(question) else add


def _masks(question: Question, choice: Choice) -> bool:
    """Whether the kernel that is chosen for a data gradient, or for that of a transposed convolution, can mask it."""
    conv, code, backward = question.conv, question.code, question.which == "backward_data"
    if choice.family != "hopper" or not code or conv.depthwise or not (backward or widened(conv, code) is conv):
        return False
    return conv2d_hopper.masks(conv, code, choice, backward)


def conv2d_takes_pair(
    x_shape: tuple[int, int, int, int], w: Any, *, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    tf32: int = 0,
) -> bool:  # fmt: skip
    """Whether `conv2d_backward_data_masked` takes sums for two batch norms."""
    who = "conv2d_takes_pair"
    conv = convolution(who, x_shape, w.shape, stride, padding, dilation, groups)
    question = Question("backward_data", conv, dtype_code(w, who), tf32)
    return bool(conv.images) and _takes_pair(question, _choose(who, question))


def _takes_pair(question: Question, choice: Choice) -> bool:
    usual = question.which == "backward_data" and _masks(question, choice)
    return usual and conv2d_hopper.takes_pair(question.conv, question.code, choice)


def conv2d_backward_data_masked(
    dy: Any, w: Any, x: Any, moments: Any, gamma: Any = None, beta: Any = None, *, y: Any = None, signs: Any = None,
    other: tuple[Any, Any] | None = None, stride: Pair, padding: Pair, dilation: Pair, groups: int,
    add: Any | None = None, transposed: bool = False, tf32: int = 0,
) -> tuple[Any, Any]:  # fmt: skip
    """`conv2d_backward_data`, and on the way what the ReLU and the batch norm below the convolution do with it.

    Args:
        x, moments, gamma, beta: of the batch norm, as of ``batch_norm_activate_backward_stats``; ``x`` as the result.
        y: the ReLU's output where it is not ``relu(batch_norm_apply(x, moments, gamma, beta))``.
        signs: of ``y`` if ``batch_norm_join`` left them: read instead of it where the kernel can.
        other: input and moments of another batch norm under the same sum; with ``signs``, where `conv2d_takes_pair`.
        transposed: the gradient of a transposed convolution instead, ``conv2d(dy, w)``; without ``add``.
        add, and the others: as in `conv2d_backward_data`.

    Returns:
        The gradient where the ReLU's output was positive, else 0, and for ``batch_norm_backward_sums`` the parts of the
        batch norm's sums, with ``other`` of both, one behind the other; or the gradient as it is and None, where no
        kernel does this on the way.
    """
    who = "conv2d_backward_data_masked"
    geometry = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    conv = convolution(who, dy.shape if transposed else x.shape, w.shape, **geometry)
    if (x if transposed else dy).shape != conv.y_shape:
        raise checks.bad_shape(who, "x" if transposed else "dy", str(conv.y_shape), (x if transposed else dy).shape)
    question = Question("forward" if transposed else "backward_data", conv, dtype_code(dy, who), tf32)
    code = check_operands(who, dy, w, None, _full(question, add), x, tf32)
    check_alike(who, x, y=y)
    if signs is not None:
        check_signs(signs, x)
    choice = _choose(who, question)
    if other is not None:
        check_alike(who, x, other=other[0])
        if signs is None or not _takes_pair(question, choice):
            raise checks.bad_value(who, "other", "None unless there are signs and conv2d_takes_pair", "a batch norm")
    if x.size and _masks(question, choice):
        dx, below = empty(x.shape, dy.dtype), conv2d_hopper.Below(x, moments, gamma, beta, y, signs, other)
        arrays = as_rows(dy), contiguous(w), _given(as_rows, add), below, dx
        return dx, conv2d_hopper.masked_gradient(conv, code, *arrays, choice, not transposed)
    if transposed:
        assert add is None, "a convolution adds nothing"
        return conv2d(dy, w, **geometry, tf32=tf32), None
    return conv2d_backward_data(dy, w, x.shape, **geometry, add=add, tf32=tf32), None


def conv2d_backward_weight(
    dy: Any,
    x: Any,
    *,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    groups: int,
    out: Any,
    accumulate: bool = False,
    norm: Norm | None = None,
    tf32: int = 0,
) -> None:
    """Gradient of `conv2d` with respect to w, into ``out`` (K, R, S, C / groups) float32: overwritten, or added to.

    The pixels are summed in chunks that depend on the sizes, and on a tuned table if there is one; the chunks in order.
    ``norm``: as in `conv2d`; the input is made on the way where that should be faster than a pass of its own.
    """
    who = "conv2d_backward_weight"
    conv = convolution(who, x.shape, out.shape, stride, padding, dilation, groups)
    code = check_types(who, dy, x, "x", tf32)
    check_sum(who, out)
    if dy.shape != conv.y_shape:
        raise checks.bad_shape(who, "dy", str(conv.y_shape), dy.shape)
    if conv.images == 0:
        sum_partials(None, 0, out, accumulate)
        return
    question = Question("backward_weight", conv, code, tf32)
    choice = _choose(who, question)
    wide = conv if choice.family in _ANY_CHANNELS else widened(conv, code)
    if norm is not None and not _weight_normalizes(question, choice):
        x, norm = batch_norm_apply(x, *norm, relu=True), None
    if choice.family == "stem":
        conv2d_stem.backward_weight(conv, dy, x, out, accumulate)
    elif wide is not conv:
        gradient = empty((*out.shape[:-1], wide.channels), float32)
        _weight(question._replace(conv=wide), choice, dy, widen(x, wide.channels), gradient, False)
        narrow(gradient, out, accumulate)
    else:
        _weight(question, choice, dy, x, out, accumulate, norm)


def _weight_normalizes(question: Question, choice: Choice) -> bool:
    """Whether the kernel that is chosen for a weight gradient should normalise its input."""
    _, conv, code, _ = question
    if choice.family == "thin":
        return conv2d_thin.normalizes(conv, code)
    able = choice.family == "hopper" and code > 0 and widened(conv, code) is conv and not conv.depthwise
    return able and conv2d_weight_hopper.normalizes(conv)


def _choose(who: str, question: Question) -> Choice:
    """The kernel that was tuned or is forced, where it can do this; else the first family that should."""
    return conv2d_choice.choice(who, question, current_device(), chosen(question), forced_family())


def _gather(
    question: Question,
    choice: Choice,
    source: Any,
    w: Any,
    bias: Any,
    add: Any,
    output: Any,
    statistics: bool = False,
    relu: bool = False,
) -> Any:
    """Both directions: gather from ``source``, multiply with the filters, add bias and ``add``, write ``output``.

    Returns the statistics of a forward pass where they are asked for and the kernel takes them. ``relu``: of a forward
    pass by the families for Hopper and for thin ones.
    """
    which, conv, code, tf32 = question
    backward = which == "backward_data"
    source, w = as_rows(source), contiguous(w)
    bias, add = _given(contiguous, bias), _given(as_rows, add)
    if conv.depthwise and depthwise.fits(conv, backward):
        return depthwise.gather(conv, code, backward, source, w, bias, add, output, statistics)
    if choice.family == "grouped":
        conv2d_grouped.gather(conv, code, backward, source, w, bias, add, output)
    elif choice.family == "small":
        conv2d_small.gather(conv, code, backward, source, w, bias, add, output)
    elif choice.family == "thin":
        conv2d_thin.gather(conv, code, tf32, backward, source, w, bias, add, output, relu)
    elif choice.family != "hopper":
        conv2d_generic.gather(conv, code, tf32, backward, source, w, bias, add, output, choice.tile)
    elif backward and bias is None and conv2d_turned.fits(conv, code, choice, current_device()):
        conv2d_turned.backward_data(conv, source, w, add, output)
    elif statistics and conv2d_hopper.takes_statistics(conv, code, choice):
        return conv2d_hopper.forward_fused(conv, code, source, w, bias, output, choice, statistics=True)
    else:
        conv2d_hopper.gather(conv, code, backward, source, w, bias, add, output, choice, relu)
    return None


def _given(kind: Callable[[Any], Any], array: Any) -> Any:
    return None if array is None else kind(array)


def _weight(
    question: Question, choice: Choice, dy: Any, x: Any, out: Any, accumulate: bool, norm: Norm | None = None
) -> None:
    _, conv, code, tf32 = question
    if conv.depthwise:
        depthwise.backward_weight(conv, code, dy, x, out, accumulate)
    elif choice.family == "grouped":
        conv2d_grouped.backward_weight(conv, code, dy, x, out, accumulate)
    elif choice.family == "small":
        conv2d_small.backward_weight(conv, code, dy, x, out, accumulate)
    elif choice.family == "thin":
        conv2d_thin.backward_weight(conv, code, tf32, dy, x, out, accumulate, norm or conv2d_thin.NOTHING)
    elif choice.family == "hopper":
        conv2d_weight_hopper.backward_weight(conv, code, dy, x, out, accumulate, choice, norm, tf32)
    else:
        conv2d_generic.backward_weight(conv, code, tf32, dy, x, out, accumulate, choice.tile)
