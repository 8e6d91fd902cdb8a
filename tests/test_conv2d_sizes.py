"""Convolutions of the sizes that networks have, drawn at random: every kernel that a tuner may take has the same bits.

On whole numbers sums are exact in any order, so that what the generic kernel gives, whose own laws hold it to the
definition at small sizes, is what all others must give. Blocks have many tiles here, sums many parts, and the last ones
of each are less than full.
"""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.convolution.conv2d_choice import options
from minidl.cuda.convolution.conv2d_family import Question, family, kernel
from minidl.cuda.convolution.conv2d_tuned import DTYPES
from minidl.cuda.device import BUILT_IN, current_device
from minidl.precision import bfloat16, float16, float32
from tests.convolutions import Case, plan_of

STORAGE = {"bf16": bfloat16, "fp16": float16, "tf32": float32, "tf32x3": float32, "fp32": float32}
MOST = {"values": 3e7, "weights": 1e7, "products": 1e11, "sum": 1.5e6}  # the last so that float32 holds it


def drawn_case(seed: int) -> tuple[Case, str]:
    rng = np.random.default_rng(seed)
    while True:
        taps = (int(rng.choice([1, 1, 3, 3, 5, 7])),) * 2 if rng.random() < 0.85 else (1, 3)
        stride = (1, 1) if rng.random() < 0.6 else (2, 2) if rng.random() < 0.7 else tuple(rng.integers(1, 4, 2))
        dilation = (1, 1) if rng.random() < 0.85 else tuple(rng.integers(1, 4, 2))
        spread = [(count - 1) * step for count, step in zip(taps, dilation, strict=True)]
        padding = [s // 2 if rng.random() < 0.8 else rng.integers(0, s + 1) for s in spread]
        images, side = int(rng.choice([1, 2, 3, 8, 31, 32, 64, 200])), int(rng.choice([3, 7, 14, 28, 56, 112]))
        size = (side, side) if rng.random() < 0.5 else tuple(rng.integers(1, side + 1, 2))
        unit = int(rng.choice([1, 2, 4, 8, 8, 8, 16, 32, 64]))
        channels, filters = (unit * int(np.exp(rng.uniform(0, np.log(1100 / unit)))) for _ in range(2))
        groups = int(rng.choice([1, 2, 8, 32], p=[0.8, 0.05, 0.05, 0.1]))
        if groups > 1:
            channels, filters = 8 * (channels % 5) or 8, 8 * (filters % 5) or 8
        elif rng.random() < 0.15:
            channels = int(rng.integers(1, 5))  # of the first layer
        if any(s + 2 * p <= reach for s, p, reach in zip(size, padding, spread, strict=True)):
            continue
        x = images, *map(int, size), channels * groups
        pairs = {"stride": stride, "padding": padding, "dilation": dilation}
        pairs = {name: tuple(map(int, pair)) for name, pair in pairs.items()}
        case = Case(f"drawn-{seed}", x, (filters * groups, *taps), **pairs, groups=groups)
        found = {
            "values": max(np.prod(case.x), np.prod(case.y)), "weights": np.prod(case.w),
            "products": np.prod(case.y) * float(np.prod(case.w[1:])), "sum": max(case.terms),
        }  # fmt: skip
        if all(found[name] <= most for name, most in MOST.items()):
            return case, str(rng.choice(list(STORAGE), p=[0.5, 0.1, 0.2, 0.1, 0.1]))


DRAWN = [drawn_case(seed) for seed in range(60)]


def questions(case: Case, kind: str) -> list[Question]:
    passes = "forward", "backward_data", "backward_weight"
    return [Question(which, plan_of(case), *DTYPES[kind]) for which in passes]


def test_what_is_drawn_has_many_kernels():
    """At least a few passes of each family that is for such sizes, and each type."""
    choices = [options(question, BUILT_IN["H200"]) for drawn in DRAWN for question in questions(*drawn)]
    assert sum(map(len, choices)) > 1000
    for name in ("generic", "grouped", "hopper", "stem", "thin"):
        assert sum(name in {choice.family for choice in some} for some in choices) >= 3, name
    assert {kind for _, kind in DRAWN} == set(STORAGE)
    assert max(np.prod(case.x) for case, _ in DRAWN) > 1e7


@pytest.mark.parametrize(("case", "kind"), DRAWN, ids=[f"{case.name}-{kind}" for case, kind in DRAWN])
def test_every_candidate_has_the_bits_of_the_generic_kernel(cuda_ops, case, kind, rng):
    """The one that is chosen, and three of those that a tuner may choose."""
    storage = STORAGE[kind]
    x, w, dy = (
        cuda_ops.from_host(rng.integers(-2, 3, shape, np.int8).astype(storage)) for shape in (case.x, case.w, case.y)
    )
    settings = case.options | ({"tf32": DTYPES[kind][1]} if storage is float32 else {})

    def found(which):
        if which == "forward":
            y = cuda_ops.conv2d(x, w, **settings)
        elif which == "backward_data":
            y = cuda_ops.conv2d_backward_data(dy, w, case.x, **settings)
        else:
            y = cuda_ops.from_host(np.full(case.w, np.nan, np.float32))
            cuda_ops.conv2d_backward_weight(dy, x, out=y, **settings)
        return cuda_ops.to_host(y)

    for question in questions(case, kind):
        with family("generic"):
            expected = found(question.which)
        np.testing.assert_array_equal(found(question.which), expected)
        choices = options(question, current_device())
        for choice in rng.permutation(len(choices))[:3]:
            with kernel(choices[choice]):
                np.testing.assert_array_equal(found(question.which), expected, err_msg=str(choices[choice]))
