"""What a step would take on a cluster that is not there: from the times of one rank's layers and a model of messages.

The schedule is that of `minidl.params.Arena` and `SGD.step`: backward, each layer's weight gradient may complete a
message (`minidl.messages.neighbourhood.cut`), messages run one after another beside the compute, and the update waits
for them in turn. Two things make a step longer than that of one rank: what the update waits, and what compute loses to
the messages beside it (`Interference`). What a message takes is `minidl.profile.cluster`'s business.
"""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from minidl import checks
from minidl.dist.simulated import AlphaBeta
from minidl.messages.factors import most_rows, row_bytes
from minidl.messages.neighbourhood import ABSORBED, FEW, Neighbour, cut, departures
from minidl.profile.cluster import Cluster
from minidl.profile.roofline import wire_bytes
from minidl.profile.runs import COMPUTE, NotInFile, Run

ALL = 1 << 40  # one message for all
GROUPS = (0, 1 << 20, 4 << 20, 25 << 20, 64 << 20, ALL)  # bytes
_TYPES = {"bf16": 2, "fp16": 2}  # bytes of a stored element; else 4
_ROUNDED_BYTES = 1.5  # that rounding reads and writes for each byte of float32 gradients
_MEMORY_BYTES_PER_MS = 4.2e9  # of the GPU whose messages are rounded, an H200
_FLOP_PER_MS = 6e11  # of the same in 16-bit products, where factors of many ranks are multiplied


@dataclass(frozen=True)
class Interference:
    """What compute loses to a message beside it.

    Attributes:
        products, memory: share of its speed that is lost while a message is under way, by layers that matrix products
            bound and by those that the memory bounds; from 0 to below 1.
        message_ms: lost to each message by its being there: its kernel waits for, and then keeps, multiprocessors.
    """

    products: float
    memory: float
    message_ms: float = 0.0

    def __str__(self) -> str:
        """As ``minidl simulate --interference`` takes it."""
        return f"{self.products:g},{self.memory:g},{self.message_ms * 1e3:g}"

    def __post_init__(self) -> None:
        for name in ("products", "memory"):
            value = getattr(self, name)
            checks.number("Interference", name, value, "from 0 to below 1", lambda v: 0 <= v < 1)
        checks.number("Interference", "message_ms", self.message_ms, "of at least 0", lambda v: v >= 0)


NO_INTERFERENCE = Interference(0.0, 0.0)
INTERFERENCE = Interference(0.4, 0.1, 0.015)  # fitted to recorded steps of 2 and 4 GPUs; see docs/distributed.md


@dataclass(frozen=True)
class LayerTimes:
    """One layer's backward pass in milliseconds, the bytes of gradients it then sends (float32), and its least work;
    ``features`` of a fully connected one: in and out; ``alone`` as of a `Neighbour`.
    """

    name: str
    weight_ms: float
    data_ms: float
    nbytes: int
    flop: int = 0
    bytes: int = 0
    features: tuple[int, int] = (0, 0)
    alone: bool = True


