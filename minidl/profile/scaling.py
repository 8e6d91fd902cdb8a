"""What a step would take on a cluster that is not there: from the times of one rank's layers and a model of messages.

The schedule is that of `minidl.params.Arena` and `SGD.step`: backward, each layer's weight gradient may complete a
message, messages run one after another beside the compute, and the update waits for them in turn. Two things make a
step longer than that of one rank: what the update waits, and what compute loses to the messages beside it.

Within a host a message takes what was measured there (interpolated over its bytes on the wire); between hosts, by an
alpha-beta model (Hockney, Parallel Computing 1994) of a sum in three stages: over the ranks of a host, of each share
over the hosts, back to the ranks. Nothing here measures or sends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from minidl import checks
from minidl.dist.simulated import AlphaBeta
from minidl.profile.roofline import wire_bytes
from minidl.profile.runs import COMPUTE, NotInFile, Run

__all__ = [
    "GROUPS",
    "INTERFERENCE",
    "Cluster",
    "LayerTimes",
    "Message",
    "Outcome",
    "StepTimes",
    "best",
    "measured",
    "points_of",
    "simulate",
]

GROUPS = (0, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 1 << 40)  # bytes; the last: one message for all
INTERFERENCE = 0.3  # what its messages cost VGG-16 on two GPUs; see docs/distributed.md


@dataclass(frozen=True)
class LayerTimes:
    """One layer's backward pass in milliseconds, and the bytes of gradients it then sends (float32)."""

    name: str
    weight_ms: float
    data_ms: float
    nbytes: int


