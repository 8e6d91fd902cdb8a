"""Adaptive optimizers, clipping of gradients and averages of weights, on flat arenas."""

from __future__ import annotations

import numpy as np

from minidl.cpu import _adaptive
from minidl.cpu.array import Array, copy_into
from minidl.precision import float32
from minidl.scalars import BETA1, BETA2, CORRECTION1, CORRECTION2, LOSS_SCALE, LR, MOMENTUM, NONFINITE, STEP, TRUST

_CHUNK = 64  # elements of an arena that share a segment


def adam_advance(control: Array, record: Array) -> None:
    """Before an update: count the step and set its corrections, unless ``control`` says nonfinite.

    Args:
        record: (8,) float32 [beta1, beta2, eps, step, 1 - beta1^step, 1 - beta2^step, trust coefficient, 0].
    """
    if control[NONFINITE] == 0:
        record[STEP] += 1
        for beta, correction in ((BETA1, CORRECTION1), (BETA2, CORRECTION2)):
            record[correction] = 1 - float(record[beta]) ** float(record[STEP])


def adamw_update(
    master: Array, grad: Array, first: Array, second: Array, working: Array | None, segment_of: Array, segments: Array,
    control: Array, record: Array,
) -> None:  # fmt: skip
    """One step of AdamW in place; nothing changes when ``control`` says nonfinite.

    Args:
        master, grad, first, second: (n,) float32 slices of arenas, n a multiple of 64.
        working: (n,) in the storage dtype, receives the rounded master; may be None.
        segment_of: (n / 64,) int32; segments: (S, 4) float32 rows [lr_scale, weight_decay, momentum_scale, trust].
        control, record: see `sgd_update` and `adam_advance`.
    """
    _check(master, segment_of, grad, first, second, working)
    if control[NONFINITE] == 0:
        _adaptive.adamw(master, grad, first, second, segment_of, segments, control[LR], 1 / control[LOSS_SCALE], record)
        _round(master, working)


def segment_norms(master: Array, grad: Array, bounds: Array, control: Array) -> Array:
    """(S, 2) float32: the norms of the weights and of the gradients, without the loss scale, of S segments.

    Args:
        master, grad: (n,) float32 slices of arenas that hold just these segments.
        bounds: (S + 1,) int32, the chunks of 64 elements of the arena at which the segments begin, and the end.
    """
    chunks = [np.square(x.reshape(-1, _CHUNK)).sum(axis=1) for x in (master, grad)]
    norms = _norms(np.stack(chunks, axis=1), bounds)
    norms[:, 1] /= control[LOSS_SCALE]
    return norms


def _norms(squares: Array, bounds: Array) -> Array:
    """Square roots of the sums of ``squares`` (chunks, 2) over the chunks of each segment."""
    if len(bounds) == 1:
        return np.zeros((0, 2), float32)
    total = np.add.reduceat(squares.astype(np.float64), bounds[:-1] - bounds[0], axis=0)
    return np.sqrt(total).astype(float32)


def lars_update(
    master: Array, grad: Array, momentum: Array, working: Array | None, segment_of: Array, segments: Array,
    norms: Array, control: Array, record: Array,
) -> None:  # fmt: skip
    """One step of LARS in place: ``buf = momentum * buf + trust * (g + decay * w)``, ``w -= lr * buf``.

    Args:
        norms: (S, 2) of `segment_norms`, a row for each of ``segments``.
        others: as `adamw_update`.
    """
    _check(master, segment_of, grad, momentum, working)
    if control[NONFINITE] == 0:
        w, g = norms.T
        trust = _trust(segments, w, g, record[TRUST] * w, g + segments[:, 1] * w)
        rates = control[LR], control[MOMENTUM], 1 / control[LOSS_SCALE]
        _adaptive.lars(master, grad, momentum, segment_of, segments, trust, *rates)
        _round(master, working)


def lamb_moments(
    master: Array, grad: Array, first: Array, second: Array, segment_of: Array, segments: Array, bounds: Array,
    control: Array, record: Array,
) -> Array:  # fmt: skip
    """The first half of a step of LAMB: moments in place; (S, 2) float32, the norms of weights and of directions.

    Args:
        bounds: as `segment_norms`.
        others: as `adamw_update`.
    """
    _check(master, segment_of, grad, first, second)
    squares = np.zeros((segment_of.size, 2), float32)
    if control[NONFINITE] == 0:
        unscale = 1 / control[LOSS_SCALE]
        _adaptive.lamb_moments(master, grad, first, second, segment_of, segments, unscale, record, squares)
    return _norms(squares, bounds)


def lamb_update(
    master: Array, first: Array, second: Array, working: Array | None, segment_of: Array, segments: Array, norms: Array,
    control: Array, record: Array,
) -> None:  # fmt: skip
    """The second half of a step of LAMB: ``w -= lr * |w| / |u| * u``, norms as `lamb_moments` gave them."""
    _check(master, segment_of, first, second, working)
    if control[NONFINITE] == 0:
        trust = _trust(segments, *norms.T, *norms.T)
        _adaptive.lamb(master, first, second, segment_of, segments, trust, control[LR], record)
        _round(master, working)


def clip_values(grad: Array, limit: float, control: Array) -> None:
    """Bound every gradient by ±``limit``, times the loss scale of ``control``, in place; NaN stays."""
    most = np.float32(limit) * control[LOSS_SCALE]
    np.clip(grad, -most, most, out=grad)


def gradient_square(grad: Array) -> Array:
    """(1,) float64: the sum of squares of ``grad`` (n,) float32, n a multiple of 64."""
    return np.array([np.square(grad.reshape(-1, _CHUNK)).sum(axis=1).sum(dtype=np.float64)])


def clip_norm(grad: Array, square: Array, limit: float, control: Array) -> None:
    """Scale ``grad`` in place so that its norm is at most ``limit``, times the loss scale of ``control``.

    Args:
        square: (1,) float64, the sum of squares that counts: of `gradient_square`, or of several arenas together; where
            it is NaN, nothing changes: what lies between the parameters, and no pass writes again, would stay NaN.
    """
    norm, most = np.float32(np.sqrt(square[0])), np.float32(limit) * control[LOSS_SCALE]
    if norm > most:
        grad *= most / norm


def blend(average: Array, x: Array, keep: float) -> None:
    """``average = keep * average + (1 - keep) * x`` in place, (n,) float32, n a multiple of 64."""
    average -= x
    average *= np.float32(keep)
    average += x


def _check(master: Array, segment_of: Array, *arenas: Array | None) -> None:
    assert master.size % _CHUNK == 0 and segment_of.size * _CHUNK == master.size, (master.shape, segment_of.shape)
    assert all(a is None or a.shape == master.shape for a in arenas), "arena slices differ in length"


def _round(master: Array, working: Array | None) -> None:
    if working is not None:
        copy_into(working, master)


def _trust(segments: Array, weight: Array, other: Array, above: Array, below: Array) -> Array:
    """``above / below`` for each segment to which trust applies and whose norms are positive, else 1."""
    applies = (segments[:, 3] != 0) & (weight > 0) & (other > 0)
    return np.divide(above, below, out=np.ones(len(segments), float32), where=applies)
