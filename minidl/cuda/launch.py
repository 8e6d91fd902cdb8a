"""The one road from Python to a kernel.

`launch` compiles a variant on first use, keeps its function per device and starts it on CuPy's current stream. Inside
`dry_run` it records what it would have started, so that every launcher can be exercised without a GPU and without CuPy.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from minidl.cuda import nvrtc
from minidl.cuda._launch import Call, Kernel, Kernels, Start, plain_number
from minidl.cuda.device import (
    BUILT_IN,
    DRY_RUN,
    DeviceRecord,
    DryRun,
    Launch,
    Watcher,
    active_dry_run,
    current_device,
    driver,
    import_cupy,
    recording,
    unprepared,
)
from minidl.cuda.hopper import TensorMaps
from minidl.cuda.machine_code import waiting

DEBUG = os.environ.get("MINIDL_DEBUG", "0") not in ("", "0")

_NO_DEFINES: dict[str, int | str] = {}
_PLAIN = (int, float, bool, complex)
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Observer = Callable[[str, str, Mapping[str, int | str]], AbstractContextManager]

_modules: dict[tuple, Any] = {}
_observer: Observer | None = None


def launch(
    stem: str,
    name: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    *args: Any,
    defines: dict[str, int | str] = _NO_DEFINES,
    shared: int = 0,
) -> None:
    """Start the ``extern "C"`` kernel ``name`` of ``<stem>.cu`` on CuPy's current stream.

    Args:
        stem: file name without ``.cu``; or the path of a kernel of one's own, with it.
        grid, block: sizes, an int or a tuple of up to three; an empty grid starts nothing.
        args: arrays (passed as pointers), None (a null pointer), NumPy scalars, NumPy arrays of size 1 (by value), or
            tensor maps (by value, one after the other).
        defines: macros of this variant; each distinct set is compiled once.
        shared: dynamic shared memory in bytes.

    Raises:
        TypeError: for a plain Python number, whose width in C would be a guess.
        RuntimeError: when the variant does not compile or cannot be started, or (with MINIDL_DEBUG=1) when the kernel
            fails.
    """
    if type(grid) is not tuple:
        grid = (grid,)
    if type(block) is not tuple:
        block = (block,)
    dry = active_dry_run()
    if dry is not None:
        _record(dry, stem, name, grid, block, args, defines, shared)
        return
    planned = _kernels.prepared(stem, name, grid, block, args, defines, shared)
    if planned is None:
        return
    recorded = recording()
    if recorded:
        recorded.starts.append(planned)
    elif _observer is None:
        start(planned)
    else:
        with _observer(stem, name, defines):
            start(planned)


def start(planned: Start) -> None:
    """Start a kernel whose arrays are known."""
    _kernels.start(planned)
    if DEBUG:
        _wait(_what(planned))


def start_all(call: Call, arrays: list[Any]) -> None:
    """Start the kernels of a call whose arrays are known."""
    call.start(arrays, _kernels)


def _what(planned: Start) -> str:
    stem, name, defines, grid, block, shared = planned.what
    return f"kernel {name} of {stem}.cu {dict(defines)}, grid {grid}, block {block}, shared {shared}"


def _failure(planned: Start, code: int) -> RuntimeError:
    return RuntimeError(f"{_what(planned)} could not be started: {_words(code)}")


def _attach() -> tuple[Callable[[], int], Callable[[], Any]]:
    """How CuPy tells the current device and stream."""
    cuda = import_cupy().cuda
    return cuda.runtime.getDevice, cuda.get_current_stream


def _words(code: int) -> str:
    """The driver's name of an error."""
    name = ctypes.c_char_p()
    driver().cuGetErrorName(code, ctypes.byref(name))
    return f"{name.value.decode() if name.value else 'unknown error'} ({code})"


def _check(name: str, args: tuple) -> None:
    """Refuses plain numbers, as `Kernel.start` does."""
    for argument in args:
        if type(argument) in _PLAIN:
            raise plain_number(name, argument)


