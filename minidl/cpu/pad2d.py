"""Padding and cropping of the two spatial axes."""

from __future__ import annotations

from minidl.cpu.array import Array, copy_into, empty


def pad2d(x: Array, padding: tuple[int, int, int, int], value: float = 0.0) -> Array:
    """``x`` (N, H, W, C) with ``padding`` = (left, right, top, bottom) pixels of ``value`` added; negative ones crop.

    The gradient is ``pad2d(dy, (-left, -right, -top, -bottom))``.
    """
    left, right, top, bottom = padding
    n, height, width, channels = x.shape
    out = empty((n, height + top + bottom, width + left + right, channels), x.dtype)
    kept_h, kept_w = _kept(height, top, bottom), _kept(width, left, right)
    inner_h, inner_w = _moved(kept_h, top), _moved(kept_w, left)
    # Only the frame is filled: the picture is written once.
    out[:, : inner_h.start] = value
    out[:, inner_h.stop :] = value
    out[:, inner_h, : inner_w.start] = value
    out[:, inner_h, inner_w.stop :] = value
    copy_into(out[:, inner_h, inner_w], x[:, kept_h, kept_w])
    return out


def _kept(size: int, before: int, after: int) -> slice:
    """The positions of an axis of the input that survive cropping."""
    first = max(-before, 0)
    return slice(first, max(size + min(after, 0), first))


def _moved(kept: slice, before: int) -> slice:
    return slice(kept.start + before, kept.stop + before)
