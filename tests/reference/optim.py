"""Optimizer updates in plain float64, 64 elements at a time."""

from __future__ import annotations

import numpy as np

CHUNK = 64


def sgd_update(master, grad, momentum, segment_of, segments, control, nesterov):
    """New master weights and new momentum (None without)."""
    w = np.array(master, np.float64)
    g = np.asarray(grad, np.float64)
    buffer = None if momentum is None else np.array(momentum, np.float64)
    lr, mu, loss_scale, nonfinite = (float(v) for v in control[:4])
    if nonfinite:
        return w, buffer
    for chunk, segment in enumerate(segment_of):
        lr_scale, decay, momentum_scale, _ = (float(v) for v in segments[segment])
        part = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        d = g[part] / loss_scale + decay * w[part]
        if buffer is not None:
            buffer[part] = mu * momentum_scale * buffer[part] + d
            d = d + mu * momentum_scale * buffer[part] if nesterov else buffer[part]
        w[part] -= lr * lr_scale * d
    return w, buffer


def update_loss_scale(control):
    """The control record after one step."""
    lr, momentum, scale, nonfinite, good, skipped, interval, unused = (float(v) for v in control)
    if nonfinite:
        scale, good, skipped = max(scale / 2, 1.0), 0.0, skipped + 1
    else:
        good += 1
        if good >= interval:
            scale, good = min(scale * 2, 2.0**24), 0.0
    return np.array([lr, momentum, scale, nonfinite, good, skipped, interval, unused])
