"""Ranks that compute one convolution together equal one rank: output, input gradient and parameter gradients."""

from __future__ import annotations

import numpy as np
import pytest

from minidl.layers.row_plan import share
from tests.dist import job

pytestmark = pytest.mark.mpi


def assert_equal_one_rank(answers, ranks):
    for answer in answers:
        assert answer["size"] == ranks and len(answer["found"]) > 40
        assert {case: found for case, found in answer["found"].items() if any(found.values())} == {}


@pytest.mark.parametrize(
    ("ranks", "of_a_group", "engine"),
    [(2, 2, "shm"), (3, 3, "shm"), (4, 4, "shm"), (4, 2, "shm"), (3, 3, "mpi"), (4, 2, "mpi")],
)
def test_a_convolution_of_several_ranks_equals_that_of_one(ranks, of_a_group, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "TIMEOUT_SECONDS", 90.0)
    answers = job.answers("parallel", ranks, tmp_path, "cpu", str(of_a_group), MINIDL_ENGINE=engine)
    assert all(answer["engine"] == engine for answer in answers)
    assert_equal_one_rank(answers, of_a_group)


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_two_gpus_equal_one(tmp_path):
    assert_equal_one_rank(job.answers("parallel", 2, tmp_path, "cuda", "2"), 2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process finds, by the way."""
    return {way: _train(tmp_path_factory.mktemp("alone"), way, 1, 1)[0] for way in ("rows", "channels")}


def _train(tmp_path, way, ranks, of_a_group):
    (tmp_path / way).mkdir()
    return job.answers("hybrid", ranks, tmp_path / way, "cpu", way, str(of_a_group))


def _own(name, value, answer):
    """The part of the whole weights that this rank holds: filters of a convolution that a group shares."""
    layer = name.split(".")[0]
    if layer not in ("conv1", "conv2"):
        return value
    part = share(len(value), answer["parts"], answer["place"])
    return value[part.begin : part.end]


@pytest.mark.parametrize(("ranks", "of_a_group"), [(2, 2), (3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize("way", ["rows", "channels"])
def test_groups_that_share_layers_train_like_one_rank(way, ranks, of_a_group, alone, tmp_path):
    for answer in _train(tmp_path, way, ranks, of_a_group):
        np.testing.assert_allclose(answer["losses"], alone[way]["losses"], rtol=2e-5)
        for name, value in alone[way]["weights"].items():
            expected = _own(name, np.array(value), answer) if way == "channels" else value
            np.testing.assert_allclose(answer["weights"][name], expected, rtol=2e-4, atol=2e-5, err_msg=name)
    assert alone[way]["losses"][-1] < alone[way]["losses"][0], "it must have learnt, or equality says little"


def test_batch_norms_of_a_group_see_its_images_only(tmp_path):
    """Two groups of two, each sharing images, equal two ranks with those images, whose batch norms are their own."""
    expected = _train(tmp_path, "data", 2, 1)
    found = _train(tmp_path, "rows-group", 4, 2)
    for rank, answer in enumerate(found):
        np.testing.assert_allclose(answer["losses"], expected[0]["losses"], rtol=2e-5)
        for name, value in expected[rank // 2]["weights"].items():
            np.testing.assert_allclose(answer["weights"][name], value, rtol=2e-4, atol=2e-5, err_msg=name)
    statistics = [np.array(answer["weights"]["bn1.running_mean"]) for answer in expected]
    assert np.abs(statistics[0] - statistics[1]).max() > 1e-3, "else the groups saw the same"
