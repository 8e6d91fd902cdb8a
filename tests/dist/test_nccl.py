"""Real NCCL jobs on the GPUs of this host: the same laws, the same faults, CUDA graphs, and GPUs asked for twice."""

from __future__ import annotations

import pytest

from minidl import backend
from tests.dist import job
from tests.dist.job import FAULTS


def _gpus() -> int:
    try:
        backend.get_ops("cuda").require_device()
        import cupy

        return cupy.cuda.runtime.getDeviceCount()
    except (ImportError, RuntimeError):
        return 0


GPUS = _gpus()
RANKS = [n for n in (2, 3, 4, 8) if n <= GPUS] or [2]

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(bool(job.missing()), reason=job.missing() or "MPI found"),
    pytest.mark.skipif(GPUS < 2, reason=f"needs two GPUs, found {GPUS}"),
]


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Starting CUDA and NCCL takes seconds by itself."""
    monkeypatch.setattr(job, "TIMEOUT_SECONDS", 90.0)


@pytest.mark.parametrize("ranks", RANKS)
def test_laws_hold(ranks, tmp_path):
    done = job.run("laws", ranks, tmp_path, "cuda")
    assert done.status == 0, done.output
    assert [answer["rank"] for answer in done.answers] == list(range(ranks))
    for answer in done.answers:
        assert answer["name"] == "nccl" and answer["size"] == ranks and answer["count"] > 100
        assert answer["failures"] == {}


@pytest.mark.parametrize("ranks", RANKS)
def test_a_captured_step_equals_the_eager_one(ranks, tmp_path):
    done = job.run("capture", ranks, tmp_path)
    assert done.status == 0, done.output
    for answer in done.answers:
        assert answer["wrong"] == 0 and answer["steps"] == answer["expected"]
        assert answer["name"] == "nccl" and answer["devices"] == list(range(ranks)) and answer["nvls"] == ["0"]


@pytest.mark.parametrize("ranks", RANKS)
def test_compiled_training_gives_the_bits_of_eager_training(ranks, tmp_path):
    done = job.run("compiled", ranks, tmp_path)
    assert done.status == 0, done.output
    for answer in done.answers:
        assert answer["name"] == "nccl" and answer["found"] == done.answers[0]["found"], "ranks must agree to the bit"
        for case, (eager, compiled) in answer["found"].items():
            assert eager == compiled, case
            losses = [loss for loss, _, _ in eager["losses"]]
            assert len(set(losses)) == len(losses)


def test_two_ranks_on_one_gpu_are_named_on_every_rank(tmp_path):
    done = job.run("joining", 2, tmp_path, "without_gpu", CUDA_VISIBLE_DEVICES="0")
    assert done.status == 0, done.output
    for answer in done.answers:
        assert answer["error"].startswith("RuntimeError: init: ranks 0-1 share GPU ") and answer["solo"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failing_rank_ends_the_job(fault, tmp_path):
    status, text = FAULTS[fault]
    done = job.run("faults", 2, tmp_path, fault, "cuda")
    assert done.status == status, done.output
    assert text in done.output and "ending all ranks" in done.output


@pytest.mark.parametrize("name", ["late_rank", "message_never_awaited", "all_exit_with_status"])
def test_what_is_no_fault_ends_in_good_order(name, tmp_path):
    done = job.run("faults", 2, tmp_path, name, "cuda")
    assert done.status == (3 if name == "all_exit_with_status" else 0), done.output
    assert "ending all ranks" not in done.output
