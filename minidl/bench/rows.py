"""The rows of a network's result file: what was measured of each layer alone, within steps, and between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minidl.bench.isolated import Case
from minidl.bench.layers import empty_row
from minidl.bench.network import Kind, NetworkTimes
from minidl.messages import factors
from minidl.profile import roofline
from minidl.profile.cost import PASSES, PassCost
from minidl.profile.results import Row
from minidl.profile.timing import Timing
from minidl.segments import Message

_KINDS = {"step": "eager", "graph_step": "captured"}


@dataclass(frozen=True)
class Table:
    """What the rows of one network are made from.

    Attributes:
        title: the rows' case.
        step: whose model, loss and optimizer the rows are of: a `TrainingStep` or a `Trainer`.
        batch: samples of this rank.
        cases: of all layers, in network order.
        isolated: rows of `minidl.bench.layers.measure`; may be empty.
        saved: bytes that each layer was the first to keep.
        alone: timing of an all-reduce of so many bytes by itself; None where it is not to be measured.
        plan: the fusion plan's way of each batch norm.
        kernels: of each (layer, pass) within a step.
        absorbed: (layer, pass) without kernels of its own: the layer that does its work.
    """

    title: str
    step: Any
    batch: int
    cases: Sequence[Case]
    isolated: Sequence[Row]
    times: NetworkTimes
    saved: Mapping[str, int]
    ceilings: Mapping[str, Any] | None
    alone: Callable[[int], Timing] | None
    plan: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[tuple[str, str], Sequence[str]] = field(default_factory=dict)
    absorbed: Mapping[tuple[str, str], str] = field(default_factory=dict)

    @property
    def fused(self) -> bool:
        """Layers run otherwise than alone."""
        return any(way != "none" for way in self.plan.values())

    @property
    def itemsize(self) -> int:
        """Bytes of a stored element."""
        return self.step.model.precision.storage.itemsize

    def new(self, layer: str, pass_name: str) -> Row:
        """An empty row."""
        model = self.step.model
        return empty_row(self.title, layer, pass_name, model.precision, model.ops.name, model.comm.size)


def network_rows(table: Table) -> list[Row]:
    """All rows: layers in network order, then loss, optimizer, what is unaccounted for, and the step."""
    known = {(row["layer"], row["pass"]): row for row in table.isolated}
    rows = []
    for case in table.cases:
        found = [_pass_row(table, case, name, known.get((case.layer.name, name))) for name in PASSES]
        rows += [row for row in found if row is not None]
    rows += _message_rows(table)
    rows.sort(key=lambda row: row["index"])  # stable: the all-reduce comes after the passes
    return rows + _other_rows(table)


def _kinds(times: NetworkTimes) -> dict[str, Kind]:
    kinds = {way: getattr(times, attribute) for way, attribute in _KINDS.items()}
    return {way: kind for way, kind in kinds.items() if kind is not None}


def _set_passes(row: Row, kinds: Mapping[str, Kind], key: tuple[str, str], *, main: bool = False) -> None:
    """Enter what a pass took within steps, and on which rank; it is the main figure where the pass was not measured
    alone, or if ``main``.
    """
    _set_steps(row, {way: kind.passes.get(key) for way, kind in kinds.items()}, main=main)
    if row["timing"] in kinds:
        _set_ranks(row, kinds[row["timing"]].pass_ranks[key])


def _set_ranks(row: Row, times: Sequence[float]) -> None:
    row |= {"rank_ms": list(times), "slowest_rank": max(range(len(times)), key=times.__getitem__)}


def _set_steps(row: Row, timings: Mapping[str, Timing | None], *, main: bool = False) -> None:
    for way, timing in timings.items():
        row["timings"][way] = timing.record() if timing is not None else None
    if row["timing"] is None or main:
        way = next((w for w in ("graph_step", "step") if timings.get(w) is not None), None)
        if way is not None:
            row |= {"timing": way, "ms": timings[way].ms, "spread": timings[way].spread}


def _pass_row(table: Table, case: Case, name: str, row: Row | None) -> Row | None:
    """The row of one pass; None where the layer has no such pass."""
    key = case.layer.name, name
    kinds = _kinds(table.times)
    if row is None and not any(key in kind.passes for kind in kinds.values()):
        return None
    if row is None:
        row = table.new(*key) | case.facts
        cost = case.cost(name, table.itemsize)
        row |= {"flop": cost.flop, "bytes": cost.bytes}
        if cost == PassCost():
            return None  # a view: only the marks around it took time
    _set_passes(row, kinds, key, main=table.fused)
    row["plan"] = table.plan.get(case.layer.name)
    if key in table.kernels and (table.fused or row["kernels"] is None):
        row["kernels"] = [{"name": kernel, "ms": None} for kernel in table.kernels[key]]
    if name == "forward":
        row["saved_bytes"] = table.saved.get(case.layer.name, 0)
    if key in table.absorbed:
        row |= {"ms": 0.0, "spread": 0.0, "in": table.absorbed[key]}
        row |= dict.fromkeys(("timing", "rank_ms", "slowest_rank"))
    roofline.fill(row, table.ceilings, matrix=any(spec.product for spec in case.layer.specs))
    return row


# -- messages ---------------------------------------------------------------------------------------------------------


def _message_rows(table: Table) -> list[Row]:
    """One row for each layer that has gradients; the message is its last layer's, for the others it is "in" that."""
    ranks = table.step.model.comm.size
    if ranks == 1:
        return []
    cases = {case.layer.name: case for case in table.cases}
    rows = []
    for message in table.step.model.arena.messages:
        carrier = message.layers[-1]
        for name in message.layers:
            case, segments = cases[name], table.step.model.arena.segments
            row = table.new(name, "all_reduce") | case.facts
            row |= _carried(table, message, case) if name == carrier else {"ms": 0.0, "spread": 0.0, "in": carrier}
            flop = sum(case.cost(p, table.itemsize).flop for p in case.asked)
            wire = _wire_bytes(table, case, sum(4 * s.size for s in segments if s.layer == name and s.trainable))
            row |= {"wire_bytes": wire, "communication_intensity": roofline.communication_intensity(flop, wire)}
            rows.append(row)
    return rows


