"""Ceilings of a few small sizes, measured by all ranks, kept, and found again: ``ceilings.py OUT``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from minidl import cpu
from minidl.dist import init
from minidl.profile import all_reduce, ceilings
from minidl.profile.timing import Budget

comm = init("cpu")
all_reduce.SIZES = (4096, 65536, 1 << 20)
ceilings.LARGEST_MATRIX, ceilings.BUDGET = 256, Budget(samples=3, seconds=0.2)
told: list[str] = []
measured = ceilings.find(cpu, comm, progress=told.append)
found = ceilings.find(cpu, comm)
answer = {"rank": comm.rank, "measured": measured, "found": found, "told": told}
(Path(sys.argv[1]) / f"rank{comm.rank}.json").write_text(json.dumps(answer))
comm.close()
