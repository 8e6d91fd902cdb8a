"""Rows of a fully connected layer travel in the place of the gradient they make: the same sums, on all ranks alike."""

from __future__ import annotations

import pytest

from minidl.messages.factors import most_rows
from tests.dist import job
from tests.dist.workers.factors import STEPS, WAYS

pytestmark = pytest.mark.mpi


def assert_the_same(answers):
    for way, (_, _, travels) in WAYS.items():
        first = answers[0][way]
        sums, factors = first["losses"]
        assert sums[-1] != sums[0] and sums[0] == factors[0]
        limit = 1e-2 if way in ("bfloat16", "rounded") else 1e-5
        for answer in answers:
            found = answer[way]
            assert found["sent"] == [0, 2 * STEPS * travels], way
            assert found["off"] <= (limit if travels else 0), (way, found["off"])
            assert found["weights"] == first["weights"], f"{way}: ranks must agree to the bit"
        sums, factors = first["messages"]
        assert (sums == factors) == (way in ("frozen weight", "summed after all"))
        assert sums == factors or {"fc1", "fc2"} <= {layers[0] for layers in factors if len(layers) == 1}
    for answer in answers:
        assert answer["exact"] == [[0.0, 0.0]] * 3


@pytest.mark.parametrize(("engine", "ranks"), [("shm", 2), ("shm", 3), ("mpi", 4)])
def test_training_is_that_of_sums(engine, ranks, tmp_path):
    assert_the_same(job.answers("factors", ranks, tmp_path, "cpu", engine))


@pytest.mark.gpu
@pytest.mark.multi_gpu
@pytest.mark.parametrize("engine", ["nccl", "auto"])
def test_two_gpus_train_alike_eagerly_and_compiled(engine, tmp_path):
    answers = job.answers("factors", 2, tmp_path, "cuda", engine)
    assert_the_same(answers)
    for answer in answers:
        eager, compiled = answer["compiled"]
        assert eager == compiled == answers[0]["compiled"][0]


def test_they_travel_where_they_are_much_smaller():
    """The layers of VGG-16, the last one of ResNet-50, and a batch that is as large as the weights."""
    assert most_rows(25088, 4096, 2, 4, "cuda") * (25088 + 4096) * 2 * 4 <= 25088 * 4096 * 4
    assert [most_rows(*shape, 2, 4, "cuda") > 128 for shape in ((25088, 4096), (4096, 4096), (4096, 1000))] == [
        True
    ] * 3
    assert most_rows(2048, 1000, 2, 4, "cuda") == 0 == most_rows(25088, 4096, 4, 4, "cpu")
    assert most_rows(4096, 4096, 4, 2, "cuda") == most_rows(4096, 4096, 4, 4, "cuda") // 2
