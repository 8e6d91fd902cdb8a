"""Several networks beside each other: one file of all their rows, one table of where their steps go."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minidl.profile.results import Row, result

__all__ = ["FAMILIES", "family", "merged", "network_table", "shares"]

Content = dict[str, Any]

# Kinds of work by the type of the layer; what is no layer goes by its name.
FAMILIES = {
    "convolution": ("Conv2d", "ConvTranspose2d"),
    "batch norm": ("BatchNorm2d",),
    "activation": ("ReLU", "Dropout"),
    "pooling": ("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d"),
    "join": ("Add", "Concat", "Pad", "Flatten"),
    "linear": ("Linear",),
}


def family(row: Row) -> str:
    """The kind of work of a row: of its layer's type, or loss, optimizer, unaccounted, wait."""
    if row["pass"] in ("unaccounted", "wait"):
        return row["pass"]
    return next((name for name, types in FAMILIES.items() if row["type"] in types), row["type"] or row["layer"])


def merged(contents: Sequence[Content]) -> Content:
    """One content of several networks' (same machine, same command); each one's setup and step stand in ``points``.

    Samples of single rows are left out, whose medians and spreads stay: they would be nine tenths of a file.
    """
    first = contents[0]
    points = [{"case": _step(c)["case"], **{key: c[key] for key in ("setup", "step", "warnings")}} for c in contents]
    rows = [_without_samples(row) for content in contents for row in content["rows"]]
    common = {key: first[key] for key in ("ceilings", "conventions")}
    warnings = [f"{p['case']} {p['setup']['precision']}: {text}" for p in points for text in p["warnings"]]
    return result(first["benchmark"], rows, first["machine"], **common, points=points, warnings=warnings)


def _without_samples(row: Row) -> Row:
    timings = {way: record and record | {"samples_ms": []} for way, record in row["timings"].items()}
    return row | {"timings": timings}


def _step(content: Content) -> Row:
    return next(row for row in content["rows"] if row["pass"] == "step")


def shares(content: Content) -> dict[str, float]:
    """Fraction of the step that each family takes, within the step; together 1 up to the spread of the medians."""
    way = "graph_step" if content["step"]["graph"] else "step"
    found: dict[str, float] = {}
    for row in content["rows"]:
        record = row["timings"][way]
        if record is not None and row["pass"] not in ("step", "all_reduce"):
            found[family(row)] = found.get(family(row), 0.0) + record["ms"]
        if row["pass"] == "all_reduce" and row["exposed_ms"]:
            found["wait"] = found.get("wait", 0.0) + row["exposed_ms"]
    total = sum(found.values())
    return {name: ms / total for name, ms in found.items()}


def network_table(contents: Sequence[Content]) -> tuple[str, list[str], list[list[str]]]:
    """(title, columns, cells): step, rate, intensity and the share of each kind of work, a network a line."""
    found = [shares(content) for content in contents]
    names = list(dict.fromkeys(name for share in found for name in share))
    names.sort(key=lambda name: -max(share.get(name, 0.0) for share in found))
    columns = ["network", "dtype", "ranks", "step ms", "images/s", "TFLOP/s", "FLOP/B", *names]
    cells = []
    for content, share in zip(contents, found, strict=True):
        row, step = _step(content), content["step"]
        main = step["graph"] or step["eager"]
        line = [row["case"], row["dtype"], str(row["ranks"]), f"{main['ms']:.2f}", f"{step['images_per_s']:.0f}"]
        line += [f"{row['flop'] / main['ms'] * 1e-9:.2f}", f"{row['intensity']:.1f}"]
        cells.append(line + [f"{share.get(name, 0.0):.1%}" for name in names])
    how = "CUDA graph" if contents[0]["step"]["graph"] else "eager"
    return f"training steps ({how}), and where their time goes", columns, cells
