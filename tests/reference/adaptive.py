"""Adaptive optimizers in plain float64, one segment at a time. A segment is (slice of the arena, row of the table)."""

from __future__ import annotations

import numpy as np


def adam(w, g, m, v, rate, decay, betas, eps, step, trust):
    """New (w, m, v) of one segment after step number ``step``; ``trust``: as LAMB, else as AdamW."""
    b1, b2 = betas
    m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
    u = decay * w + m / (1 - b1**step) / (np.sqrt(v / (1 - b2**step)) + eps)
    sizes = np.linalg.norm(w), np.linalg.norm(u)
    factor = sizes[0] / sizes[1] if trust and min(sizes) > 0 else 1.0
    return w - rate * factor * u, m, v


def lars(w, g, buffer, rate, decay, momentum, coefficient, trust):
    """New (w, buffer) of one segment."""
    sizes = np.linalg.norm(w), np.linalg.norm(g)
    factor = coefficient * sizes[0] / (sizes[1] + decay * sizes[0]) if trust and min(sizes) > 0 else 1.0
    buffer = momentum * buffer + factor * (g + decay * w)
    return w - rate * buffer, buffer
