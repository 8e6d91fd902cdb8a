"""Spans as NVTX ranges, ``layer/pass``, for Nsight Systems and Nsight Compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from minidl import checks


class NvtxRanges:
    """A profiler that marks each span on the host's thread.

    Raises:
        ImportError: without CuPy, through which NVTX is called.
    """

    def __init__(self) -> None:
        try:
            from cupy.cuda import nvtx
        except ImportError as error:
            raise checks.missing_extra("NVTX ranges", "cuda13", error) from error
        self._nvtx = nvtx

    @contextmanager
    def span(self, layer: str, pass_name: str, stream: Any = None) -> Iterator[None]:
        """See `minidl.profile.Profiler`."""
        self._nvtx.RangePush(f"{layer}/{pass_name}")
        try:
            yield
        finally:
            self._nvtx.RangePop()
