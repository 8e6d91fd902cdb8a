"""Ranks that compute one convolution together equal one rank: output, input gradient and parameter gradients."""

from __future__ import annotations

import pytest

from tests.conftest import CUDA
from tests.dist import job

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(bool(job.missing()), reason=job.missing() or "MPI found")]


def assert_equal_one_rank(answers, ranks):
    for answer in answers:
        assert answer["size"] == ranks and len(answer["found"]) > 40
        assert {case: found for case, found in answer["found"].items() if any(found.values())} == {}


@pytest.mark.parametrize("engine", ["mpi", "shm"])
@pytest.mark.parametrize(("ranks", "of_a_group"), [(2, 2), (3, 3), (4, 4), (4, 2)])
def test_a_convolution_of_several_ranks_equals_that_of_one(ranks, of_a_group, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "TIMEOUT_SECONDS", 90.0)
    done = job.run("parallel", ranks, tmp_path, "cpu", str(of_a_group), MINIDL_ENGINE=engine)
    assert done.status == 0, done.output
    assert len(done.answers) == ranks and all(answer["engine"] == engine for answer in done.answers)
    assert_equal_one_rank(done.answers, of_a_group)


@pytest.mark.multi_gpu
@pytest.mark.parametrize("device", [CUDA])
def test_two_gpus_equal_one(device, tmp_path, monkeypatch):
    import cupy

    monkeypatch.setattr(job, "TIMEOUT_SECONDS", 90.0)  # starting CUDA and NCCL takes seconds by itself
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    done = job.run("parallel", 2, tmp_path, device, "2")
    assert done.status == 0, done.output
    assert_equal_one_rank(done.answers, 2)
