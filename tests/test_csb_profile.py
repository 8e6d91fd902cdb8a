"""The profile of a sparse product: its parts, and what is uneven about it."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.profile.timing import Budget
from minidl.sparse import CSBMatrix
from minidl.sparse.profile import profile_product
from tests.tolerance import draw

BRIEF = Budget(samples=2, seconds=0.01, least=2, sample_ms=0.01)


def matrix(ops, rng, shape=(300, 200)):
    dense = draw(rng, shape, np.float32)
    dense[rng.random(shape) > 0.1] = 0
    dense[:64] *= rng.random((64, shape[1])) < 0.2  # block rows of different lengths
    return CSBMatrix.from_dense(dense).to(ops.name)


@pytest.mark.parametrize("features_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("transposed", [False, True], ids=["A", "At"])
def test_a_profile_tells_the_route_and_what_is_uneven(ops, rng, transposed, features_last):
    a = matrix(ops, rng)
    a = a.T if transposed else a
    x = draw(rng, (70, a.shape[1]) if features_last else (a.shape[1], 70), np.float32)
    before = ops.to_host(a.data)
    found = profile_product(a, ops.from_host(x), features_last=features_last, budget=BRIEF)
    assert found.route == a.route(70, features_last=features_last) and found.ms > 0
    assert all(ms > 0 for ms in found.parts_ms.values()) and all(ratio >= 1 for ratio in found.uneven.values())
    assert all(name in str(found) for name in (found.route, *found.parts_ms, *found.uneven))
    np.testing.assert_array_equal(ops.to_host(a.data), before)


def test_uneven_block_rows_are_counted_exactly(cpu_ops):
    a = CSBMatrix.from_coo(np.ones(4, np.float32), ([0, 1, 1, 9], [0, 0, 9, 1]), (16, 16), blocksize=8)
    x = np.ones((16, 20), np.float32)
    assert profile_product(a, x, budget=BRIEF).uneven == {"block rows": 1.5}  # 3 and 1
    assert profile_product(a.T, x, budget=BRIEF).uneven == {"block rows": 1.5}


def test_the_parts_of_the_fast_kernels_are_told_apart(cuda_ops, rng):
    from minidl.cuda.device import current_device
    from minidl.cuda.sparse.csb_routes import route

    if current_device().arch != (9, 0):
        pytest.skip("needs a Hopper GPU")
    a = matrix(cuda_ops, rng, (600, 900))
    x = cuda_ops.from_host(draw(rng, (900, 500), np.float32))
    with route("rows"):
        found = profile_product(a, x, budget=BRIEF)
    assert list(found.parts_ms) == ["index decode", "loads", "multiply-adds"]
    assert set(found.uneven) == {"warps", "rounds"} and found.uneven["rounds"] >= 1 <= found.uneven["warps"]
    with route("split"):
        assert list(profile_product(a, x, split="tf32x3", budget=BRIEF).parts_ms) == ["index decode"]
