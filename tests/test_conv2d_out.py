"""Convolutions that write where they are told: the bits of a new array, and nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.convolutions import CASES as ALL
from tests.convolutions import SIXTEEN, cases, put
from tests.test_conv2d_families import CASES
from tests.tolerance import draw


def check(ops, case, storage, rng, before):
    """Each operation into the channels of a wider array from ``before`` on."""
    x, w, dy = (draw(rng, shape, storage) for shape in (case.x, case.w, case.y))
    bias, back = (rng.standard_normal(n).astype(np.float32) for n in (case.y[3], case.x[3]))
    x, w, dy, bias, back = put(ops, x, w, dy, bias, back)
    operations = {
        "conv2d": (case.y, lambda **out: ops.conv2d(x, w, bias, **case.options, **out)),
        "rectified": (case.y, lambda **out: ops.conv2d(x, w, bias, **case.options, relu=True, **out)),
        "stats": (case.y, lambda **out: ops.conv2d_stats(x, w, bias, **case.options, **out)),
        "transposed": (case.x, lambda **out: ops.conv2d_backward_data(dy, w, case.x, bias=back, **case.options, **out)),
    }
    for name, (shape, operation) in operations.items():
        channels = shape[3]
        wide = ops.from_host(np.full((*shape[:3], before + channels + 8), -7, storage))
        place = wide[..., before : before + channels]
        expected, found = operation(), operation(out=place)
        if name == "stats":
            assert ops.to_host(expected[1]).tobytes() == ops.to_host(found[1]).tobytes()
            expected, found = expected[0], found[0]
        assert found is place, name
        wide = ops.to_host(wide)
        assert wide[..., before : before + channels].tobytes() == ops.to_host(expected).tobytes(), name
        assert (wide[..., :before] == -7).all() and (wide[..., before + channels :] == -7).all(), name


@cases(ALL)
def test_any_convolution(ops, case, dtype, rng):
    check(ops, case, dtype, rng, 3)


@SIXTEEN
@pytest.mark.parametrize("before", [8, 3])
@cases(CASES)
def test_in_each_family(forced_ops, case, storage, before, rng):
    check(forced_ops, case, storage, rng, before)


@cases(ALL[:1])
def test_another_shape_or_type_is_refused(ops, case, rng):
    x, w = put(ops, draw(rng, case.x, np.dtype(np.float32)), draw(rng, case.w, np.dtype(np.float32)))
    if ops.name == "cpu":
        pytest.skip("asserted inside")
    for wrong in (ops.empty((*case.y[:3], case.y[3] + 1), np.float32), ops.empty(case.y, np.float64)):
        with pytest.raises(ValueError, match="out"):
            ops.conv2d(x, w, **case.options, out=wrong)
