"""Parameter updates on flat arenas, decided on the device; the kernels are in optim.cu."""

from __future__ import annotations

from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.launch import launch
from minidl.cuda.rows import DTYPE, address, dense
from minidl.precision import float32
from minidl.shapes import ceil_div

BLOCK = 256
CHUNK = 64  # elements that share a segment
# Elements, as unrolled in optim.cu.
PER_BLOCK = {"sgd_update": BLOCK * 4 * 2, "sgd_begin": BLOCK * 4 * 4, "find_nonfinite": BLOCK * 4 * 4}


def check_arena(who: str, argument: str, x: Any, n: int, dtype: Any = float32) -> None:
    """The kernels read 16 bytes at a time and trust the length, so a wrong arena would corrupt memory."""
    if x.dtype != dtype:
        raise checks.bad_dtype(who, argument, dtype, x.dtype)
    if x.shape != (n,) or not dense(x) or address(x) % 16:
        raise checks.bad_shape(who, argument, f"({n},), dense and aligned to 16 bytes", x.shape)


def check_update(who: str, n: int, segment_of: Any, segments: Any, control: Any, **arenas: Any | None) -> None:
    """What every update of ``n`` weights asks of its tables and float32 ``arenas``, of which some may be None."""
    if n % CHUNK:
        raise checks.bad_shape(who, "master", f"(n,), n a multiple of {CHUNK}", (n,))
    for argument, arena in arenas.items():
        if arena is not None:
            check_arena(who, argument, arena, n)
    assert segment_of.dtype == np.int32 and segment_of.shape == (n // CHUNK,), (segment_of.dtype, segment_of.shape)
    assert segments.dtype == float32 and segments.shape[1:] == (4,), (segments.dtype, segments.shape)
    assert all(dense(table) for table in (segment_of, segments, control))
    assert control.dtype == float32 and control.shape == (8,), control.shape


def rounding(who: str, working: Any | None, n: int) -> dict[str, int | str]:
    """Macros of kernels that write rounded weights to ``working`` (n,), where there is one."""
    if working is not None:
        if working.dtype not in DTYPE:
            raise checks.bad_dtype(who, "working", "float32, bfloat16 or float16", working.dtype)
        check_arena(who, "working", working, n, working.dtype)
    code = DTYPE[float32 if working is None else working.dtype]
    return {"DTYPE": code, "WORKING": int(working is not None)}


def sgd_update(
    master: Any, grad: Any | None, momentum: Any | None, working: Any | None, segment_of: Any, segments: Any,
    control: Any, *, nesterov: bool,
) -> None:  # fmt: skip
    """As `minidl.cpu.optim.sgd_update`."""
    n = master.size
    if grad is None and (momentum is None or nesterov):
        raise checks.bad_value("sgd_update", "grad", "an array without momentum or with nesterov", None)
    if nesterov and momentum is None:
        raise checks.bad_value("sgd_update", "nesterov", "False without a momentum buffer", nesterov)
    check_update("sgd_update", n, segment_of, segments, control, master=master, grad=grad, momentum=momentum)
    present = {"GRADIENT": int(grad is not None), "MOMENTUM": int(momentum is not None), "NESTEROV": int(nesterov)}
    defines = rounding("sgd_update", working, n) | present
    args = (master, grad, momentum, working, segment_of, segments, control, np.int64(n))
    launch("optim", "sgd_update", ceil_div(n, PER_BLOCK["sgd_update"]), BLOCK, *args, defines=defines)


def sgd_begin(master: Any, momentum: Any, segment_of: Any, segments: Any, control: Any) -> None:
    """As `minidl.cpu.optim.sgd_begin`."""
    n = master.size
    check_update("sgd_begin", n, segment_of, segments, control, master=master, momentum=momentum)
    args = (master, momentum, segment_of, segments, control, np.int64(n))
    launch("optim", "sgd_begin", ceil_div(n, PER_BLOCK["sgd_begin"]), BLOCK, *args)


def find_nonfinite(grad: Any, control: Any) -> None:
    """control[NONFINITE] = 1.0 when ``grad`` ((n,) float32) holds an Inf or a NaN, else 0.0."""
    check_arena("find_nonfinite", "grad", grad, grad.size)
    n = np.int64(grad.size)
    launch("optim", "clear_nonfinite", 1, 1, control)
    launch("optim", "find_nonfinite", ceil_div(grad.size, PER_BLOCK["find_nonfinite"]), BLOCK, grad, control, n)


def update_loss_scale(control: Any) -> None:
    """Halve the loss scale (to 1 at least) after an overflow; double it (2^24 at most) each growth_interval steps."""
    launch("optim", "update_loss_scale", 1, 1, control)
