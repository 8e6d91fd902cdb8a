"""Runs the communicator laws on this rank, all ranks in the same order: ``laws.py OUT DEVICE [ENGINE]``.

The engine ``played`` is that of staged arrays, on arrays that play those of a GPU; ``played-mpi`` hands such to MPI.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from minidl.backend import get_ops
from minidl.dist import init
from minidl.dist.staged import StagedCommunicator
from tests.dist.laws import tried


class Played(np.ndarray):
    """An array that the engines of the host would not take: it is no plain NumPy array."""


class PlayedCopies:
    """Copies between the host and a GPU that is not there."""

    ops = SimpleNamespace(
        Array=Played, to_host=np.array, copy_into=np.copyto, from_host=lambda host: np.array(host).view(Played)
    )

    def host(self, array):
        return np.full_like(array, 77, subok=False)

    def ready(self):
        return "ready"

    def wait(self, ready):
        assert ready == "ready"

    def taken(self, gathered):
        return gathered.view(Played)

    def fetch(self, host, array, ready):
        assert ready == "ready"
        np.copyto(host, array.view(np.ndarray))

    def put(self, array, host):
        np.copyto(array, host)


class PlayedInPlace(PlayedCopies):
    """No copies: MPI is given the arrays, when they are ready."""

    ops = SimpleNamespace(**vars(PlayedCopies.ops), empty=lambda shape, dtype: np.empty(shape, dtype).view(Played))

    def host(self, array):
        return array

    def fetch(self, host, array, ready):
        assert host is array and ready == "ready"

    def put(self, array, host):
        assert host is array

    def taken(self, gathered):
        assert isinstance(gathered, Played)
        return gathered


def main(out: str, device: str, engine: str = "") -> None:
    if engine == "played":
        comm, ops = StagedCommunicator(init(device), PlayedCopies()), PlayedCopies.ops
    elif engine == "played-mpi":
        control, copies = init(device, "mpi"), PlayedInPlace()
        control.carry(copies.ops)
        comm, ops = StagedCommunicator(control, copies, name="cuda-mpi"), copies.ops
    else:
        comm, ops = init(device, engine), get_ops(device)
    failures, count = tried(comm, ops)
    result = {"name": comm.name, "rank": comm.rank, "size": comm.size, "count": count, "failures": failures}
    Path(out, f"{comm.rank}.json").write_text(json.dumps(result))
    comm.close()
    comm.close()


main(*sys.argv[1:])
