"""Sparse layers on several ranks, each with a share of the images, train as on one rank with all of them: the same
losses and weights within float32 rounding, weights of the same bits on every rank, messages with the elements only.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.dist import job

pytestmark = pytest.mark.mpi

GPU = [pytest.mark.gpu, pytest.mark.multi_gpu]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one rank finds with all images."""
    answers = {}

    def found(*way):
        if way not in answers:
            [answers[way]] = job.answers("sparse", 1, tmp_path_factory.mktemp("alone"), *way)
        return answers[way]

    return found


def _train(alone, ranks, device, granularity, tmp_path):
    """What each rank finds, which is what one does."""
    expected = alone(device, granularity)
    together = job.answers("sparse", ranks, tmp_path, device, granularity)
    for answer in together:
        assert answer == together[0], "ranks must agree to the bit"
        assert answer["masks"] == expected["masks"] and answer["sent"] == expected["sent"]
        assert abs(answer["loss"] - expected["loss"]) <= 2e-5 * (1 + abs(expected["loss"]))
        for name, value in expected["weights"].items():
            np.testing.assert_allclose(answer["weights"][name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    for name, dense, most in (("conv", 12 * 27, 0.45), ("sparse", 64 * 192, 0.25)):
        elements = len(expected["weights"][f"{name}.weight"])
        assert elements < most * dense and elements <= expected["sent"][name] < elements + 64
    moved = np.abs(np.subtract(expected["weights"]["sparse.weight"], expected["first"]))
    assert moved.max() > 1e-2, "it must have learnt, or equality says little"
    return expected


@pytest.mark.parametrize("device,ranks", [("cpu", 2), ("cpu", 3), pytest.param("cuda", 2, marks=GPU)])
def test_sparse_layers_train_on_several_ranks_as_on_one(device, ranks, alone, tmp_path):
    _train(alone, ranks, device, "none", tmp_path)


@pytest.mark.parametrize("ranks,granularity", [(2, "weight"), (3, "weight"), (2, "filter"), (3, "2:4")])
def test_ranks_prune_alike(ranks, granularity, alone, tmp_path):
    masks = _train(alone, ranks, "cpu", granularity, tmp_path)["masks"]
    kept = {name: sum(mask) / len(mask) for name, mask in masks.items()}
    if granularity == "filter":  # the last layer's outputs are the network's
        assert kept.keys() == {"fc1.weight", "fc1.bias"} and max(kept.values()) < 0.22
    else:
        most = 0.51 if granularity == "2:4" else 0.21
        assert kept.keys() == {"fc1.weight", "fc2.weight"} and max(kept.values()) < most
