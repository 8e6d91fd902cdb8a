"""All ranks run by the fusion plan of rank 0, and compute what one rank does."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dist import job
from tests.test_fusion import close, distance

pytestmark = pytest.mark.mpi


def test_ranks_follow_the_plan_of_rank_0(tmp_path):
    answers = job.answers("fusing", 3, tmp_path, "cpu")
    first, *others = answers
    assert first["timed"] == 6, "forward and backward, two of the four batch norms being alike"
    assert first["plan"] == {
        "bn0": "none",
        "bn1": "elementwise",
        "bn2": "none",
        "bn3": "elementwise",
    }
    assert first["deferred"] == ["bn1", "bn3"]
    for other in others:
        assert other == first | {"timed": 0}, "the others wait"


@pytest.mark.parametrize("device", job.DEVICES)
@pytest.mark.parametrize("sizes", [(5, 2), (4, 1, 3)], ids=str)
def test_synchronised_batch_norms_of_unequal_shares_are_those_of_the_whole_batch(device, sizes, tmp_path):
    """Losses, gradients and running statistics, by every plan, against one rank without a plan."""
    if device == "cuda" and job.most_ranks() < len(sizes):
        pytest.skip(f"needs {len(sizes)} GPUs")
    (tmp_path / "alone").mkdir()
    [alone] = job.answers("synchronised", 1, tmp_path / "alone", device, str(sum(sizes)))
    one = {mode: {how: arrays(of) for how, of in plans.items()} for mode, plans in alone.items()}
    first, *others = job.answers("synchronised", len(sizes), tmp_path, device, *map(str, sizes))
    exact = one["fp32"]["none"]
    assert all(answer == first for answer in others), "ranks must agree to the bit"
    for found in first["fp32"].values():
        close(exact, arrays(found), 2e-5)
    for how, found in first["bf16"].items():
        same = one["bf16"][how]
        assert 4 * distance(same, arrays(found)) < distance(exact, same), f"{how}: more than 16 bits leave open"


def arrays(found):
    return {name: np.asarray(values) for name, values in found.items()}
