"""Real MPI jobs on this machine: the laws on several ranks and engines, and what `init` answers."""

from __future__ import annotations

import os
import shlex
import sys

import pytest

from minidl.dist import mpiexec
from tests.dist import job

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("engine", "ranks", "per_host"),
    [
        ("auto", 1, 0),
        ("mpi", 2, 0),
        ("mpi", 3, 0),
        ("shm", 2, 0),
        ("shm", 3, 0),
        ("shm", 4, 0),
        ("shm", 4, 2),
        ("played", 2, 0),
        ("played", 4, 2),
        ("played-mpi", 3, 0),
    ],
)
def test_laws_hold(engine, ranks, per_host, tmp_path, monkeypatch):
    if ranks > 3:  # MPI's waits spin, and four ranks may share two busy cores
        monkeypatch.setattr(job, "TIMEOUT_SECONDS", 90.0)
    hosts = {"MINIDL_RANKS_PER_HOST": str(per_host)} if per_host else {}
    answers = job.answers("laws", ranks, tmp_path, "cpu", engine, **hosts)
    assert [answer["rank"] for answer in answers] == list(range(ranks))
    for answer in answers:
        assert answer["name"] == {"auto": "solo", "played": "staged", "played-mpi": "cuda-mpi"}.get(engine, engine)
        assert answer["size"] == ranks and answer["count"] > 100
        assert answer["failures"] == {}


def test_init_is_idempotent_and_starts_again_after_close(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "once"):
        assert answer["before"] and answer["same"] and answer["after"]
        assert answer["other"] == "RuntimeError: init: called for cuda after cpu; close the communicator first"
        assert "barrier called after close" in answer["closed"]
        assert answer["total"] == [2.0] * 3 and answer["size"] == 2


def test_ranks_may_part_and_join_again_and_again(tmp_path):
    """Whatever was still under way: a later communicator may be given the place of one before."""
    answers = job.answers("joining", 3, tmp_path, "again")
    assert [answer["sums"] for answer in answers] == [[9 * number for number in range(3)]] * 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_agreement_errors_are_raised_on_every_rank(ranks, tmp_path):
    answers = job.answers("joining", ranks, tmp_path, "different_plans")
    assert all(answer == answers[0] for answer in answers)
    others = "on rank 0" if ranks == 2 else "on ranks 0, 2"
    answer = answers[0]
    assert answer["shape"] == (
        "ValueError: ranks differ in parameter plan, first in entry 1: "
        f"{others}: fc.weight (1000, 512); on rank 1: fc.weight (10, 512)"
    )
    assert "first in entry 1" in answer["length"] if ranks > 2 else "fc.weight (10, 512)" in answer["length"]
    assert "first in entry 1: on rank 0: fc.weight float32 (3, 2) sha256" in answer["weights"]


def test_refused_arrays_leave_the_ranks_in_step(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "errors_leave_ranks_in_step"):
        first, second, third = answer["errors"]
        assert first.startswith(
            "TypeError: all_reduce: array must be one of float32, float64, int32, int64, bfloat16, got float"
        )
        assert second.startswith("TypeError: start_all_reduce: array must be one of")
        assert third.startswith("ValueError: all_reduce: array must be writeable")
        assert answer["total"] == [2.0] * 4


def test_one_failing_start_is_raised_on_every_rank(tmp_path):
    for answer in job.answers("joining", 3, tmp_path, "without_threadpoolctl"):
        assert answer["error"].startswith("RuntimeError: sharing the cores between ranks failed: on rank 1: Import")
        assert "pip install 'minidl[mpi]'" in answer["error"]


def test_without_room_for_shared_memory_sums_go_by_mpi_and_one_rank_says_so(tmp_path):
    done = job.run("joining", 3, tmp_path, "without_shared_memory")
    assert done.status == 0, done.output
    what = "MiB of memory between the ranks of a host failed: on rank 1: OSError: [Errno 28] No space left on device"
    for answer in done.answers:
        assert answer["name"] == "mpi" and answer["total"] == [3.0] * 3
        assert answer["error"].startswith("RuntimeError: sharing ") and what in answer["error"]
    assert done.output.count(f"{what}; sums go by MPI, which is slower") == 1


def test_the_engine_is_the_users_and_the_same_everywhere(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "engines"):
        assert answer["different"] == (
            "ValueError: init: on rank 0: engine shm; on rank 1: engine mpi; all ranks need the same"
        )
        assert answer["unknown"].startswith("ValueError: unknown engine 'smh'; did you mean 'shm'?")
        assert answer["name"] == "mpi" and answer["auto"] == "shm"


