"""Random words by counter: what a sample draws depends on the seed, the epoch and the sample, on nothing else.

Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), over whole arrays of counters.
NumPy's own Philox counts elements of one stream; a loader needs a few words of each of many streams.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

# Far away from the streams of dropout layers, which draw from the same seed.
_SHUFFLE_STREAM = 0xDA7A0000


def random_words(seed: int, epoch: int, stream: int, index: np.ndarray) -> np.ndarray:
    """Four random words for each sample index: uint32 of shape ``(*index.shape, 4)``.

    Counter (index low, index high, epoch, stream), key (seed low, seed high).
    """
    index = np.asarray(index).astype(np.uint64)
    c0, c1 = index & _LOW, index >> _HALF
    c2, c3 = np.full_like(index, epoch & 0xFFFFFFFF), np.full_like(index, stream & 0xFFFFFFFF)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = (p1 >> _HALF) ^ c1 ^ np.uint64(k0), (p0 >> _HALF) ^ c3 ^ np.uint64(k1)
        c1, c3 = p1 & _LOW, p0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def below(words: np.ndarray, limit: int) -> np.ndarray:
    """Uniform integers in ``[0, limit)`` from random words (multiply and shift; bias below ``limit / 2**32``)."""
    return ((words.astype(np.uint64) * np.uint64(limit)) >> _HALF).astype(np.int64)


def shuffled(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of ``range(count)``: samples in the order of their random words, so no NumPy version changes it."""
    words = random_words(seed, epoch, _SHUFFLE_STREAM, np.arange(count)).astype(np.uint64)
    return np.argsort(words[:, 0] << _HALF | words[:, 1], kind="stable")
