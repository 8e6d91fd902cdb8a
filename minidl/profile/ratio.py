"""The ratio of two timings with its uncertainty, and what may be said of it: SAME, FASTER, SLOWER or UNCLEAR.

A verdict rests on an interval for the ratio of the medians (B over A), not on the ratio alone, and on a least effect
that matters (the threshold, 2 %):

    SAME     the 95 % interval lies within the threshold: whatever changed is too small to matter
    SLOWER   the 99 % interval lies above it            FASTER   the 99 % interval lies below it
    UNCLEAR  neither: the samples cannot tell, and more of them or a quieter machine would

A change needs the surer interval because a file has hundreds of rows, and a false alarm in every fortieth of them
would be many.

The interval comes from a bootstrap of the medians (Efron 1979) that draws blocks of neighbouring samples
(circular block bootstrap, Politis & Romano 1992), for the samples of a run follow one another in time and are not
independent. Two more uncertainties widen it: few samples (Student's factor), and drift: the medians of the first and
the second half of a run differ by more than noise where clocks fell or a cache warmed, and by as much as the run
depends on when it was taken. A row may be lucky in its drift; what is usual among the rows of both files tells how
restless the machine was and may be added (``restless``). What differs between two runs but not within one (another
node, another layout in memory) no two files can show; the threshold is there for it.

Everything is reckoned in logarithms, so that B against A is exactly the reverse of A against B.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import numpy as np

SAME, FASTER, SLOWER, UNCLEAR = "SAME", "FASTER", "SLOWER", "UNCLEAR"
THRESHOLD = 0.02
_DRAWS = 1000
_SEED = 20
_LEAST_MS = 1e-7  # what result files resolve; a span that did not occur in one of the steps is a sample of 0
_Z = 1.959964  # 97.5th percentile of the normal distribution
_SURER = 2.575829 / _Z  # a 99 % interval in half-widths of a 95 % one


@dataclass(frozen=True)
class Interval:
    """A ratio of times with what is known of it.

    Attributes:
        ratio: median of B over median of A; above 1: B is slower.
        low, high: its 95 % interval.
        basis: what it was reckoned from: samples, spread, or identical for one measurement met twice.
        drift: the larger of the two runs' drifts, a fraction; 0 where no samples tell.
    """

    ratio: float
    low: float
    high: float
    basis: str
    drift: float = 0.0


def ratio_of_medians(a: Sequence[float], b: Sequence[float], restless: float = 0.0) -> Interval:
    """The ratio of the medians of two runs of at least two samples each, milliseconds in the order they were taken.

    Args:
        restless: a further uncertainty of the ratio, as a logarithm.
    """
    if list(a) == list(b):
        return Interval(1.0, 1.0, 1.0, "identical")
    logs = [_logs(samples) for samples in (a, b)]
    drawn_a, drawn_b = (_drawn_medians(run) for run in logs)
    point = float(np.median(logs[1]) - np.median(logs[0]))
    low, high = np.percentile(drawn_b - drawn_a, [2.5, 97.5])
    factor, drifts = _few(min(len(a), len(b))), [drift(samples) for samples in (a, b)]
    down = math.hypot(max(point - low, 0.0) * factor, restless, *drifts)
    up = math.hypot(max(high - point, 0.0) * factor, restless, *drifts)
    return Interval(math.exp(point), math.exp(point - down), math.exp(point + up), "samples", math.expm1(max(drifts)))


def ratio_of_spreads(a_ms: float, a_spread: float, b_ms: float, b_spread: float) -> Interval:
    """The ratio of two medians of which only the interquartile ranges are known, as fractions of the medians.

    It reaches from the upper quartile of one to the lower of the other. That is at least the 95 % interval of medians
    of seven independent samples or more each, and cautious for more of them: how many there were is not known.
    """
    if (a_ms, a_spread) == (b_ms, b_spread):
        return Interval(1.0, 1.0, 1.0, "identical")
    point, half = math.log(b_ms / a_ms), (a_spread + b_spread) / 2
    return Interval(math.exp(point), math.exp(point - half), math.exp(point + half), "spread")


def drift(samples: Sequence[float]) -> float:
    """How far the medians of the two halves of a run lie apart, as a logarithm; 0 for fewer than four samples."""
    logs, half = _logs(samples), len(samples) // 2
    return float(abs(np.median(logs[-half:]) - np.median(logs[:half]))) if half > 1 else 0.0


def verdict_of(interval: Interval, threshold: float = THRESHOLD) -> str:
    """SAME, FASTER, SLOWER or UNCLEAR; ``threshold`` is the least change that matters, a fraction."""
    edge = math.log1p(threshold)
    point, low, high = map(math.log, (interval.ratio, interval.low, interval.high))
    if point - _SURER * (point - low) > edge:
        return SLOWER
    if point + _SURER * (high - point) < -edge:
        return FASTER
    return SAME if -edge <= low and high <= edge else UNCLEAR


def _logs(samples: Sequence[float]) -> np.ndarray:
    return np.log(np.maximum(np.asarray(samples, np.float64), _LEAST_MS))


def _drawn_medians(logs: np.ndarray) -> np.ndarray:
    """Medians of samples drawn again in blocks; what is drawn depends on the run alone, not on its place among rows."""
    n = len(logs)
    length = max(1, round(n ** (1 / 3)))
    rng = np.random.default_rng([_SEED, crc32(logs.tobytes())])
    starts = rng.integers(0, n, (_DRAWS, -(-n // length), 1))
    picks = ((starts + np.arange(length)) % n).reshape(_DRAWS, -1)[:, :n]
    return np.median(logs[picks], axis=1)


def _few(n: int) -> float:
    """How much wider than a bootstrap's the interval of n samples must be: Student's quantile over the normal one,
    and the variance that drawing with replacement loses. Tends to 1; the quantile is Fisher & Cornish's expansion.
    """
    z, nu = _Z, n - 1
    quantile = z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
    quantile += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    return quantile / z * math.sqrt(n / nu)
