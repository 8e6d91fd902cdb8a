"""Limits of memory: of the GPU as people write them, of the host as the system sets them."""

from __future__ import annotations

import math
import re
from pathlib import Path

from minidl import checks

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


HOST_SHARE = 0.8  # of what is free: pinned memory cannot be swapped, and others need some


def host_budget(root: str | Path = "/") -> int | None:
    """Bytes of host memory that a plan may use; None where the system does not tell.

    It is a share of the least of what the machine has free and of what the process's control group (version 1 or 2, and
    those around it) leaves: inside a container the machine's own figure says nothing. Page cache counts as free.
    """
    root = Path(root)
    free = []
    for line in _lines(root / "proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            free += _left(root / "sys/fs/cgroup", path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            files = "memory.limit_in_bytes", "memory.usage_in_bytes"
            free += _left(root / "sys/fs/cgroup/memory", path, *files)
    return int(HOST_SHARE * max(min(free), 0)) if free else None


def _left(mount: Path, path: str, most: str, used: str) -> list[int]:
    """What each control group from ``path`` up to the mount leaves; a container may see only the mount itself."""
    left = []
    folder = mount / path.strip("/")
    for group in dict.fromkeys([folder, *folder.parents, mount]):
        if mount not in (group, *group.parents):
            continue
        limit, now = _lines(group / most), _lines(group / used)
        if limit and now and limit[0] != "max":
            fields = (line.split() for line in _lines(group / "memory.stat"))
            cache = sum(int(f[1]) for f in fields if f[0] in ("inactive_file", "active_file"))
            left.append(int(limit[0]) - max(int(now[0]) - cache, 0))
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
