"""Runs the communicator laws on this rank, all ranks in the same order: ``laws.py OUT DEVICE [ENGINE]``.

The engine ``played`` is that of staged arrays, on arrays that play those of a GPU; ``played-mpi`` hands such to MPI.
"""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from minidl.backend import get_ops
from minidl.dist import init
from minidl.dist.staged import StagedCommunicator
from tests.dist.laws import CommunicatorLaws


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


def cases(law):
    """The keyword arguments of every case that pytest would make of a parametrised function."""
    marks = [mark.args[:2] for mark in getattr(law, "pytestmark", []) if mark.name == "parametrize"]
    for values in itertools.product(*(values for _, values in marks)):
        yield dict(zip((name for name, _ in marks), values, strict=True))


def main(out: str, device: str, engine: str = "") -> None:
    laws = CommunicatorLaws()
    if engine == "played":
        comm, laws.ops = StagedCommunicator(init(device), PlayedCopies()), PlayedCopies.ops
    elif engine == "played-mpi":
        control, copies = init(device, "mpi"), PlayedInPlace()
        control.carry(copies.ops)
        comm, laws.ops = StagedCommunicator(control, copies, name="cuda-mpi"), copies.ops
    else:
        comm, laws.ops = init(device, engine), get_ops(device)
    laws.comm = comm
    failures, count = {}, 0
    for name in sorted(name for name in dir(laws) if name.startswith("test_")):
        for case in cases(getattr(laws, name)):
            count += 1
            failure = None
            try:
                getattr(laws, name)(**case)
            except Exception:
                failure = traceback.format_exc()
            # Where one rank fails, the others are told, and all stay in step.
            found = [text for text in comm.share(failure) if text is not None]
            if found:
                failures[f"{name} {case}"] = found[0]
    result = {"name": comm.name, "rank": comm.rank, "size": comm.size, "count": count, "failures": failures}
    Path(out, f"{comm.rank}.json").write_text(json.dumps(result))
    comm.close()
    comm.close()


main(*sys.argv[1:])
