"""Gradients added to the momentum on several ranks: one of them brings the momentum, messages add the gradients."""

from __future__ import annotations

import pytest

from tests.dist import job

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(("engine", "ranks"), [("shm", 2), ("shm", 3), ("mpi", 2)])
def test_training_is_that_of_gradients_apart(engine, ranks, tmp_path):
    """Within the rounding of sums in another order."""
    answers = job.answers("in_momentum", ranks, tmp_path, "cpu", engine)
    for precision, first in answers[0].items():
        apart, added = first["losses"]
        assert apart[-1] != apart[0] and apart[0] == added[0]
        assert first["off"] <= (1e-2 if precision == "bf16" else 1e-5)
        for answer in answers:
            assert answer[precision]["state"] == first["state"], "ranks must agree to the bit"
