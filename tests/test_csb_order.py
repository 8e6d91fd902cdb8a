"""Laws of the order in which the float32 product shares output features among warps."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.sparse.csb_order import RANGE, UNIT, deal, line
from minidl.sparse import CSBPattern


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("features", [1, 64, 70, 300, 1024, 1100, 5000])
def test_each_feature_is_dealt_once_and_lines_stay_together(rng, features, together):
    order = deal(rng.integers(0, 100, features), together)
    assert order.dtype == np.int32 and order.size % 256 == 0 and order.size - features < 256
    np.testing.assert_array_equal(np.sort(order), np.arange(order.size))
    lines = order.reshape(-1, together)
    assert (lines == lines[:, :1] + np.arange(together)).all() and (lines[:, 0] % together == 0).all()
    np.testing.assert_array_equal(order // RANGE, np.arange(order.size) // RANGE)
    units = -(-features // 64) * 4  # of the thread blocks that features ask for
    assert np.isin(np.arange(features), order[: units * UNIT]).all()


@pytest.mark.parametrize("features", [512, 2048])
def test_warps_have_as_much_to_do(rng, features):
    """Where in the order in which features lie some warp has far more."""
    elements = rng.poisson(40 * np.exp(0.6 * rng.standard_normal(features)))
    lying, load = (elements[order].reshape(-1, UNIT).sum(1) for order in (np.arange(features), deal(elements, 1)))
    assert lying.max() > 1.2 * load.mean()
    for first in range(0, features, RANGE):
        dealt = load[first // UNIT : (first + RANGE) // UNIT]
        assert dealt.max() < 1.05 * dealt.mean()


def test_a_pattern_counts_what_its_products_sum(cuda_ops, rng):
    """Of the transposed convolution the columns of a tap; found once."""
    row, column = np.nonzero(rng.random((40, 4 * 64)) < 0.1 * (np.arange(4 * 64) % 64 < 50))
    pattern, _ = CSBPattern.from_coo(row, column, (40, 4 * 64), 64)
    for arguments, counts in (
        ((False, False), np.bincount(row, minlength=40)),
        ((True, False), np.bincount(column, minlength=256)),
        ((True, True, 4, 50), np.bincount(column % 64, minlength=50)),
    ):
        order = pattern.order(cuda_ops, *arguments)
        np.testing.assert_array_equal(cuda_ops.to_host(order), deal(counts, line(arguments[1])))
        assert pattern.order(cuda_ops, *arguments) is order


def test_a_cpu_needs_no_order(cpu_ops):
    pattern, _ = CSBPattern.from_coo([0], [0], (4, 4))
    assert pattern.order(cpu_ops, False, True) is None
