"""Experimental: the ranks that are left go on when one is lost (ULFM: Bland et al., "Post-failure recovery of MPI
communication capability", IJHPCA 2013).

A job that was joined with ``dist.init("cpu", elastic=True)`` raises `RankLost` from the collectives of all other ranks
when the process of one ends or is killed. They call `minidl.dist.shrink` and build anew, from the newest checkpoint:
that is what ``minidl train --elastic`` does. A rank that fails with an exception, or does not answer, ends the job as
always.

It takes an MPI with MPIX_Comm_shrink that was started to tolerate failures: Open MPI 5 with ``mpiexec --with-ft ulfm``
(``python -m minidl.launch --elastic``). MPICH has the calls, but its launcher ends the job, or the ranks that are left
were seen to hang.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from minidl import checks

_TOLERANT = "OMPI_MCA_mpi_ft_enable"  # set by mpiexec --with-ft ulfm
_LOSSES = "ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED"


class RankLost(RuntimeError):
    """The process of another rank is gone; `minidl.dist.shrink` joins those that are left."""


def require(mpi: Any) -> None:
    """Refuse an MPI (the module ``mpi4py.MPI``, initialised) that ends with the first rank that is lost.

    Raises:
        ValueError: naming the library and what is missing.
    """
    name = mpi.Get_library_version().splitlines()[0].strip("\0 ,")
    remedy = "take Open MPI 5 and start with mpiexec --with-ft ulfm, or python -m minidl.launch --elastic"
    if not hasattr(ctypes.CDLL(mpi.__file__), "MPIX_Comm_shrink"):
        raise checks.impossible("init", f"elastic: {name} has no MPIX_Comm_shrink", remedy)
    if not name.startswith("Open MPI"):
        raise checks.impossible("init", f"elastic: the launcher of {name} ends the ranks that are left", remedy)
    if os.environ.get(_TOLERANT, "0") in ("0", "false"):
        raise checks.impossible("init", f"elastic: {name} was not started to go on without a lost rank", remedy)


def is_loss(mpi: Any, error: BaseException) -> bool:
    """Whether an error of MPI tells that a rank is lost, here or as another rank has found out."""
    known = {getattr(mpi, name) for name in _LOSSES if hasattr(mpi, name)}
    return isinstance(error, mpi.Exception) and error.Get_error_class() in known