def _wire_bytes(table: Table, case: Case, gradient_bytes: int) -> float:
    """What a rank sends: of a sum of gradients, or of the factors in their place."""
    ranks = table.step.model.comm.size
    gathered = _gathered_bytes(table, case)
    return gathered * (ranks - 1) / ranks if gathered else roofline.wire_bytes(gradient_bytes, ranks)


def _gathered_bytes(table: Table, case: Case) -> int:
    """Factors of all ranks that travel in the place of this layer's gradients (`minidl.messages.factors`), or 0."""
    model, itemsize = table.step.model, table.itemsize
    rows = table.batch * model.comm.size
    if rows > model.arena.factored.get(case.layer.name, 0):
        return 0
    outputs, inputs = case.layer.specs[0].shape
    return rows * factors.row_bytes(inputs, outputs, itemsize)


def _carried(table: Table, message: Message, case: Case) -> Row:
    """The figures of a whole message, whose last layer is that of ``case``: alone where that was measured, and within
    steps.
    """
    gathered, nbytes = _gathered_bytes(table, case), 4 * (message.end - message.begin)
    row = table.new("", "all_reduce")
    row |= {"wire_bytes": _wire_bytes(table, case, nbytes), "transfer_ms": None}
    if table.alone is not None and not gathered:
        timing = table.alone(nbytes)
        row |= {"ms": timing.ms, "spread": timing.spread, "timing": "hot"}
        row["timings"]["hot"] = timing.record()
    found = table.times.main.messages.get(message.name)
    if found is not None:
        row |= {"wait_ms": found.wait, "exposed_ms": found.exposed}
        if row["ms"] is None:
            row |= {"ms": found.transfer, "spread": 0.0}
    roofline.fill(row, table.ceilings, matrix=False)
    row["transfer_ms"] = found.transfer if found is not None else None
    kept = ("ms", "spread", "timing", "timings", "floor_ms", "bound", "roof_share", "bus_gb_per_s")
    kept += ("transfer_ms", "wait_ms", "exposed_ms")
    whole = {"message_bytes": gathered or nbytes, "message_layers": len(message.layers)}
    return {key: row[key] for key in kept} | whole | ({"factors": True} if gathered else {})


# -- what is no layer -------------------------------------------------------------------------------------------------


def _other_rows(table: Table) -> list[Row]:
    """Loss and optimizer with their least work; the unaccounted rest; the step with the sum of all work."""
    step, kinds, itemsize = table.step, _kinds(table.times), table.itemsize
    logits = (table.batch, *step.model.output_node.shape)
    loss = step.loss.cost(logits, itemsize=itemsize)
    costs = {("loss", "forward"): loss.forward, ("loss", "backward_data"): loss.backward_data}
    if step.model.comm.size > 1:
        costs["loss", "wait"] = PassCost()  # the ranks' totals are joined before the first gradient can be scaled
    costs["optimizer", "update"] = step.optimizer.cost()
    rows = []
    for key, cost in costs.items():
        row = table.new(*key) | {"flop": cost.flop, "bytes": cost.bytes}
        _set_passes(row, kinds, key)
        roofline.fill(row, table.ceilings, matrix=False)
        rows.append(row)
    rest, whole = table.new("step", "unaccounted"), table.new("step", "step")
    _set_steps(rest, {way: kind.unaccounted for way, kind in kinds.items()})
    _set_steps(whole, {way: kind.plain for way, kind in kinds.items()})
    passes = [case.cost(name, itemsize) for case in table.cases for name in case.asked]
    total = sum([*passes, *costs.values()], PassCost())
    whole |= {"flop": total.flop, "bytes": total.bytes, "intensity": total.intensity}
    if whole["ms"]:
        whole["tflops"], whole["gb_per_s"] = roofline.achieved(total.flop, total.bytes, whole["ms"])
    _set_ranks(whole, table.times.main.ranks)
    whole["energy_mj"] = table.times.energy_mj
    return [*rows, rest, whole]
