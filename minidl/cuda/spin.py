"""A kernel of known duration, for timers and their tests."""

from __future__ import annotations

import numpy as np

from minidl.cuda.launch import launch


def spin(seconds: float) -> None:
    """Keep the current stream busy for so long, by the device's clock."""
    launch("spin", "spin", 1, 1, np.uint64(round(seconds * 1e9)))
