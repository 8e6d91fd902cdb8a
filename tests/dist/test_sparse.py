"""Sparse layers on several ranks, each with a share of the images, train as on one rank with all of them: the same
losses and weights within float32 rounding, weights of the same bits on every rank, messages with the elements only.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.dist import job

pytestmark = pytest.mark.mpi

GPU = [pytest.mark.gpu, pytest.mark.multi_gpu]


def _train(device, ranks, granularity, tmp_path):
    """(what one rank finds, what each of several finds)."""
    (tmp_path / "alone").mkdir()
    alone = job.run_alone("sparse", tmp_path / "alone", device, granularity)
    together = job.run("sparse", ranks, tmp_path, device, granularity)
    assert alone.status == together.status == 0, alone.output + together.output
    assert len(together.answers) == ranks
    [expected] = alone.answers
    for answer in together.answers:
        assert answer == together.answers[0], "ranks must agree to the bit"
        assert answer["masks"] == expected["masks"] and answer["sent"] == expected["sent"]
        assert abs(answer["loss"] - expected["loss"]) <= 2e-5 * (1 + abs(expected["loss"]))
        for name, value in expected["weights"].items():
            np.testing.assert_allclose(answer["weights"][name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    for name, dense in (("conv", 12 * 27), ("sparse", 64 * 192)):
        elements = len(expected["weights"][f"{name}.weight"])
        assert elements < 0.5 * dense and elements <= expected["sent"][name] < elements + 65, "with a bias, no more"
    moved = np.abs(np.subtract(expected["weights"]["sparse.weight"], expected["first"]))
    assert moved.max() > 1e-2, "it must have learnt, or equality says little"
    return expected


@pytest.mark.parametrize("device,ranks", [("cpu", 2), ("cpu", 3), pytest.param("cuda", 2, marks=GPU)])
def test_sparse_layers_train_on_several_ranks_as_on_one(device, ranks, tmp_path):
    _train(device, ranks, "none", tmp_path)


@pytest.mark.parametrize("ranks,granularity", [(2, "weight"), (3, "weight"), (2, "filter"), (3, "2:4")])
def test_ranks_prune_alike(ranks, granularity, tmp_path):
    masks = _train("cpu", ranks, granularity, tmp_path)["masks"]
    kept = {name: sum(mask) / len(mask) for name, mask in masks.items()}
    if granularity == "filter":  # the last layer's outputs are the network's
        assert kept.keys() == {"fc1.weight", "fc1.bias"} and max(kept.values()) < 0.22
    else:
        most = 0.51 if granularity == "2:4" else 0.21
        assert kept.keys() == {"fc1.weight", "fc2.weight"} and max(kept.values()) < most
