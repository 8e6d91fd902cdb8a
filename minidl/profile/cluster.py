"""What a sum over ranks takes: within a host as it was measured there, between hosts by a model.

Measured points come from any result of several ranks: its ceilings, what ``minidl doctor`` kept, or
``bench_all_reduce.py``, which has every engine of a host.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl import checks
from minidl.dist import ipc
from minidl.dist.simulated import AlphaBeta
from minidl.profile.roofline import wire_bytes
from minidl.profile.runs import NotInFile

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Sums:
    """All-reduces as they were measured within a host: of how many ranks, and by engine (bytes that each rank sends,
    milliseconds).
    """

    ranks: int
    engines: Mapping[str, Points]

    def points(self, engine: str = "") -> Points:
        """Those of one engine; default: the first, which the runtime takes by itself.

        Raises:
            ValueError: for an engine that was not measured.
        """
        engine = engine or next(iter(self.engines))
        if engine not in self.engines:
            raise checks.unknown("engine of measured all-reduces", engine, list(self.engines))
        return self.engines[engine]


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal ranks.

    Between hosts, by an alpha-beta model (Hockney, Parallel Computing 1994) of a sum in three stages: over the ranks of
    a host, of each share over the hosts, back to the ranks.

    Attributes:
        ranks_per_host: GPUs of a host.
        points: (bytes that each rank sends, milliseconds) of all-reduces measured within a host.
        network: between hosts, of each rank.
        by_kernels: within a host our own kernels add up gradients; then messages wait for passes that bear them.
    """

    ranks_per_host: int
    points: Points
    network: AlphaBeta
    by_kernels: bool = False

    def all_reduce(self, nbytes: float, hosts: int) -> float:
        """Milliseconds of a sum over all ranks."""
        local = self.ranks_per_host
        inside = _interpolated(self.points, wire_bytes(nbytes, local)) if local > 1 else 0.0
        if hosts == 1:
            return inside
        # Latencies as in a tree, there and back; bytes as in a ring over the hosts, of each rank's share.
        seconds = 2 * math.ceil(math.log2(hosts)) * self.network.latency
        seconds += wire_bytes(nbytes / local, hosts) / self.network.bandwidth
        return inside + 1e3 * seconds


def _interpolated(points: Sequence[tuple[float, float]], wire: float) -> float:
    """Milliseconds of so many bytes: between two points by a line, beyond them at the nearest one's latency or rate."""
    sent, ms = zip(*points, strict=True)
    if wire > sent[-1]:
        return ms[-1] * wire / sent[-1]
    return float(np.interp(wire, sent, ms))


def sums_of(content: Mapping[str, Any], file: str) -> Sums:
    """The all-reduces measured in a result file of several ranks.

    Raises:
        NotInFile: where none were.
    """
    if content.get("benchmark") == "bench_all_reduce":
        return _benchmarked(content["rows"])
    found = (content.get("ceilings") or {}).get("all_reduce")
    if not found:
        raise NotInFile(f"{file}: no all-reduces in it; make it on several ranks, or give --link")
    ranks = found["ranks"]
    points = tuple((wire_bytes(p["bytes"], ranks), p["ms"]) for p in found["points"])
    return Sums(ranks, {found["engine"]: points})


def _benchmarked(rows: Sequence[Mapping[str, Any]]) -> Sums:
    """Each engine by the ways that it takes for each size."""
    ranks, peer = rows[0]["ranks"], next(iter(rows[0]["peers"]))
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        found.setdefault(row["bytes"], {peer: row["peers"][peer]})[row["arm"]] = row["ms"]
    on_gpus = peer == "nccl"
    engines = {name: {size: _way(name, size, ranks) for size in found} for name in ipc.ROUTES} if on_gpus else {}
    engines = engines or {name: dict.fromkeys(found, name) for name in ("shm", "mpi")}
    return Sums(
        ranks,
        {
            name: tuple((wire_bytes(size, ranks), found[size][way]) for size, way in sorted(ways.items()))
            for name, ways in engines.items()
            if all(way in found[size] for size, way in ways.items())
        },
    )


def _way(engine: str, nbytes: int, ranks: int) -> str:
    """The benchmark's name for the way of a gradient's sum."""
    routes = ipc.ROUTES[engine]
    way = routes.way(nbytes, ranks)
    return f"{way}-{routes.blocks}" if way == "two-shot" else way
