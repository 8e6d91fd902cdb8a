"""How long idle OpenMP threads spin. Imported before everything that loads GNU's OpenMP runtime, which asks once.

By default its threads spin for some milliseconds at the end of each parallel loop. On a busy machine the scheduler may
put two of them on one core: whoever spins then burns the time slice of whoever it waits for, in each of the hundreds
of loops of a step, and training takes sixty times as long. A short spin bridges the gaps between the loops of a step:
less costs time on an idle machine, more costs it on a busy one. A step of ResNet-20 on two cores takes 170 ms beside
another such program with a count of 5000, 108 with 2000, 87 with 1000, 78 with 500; alone, in turns with 5000 (33 to 39
ms), 5 %, 9 % and 20 % longer.
OMP_WAIT_POLICY or GOMP_SPINCOUNT in the environment win, and a runtime that another package loaded before keeps its
own.
"""

from __future__ import annotations

import importlib
import os

SPIN_COUNT = 2000
_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def _load_runtime() -> None:
    """Load the runtime under our choice; the environment stays as it was, for other runtimes and for children."""
    chosen = any(variable in os.environ for variable in _CHOICES)
    if not chosen:
        os.environ["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    try:
        importlib.import_module("minidl.cpu._conv2d")
    finally:
        if not chosen:
            del os.environ["GOMP_SPINCOUNT"]


_load_runtime()