@dataclass(frozen=True)
class StepTimes:
    """A step of one rank alone, in milliseconds; ``layers`` in the order of the backward pass."""

    case: str
    images: int
    forward_ms: float
    layers: tuple[LayerTimes, ...]
    update_ms: float

    @property
    def ms(self) -> float:
        return self.forward_ms + self.update_ms + sum(layer.weight_ms + layer.data_ms for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(layer.nbytes for layer in self.layers)


@dataclass(frozen=True)
class Cluster:
    """Hosts of equal ranks.

    Attributes:
        ranks_per_host: GPUs of a host.
        points: (bytes that each rank sends, milliseconds) of all-reduces measured within a host.
        network: between hosts, of each rank.
    """

    ranks_per_host: int
    points: tuple[tuple[float, float], ...]
    network: AlphaBeta

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


@dataclass(frozen=True)
class Message:
    """One sum of gradients and its times in milliseconds from the start of the step.

    Attributes:
        layers: in the order of the backward pass; it is ready when the last has its weight gradient.
        waited: how long the update stood waiting for it.
    """

    layers: tuple[str, ...]
    nbytes: int
    ready: float
    begin: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """A simulated step.

    Attributes:
        group_bytes: as it was told.
        slowed_ms: what compute lost to the messages beside it.
    """

    hosts: int
    ranks: int
    group_bytes: int
    ms: float
    alone_ms: float
    images_per_s: float
    slowed_ms: float
    messages: tuple[Message, ...]

    @property
    def waited_ms(self) -> float:
        """What the update waited for messages."""
        return sum(message.waited for message in self.messages)

    @property
    def exposed_ms(self) -> float:
        """What communication adds to the step."""
        return self.waited_ms + self.slowed_ms

    @property
    def efficiency(self) -> float:
        """Images per second and rank, beside one rank alone."""
        return self.alone_ms / self.ms


def measured(run: Run) -> StepTimes:
    """The step of a run on one rank. The time of its layers is scaled to that of the step without profiling.

    Raises:
        NotInFile: for several ranks, or a run without the passes of each layer and the whole step.
    """
    if run.ranks != 1:
        raise NotInFile(f"{run.file}: {run.case} was measured on {run.ranks} ranks; layers alone are needed: 1 rank")
    times: dict[tuple[int, str], dict[str, Any]] = {}
    whole = update = others = 0.0
    for row in run.rows:
        if row["pass"] == "step":
            whole = row["ms"]
        elif row["pass"] == "update":
            update = row["ms"]
        elif row["pass"] in COMPUTE and row["ms"] is not None:
            if row.get("index") is None:
                others += row["ms"]  # of the loss
            else:
                layer = times.setdefault((row["index"], row["layer"]), {"parameters": row.get("parameters") or 0})
                layer[row["pass"]] = row["ms"]
    if not whole or not times:
        raise NotInFile(f"{run.file}: {run.case} has no step or no layers; make it with: minidl bench model")
    forward = others + sum(layer.get("forward", 0.0) for layer in times.values())
    backward = [
        LayerTimes(name, t.get("backward_weight", 0.0), t.get("backward_data", 0.0), 4 * t["parameters"])
        for (_, name), t in sorted(times.items(), reverse=True)
    ]
    images = int(run.case.rpartition("/b")[2].partition(",")[0])
    found = StepTimes(run.case, images, forward, tuple(backward), update)
    return _scaled(found, whole / found.ms)


def simulate(
    step: StepTimes,
    cluster: Cluster,
    hosts: int,
    group_bytes: int,
    *,
    interference: float = INTERFERENCE,
    message_share: float = 1.0,
) -> Outcome:
    """One step on ``hosts`` hosts.

    Args:
        group_bytes: as in `Model`.
        interference: share of its speed that compute loses while a message is under way, below 1.
        message_share: bytes sent for each byte of float32 gradients: 0.5 with bfloat16 messages.
    """
    checks.number("simulate", "interference", interference, "from 0 to below 1", lambda v: 0 <= v < 1)
    time = _Timeline(interference)
    time.compute(step.forward_ms)
    sums: list[Message] = []
    layers, nbytes, left = [], 0, step.nbytes
    for layer in step.layers:
        time.compute(layer.weight_ms)
        if layer.nbytes:
            layers.append(layer.name)
            nbytes, left = nbytes + layer.nbytes, left - layer.nbytes
            if nbytes >= group_bytes or left == 0:
                ready = time.now
                begin, end = time.send(cluster.all_reduce(nbytes * message_share, hosts))
                sums.append(Message(tuple(layers), nbytes, ready, begin, end))
                layers, nbytes = [], 0
        time.compute(layer.data_ms)
    messages = []
    for message in sums:
        messages.append(replace(message, waited=time.wait(message.end)))
        time.compute(step.update_ms * message.nbytes / step.nbytes)
    ranks = hosts * cluster.ranks_per_host
    rate = ranks * step.images / time.now * 1e3
    return Outcome(hosts, ranks, group_bytes, time.now, step.ms, rate, time.slowed, tuple(messages))


class _Timeline:
    """A rank's compute and, beside it, messages one after another; milliseconds."""

    def __init__(self, interference: float) -> None:
        self.now = self.slowed = 0.0
        self._free = 0.0  # when the last message is through
        self._speed = 1 - interference

    def compute(self, ms: float) -> None:
        """Pass so much work; messages under way take their share of the speed."""
        beside = min(ms, max(self._free - self.now, 0.0) * self._speed)
        lost = beside / self._speed - beside
        self.now, self.slowed = self.now + ms + lost, self.slowed + lost

    def send(self, ms: float) -> tuple[float, float]:
        """Begin and end of a message that is ready now."""
        begin = max(self.now, self._free)
        self._free = begin + ms
        return begin, self._free

    def wait(self, moment: float) -> float:
        """How long it takes until then."""
        waited = max(moment - self.now, 0.0)
        self.now += waited
        return waited


def best(step: StepTimes, cluster: Cluster, hosts: int, groups: Iterable[int] = GROUPS, **options: float) -> Outcome:
    """The outcome of the group size that is fastest, of equal ones the smallest."""
    return min((simulate(step, cluster, hosts, size, **options) for size in groups), key=lambda outcome: outcome.ms)


def _scaled(step: StepTimes, factor: float) -> StepTimes:
    layers = tuple(
        replace(layer, weight_ms=layer.weight_ms * factor, data_ms=layer.data_ms * factor) for layer in step.layers
    )
    return replace(step, forward_ms=step.forward_ms * factor, layers=layers, update_ms=step.update_ms * factor)


def _interpolated(points: Sequence[tuple[float, float]], wire: float) -> float:
    """Milliseconds of so many bytes: between two points by a line, beyond them at the nearest one's latency or rate."""
    sent, ms = zip(*points, strict=True)
    if wire > sent[-1]:
        return ms[-1] * wire / sent[-1]
    return float(np.interp(wire, sent, ms))


def points_of(content: Mapping[str, Any], file: str) -> tuple[int, tuple[tuple[float, float], ...]]:
    """(ranks, the measured all-reduces) of a result file of several ranks.

    Raises:
        NotInFile: where none were measured.
    """
    found = (content.get("ceilings") or {}).get("all_reduce")
    if not found:
        raise NotInFile(f"{file}: no all-reduces in it; make it on several ranks, or give --link")
    ranks = found["ranks"]
    return ranks, tuple((wire_bytes(p["bytes"], ranks), p["ms"]) for p in found["points"])
