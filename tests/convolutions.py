"""What laws of single convolution kernels share: operands of a case, its results by the table and by the definition."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from minidl.cuda.convolution import conv2d_hopper, conv2d_hopper_tiles
from minidl.cuda.convolution.conv2d_family import family
from minidl.cuda.convolution.conv2d_plan import Convolution, convolution
from minidl.cuda.device import BUILT_IN, current_device
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


def same_bits(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.view(f"u{one.itemsize}"), other.view(f"u{other.itemsize}"))


def poison(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """What the launchers ``modules`` allocate holds NaN before it is written."""
    for name in modules or ("conv2d",):
        module = sys.modules[f"{LAUNCHERS}.{name}"]

        def poisoned(shape: tuple[int, ...], dtype: Any, own: Callable = module.empty) -> Any:
            array = own(shape, dtype)
            array.view(np.uint8).fill(255)  # NaN in every storage type
            return array

        monkeypatch.setattr(module, "empty", poisoned)


def each_tile(monkeypatch: pytest.MonkeyPatch, case: Case, backward: bool, share: int, **options: Any) -> Iterator[Any]:
    """Each tile of Hopper's that a case may be given, forced within the loop, twice: on the device as it is, and as if
    it had two multiprocessors, so that other blocks compute the same, and several tiles each.
    """
    devices = current_device(), dataclasses.replace(current_device(), multiprocessors=2)
    try:
        for tile in conv2d_hopper_tiles.candidates(plan_of(case), backward, current_device(), **options):
            for device in devices:
                monkeypatch.setattr(conv2d_hopper, "current_device", lambda device=device: device)
                monkeypatch.setattr(conv2d_hopper, "choose", lambda *_, tile=tile: (tile, share))
                forget_plans()
                with family("hopper"):
                    yield tile
    finally:
        forget_plans()


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


def exact_on_whole_numbers(
    ops: Any, case: Case, storage: Any, rng: np.random.Generator, passes: Callable, tf32: int = 0
) -> None:
    """Every bit is the definition's: alone, with biases and a further gradient, and rectified."""
    expected_of = EXPECTED[passes]
    hosts = draws(rng, case, storage)
    placed = put(ops, *hosts)
    same(passes(ops, case, *placed, tf32=tf32), expected_of(case, *hosts, storage))
    some = [draw_integers(rng, case.w[0], float32), draw_integers(rng, case.x[3], float32)]
    add = draw_integers(rng, case.x, storage)
    bias, dbias, added = put(ops, *some, add)
    found = passes(ops, case, *placed, forward_bias=bias, bias=dbias, add=added, tf32=tf32)
    same(found, expected_of(case, *hosts, storage, *some, add))
    rectified = ops.to_host(ops.conv2d(*placed[:2], bias, **case.options, relu=True, tf32=tf32))
    same([rectified], [np.maximum(found[0].astype(np.float64), 0.0)])


def exact_weight_gradient(ops: Any, case: Case, storage: Any, rng: np.random.Generator) -> None:
    """On whole numbers, set and added to what is there."""
    x, _, dy = draws(rng, case, storage)
    start = draw_integers(rng, case.w, float32)
    expected = reference.conv2d_backward_weight(dy, x, case.w, **case.options)
    placed = put(ops, dy, x)
    same([weight_gradient(ops, case, *placed)], [expected])
    same([weight_gradient(ops, case, *placed, start)], [expected + start])


def equals_definition(
    ops: Any,
    case: Case,
    storage: Any,
    rng: np.random.Generator,
    passes: Callable,
    tf32: int = 0,
    scale: float = 4,
) -> None:
    """Within what rounding may do, and again to the bit: alone, and with biases and a further gradient."""
    hosts = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y)]
    some = [draw(rng, case.w[0], float32), draw(rng, case.x[3], float32), draw(rng, case.x, storage)]
    placed, (bias, dbias, added) = put(ops, *hosts), put(ops, *some)
    for given, more, terms in (
        ({}, (), (0, 0, 0)),
        ({"forward_bias": bias, "bias": dbias, "add": added}, some, (1, 2, 0)),
    ):
        found = passes(ops, case, *placed, tf32=tf32, **given)
        same(passes(ops, case, *placed, tf32=tf32, **given), found)
        expected = EXPECTED[passes](case, *hosts, np.float64, *more)
        kinds, terms = (storage, storage, float32), np.add(terms, case.terms)
        for one, other, kind, count in zip(found, expected, kinds, terms, strict=False):
            assert_close(one, other, kind, terms=int(count), scale=scale, tf32=tf32 == 1)


