"""Storage types and compute modes: what an array holds and how products of it are computed.

Whatever the storage, sums, statistics, gradients of parameters and master weights are at least float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from minidl import checks

float32 = np.dtype(np.float32)
float16 = np.dtype(np.float16)
bfloat16 = np.dtype(ml_dtypes.bfloat16)


@dataclass(frozen=True)
class Precision:
    """How a model stores its activations and computes its products.

    Attributes:
        name: short name, as used in result files: fp32, tf32, tf32x3, bf16 or fp16.
        storage: dtype of activations and of the weights that enter products.
        tf32: TF32 products (operands rounded to 10-bit mantissas; GPU only) that stand for one of float32 arrays: 1, or
            3 of operands split in two, which comes near to float32's accuracy; 0: exact products.
        loss_scaling: gradients need a scaled loss so that they do not underflow (float16).
    """

    name: str
    storage: np.dtype
    tf32: int = 0
    loss_scaling: bool = False


_PRECISIONS = {
    "fp32": Precision("fp32", float32),
    "tf32": Precision("tf32", float32, tf32=1),
    "tf32x3": Precision("tf32x3", float32, tf32=3),
    "bf16": Precision("bf16", bfloat16),
    "fp16": Precision("fp16", float16, loss_scaling=True),
}
PRECISIONS = tuple(_PRECISIONS)
"""The names of all precisions."""
_ALIASES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def precision(spec: str | np.dtype | type | Precision) -> Precision:
    """The precision of a name (``"fp32"``, ``"tf32"``, ``"tf32x3"``, ``"bf16"``, ``"bfloat16"``, ...) or of a dtype.

    Raises:
        ValueError: for any other name or dtype.
    """
    if isinstance(spec, Precision):
        return spec
    name = spec if isinstance(spec, str) else np.dtype(spec).name
    name = _ALIASES.get(name, name)
    if name not in _PRECISIONS:
        raise checks.unknown("precision", name, [*_PRECISIONS, *_ALIASES])
    return _PRECISIONS[name]


def precision_on(
    device: str, spec: str | np.dtype | type | Precision, who: str, argument: str = "precision"
) -> Precision:
    """The `precision` of ``spec``, which ``who`` was given as ``argument``, for ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: for one that there is not, or not there: TF32 on the CPU.
    """
    found = precision(spec)
    if found.tf32 and device == "cpu":
        raise checks.bad_value(who, argument, "fp32, bf16 or fp16 on the cpu", found.name)
    return found
