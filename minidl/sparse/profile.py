"""Where the time of a product with a `CSBMatrix` goes: loads, index decoding, multiply-adds, and what is uneven."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from minidl import backend
from minidl.profile.timing import Budget, timer
from minidl.sparse.pattern import CSBPattern

if TYPE_CHECKING:
    from minidl.sparse.csb import CSBMatrix


@dataclass(frozen=True)
class ProductProfile:
    """One product, whole and in parts.

    Attributes:
        route: the kernels it ran on, as `CSBMatrix.route` names them.
        ms: the whole product; median.
        parts_ms: each part alone, by name: ``"index decode"`` (finding elements and bringing them into the order in
            which they are multiplied), ``"loads"`` (of the dense operand), ``"multiply-adds"`` (of operands that lie in
            shared memory already). Loads and multiply-adds run beside each other: the larger is what to work on, and
            what ``ms`` exceeds it by, the decoding aside, is what they do not hide. Parts that a route does not have
            apart are left out.
        uneven: the busiest over the average, 1 where work is spread evenly: ``"warps"`` that wait for each other,
            ``"rounds"`` (the last round of thread blocks leaves multiprocessors idle), ``"block rows"`` on a CPU.
    """

    route: str
    ms: float
    parts_ms: Mapping[str, float]
    uneven: Mapping[str, float]

    def __str__(self) -> str:
        lines = [f"{self.route}: {self.ms:.4g} ms"]
        lines += [f"  {name:<14} {ms:8.4f} ms alone, {100 * ms / self.ms:3.0f} %" for name, ms in self.parts_ms.items()]
        lines += [f"  {name:<14} {ratio:8.2f} busiest over average" for name, ratio in self.uneven.items()]
        return "\n".join(lines)


def profile_product(
    a: CSBMatrix, x: Any, *, features_last: bool = False, split: str | None = None, budget: Budget | None = None
) -> ProductProfile:
    """Time ``a.matmul(x)`` and its parts; the result is thrown away.

    Args:
        x, features_last, split: as `CSBMatrix.matmul`.
        budget: how long each part is measured; None takes the usual one.

    On a GPU the times are those of a captured graph that repeats the call on the same operands: what fits into the
    second-level cache is read from there.
    """
    ops = backend.ops_of(a.data)
    clock, budget = timer(ops), budget or Budget()

    def ms(call: Callable[[], Any]) -> float:
        return (clock.replayed([call], budget) or clock.hot(call, budget)).ms

    options = {"features_last": features_last, "split": split}
    samples = x.shape[0 if features_last else -1] if x.ndim == 2 else 1
    route = a.route(samples, **options)
    if ops.name == "cpu":
        parts: dict[str, Callable[[], Any]] = {}
        if features_last:  # features first, some are read where they lie
            empty = _without_elements(a)
            parts["loads"] = lambda: empty.matmul(x, **options)
        counts = np.diff(a.pattern.indptr).reshape(a.pattern.grid).sum(0 if a.transposed else 1)
        uneven = {"block rows": float(counts.max() / counts.mean())} if a.nnz else {}
    else:
        from minidl.cuda.sparse.csb_profile import parts_of

        where = a.pattern.shape, a.pattern.side, a.transposed, features_last, route, split
        order = a.pattern.order(ops, a.transposed, features_last)
        parts, uneven = parts_of(a.indptr, a.indices, a.data, x, *where, order)
    whole = ms(lambda: a.matmul(x, **options))
    return ProductProfile(route, whole, {name: ms(call) for name, call in parts.items()}, uneven)


def _without_elements(a: CSBMatrix) -> CSBMatrix:
    """A matrix like ``a`` that has none: its products pack and store, and multiply nothing."""
    pattern = CSBPattern(np.zeros_like(a.pattern.indptr), [], a.pattern.shape, a.pattern.side)
    return type(a)(pattern, a.data[:0], transposed=a.transposed)
