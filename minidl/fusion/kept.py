"""Measured plans on disk: what one holds for, and where it is kept for the next run."""

from __future__ import annotations

import functools
import hashlib
import json
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from minidl import cache
from minidl.cuda import nvrtc
from minidl.cuda.convolution import conv2d_tuned
from minidl.cuda.device import current_device, import_cupy
from minidl.fusion.plans import MODES, Plan
from minidl.precision import Precision
from minidl.profile.results import machine_record, write


def setting(ops: ModuleType, precision: Precision, batch: int | None) -> dict[str, Any]:
    """What measurements hold for: device, precision and samples of a rank (None: not known)."""
    device = current_device().name if ops.name == "cuda" else machine_record()["cpu"]
    return {"device": device, "precision": precision.name, "batch": batch}


def path_of(ops: ModuleType, setting: dict[str, Any], fingerprint: str) -> Path:
    """Where the plan for a network and a setting is kept; another driver or other kernels have another place."""
    words = f"{setting['device']} {setting['precision']} b{setting['batch']} {fingerprint} {_software(ops)}"
    return cache.folder() / "fusion" / cache.file_name(words)


def _software(ops: ModuleType) -> str:
    """What a choice also depends on: driver, kernels, the table of tuned convolutions, and the modes to choose from."""
    driver = import_cupy().cuda.runtime.driverGetVersion() if ops.name == "cuda" else 0
    tuned = conv2d_tuned.current().digest if ops.name == "cuda" else ""
    return hashlib.sha256(json.dumps([driver, tuned, _kernels(), list(MODES)]).encode()).hexdigest()[:12]


@functools.cache
def _kernels() -> str:
    texts = (path.read_bytes() for _, path in sorted(nvrtc.sources().items()))
    return hashlib.sha256(b"\0".join(texts)).hexdigest()


def load(path: Path) -> Plan | None:
    """The plan kept there; a damaged file is as good as none."""
    with suppress(OSError, ValueError):
        return Plan.load(path)
    return None


def keep(plan: Plan, path: Path) -> str:
    """Write a plan where `load` finds it; the path, or why it cannot be written."""
    try:
        write(path, plan.record())
    except OSError as error:
        return f"no file: {error}"
    return str(path)
