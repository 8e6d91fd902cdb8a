"""What convolutions lose without a measured choice of kernels."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pages.files import File, table

_WORST = 12  # rows of the second table


def choices(files: Iterable[File]) -> str:
    """What convolutions lose without tuning: by pass, and the worst of them."""
    rows = [row for file in files for row in file["rows"]]
    losses: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        losses.setdefault((row["pass"], row["dtype"]), []).append(row["ms"] / row["peers"]["tuned"])
    lines = []
    for key, some in losses.items():
        mean, over = f"{statistics.geometric_mean(some) - 1:.1%}", f"{sum(loss > 1.1 for loss in some)} of {len(some)}"
        lines.append([*key, mean, f"{max(some) - 1:.1%}", over])
    head = table(["pass", "dtype", "behind, mean", "worst", "by over 10 %"], sorted(lines))
    worst = sorted(rows, key=lambda row: row["peers"]["tuned"] / row["ms"])[:_WORST]
    lines = []
    for row in worst:
        ms, tuned = row["ms"], row["peers"]["tuned"]
        figures = f"{ms * 1e3:.1f}", f"{tuned * 1e3:.1f}", f"{ms / tuned - 1:.1%}"
        lines.append([f"{row['case']} {row['pass']}", *figures, row["kernel"], row["tuned"]])
    return f"{head}\n\n{table(['worst', 'µs', 'tuned µs', 'behind', 'kernel', 'tuned kernel'], lines)}"
