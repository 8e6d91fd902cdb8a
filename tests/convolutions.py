"""What laws of single convolution kernels share: operands of a case, its results by the table and by the definition."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_hopper
from minidl.cuda.convolution.conv2d_plan import Convolution, convolution
from minidl.cuda.device import BUILT_IN
from minidl.cuda.launch import dry_run
from minidl.precision import bfloat16, float16, float32
from tests.reference import conv2d as reference
from tests.test_conv2d_ops import Case, pitched, put
from tests.tolerance import assert_close, draw, draw_integers

SIXTEEN = pytest.mark.parametrize("storage", [bfloat16, float16], ids=["bf16", "fp16"])
EVERY = pytest.mark.parametrize("storage", [bfloat16, float16, float32], ids=["bf16", "fp16", "fp32"])
LAUNCHERS = "minidl.cuda.convolution"
PITCHES = (8, 8), (2, 4), (3, 2), (1, 1)  # channels before and behind those of a slice


def draws(rng: np.random.Generator, case: Case, dtype: Any) -> tuple[Any, ...]:
    """Whole numbers for input, filters and output gradient."""
    return tuple(draw_integers(rng, shape, dtype) for shape in (case.x, case.w, case.y))


def plan_of(case: Case) -> Convolution:
    """The case as launchers see it."""
    return convolution("test", case.x, case.w, *(case.options[o] for o in ("stride", "padding", "dilation", "groups")))


def forget_plans() -> None:
    """What is launched on Hopper is worked out anew: for who replaces what it follows from."""
    conv2d_hopper.plan.cache_clear()
    conv2d_hopper._launches.cache_clear()


def stems_of(case: Case, dtype: Any, device: str = "H200", **options: Any) -> list[str]:
    """The files of the kernels that output, data gradient and weight gradient would launch."""
    from minidl import cuda as ops

    with dry_run(BUILT_IN[device]) as log:
        x, w, dy = (ops.empty(shape, dtype) for shape in (case.x, case.w, case.y))
        ops.conv2d(x, w, **case.options, **options)
        ops.conv2d_backward_data(dy, w, case.x, **case.options, **options)
        ops.conv2d_backward_weight(dy, x, **case.options, out=ops.empty(case.w, np.float32), **options)
    return [launch.stem for launch in log.launches]


def both(
    ops: Any, case: Case, x: Any, w: Any, dy: Any, forward_bias: Any = None, tf32: int = 0, **backward: Any
) -> list[Any]:
    """Output and data gradient, on the host."""
    y = ops.conv2d(x, w, forward_bias, **case.options, tf32=tf32)
    dx = ops.conv2d_backward_data(dy, w, (dy.shape[0], *case.x[1:]), **case.options, tf32=tf32, **backward)
    return [ops.to_host(array) for array in (y, dx)]


def weight_gradient(ops: Any, case: Case, dy: Any, x: Any, start: Any = None, tf32: int = 0) -> Any:
    """Set, or added to ``start``; on the host."""
    out = ops.from_host(np.full(case.w, np.nan, np.float32) if start is None else start)
    ops.conv2d_backward_weight(dy, x, **case.options, tf32=tf32, out=out, accumulate=start is not None)
    return ops.to_host(out)


def three(ops: Any, case: Case, x: Any, w: Any, dy: Any, tf32: int = 0, **some: Any) -> list[Any]:
    """Output, data gradient and weight gradient, on the host."""
    return [*both(ops, case, x, w, dy, tf32=tf32, **some), weight_gradient(ops, case, dy, x, tf32=tf32)]


def both_expected(
    case: Case, x: Any, w: Any, dy: Any, dtype: Any, bias: Any = None, dbias: Any = None, add: Any = None
) -> tuple[Any, Any]:
    """Output and data gradient by the definition, rounded once."""
    y = reference.conv2d(x, w, bias, **case.options).astype(dtype)
    return y, reference.conv2d_backward_data(dy, w, case.x, **case.options, bias=dbias, add=add).astype(dtype)


def three_expected(case: Case, x: Any, w: Any, dy: Any, dtype: Any, *some: Any) -> tuple[Any, Any, Any]:
    """As `both_expected`, and the weight gradient in float32."""
    gradient = reference.conv2d_backward_weight(dy, x, case.w, **case.options).astype(np.float32)
    return *both_expected(case, x, w, dy, dtype, *some), gradient


EXPECTED = {both: both_expected, three: three_expected}


def same(found: Any, expected: Any) -> None:
    """Arrays of the same values; NaN equals NaN."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.astype(np.float64), other.astype(np.float64))


class Guarded:
    """Stands in for a launcher's ``empty``: arrays of NaN between guards, all of which are remembered."""

    _GUARD = 2048

    def __init__(self, ops: Any):
        self._ops, self._buffers = ops, []

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> Any:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        buffer = self._ops.empty(size + 2 * self._GUARD, np.uint8)
        buffer.fill(255)
        self._buffers.append((buffer, size))
        return buffer[self._GUARD : self._GUARD + size].view(dtype).reshape(shape)

    def check(self, count: int) -> None:
        """So many arrays were made, and nothing was written beside them."""
        assert len(self._buffers) == count
        for buffer, size in self._buffers:
            host = self._ops.to_host(buffer)
            assert (host[: self._GUARD] == 255).all() and (host[self._GUARD + size :] == 255).all()