def test_cuda_without_gpu_is_refused_on_every_rank(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "without_gpu", CUDA_VISIBLE_DEVICES=""):
        assert answer["error"].startswith("RuntimeError: binding a GPU to each rank failed: on ranks 0-1: ")
        assert answer["solo"]


def test_a_gpu_that_one_rank_lacks_is_missed_by_all(tmp_path):
    for answer in job.answers("joining", 3, tmp_path, "one_rank_without_gpu", CUDA_VISIBLE_DEVICES=""):
        assert answer["error"].startswith("RuntimeError: binding a GPU to each rank failed: on rank 1: ")
        assert answer["solo"]


def test_different_devices_are_refused_on_every_rank(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "different_devices"):
        assert "on rank 0: cpu; on rank 1: cuda" in answer["error"] and answer["solo"]


@pytest.mark.parametrize("ranks", [1, 2])
def test_missing_mpi4py_under_a_launcher_is_an_error(ranks, tmp_path):
    done = job.run("joining", ranks, tmp_path, "without_mpi4py")
    assert len(done.answers) == ranks, done.output
    for answer in done.answers:
        if ranks == 1:  # alone, nobody misses it
            assert answer["error"] == "no error"
        else:
            assert answer["error"].startswith("ImportError: this process was started as one of 2 ranks, and mpi4py")
            assert answer["error"].endswith("pip install 'minidl[mpi]'")


def test_too_low_a_thread_level_is_an_error(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "without_threads"):
        assert "MPI_THREAD_MULTIPLE" in answer["error"]


def test_launcher_of_another_mpi_is_an_error(tmp_path):
    done = job.run_alone("joining", tmp_path, "without_gpu", OMPI_COMM_WORLD_SIZE="4")
    assert "started as one of 4 ranks" in done.answers[0]["error"], done.output
    assert "sees only itself" in done.answers[0]["error"]


def test_cores_are_shared_between_ranks(tmp_path):
    for answer in job.answers("joining", 2, tmp_path, "threads"):
        share = max(1, answer["cores"] // 2)
        assert answer["omp"] == str(share) and set(answer["blas"]) == {share}


@pytest.mark.parametrize("ranks", [1, 3])
def test_mpich_sleeps_where_there_are_more_ranks_than_cores(ranks, tmp_path):
    """A launcher on two cores; whoever has told MPICH is obeyed."""
    if mpiexec.find().family != "MPICH":
        pytest.skip("Open MPI's launcher lets ranks that wait yield")
    bind = "import os, sys; os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2]); "
    bind += "os.execv(sys.argv[1], sys.argv[1:])"
    launcher = [sys.executable, "-c", bind, *mpiexec.find().command(ranks, [sys.executable])]
    program = [str(job.WORKERS / "joining.py"), str(tmp_path), "threads"]
    for told, expected in (({}, "1" if ranks > 2 else None), ({"MPIR_CVAR_ENABLE_HEAVY_YIELD": "0"}, "0")):
        done = job.run_command([*launcher, *program], tmp_path, **told)
        assert [answer["sleeps"] for answer in done.answers] == [expected] * ranks, done.output


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_bound_ranks_use_their_own_core(tmp_path):
    done = job.run("joining", 2, tmp_path, "bound_threads")
    assert [answer["omp"] for answer in done.answers] == ["1", "1"], done.output
    assert [answer["cores"] for answer in done.answers] == [1, 1]


def test_a_users_thread_count_wins(tmp_path):
    done = job.run("joining", 2, tmp_path, "threads", OMP_NUM_THREADS="2")
    assert [answer["omp"] for answer in done.answers] == ["2", "2"], done.output


def test_the_launcher_module_runs_a_script(tmp_path):
    command = [sys.executable, "-m", "minidl.launch", "-n", "3", str(job.WORKERS / "joining.py"), str(tmp_path), "once"]
    done = job.run_command(command, tmp_path)
    assert done.status == 0, done.output
    assert len(done.answers) == 3 and f"3 ranks by {mpiexec.find().family}" in done.output


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_the_launcher_module_runs_ranks_where_streams_are_closed(closed, tmp_path):
    """MPICH's launcher fails without its own."""
    launch = [sys.executable, "-m", "minidl.launch", "-n", "2", str(job.WORKERS / "joining.py"), str(tmp_path), "once"]
    done = job.run_command(["sh", "-c", f"exec {shlex.join(launch)} {closed}"], tmp_path)
    assert done.status == 0 and len(done.answers) == 2, done.output