@dataclass(frozen=True)
class StepTimes:
    """A step of one rank alone, in milliseconds; ``layers`` in the order of the backward pass."""

    case: str
    images: int
    forward_ms: float
    layers: tuple[LayerTimes, ...]
    update_ms: float
    itemsize: int = 4
    device: str = "cpu"

    @property
    def ms(self) -> float:
        return self.forward_ms + self.update_ms + sum(layer.weight_ms + layer.data_ms for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Of all gradients."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def neighbours(self) -> list[Neighbour]:
        """As `Model.neighbours` gives them, but for the weights that more samples share."""
        few = FEW / self.images
        return [
            Neighbour(one.name, one.nbytes, round(one.flop * few), round(one.bytes * few), one.alone)
            for one in self.layers
        ]

    def scaled(self, ms: float) -> StepTimes:
        """The same in so many milliseconds."""
        factor = ms / self.ms
        layers = tuple(
            replace(layer, weight_ms=layer.weight_ms * factor, data_ms=layer.data_ms * factor) for layer in self.layers
        )
        forward, update = self.forward_ms * factor, self.update_ms * factor
        return replace(self, forward_ms=forward, layers=layers, update_ms=update)


@dataclass(frozen=True)
class Message:
    """One sum of gradients and its times in milliseconds from the start of the step.

    Attributes:
        layers: in the order of the backward pass; it is ready when the last has its weight gradient.
        waited: how long the update stood waiting for it.
        before: the layer whose backward pass it waited for, to start then.
    """

    layers: tuple[str, ...]
    nbytes: int
    ready: float
    begin: float
    end: float
    waited: float = 0.0
    before: str = ""


@dataclass(frozen=True)
class Outcome:
    """A simulated step.

    Attributes:
        group_bytes: as it was told.
        slowed_ms: what compute lost to messages: beside it, and for rounding them.
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
    times: dict[tuple[int, str], Counter[str]] = {}
    features: dict[str, tuple[int, int]] = {}
    absorbed: dict[str, bool] = {}
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
                layer = times.setdefault((row["index"], row["layer"]), Counter(parameters=row.get("parameters") or 0))
                layer[row["pass"]] = row["ms"]
                absorbed[row["layer"]] = row.get("type") in ABSORBED
                if row.get("type") == "Linear":
                    features[row["layer"]] = row["input_shapes"][0][-1], row["output_shape"][-1]
                if row["pass"] != "forward":
                    layer.update(flop=row.get("flop") or 0, bytes=row.get("bytes") or 0)
    if not whole or not times:
        raise NotInFile(f"{run.file}: {run.case} has no step or no layers; make it with: minidl bench model")
    forward = others + sum(layer["forward"] for layer in times.values())
    backward = [
        LayerTimes(
            name,
            t["backward_weight"],
            t["backward_data"],
            4 * t["parameters"],
            t["flop"],
            t["bytes"],
            features.get(name, (0, 0)),
            not absorbed[name],
        )  # fmt: skip
        for (_, name), t in sorted(times.items(), reverse=True)
    ]
    images = int(run.case.rpartition("/b")[2].partition(",")[0])
    device = run.rows[0].get("device") or "cpu"
    found = StepTimes(run.case, images, forward, tuple(backward), update, _TYPES.get(run.dtype, 4), device)
    return found.scaled(whole)


def simulate(
    step: StepTimes,
    cluster: Cluster,
    hosts: int,
    group_bytes: int,
    *,
    interference: Interference = INTERFERENCE,
    message_share: float = 1.0,
    factors: bool = True,
    waits: float = 0.0,
) -> Outcome:
    """One step on ``hosts`` hosts.

    Args:
        group_bytes: as in `Model`.
        message_share: bytes sent for each byte of float32 gradients: 0.5 with bfloat16 messages, which compute rounds
            first.
        factors: as in `Model`.
        waits: messages wait for passes that with so many samples of a rank bear them
            (`minidl.messages.neighbourhood.departures`); 0: they do not.
    """
    nbytes = {layer.name: layer.nbytes for layer in step.layers if layer.nbytes}
    ranks = hosts * cluster.ranks_per_host
    most = {layer.name: _most_rows(step, layer, message_share) for layer in step.layers} if factors else {}
    apart = {name for name, rows in most.items() if rows and ranks > 1}
    neighbours = step.neighbours
    messages = {names[-1]: names for names in cut(nbytes.items(), group_bytes, apart=apart)}
    before = departures(neighbours, messages.values(), step.itemsize, waits) if waits else {}
    time = _Timeline(interference if ranks > 1 else NO_INTERFERENCE)
    time.compute(step.forward_ms)
    sums: list[Message] = []
    waiting: deque[tuple[str, float]] = deque()  # last layer, when it was ready

    def send(last: str, ready: float) -> None:
        size = sum(nbytes[name] for name in messages[last])
        if message_share < 1 and ranks > 1:
            time.lose(_ROUNDED_BYTES * size / _MEMORY_BYTES_PER_MS)
        begin, end = time.send(cluster.all_reduce(size * message_share, hosts))
        sums.append(Message(messages[last], size, ready, begin, end, before=before.get(last, "")))

    for layer, neighbour in zip(step.layers, neighbours, strict=True):
        while waiting and before[waiting[0][0]] == layer.name:
            send(*waiting.popleft())
        _, products = neighbour.work(step.itemsize)
        if layer.name in apart and ranks * step.images <= most[layer.name]:
            sums.append(_factors(time, step, layer, cluster, hosts))
            continue
        time.compute(layer.weight_ms, products)
        if layer.name in before:
            waiting.append((layer.name, time.now))
        elif layer.name in messages:
            send(layer.name, time.now)
        time.compute(layer.data_ms, products)
    done = []
    for message in sums:
        done.append(replace(message, waited=message.waited + time.wait(message.end)))
        time.compute(step.update_ms * sum(nbytes[name] for name in message.layers) / step.nbytes)
    rate = ranks * step.images / time.now * 1e3
    return Outcome(hosts, ranks, group_bytes, time.now, step.ms, rate, time.slowed, tuple(done))


def _most_rows(step: StepTimes, layer: LayerTimes, message_share: float) -> int:
    """Samples up to which a layer sends factors in the place of its gradient."""
    inputs, outputs = layer.features
    return most_rows(inputs, outputs, step.itemsize, int(4 * message_share), step.device) if inputs else 0


def _factors(time: _Timeline, step: StepTimes, layer: LayerTimes, cluster: Cluster, hosts: int) -> Message:
    """A layer's backward pass whose factors travel beside its input gradient: to all, half the way of a sum."""
    inputs, outputs = layer.features
    rows = hosts * cluster.ranks_per_host * step.images
    size, ready = rows * row_bytes(inputs, outputs, step.itemsize), time.now
    begin, end = time.send(cluster.all_reduce(size / 2, hosts))
    time.compute(layer.data_ms)
    waited = time.wait(end)
    time.compute(layer.weight_ms)
    time.lose(max(2 * rows * inputs * outputs / _FLOP_PER_MS - layer.weight_ms, 0.0))
    return Message((layer.name,), size, ready, begin, end, waited)


class _Timeline:
    """A rank's compute and, beside it, messages one after another; milliseconds."""

    def __init__(self, interference: Interference) -> None:
        self.now = self.slowed = 0.0
        self._free = 0.0  # when the last message is through
        self._lost = interference

    def compute(self, ms: float, products: bool = False) -> None:
        """Pass so much work; messages under way take their share of the speed."""
        speed = 1 - (self._lost.products if products else self._lost.memory)
        beside = min(ms, max(self._free - self.now, 0.0) * speed)
        self.lose(beside / speed - beside)
        self.now += ms

    def lose(self, ms: float) -> None:
        """What messages take from compute."""
        self.now, self.slowed = self.now + ms, self.slowed + ms

    def send(self, ms: float) -> tuple[float, float]:
        """Begin and end of a message that is ready now."""
        begin = max(self.now, self._free)
        self._free = begin + ms
        self.lose(self._lost.message_ms)
        return begin, self._free

    def wait(self, moment: float) -> float:
        """How long it takes until then."""
        waited = max(moment - self.now, 0.0)
        self.now += waited
        return waited


def best(step: StepTimes, cluster: Cluster, hosts: int, groups: Iterable[int] = GROUPS, **options: Any) -> Outcome:
    """The outcome of the group size that is fastest, of equal ones the smallest."""
    return min((simulate(step, cluster, hosts, size, **options) for size in groups), key=lambda outcome: outcome.ms)


def tuned_interference(record: Mapping[str, Any]) -> Interference:
    """What ``minidl tune comm`` found out about it, beside products and beside what the memory bounds.

    Args:
        record: of `minidl.profile.grouping.measure`, between GPUs.
    """
    cases = []
    for kind, flop in (("products", 1 << 40), ("memory", 0)):
        groups = record["beside"][kind]
        total, layer_bytes = groups[-1]["bytes"], groups[0]["bytes"]
        alone = {g["bytes"]: g["alone_ms"] * g["bytes"] / total for g in groups}  # of one message
        points = tuple((wire_bytes(size, record["ranks"]), ms) for size, ms in sorted(alone.items()))
        cluster = Cluster(record["ranks"], points, AlphaBeta(0.0, 1.0))
        for group in groups:
            compute = (group["step_ms"] - group["exposed_ms"]) * layer_bytes / total
            layer = LayerTimes("", compute, 0.0, layer_bytes, flop, 1)
            layers = tuple(replace(layer, name=str(i)) for i in range(total // layer_bytes))
            cases.append((StepTimes(kind, 1, 0.0, layers, 0.0), cluster, group["bytes"], 1.0, group["exposed_ms"]))
    return fitted(cases)


def fitted(cases: Sequence[tuple[StepTimes, Cluster, int, float, float]]) -> Interference:
    """The interference that explains best what messages were measured to add to steps.

    Args:
        cases: (step, cluster of one host, group_bytes, message_share, milliseconds added). Least squares over tenths,
            and every second microsecond: a coarse grid, then downhill.
    """

    @functools.cache
    def error(products: int, memory: int, us: int) -> float:
        found = Interference(products / 10, memory / 10, us / 500)
        return sum(
            (simulate(step, cluster, 1, size, interference=found, message_share=part).ms - step.ms - added) ** 2
            for step, cluster, size, part, added in cases
        )

    best = min(product(range(0, 10, 3), range(0, 10, 3), range(0, 13, 3)), key=lambda point: error(*point))
    while True:
        axes = (range(max(at - 1, 0), min(at + 2, end)) for at, end in zip(best, (10, 10, 21), strict=True))
        lower = min(product(*axes), key=lambda point: error(*point))
        if error(*lower) >= error(*best):
            return Interference(best[0] / 10, best[1] / 10, best[2] / 500)
        best = lower
