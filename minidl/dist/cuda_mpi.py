"""Collectives on CuPy arrays by an MPI that takes them as they are ("CUDA-aware"): where asked for, and tried first.

An MPI without CUDA reads an address of the GPU as one of the host, and crashes. So it is asked whether it was built and
started with CUDA; where it does not say, it is not used.
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.dist.agree import together
from minidl.dist.mpi import MPICommunicator
from minidl.dist.staged import StagedCommunicator

_QUERY = "MPIX_Query_cuda_support"
_TRIED = 1000


def on_device(comm: MPICommunicator, device: int) -> StagedCommunicator:
    """``comm``, from now on for arrays of each rank's current GPU, number ``device``; a collective.

    Raises:
        RuntimeError: on every rank, when MPI does not take such arrays on one, or adds them wrongly.
    """
    together(comm, "asking MPI whether it takes arrays of GPUs", lambda: require_cuda(comm.mpi))
    copies = InPlace(device)
    comm.carry(copies.ops)
    joined = StagedCommunicator(comm, copies, name="cuda-mpi")
    together(comm, "adding arrays of GPUs by MPI", lambda: _try_out(joined, copies.ops))
    return joined


def require_cuda(mpi: Any) -> None:
    """Refuse an MPI (the module ``mpi4py.MPI``, initialised) that does not say that it takes arrays of GPUs.

    Raises:
        ValueError: naming the library and what it lacks.
    """
    library, name = ctypes.CDLL(mpi.__file__), mpi.Get_library_version().splitlines()[0].strip("\0 ,")
    remedy = "use engine nccl or staged, or an MPI built and started with CUDA (MPICH: MPIR_CVAR_ENABLE_GPU=1)"
    if not hasattr(library, _QUERY):
        raise checks.impossible("init", f"engine cuda-mpi: {name} has no {_QUERY}", remedy)
    if not getattr(library, _QUERY)():
        raise checks.impossible("init", f"engine cuda-mpi: {name} says that it takes no arrays of GPUs", remedy)


def _try_out(comm: StagedCommunicator, ops: ModuleType) -> None:
    numbers = np.arange(_TRIED, dtype=np.float32)
    array = ops.from_host(numbers + np.float32(comm.rank))
    comm.all_reduce(array)
    if (ops.to_host(array) != numbers * comm.size + sum(range(comm.size))).any():
        raise RuntimeError("sums are wrong")


class InPlace:
    """In the place of `minidl.dist.staged.DeviceCopies`: the host waits for the GPU, and MPI takes the arrays there."""

    def __init__(self, device: int) -> None:
        import cupy

        self._cuda, self._device = cupy.cuda, cupy.cuda.Device(device)
        self.ops = backend.get_ops("cuda")

    def host(self, array: Any) -> Any:
        """What MPI is given: the array."""
        return array

    def ready(self) -> Any:
        """A mark behind what the current stream was given so far."""
        return self._cuda.get_current_stream().record(self._cuda.Event(disable_timing=True))

    def wait(self, ready: Any) -> None:
        """Return when the GPU has come so far."""
        ready.synchronize()

    def fetch(self, host: Any, array: Any, ready: Any) -> None:
        """The values are there, and MPI finds the GPU in this thread."""
        self._device.use()
        ready.synchronize()

    def put(self, array: Any, host: Any) -> None:
        """What this thread copied on the GPU is done."""
        self._cuda.get_current_stream().synchronize()

    def taken(self, gathered: Any) -> Any:
        """What `HostCommunicator.all_gather` made, on the device."""
        return gathered
