"""Tables of plans for less memory."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pages.files import File, Row, table


def _pinning_rows(files: Iterable[File]) -> dict[tuple[str, float | None], dict[str, Row]]:
    found: dict[tuple[str, float | None], dict[str, Row]] = {}
    for file in files:
        for row in file["rows"]:
            found.setdefault((row["case"], row.get("share")), {})[row["arm"]] = row
    return found


def pinning(files: Iterable[File]) -> str:
    """Bytes kept by dynamic programming against an MILP and other policies, over all limits of a network."""
    cases: dict[str, list[dict[str, Row]]] = {}
    for (case, _), arms in _pinning_rows(files).items():
        if arms["dp"]["feasible"]:
            cases.setdefault(case, []).append(arms)
    rows = []
    for case, found in cases.items():
        proved = [arms["dp"] for arms in found if arms["dp"].get("milp_proven")]
        gap = f"{max(row['gap'] for row in proved):.3g}" if proved else "-"
        times = f"{max(arms['dp']['ms'] for arms in found):.0f}"
        rows.append(
            [case, str(len(found)), str(len(proved)), gap, _kept(found, "static"), _kept(found, "geeps"), times]
        )
    head = ["network, images, batch", "limits with a plan", "MILP proved", "gap", "kept, times static"]
    return table([*head, "times GeePS", "plan ms, at most"], rows)


def _kept(found: list[dict[str, Row]], arm: str) -> str:
    """Median over limits of 25 to 75 % of the kept bytes, over those of ``arm``."""
    middle = [arms for arms in found if arms["dp"].get("share") is not None and 0.25 <= arms["dp"]["share"] <= 0.75]
    pairs = [(arms["dp"]["kept_bytes"], arms.get(arm, {}).get("kept_bytes") or 0) for arms in middle]
    ratios = [ours / theirs if theirs else float("inf") for ours, theirs in pairs]
    return f"{statistics.median(ratios):.2f}" if ratios and statistics.median(ratios) < float("inf") else "-"


def predicted_steps(files: Iterable[File]) -> str:
    """Simulated steps by policy, in times of the step without a limit."""
    arms = {
        "vdnn-all": "move everything (vDNN)", "geeps": "GeePS", "dp": "fewest bytes moved",
        "joint": "keep, move or rebuild",
    }  # fmt: skip
    wanted = {"resnet50": 0.25, "resnet152": 0.25, "densenet121": 0.25, "unet": 0.3}
    rows = []
    for (case, share), found in _pinning_rows(files).items():
        if share is not None and share in (wanted.get(case.split("/")[0]), 0.5, 0.75):
            ratio = lambda r: f"{r['step_ms'] / r['step_unlimited_ms']:.2f}" if r and r.get("step_ms") else "-"  # noqa: E731
            if any(found.get(arm, {}).get("step_ms") for arm in arms) and case.split("/")[0] in wanted:
                rows.append([case, f"{share:.0%}", *(ratio(found.get(arm)) for arm in arms)])
    return table(["network", "limit", *arms.values()], rows)


def limited_steps(files: Iterable[File]) -> str:
    """Training steps under a limit of memory, slowest against the unlimited step first; PyTorch's ways beside them."""
    limited = [row for file in files for row in file["rows"] if "limit_bytes" in row]
    limited.sort(key=lambda row: -row["ratio"])
    return f"{_limited(limited)}\n\n{_without_a_plan(limited)}"


def _limited(limited: list[Row]) -> str:
    rows = [
        [
            row["case"], row["arm"], row.get("fusion") or "none", f"{row['ms']:.1f}", f"{row['ratio']:.2f}",
            f"{row['ratio_to_bound']:.2f}", f"{row['predicted_ratio']:.2f}", _gib(row["need_bytes"]),
            _gib(row["limit_bytes"]), _gib(row["peak_bytes"]), _gib(row["moved_bytes"]), _gib(row["made_again_bytes"]),
        ]
        for row in limited
    ]  # fmt: skip
    head = ["network, images, batch", "plan, limit", "fusion", "ms", "times unlimited", "times bound", "predicted"]
    return table([*head, "need GiB", "limit GiB", "peak GiB", "moved GiB", "made again GiB"], rows)


def _without_a_plan(limited: list[Row]) -> str:
    """Of several runs the fastest of each."""
    rows = []
    for case in dict.fromkeys(row["case"] for row in limited):
        mine = [row for row in limited if row["case"] == case]
        found_ms = {"minidl": min((row["unlimited_ms"], row["need_bytes"]) for row in mine)}
        for name in sorted({name for row in mine for name in row["peers"]}):
            theirs = [row for row in mine if name in row["peers"]]
            found_ms[name] = min((row["peers"][name], row["peer_peak_bytes"][name]) for row in theirs)
        for name, (ms, held) in sorted(found_ms.items(), key=lambda item: item[1]):
            rows.append([case, name, f"{ms:.1f}", _gib(held)])
    return table(["network, images, batch", "without a plan", "ms", "GiB"], rows)


def held_gradients(files: Iterable[File]) -> str:
    """Steps by ways to hold gradients, without a limit."""
    rows = [
        [
            row["case"], str(row.get("ranks", 1)), row["arm"], f"{row['ms']:.2f}", f"{row['spread']:.1%}",
            f"{row['gradient_bytes'] / (1 << 20):.1f}", _gib(row["peak_bytes"]),
        ]
        for file in files if any(row["arm"].startswith("gradients") for row in file["rows"])
        for row in file["rows"] if "limit_bytes" not in row
    ]  # fmt: skip
    head = ["network, images, batch of a rank", "ranks", "gradients", "ms", "spread", "MiB of gradients", "peak GiB"]
    return table(head, rows)


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.2f}"