# -- laws of a kernel that a fixture forces; `passes` is `both` or `three` ---------------------------------------------


def exact_on_whole_numbers(ops: Any, case: Case, storage: Any, rng: np.random.Generator, passes: Callable) -> None:
    """Every bit is the definition's: alone, with biases and a further gradient, and rectified."""
    expected_of = EXPECTED[passes]
    hosts = draws(rng, case, storage)
    placed = put(ops, *hosts)
    same(passes(ops, case, *placed), expected_of(case, *hosts, storage))
    some = [draw_integers(rng, case.w[0], float32), draw_integers(rng, case.x[3], float32)]
    add = draw_integers(rng, case.x, storage)
    bias, dbias, added = put(ops, *some, add)
    found = passes(ops, case, *placed, forward_bias=bias, bias=dbias, add=added)
    same(found, expected_of(case, *hosts, storage, *some, add))
    rectified = ops.to_host(ops.conv2d(*placed[:2], bias, **case.options, relu=True))
    same([rectified], [np.maximum(found[0].astype(np.float64), 0.0)])


def exact_weight_gradient(ops: Any, case: Case, storage: Any, rng: np.random.Generator) -> None:
    """On whole numbers, set and added to what is there."""
    x, _, dy = draws(rng, case, storage)
    start = draw_integers(rng, case.w, float32)
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    placed = put(ops, dy, x)
    same([weight_gradient(ops, case, *placed)], [expected])
    same([weight_gradient(ops, case, *placed, start)], [expected + start])


def equals_definition(ops: Any, case: Case, storage: Any, rng: np.random.Generator) -> None:
    """Each of the three passes, within what rounding may do."""
    hosts = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y)]
    y, dx, dw = three(ops, case, *put(ops, *hosts))
    x, w, dy = hosts
    assert_close(y, reference.conv2d(x, w, **case.options), storage, terms=case.terms[0], scale=4)
    expected = reference.conv2d_backward_data(dy, w, case.x, **case.options)
    assert_close(dx, expected, storage, terms=case.terms[1], scale=4)
    assert_close(dw, reference.conv2d_backward_weight(dy, x, case.w, **case.options), terms=case.terms[2], scale=4)


def bits_of_dense_arrays(
    ops: Any,
    case: Case,
    storage: Any,
    rng: np.random.Generator,
    passes: Callable,
    pitches: Sequence[tuple[int, int]] = PITCHES,
) -> None:
    """Repeats, and slices of wider arrays at any address, give the same bits."""
    hosts, add = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y)], draw(rng, case.x, storage)
    x, w, dy = put(ops, *hosts)
    expected = passes(ops, case, x, w, dy, add=ops.from_host(add))
    same(passes(ops, case, x, w, dy, add=ops.from_host(add)), expected)
    for before, after in pitches:
        x, dy, other = (pitched(ops, host, before, after) for host in (hosts[0], hosts[2], add))
        same(passes(ops, case, x, w, dy, add=other), expected)


def writes_its_output_alone(
    ops: Any,
    case: Case,
    storage: Any,
    rng: np.random.Generator,
    passes: Callable,
    monkeypatch: pytest.MonkeyPatch,
    modules: Sequence[str] = ("conv2d",),
    count: int = 2,
) -> None:
    """Of ``count`` arrays that the launchers ``modules`` allocate all is written, and nothing beside it."""
    hosts, guarded = draws(rng, case, storage), Guarded(ops)
    placed = put(ops, *hosts)
    for module in modules:
        monkeypatch.setattr(sys.modules[f"{LAUNCHERS}.{module}"], "empty", guarded)
    same(passes(ops, case, *placed), EXPECTED[passes](case, *hosts, storage))
    guarded.check(count)


def keeps_nonfinite_apart(
    ops: Any,
    case: Case,
    storage: Any,
    rng: np.random.Generator,
    passes: Callable,
    where: tuple[tuple[int, ...], tuple[int, ...]] = ((-1, -1, -1, -1), (0, 0, 0, 0)),
) -> None:
    """A NaN or infinity at ``where`` of input and output gradient reaches what the definition says and nothing else."""
    x, w, dy = draws(rng, case, storage)
    w = np.ones_like(w)
    for bad in (np.nan, np.inf):
        hurt, pain = x.copy(), dy.copy()
        hurt[where[0]], pain[where[1]] = bad, bad
        with np.errstate(invalid="ignore"):
            expected = EXPECTED[passes](case, hurt, w, pain, storage)
        for one, other in zip(passes(ops, case, *put(ops, hurt, w, pain)), expected, strict=True):
            np.testing.assert_array_equal(np.isfinite(one.astype(np.float64)), np.isfinite(other.astype(np.float64)))
