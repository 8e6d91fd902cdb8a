"""Runs the communicator laws on this rank, all ranks in the same order: ``laws.py OUT DEVICE [ENGINE]``."""

from __future__ import annotations

import itertools
import json
import sys
import traceback
from pathlib import Path

from minidl.backend import get_ops
from minidl.dist import init
from tests.dist.laws import CommunicatorLaws


def cases(law):
    """The keyword arguments of every case that pytest would make of a parametrised function."""
    marks = [mark.args[:2] for mark in getattr(law, "pytestmark", []) if mark.name == "parametrize"]
    for values in itertools.product(*(values for _, values in marks)):
        yield dict(zip((name for name, _ in marks), values, strict=True))


def main(out: str, device: str, engine: str = "") -> None:
    comm = init(device, engine)
    laws = CommunicatorLaws()
    laws.comm, laws.ops = comm, get_ops(device)
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
