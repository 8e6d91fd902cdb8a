"""Momentum shared out among ranks: the same training, a part of the memory."""

from __future__ import annotations

import numpy as np
import pytest

from minidl import checkpoint
from tests.dist import job

pytestmark = pytest.mark.mpi


def assert_the_same(answers, ranks, *, exact):
    for way, first in answers[0].items():
        whole, parts = first["losses"]
        assert whole[-1] != whole[0] and max(abs(a - b) for a, b in zip(whole, parts, strict=True)) <= (
            0 if exact else 1e-2 if "bf16" in way else 1e-5
        )
        limit = 0.0 if exact else 1e-2 if "bf16" in way else 1e-5
        for answer in answers:
            found = answer[way]
            assert found["weights"] <= limit and found["momentum"] <= limit and found["loaded"] == 0, (way, found)
            assert found["working"] == first["working"], "ranks must agree to the bit"
        assert sum(answer[way]["kept"] for answer in answers) == first["all"]
        assert max(answer[way]["kept"] for answer in answers) < 1.5 * first["all"] / ranks


@pytest.mark.parametrize(
    ("engine", "ranks", "exact"), [("shm", 2, True), ("shm", 3, True), ("mpi", 2, True), ("mpi", 3, False)]
)
def test_sharded_training_is_the_same(engine, ranks, exact, tmp_path):
    """In shared memory to the bit; with MPI, and more than two ranks, sums may be added in another order."""
    assert_the_same(job.answers("sharded", ranks, tmp_path, "cpu", engine), ranks, exact=exact)


def test_the_command_trains_writes_and_goes_on(tmp_path):
    """Its checkpoints are those of a run with momentum everywhere, and go on with another number of ranks."""
    common = "-m minidl train --device cpu --data synthetic --model lenet --samples 64 --batch 16 --lr 0.01 --workers 0"
    kept = {}
    for name, option in (("whole", []), ("parts", ["--shard-momentum"])):
        done = job.run_program(
            [*common.split(), "--epochs", "1", "--output", str(tmp_path / name), *option], 2, tmp_path
        )
        assert done.status == 0, done.output
        assert ("with sharded momentum, checkpoints" in done.output) == bool(option), "what takes part is told"
        tensors, _ = checkpoint.load(checkpoint.latest(tmp_path / name))
        kept[name] = tensors
    assert any(name.startswith("optimizer.momentum.") for name in kept["whole"])
    assert kept["whole"].keys() == kept["parts"].keys()
    for name, value in kept["whole"].items():
        np.testing.assert_array_equal(kept["parts"][name], value, err_msg=name)
    more = [*common.split(), "--epochs", "2", "--shard-momentum", "--output", str(tmp_path / "parts"), "--resume"]
    done = job.run_program(more, 3, tmp_path)
    assert done.status == 0, done.output


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_shard_alike(tmp_path):
    assert_the_same(job.answers("sharded", 2, tmp_path, "cuda"), 2, exact=False)
