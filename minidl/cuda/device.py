"""The device a launcher plans for: the GPU in use, or the one a dry run imagines.

Launchers read a frozen record instead of asking the driver, so that everything they decide (tile sizes, grids, kernel
variants) can be decided, tested and compiled on a machine without a GPU.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from minidl import checks

KIB, MIB = 1024, 1024 * 1024
HOPPER = (9, 0)  # the compute capability with a copy engine and products of warpgroups (hopper.cuh, wgmma.cuh)


@dataclass(frozen=True)
class DeviceRecord:
    """What a launcher may know about a GPU.

    Attributes:
        name: as the driver spells it.
        arch: compute capability (major, minor).
        multiprocessors: number of streaming multiprocessors.
        shared_per_block: most shared memory one block may ask for (opt-in limit), bytes.
        l2_bytes: size of the second-level cache.
        memory_bytes: size of the device memory.
    """

    name: str
    arch: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    l2_bytes: int
    memory_bytes: int

    def __hash__(self) -> int:
        return hash(self.name)  # of all fields it would take longer than what is looked up by it

    def to_json(self) -> str:
        """One JSON object; `from_json` gives the same record back."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> DeviceRecord:
        """The record that `to_json` wrote."""
        fields = json.loads(text)
        return cls(**{**fields, "arch": tuple(fields["arch"])})


# Limits from the CUDA programming guide's table of compute capabilities, sizes as the driver reports them.
BUILT_IN = {
    "A100": DeviceRecord("NVIDIA A100-SXM4-80GB", (8, 0), 108, 163 * KIB, 40 * MIB, 81153 * MIB),
    "RTX 3090": DeviceRecord("NVIDIA GeForce RTX 3090", (8, 6), 82, 99 * KIB, 6 * MIB, 24237 * MIB),
    "L40": DeviceRecord("NVIDIA L40", (8, 9), 142, 99 * KIB, 96 * MIB, 45589 * MIB),
    "H100": DeviceRecord("NVIDIA H100 80GB HBM3", (9, 0), 132, 227 * KIB, 50 * MIB, 81079 * MIB),
    "H200": DeviceRecord("NVIDIA H200", (9, 0), 132, 227 * KIB, 60 * MIB, 143156 * MIB),
}


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a dry run."""

    stem: str
    name: str
    defines: tuple[tuple[str, int | str], ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int


class Watcher(Protocol):
    """Sees a dry run as it goes: for those who plan memory."""

    def allocated(self, array: Any) -> None:
        """The table made ``array``; it lives until nobody refers to it or to a view of it."""

    def launched(self, name: str, arguments: tuple) -> None:
        """A kernel would read or write the arrays among ``arguments``."""


@dataclass
class DryRun:
    """The log of a dry run: the imagined device and every launch that would have happened, in order."""

    device: DeviceRecord
    launches: list[Launch] = field(default_factory=list)
    watcher: Watcher | None = None
    memory: Callable[[int], Any] | None = None  # for so many bytes: a buffer, or None for memory of their own

    def made(self, shape: Any, dtype: Any) -> Any:
        """A new array, of which the watcher is told; nobody touches what is in it."""
        array = np.empty(shape, dtype)
        if self.memory is not None and (buffer := self.memory(array.nbytes)) is not None:
            array = np.ndarray(array.shape, array.dtype, buffer)
        if self.watcher is not None:
            self.watcher.allocated(array)
        return array

    def zeroed(self, shape: Any, dtype: Any) -> Any:
        """As `made`, for who asks for zeros."""
        return self.made(shape, dtype)

    def copied(self, host: Any) -> Any:
        """As `made`, for who asks for what is in ``host``."""
        return self.made(host.shape, host.dtype)

    @property
    def variants(self) -> list[tuple[str, tuple[tuple[str, int | str], ...]]]:
        """Each distinct (stem, defines) once, sorted: what has to be compiled."""
        return sorted({(launch.stem, launch.defines) for launch in self.launches}, key=str)


DRY_RUN: ContextVar[DryRun | None] = ContextVar("minidl_dry_run", default=None)
active_dry_run = DRY_RUN.get


@dataclass
class Recorded:
    """What an operation does that is being prepared (`minidl.cuda.prepared`).

    Attributes:
        made: (function, shape, dtype) of each new array.
        arrays: these arrays.
        starts: the launches, which are to follow.
    """

    made: list[tuple[Callable[[Any, Any], Any], Any, Any]] = field(default_factory=list)
    arrays: list[Any] = field(default_factory=list)
    starts: list[Any] = field(default_factory=list)

    def make(self, function: Callable[[Any, Any], Any], shape: Any, dtype: Any) -> Any:
        """A new array, noted."""
        array = function(shape, dtype)
        self.made.append((function, shape, dtype))
        self.arrays.append(array)
        return array


# What notes what is done; False: nothing is noted, and no operation is prepared; None: any may be.
RECORDING: ContextVar[Recorded | Literal[False] | None] = ContextVar("minidl_recording", default=None)
recording = RECORDING.get


@contextmanager
def unprepared() -> Iterator[None]:
    """Inside, every operation decides anew, by what is so inside, and has its arrays as it asks for them."""
    token = RECORDING.set(False)
    try:
        yield
    finally:
        RECORDING.reset(token)


_live: dict[int, DeviceRecord] = {}


@functools.cache
def import_cupy() -> Any:
    """The CuPy module.

    Raises:
        ImportError: when CuPy is not installed, naming the extra that brings it.
    """
    try:
        import cupy
    except ImportError as error:
        raise checks.missing_extra("the CUDA backend", "cuda13", error) from error
    return cupy


@functools.cache
def driver() -> ctypes.CDLL:
    """The driver's library, which CuPy has loaded: for what CuPy does not offer, or not fast enough."""
    return ctypes.CDLL("libcuda.so.1")


def current_device() -> DeviceRecord:
    """The record of CuPy's current device, or that of the dry run around the call.

    Raises:
        ImportError: when CuPy is not installed.
        RuntimeError: when there is no usable GPU or driver.
    """
    dry = active_dry_run()
    if dry is not None:
        return dry.device
    cupy = import_cupy()
    try:
        index = cupy.cuda.runtime.getDevice()
        if index not in _live:
            _live[index] = _read(cupy.cuda.runtime.getDeviceProperties(index))
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"no usable GPU: {error}; is there an NVIDIA GPU with a recent driver?") from error
    return _live[index]


def _read(properties: dict[str, Any]) -> DeviceRecord:
    return DeviceRecord(
        name=properties["name"].decode(),
        arch=(properties["major"], properties["minor"]),
        multiprocessors=properties["multiProcessorCount"],
        shared_per_block=properties["sharedMemPerBlockOptin"],
        l2_bytes=properties["l2CacheSize"],
        memory_bytes=properties["totalGlobalMem"],
    )