def bits_of_dense_arrays(
    ops: Any,
    case: Case,
    storage: Any,
    rng: np.random.Generator,
    passes: Callable,
    pitches: Sequence[tuple[int, int]] = PITCHES,
    tf32: int = 0,
) -> None:
    """Repeats, and slices of wider arrays at any address, give the same bits."""
    hosts, add = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y)], draw(rng, case.x, storage)
    x, w, dy = put(ops, *hosts)
    expected = passes(ops, case, x, w, dy, add=ops.from_host(add), tf32=tf32)
    same_bits(passes(ops, case, x, w, dy, add=ops.from_host(add), tf32=tf32), expected)
    for before, after in pitches:
        x, dy, other = (pitched(ops, host, before, after) for host in (hosts[0], hosts[2], add))
        same_bits(passes(ops, case, x, w, dy, add=other, tf32=tf32), expected)


def writes_its_output_alone(
    ops: Any,
    case: Case,
    storage: Any,
    rng: np.random.Generator,
    passes: Callable,
    monkeypatch: pytest.MonkeyPatch,
    modules: Sequence[str] = ("conv2d",),
    count: int = 2,
    tf32: int = 0,
) -> None:
    """Of ``count`` arrays that the launchers ``modules`` allocate all is written, and nothing beside it."""
    hosts, guarded = draws(rng, case, storage), Guarded(ops)
    placed = put(ops, *hosts)
    for module in modules:
        monkeypatch.setattr(sys.modules[f"{LAUNCHERS}.{module}"], "empty", guarded)
    same(passes(ops, case, *placed, tf32=tf32), EXPECTED[passes](case, *hosts, storage))
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


def independent_of_the_batch(ops: Any, case: Case, rng: np.random.Generator, images: int = 67) -> None:
    """An image's output and data gradient have the same bits alone, in a part, and in a batch of so many."""
    x, dy = (draw(rng, (images, *shape[1:]), bfloat16) for shape in (case.x, case.y))
    x, w, dy = put(ops, x, draw(rng, case.w, bfloat16), dy)
    whole = both(ops, case, x, w, dy)
    for some in (slice(0, 1), slice(images - 1, images), slice(2, images // 2 + 2)):
        same_bits(both(ops, case, x[some], w, dy[some]), [array[some] for array in whole])


def same_bits_by_every_tile(
    ops: Any, case: Case, storage: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    """Which of Hopper's tiles is chosen, and so the device, cannot be seen, with and without what is added."""
    hosts = [draw(rng, shape, storage) for shape in (case.x, case.w, case.y, case.x)]
    x, w, dy, add, bias, dbias = put(ops, *hosts, draw(rng, case.w[0], float32), draw(rng, case.x[3], float32))
    options = case.options | {"tf32": int(storage == float32)}
    poison(monkeypatch)
    for backward in (False, True):
        found: dict[Any, list] = {}
        for tile in each_tile(monkeypatch, case, backward, share):
            if backward:
                more = {}, {"bias": dbias, "add": add}
                made = [ops.conv2d_backward_data(dy, w, case.x, **some, **options) for some in more]
            else:
                made = [ops.conv2d(x, w, b, **options) for b in (None, bias)]
            found.setdefault(tile, []).extend(ops.to_host(array) for array in made)
        first = found[conv2d_hopper_tiles.TILES[0]]
        assert all(np.isfinite(array.astype(np.float32)).all() for array in first) and len(found) > 1
        for made in found.values():
            same_bits(made, [*first[:2], *first[:2]])


def last_of_many_images(ops: Any, case: Case, rng: np.random.Generator, data: bool = False) -> None:
    """Offsets are 64 bits wide: of more than 2**31 values the last two images are treated as they are alone, those
    before, of zeros, give zeros; in whole numbers, whose sums are exact.

    Args:
        data: the data gradient, too.
    """
    last = ops.from_host(draw_integers(rng, (2, *case.x[1:]), bfloat16))
    w = ops.from_host(draw_integers(rng, case.w, bfloat16, limit=1))
    x = ops.zeros(case.x, bfloat16)
    x[-2:] = last
    y, alone = (ops.conv2d(images, w, **case.options) for images in (x, last))
    assert max(x.size, y.size) > 2**31 and not ops.to_host(y[:2]).astype(np.float32).any()
    pairs = [(y, alone)]
    if data:
        dx = [
            ops.conv2d_backward_data(dy, w, shape, **case.options) for dy, shape in ((y, x.shape), (alone, last.shape))
        ]
        pairs.append(tuple(dx))
    for whole, part in pairs:
        same_bits([ops.to_host(whole[-2:])], [ops.to_host(part)])
    gradient = weight_gradient(ops, case, alone, last)
    assert gradient.any()
    same([weight_gradient(ops, case, y, x)], [gradient])
