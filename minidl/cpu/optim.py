"""Optimizer updates on flat arenas, steered by a control record that lives beside them.

``control`` is (8,) float32: ``[lr, momentum, loss_scale, nonfinite, good_steps, skipped_steps, growth_interval, 0]``.
"""

from __future__ import annotations

import numpy as np

from minidl import checks
from minidl.cpu import _optim
from minidl.cpu.array import Array, copy_into
from minidl.precision import float32
from minidl.scalars import GOOD_STEPS, GROWTH_INTERVAL, LOSS_SCALE, LR, MOMENTUM, NONFINITE, SKIPPED_STEPS

_CHUNK = 64  # elements of an arena that share a segment
_LARGEST_SCALE = 2.0**24


def sgd_update(
    master: Array, grad: Array | None, momentum: Array | None, working: Array | None, segment_of: Array,
    segments: Array, control: Array, *, nesterov: bool,
) -> None:  # fmt: skip
    """One step of stochastic gradient descent in place; nothing changes when ``control`` says nonfinite.

    ``g = grad / loss_scale + weight_decay * w``; ``buf = (momentum * buf + weight_decay * w) + grad / loss_scale``;
    ``d = g + momentum * buf`` (nesterov), ``buf``, or ``g`` (without momentum); ``w -= lr * lr_scale * d``.

    Args:
        master, grad, momentum: (n,) float32 slices of arenas, n a multiple of 64; momentum may be None. Where grad is,
            `sgd_begin` came before, the momentum holds the gradient already, and is only read.
        working: (n,) in the storage dtype, receives the rounded master; may be None.
        segment_of: (n / 64,) int32, the row of ``segments`` for each 64 elements.
        segments: (S, 4) float32 rows ``[lr_scale, weight_decay, momentum_scale, 0]``; the third scales momentum.
        control: (8,) float32 in the order of `minidl.scalars`; read only here.
    """
    assert master.size % _CHUNK == 0 and segment_of.size * _CHUNK == master.size, (master.shape, segment_of.shape)
    assert all(a is None or a.shape == master.shape for a in (grad, momentum, working)), "arena slices differ in length"
    if grad is None and (momentum is None or nesterov):
        raise checks.bad_value("sgd_update", "grad", "an array without momentum or with nesterov", None)
    if control[NONFINITE] != 0:
        return
    same = working is not None and working.dtype == float32
    rates = control[LR], control[MOMENTUM], 1 / control[LOSS_SCALE]
    _optim.sgd(master, grad, momentum, working if same else None, segment_of, segments, *rates, nesterov)
    if working is not None and not same:
        copy_into(working, master)


def sgd_begin(master: Array, momentum: Array, segment_of: Array, segments: Array, control: Array) -> None:
    """``momentum = momentum_factor * momentum + weight_decay * master``, in place: gradients are then added to it.

    With `sgd_update` without gradients it gives the bits of `sgd_update` with them, where one sum is added to each
    element.

    Args:
        master, momentum: (n,) float32, n a multiple of 64; the second is updated.
        segment_of, segments, control: as for `sgd_update`; nonfinite is not looked at.
    """
    assert master.size % _CHUNK == 0 and segment_of.size * _CHUNK == master.size, (master.shape, segment_of.shape)
    assert momentum.shape == master.shape, (momentum.shape, master.shape)
    _optim.sgd_begin(master, momentum, segment_of, segments, control[MOMENTUM])


def find_nonfinite(grad: Array, control: Array) -> None:
    """``control[NONFINITE] = 1`` when an element of ``grad`` (n,) float32 is infinite or not a number, else 0."""
    control[NONFINITE] = _optim.any_nonfinite(grad)


def update_loss_scale(control: Array) -> None:
    """After a step: halve the loss scale if it overflowed, double it after ``growth_interval`` good steps in a row.

    P. Micikevicius et al., "Mixed precision training", ICLR 2018. The scale stays within 1 .. 2**24.
    """
    if control[NONFINITE] != 0:
        control[LOSS_SCALE] = np.maximum(control[LOSS_SCALE] * 0.5, 1.0)
        control[GOOD_STEPS] = 0.0
        control[SKIPPED_STEPS] += 1.0
        return
    control[GOOD_STEPS] += 1.0
    if control[GOOD_STEPS] >= control[GROWTH_INTERVAL]:
        control[LOSS_SCALE] = np.minimum(control[LOSS_SCALE] * 2.0, _LARGEST_SCALE)
        control[GOOD_STEPS] = 0.0
