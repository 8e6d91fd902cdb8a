"""Layouts in which an operation may find its input: dense, a slice of channels, or any other view."""

from __future__ import annotations

import numpy as np

LAYOUTS = ["dense", "pitched", "strided"]


def place(ops, host: np.ndarray, layout: str = "dense"):
    """``host`` as an array of the table in a layout.

    "pitched" is ``wide[..., 1 : 1 + C]``, misaligned for vector loads; "strided" is every second channel of a wider
    array, which operations have to copy.
    """
    if layout == "dense":
        return ops.from_host(host)
    channels = host.shape[-1]
    wide = np.full((*host.shape[:-1], channels + 4 if layout == "pitched" else 2 * channels), 7, host.dtype)
    part = slice(1, 1 + channels) if layout == "pitched" else slice(0, None, 2)
    wide[..., part] = host
    return ops.from_host(wide)[..., part]
