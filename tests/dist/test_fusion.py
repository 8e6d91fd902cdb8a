"""All ranks run by the fusion plan of rank 0, and compute what one rank does."""

from __future__ import annotations

import pytest

from tests.dist import job

pytestmark = pytest.mark.mpi


def test_ranks_follow_the_plan_of_rank_0(tmp_path):
    done = job.run("fusing", 3, tmp_path, "cpu")
    assert done.status == 0, done.output
    first, *others = done.answers
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
