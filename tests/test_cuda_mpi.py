"""Which MPI is handed arrays of a GPU: one that says that it takes them, and adds them rightly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from minidl.dist import SOLO, cuda_mpi

MPI = SimpleNamespace(__file__="libmpi.so", Get_library_version=lambda: "Open MPI v5.0.11, package: x\0\nmore")


@pytest.mark.parametrize(
    ("library", "message"),
    [
        (SimpleNamespace(), "engine cuda-mpi: Open MPI v5.0.11, package: x has no MPIX_Query_cuda_support; use engine"),
        (SimpleNamespace(MPIX_Query_cuda_support=lambda: 0), "package: x says that it takes no arrays of GPUs; use"),
        (SimpleNamespace(MPIX_Query_cuda_support=lambda: 1), ""),
    ],
)
def test_only_an_mpi_that_says_so_is_used(library, message, monkeypatch):
    asked = []
    monkeypatch.setattr(cuda_mpi.ctypes, "CDLL", lambda path: asked.append(path) or library)
    if message:
        with pytest.raises(ValueError) as error:
            cuda_mpi.require_cuda(MPI)
        assert message in str(error.value) and "nccl or staged" in str(error.value)
    else:
        cuda_mpi.require_cuda(MPI)
    assert asked == ["libmpi.so"]


def test_the_mpi_at_hand_is_asked_once_it_runs_and_answers():
    """The wheels are built without CUDA; one that says otherwise is believed."""
    pytest.importorskip("mpi4py")
    try:
        from mpi4py import MPI as library
    except RuntimeError:
        pytest.skip("mpi4py finds no MPI library")
    with pytest.raises(ValueError, match="engine cuda-mpi: .* (has no MPIX_Query|says that it takes no arrays)"):
        cuda_mpi.require_cuda(library)


@pytest.mark.parametrize("wrong", [False, True])
def test_wrong_sums_are_noticed_before_any_gradient_is_added(wrong, cpu_ops, monkeypatch):
    def spoilt(self, array):
        array[7] += wrong

    monkeypatch.setattr(type(SOLO), "all_reduce", spoilt)
    if wrong:
        with pytest.raises(RuntimeError, match="sums are wrong"):
            cuda_mpi._try_out(SOLO, cpu_ops)
    else:
        cuda_mpi._try_out(SOLO, cpu_ops)


@pytest.mark.parametrize("lost", [None, 0, 1])
def test_every_ranks_numbers_are_in_the_sums_that_are_tried(lost, cpu_ops):
    """Here the last of three ranks, the other two played: each adds its own rank to the numbers."""

    def all_reduce(array):
        array += sum(array - 2 + rank for rank in (0, 1) if rank != lost)

    comm = SimpleNamespace(rank=2, size=3, all_reduce=all_reduce)
    if lost is None:
        cuda_mpi._try_out(comm, cpu_ops)
    else:
        with pytest.raises(RuntimeError, match="sums are wrong"):
            cuda_mpi._try_out(comm, cpu_ops)
