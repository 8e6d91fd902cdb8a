"""Limits of memory as people write them."""

from __future__ import annotations

import math
import re

from minidl import checks

__all__ = ["parse_limit"]

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40,
}  # fmt: skip


def parse_limit(limit: str | float, need: int) -> int:
    """Bytes of a limit: ``"8GB"`` (10^9), ``"8GiB"`` (2^30), a number of bytes; ``"25%"`` or 0.25 of ``need``.

    A number of at most 1 is a fraction, a larger one bytes.

    Raises:
        ValueError: for anything else, and for limits that are not above 0.
    """
    expected = "above 0: a size (8GB, 7.5GiB, bytes) or a part of what the step needs (25%, 0.25)"
    text = str(limit).strip().lower().replace(" ", "")
    match = re.fullmatch(r"([0-9.]+(?:e[+-]?[0-9]+)?)(%|[kmgt]?i?b)?", text)
    try:
        number, unit = float(match[1]), match[2] or ""
    except (TypeError, ValueError):
        raise checks.bad_value("memory", "limit", expected, limit) from None
    if unit == "%":
        count = need * number / 100
    elif unit == "" and number <= 1:
        count = need * number
    elif unit in _UNITS:
        count = number * _UNITS[unit]
    else:
        raise checks.bad_value("memory", "limit", expected, limit)
    if not math.isfinite(count) or count < 1:
        raise checks.bad_value("memory", "limit", expected, limit)
    return int(count)
