"""Kernels compiled before anything launches them: found on shapes, by all cores, into the cache that launches read."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from minidl.cuda import nvrtc
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.launch import dry_run

Variant = tuple[str, tuple[tuple[str, int | str], ...]]


class Built(NamedTuple):
    """Kernels that were found, those of them that the cache lacked, seconds to find and to compile them."""

    kernels: int
    missing: int
    walk_s: float
    compile_s: float


def kernels_of(walk: Callable[[], Any], device: DeviceRecord | None = None) -> list[Variant]:
    """Every kernel that ``walk`` launches, each once, as `minidl.cuda.nvrtc.compile_all` takes them; needs no GPU.

    Args:
        device: that it is to run on; default: an H200.
    """
    with dry_run(device) as log:
        walk()
    return log.variants


def compile_ahead(walk: Callable[[], Any], device: DeviceRecord | None = None, processes: int | None = None) -> Built:
    """Compile the kernels of ``walk`` that the cache lacks.

    Args:
        device: to compile for, which need not be there; default: this machine's GPU.
        processes: that compile; default: one for each core.
    """
    device, started = device or current_device(), time.perf_counter()
    kernels = kernels_of(walk, device)
    walked, arch = time.perf_counter(), nvrtc.target(device.arch)
    missing = [kernel for kernel in kernels if not nvrtc.is_built(kernel[0], arch, dict(kernel[1]))]
    nvrtc.compile_all(missing, arch, processes)
    return Built(len(kernels), len(missing), walked - started, time.perf_counter() - walked)
