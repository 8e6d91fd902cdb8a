"""How long each step of a trace takes: from a result file of ``minidl bench layers``, or from FLOP and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minidl import checks
from minidl.memory.simulate import Link
from minidl.memory.trace import Trace
from minidl.profile import roofline

# As `minidl bench ceilings` measured them (benchmarks/results/h200): an H200 and its link to the host (PCIe 5 x16).
CEILINGS: dict[str, dict[str, Any]] = {
    "H200": {
        "machine": "NVIDIA H200",
        "copy_gb_per_s": 4264.0,
        "matrix_tflops": {"bf16": 795.0, "fp16": 763.0, "tf32": 392.0, "fp32": 50.9},
        "vector_tflops": {"fp32": 65.4},
        "host_to_device_gb_per_s": 55.4,
        "device_to_host_gb_per_s": 55.2,
        "both_ways_gb_per_s": 101.4,
    }
}
SHARE = 0.8  # of the roofline, reached by an average pass of a large network
LAUNCH_MS = 0.0015  # in a captured step


def link_of(ceilings: Mapping[str, Any]) -> Link:
    """The link of a record of ceilings, both directions at once.

    Raises:
        ValueError: when the record holds no rates of the link.
    """
    both = ceilings.get("both_ways_gb_per_s")
    out, into = ceilings.get("device_to_host_gb_per_s"), ceilings.get("host_to_device_gb_per_s")
    if not (out and into):
        expected = "device_to_host_gb_per_s and host_to_device_gb_per_s"
        raise checks.bad_value("ceilings", "link", expected, None, "minidl bench ceilings --device cuda measures them")
    half = both / 2 if both else None
    return Link(min(out, half or out), min(into, half or into))


def modelled(trace: Trace, ceilings: Mapping[str, Any], share: float = SHARE) -> list[float]:
    """Milliseconds of each step: FLOP of products and traffic at ``share`` of the roofline, and a launch.

    Args:
        ceilings: a record of `minidl bench ceilings`, or one of `CEILINGS`.
        share: in (0, 1].

    Raises:
        ValueError: for a share outside, or ceilings that lack a rate for the trace's precision.
    """
    share = checks.number("memory planner", "share", share, "in (0, 1]", lambda v: 0 < v <= 1)
    precision = str(trace.facts.get("precision", "fp32"))
    times = []
    for step in trace.steps:
        flop = step.flop if step.matrix else 0  # others wait for memory
        least, _ = roofline.floor(flop, step.traffic, ceilings, precision, step.matrix)
        if least is None:
            raise checks.bad_value("ceilings", "rates", f"memory and {precision} rates", ceilings.get("machine"))
        times.append(least / share + LAUNCH_MS if step.traffic else 0.0)
    return times


def measured(trace: Trace, content: Mapping[str, Any]) -> list[float]:
    """Milliseconds of each step from the rows of a result file of ``minidl bench layers``.

    A time within a captured step counts before one taken alone. Another batch than the trace's scales them. A pass that
    several spans share (updates, sums at a fan-out) is shared out among them; one without work (a view) takes no time.

    Raises:
        ValueError: for another model or precision, or when passes of the trace are missing in the file.
    """
    setup = content.get("setup") or {}
    for name in ("model", "precision"):
        if name in setup and setup[name] != trace.facts.get(name):
            raise checks.bad_value("times", name, repr(trace.facts.get(name)), setup[name], "measure that model")
    scale = trace.facts.get("batch", 1) / setup["batch"] if setup.get("batch") else 1.0
    found = {}
    for row in content["rows"]:
        if row.get("arm") == "minidl" and row.get("layer"):
            within = (row.get("timings") or {}).get("graph_step") or {}
            ms = within.get("ms") if within.get("ms") is not None else row["ms"]
            if ms is not None:
                found[row["layer"], row["pass"]] = max(float(ms), 0.0) * scale
    keys = [(step.name, step.pass_name) for step in trace.steps]
    for key, step in zip(keys, trace.steps, strict=True):
        if step.bytes == 0:
            found.setdefault(key, 0.0)
    missing = sorted(f"{name} {pass_name}" for name, pass_name in set(keys) - found.keys())
    if missing:
        listed = ", ".join(missing[:5])
        raise checks.bad_value("times", "result file", "one with every pass of the model", f"none for {listed}")
    return [found[key] / keys.count(key) for key in keys]
