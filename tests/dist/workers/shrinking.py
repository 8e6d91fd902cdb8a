"""One of three ranks is killed in the midst of a call; the others go on: ``shrinking.py OUT WAY``."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from minidl import dist
from tests.dist.laws import CommunicatorLaws


def lost_in(way: str, comm: dist.Communicator) -> str:
    """What the others are told, who are in a call or on their way to one when rank 1 is killed."""
    array = np.ones(50_000, "float32")
    group = comm.split(0) if way == "group" else comm
    for number in range(5):
        group.all_reduce(array)
        if comm.rank == 1 and number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            if way == "message":
                comm.start_all_reduce(array, name="conv1").wait()
            elif way == "computing":
                time.sleep(0.5)
                comm.barrier()
            elif way == "exchange":
                partner = {0: 1, 1: 0}.get(comm.rank)
                arrays = {} if partner is None else {partner: array}
                comm.start_exchange(arrays, {other: array.copy() for other in arrays}).wait()
            else:
                group.share(number)
        except dist.RankLost as error:
            return str(error)
    return "nothing"


def main(out: str, way: str) -> None:
    comm = dist.init("cpu", elastic=True)
    old = comm.rank
    Path(out, f"{old}.at").touch()
    try:
        told = lost_in(way, comm)
    except dist.RankLost as error:  # in the sum before
        told = str(error)
    again = dist.shrink()
    total = np.array([10.0**old])
    again.all_reduce(total)
    laws = CommunicatorLaws()
    laws.comm, laws.ops = again, __import__("minidl.cpu", fromlist=["cpu"])
    laws.test_messages_run_beside_other_collectives()
    answer = {"old": old, "rank": again.rank, "size": again.size, "told": told, "total": total[0]}
    answer |= {"world": dist.world() is again}
    Path(out, f"{old}.json").write_text(json.dumps(answer))


main(*sys.argv[1:])
