"""What the convolutions' launchers check of their operands before anything could corrupt memory."""

from __future__ import annotations

from typing import Any

from minidl import checks
from minidl.cuda.rows import dtype_code
from minidl.precision import float32


def check_types(who: str, first: Any, second: Any, name: str, tf32: int) -> int:
    """Of two arrays that are multiplied; the macro DTYPE."""
    code = dtype_code(first, who)
    if second.dtype != first.dtype:
        raise checks.bad_dtype(who, name, first.dtype, second.dtype)
    check_tf32(who, tf32, code)
    return code


def check_tf32(who: str, tf32: int, code: int) -> None:
    """Raise unless products of this storage type may be rounded so."""
    if tf32 not in (0, 1, 3):
        raise checks.bad_value(who, "tf32", "0 (exact products), 1 (TF32) or 3 (three TF32 products)", tf32)
    if tf32 and code:
        raise checks.bad_value(who, "tf32", "False unless the arrays are float32", tf32)


def check_operands(who: str, source: Any, w: Any, bias: Any, add: Any, output: Any, tf32: int) -> int:
    """What the kernels rely on; the macro DTYPE."""
    code = check_types(who, source, w, "w", tf32)
    channels = output.shape[-1]
    if bias is not None and (bias.dtype != float32 or bias.shape != (channels,)):
        raise checks.bad_shape(who, "bias", f"({channels},) in float32", bias.shape)
    if add is not None and (add.dtype != output.dtype or add.shape != output.shape):
        raise checks.bad_shape(who, "add", f"{output.shape} in {output.dtype}", add.shape)
    return code


def check_alike(who: str, dx: Any, **arrays: Any) -> None:
    """That what a gradient is masked by is of its shape and dtype."""
    for name, array in arrays.items():
        if array is not None and array.shape != dx.shape:
            raise checks.bad_shape(who, name, str(dx.shape), array.shape)
        if array is not None and array.dtype != dx.dtype:
            raise checks.bad_dtype(who, name, dx.dtype, array.dtype)