def _load(key: tuple[int, str, str], defines: dict[str, int | str]) -> Kernel:
    cupy = import_cupy()
    device, stem, name = key
    variant = (device, stem, *sorted(defines.items()))
    if variant not in _modules:
        image = nvrtc.build(stem, nvrtc.target(current_device().arch), defines).image
        module = cupy.cuda.function.Module()
        module.load(image)
        _modules[variant] = module, waiting(image)
    module, waits = _modules[variant]
    entry = ctypes.cast(driver().cuLaunchKernelEx, ctypes.c_void_p).value
    return Kernel(name, module, module.get_function(name).ptr, entry, name in waits)


def _grant(kernel: Kernel, shared: int) -> None:
    """Raise the kernel's limit of dynamic shared memory: static and dynamic together may pass 48 KiB only on demand."""
    code = driver().cuFuncSetAttribute(ctypes.c_void_p(kernel.function), _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
    if code:
        raise RuntimeError(f"kernel {kernel.name} cannot have {shared} bytes of shared memory: {_words(code)}")
    kernel.granted = shared


_kernels = Kernels(_attach, _load, _grant, _failure, os.environ.get("MINIDL_OVERLAP", "1") not in ("", "0"))
_kernels.watched = DEBUG


def _wait(what: str) -> None:
    cupy = import_cupy()
    stream = cupy.cuda.get_current_stream()
    if stream.is_capturing():
        return
    try:
        stream.synchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"kernel {what} failed: {error}") from error


def _record(
    dry: DryRun,
    stem: str,
    name: str,
    grid: tuple[int, ...],
    block: tuple[int, ...],
    args: tuple,
    defines: Mapping[str, int | str],
    shared: int,
) -> None:
    """Hold a dry launch to the driver's own limits, then log it."""
    _check(name, args)
    assert all(limit >= size >= 0 for size, limit in zip(grid, (2**31 - 1, 65535, 65535), strict=False)), (name, grid)
    assert all(size >= 1 for size in block) and math.prod(block) <= 1024, (name, block)
    assert 0 <= shared <= dry.device.shared_per_block, (name, shared)
    if 0 not in grid:
        sizes = tuple(map(int, grid)), tuple(map(int, block))
        dry.launches.append(Launch(stem, name, tuple(sorted(defines.items())), *sizes, int(shared)))
        if _observer is not None:
            with _observer(stem, name, defines):
                pass
        if dry.watcher is not None:
            dry.watcher.launched(name, tuple(_behind_maps(args)))


def _behind_maps(args: tuple) -> Iterator[Any]:
    """``args`` with the arrays that tensor maps describe in the place of the maps."""
    for argument in args:
        if type(argument) is TensorMaps:
            yield from argument.arrays
        else:
            yield argument


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Open ``observer(stem, name, defines)`` around each launch: for a profiler that wants to see single kernels.

    Those of a dry run count too.
    """
    global _observer
    before, _observer, watched, _kernels.watched = _observer, observer, _kernels.watched, True
    try:
        yield
    finally:
        _observer, _kernels.watched = before, watched


@contextmanager
def overlapping(wanted: bool) -> Iterator[None]:
    """Whether kernels that wait may begin while those before them end; else each starts when the last has ended.

    They may unless MINIDL_OVERLAP=0 is set. It changes no bit of a result, so it is no part of any key: for
    measurements, and to find out who forgot to wait.
    """
    before, _kernels.overlapping = _kernels.overlapping, wanted
    try:
        yield
    finally:
        _kernels.overlapping = before


@contextmanager
def dry_run(device: DeviceRecord | None = None, watcher: Watcher | None = None) -> Iterator[DryRun]:
    """Run the operation table without a GPU: nothing is launched and arrays are NumPy arrays nobody touches.

    Yields a log whose ``launches`` grows with each launch. The imagined device is an H200 unless given; ``watcher``
    hears of each array and each launch as it happens.
    """
    log = DryRun(device or BUILT_IN["H200"], watcher=watcher)
    token = DRY_RUN.set(log)
    try:
        with unprepared():
            yield log
    finally:
        DRY_RUN.reset(token)
