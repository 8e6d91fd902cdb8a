"""Dropout by Philox4x32-10 in Python integers, after Salmon et al., SC 2011."""

from __future__ import annotations

import math

import numpy as np

WORD = 2**32


def philox4x32(counter, key, rounds=10):
    """Four random words from a counter of four words and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(0xD2511F53 * c0, WORD)
        high1, low1 = divmod(0xCD9E8D57 * c2, WORD)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % WORD, (k1 + 0xBB67AE85) % WORD
    return c0, c1, c2, c3


def mask(shape, p, key, stream):
    """Booleans of ``shape`` (N, ...): which elements are kept."""
    seed_low, seed_high, step, first_sample = (int(k) for k in key)
    kept = np.zeros((shape[0], math.prod(shape[1:])), bool)
    for n in range(kept.shape[0]):
        for e in range(kept.shape[1]):
            counter = (e // 4, (first_sample + n) % WORD, step, stream)
            kept[n, e] = philox4x32(counter, (seed_low, seed_high))[e % 4] >= math.ceil(p * 2.0**32)
    return kept.reshape(shape)


def dropout(x, p, key, stream, whole=False):
    """In float64, with the factor 1 / (1 - p) rounded to float32; ``whole``: a sample's first element decides."""
    kept = mask(x.shape, p, key, stream)
    if whole:
        first = mask((x.shape[0], 1), p, key, stream)
        kept = np.broadcast_to(first.reshape(-1, *[1] * (x.ndim - 1)), x.shape)
    factor = float(np.float32(1 / (1 - p))) if p < 1 else 0.0
    return np.where(kept, np.where(kept, x, 0).astype(np.float64) * factor, 0.0)
