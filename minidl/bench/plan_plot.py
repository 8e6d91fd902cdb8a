"""Memory over the steps of a training step, without a plan and with one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from minidl import checks
from minidl.memory import Plan, Problem, check

_GIB = 1 << 30


def draw(path: str | Path, problem: Problem, plan: Plan, limit: int) -> Path:
    """Write the picture; its format follows from the name.

    Raises:
        ImportError: without matplotlib, naming the extra.
        ValueError: for a format that matplotlib does not know.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: F401
        from matplotlib.figure import Figure
    except ImportError as error:
        raise checks.missing_extra("plotting", "plot", error) from error
    trace = problem.trace
    steps = np.arange(len(trace))
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.fill_between(steps, problem.usage / _GIB, step="mid", color="#cfd8e3", label="without a plan")
    axes.fill_between(steps, np.array(check(trace, plan).device) / _GIB, step="mid", color="#2b6cb0", label="planned")
    axes.axhline(limit / _GIB, color="#c53030", linewidth=1, label="limit")
    axes.axvline(trace.loss, color="#4a5568", linewidth=0.8, linestyle=":", label="loss")
    axes.set(xlabel="pass", ylabel="GiB on the GPU", xlim=(0, len(trace) - 1), ylim=(0, None))
    facts = trace.facts
    axes.set_title(f"{facts.get('model', 'network')}, batch {facts.get('batch')}, {facts.get('precision')}", loc="left")
    axes.legend(frameon=False, fontsize="small")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
