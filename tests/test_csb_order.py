"""Laws of the order in which the float32 product shares output features among warps."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.cuda.sparse.csb_order import GROUP, LINE, RANGE, UNIT, deal
from minidl.sparse import CSBPattern


@pytest.mark.parametrize("features", [1, 64, 70, 300, 1024, 1100, 5000])
def test_each_feature_has_one_place_and_lines_stay_together(rng, features):
    order = deal(rng.integers(0, 100, features))
    found, place = order // GROUP, order % GROUP
    assert order.dtype == np.uint32 and order.size % 256 == 0 and order.size - features < 256
    np.testing.assert_array_equal(np.sort(found), np.arange(order.size))
    for group, places in zip(found.reshape(-1, GROUP), place.reshape(-1, GROUP), strict=True):
        rising = np.empty(GROUP, np.int64)
        rising[places] = group
        assert (np.diff(rising) > 0).all()
        lines = rising.reshape(-1, LINE)
        assert (lines % LINE == np.arange(LINE)).all() and (np.diff(lines) == 1).all()
    first = np.arange(order.size) // RANGE * RANGE
    assert (found // RANGE * RANGE == first).all()


@pytest.mark.parametrize("features", [512, 2048])
def test_warps_have_as_much_to_do(rng, features):
    """Where in the order in which features lie some warp has far more."""
    elements = rng.poisson(40 * np.exp(0.6 * rng.standard_normal(features)))
    load = elements[deal(elements) // GROUP].reshape(-1, UNIT).sum(1)
    assert elements.reshape(-1, UNIT).sum(1).max() > 1.2 * load.mean()
    for first in range(0, features, RANGE):
        dealt = load[first // UNIT : (first + RANGE) // UNIT]
        assert dealt.max() < 1.05 * dealt.mean()


def test_a_pattern_counts_what_its_products_sum(cuda_ops, rng):
    """Of the transposed convolution the columns of a tap; found once."""
    row, column = np.nonzero(rng.random((40, 4 * 64)) < 0.1 * (np.arange(4 * 64) % 64 < 50))
    pattern, _ = CSBPattern.from_coo(row, column, (40, 4 * 64), 64)
    for arguments, counts in (
        ((), np.bincount(row, minlength=40)),
        ((True,), np.bincount(column, minlength=256)),
        ((True, 4, 50), np.bincount(column % 64, minlength=50)),
    ):
        order = pattern.order(cuda_ops, *arguments)
        np.testing.assert_array_equal(cuda_ops.to_host(order), deal(counts))
        assert pattern.order(cuda_ops, *arguments) is order


def test_a_cpu_needs_no_order(cpu_ops):
    pattern, _ = CSBPattern.from_coo([0], [0], (4, 4))
    assert pattern.order(cpu_ops) is None
