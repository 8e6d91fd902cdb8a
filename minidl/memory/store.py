"""A store that carries out a plan of keeping and moving: what leaves the device is copied to the host and back.

It does what a plan says, not when: copies are made in place of the calls that save and take, on any operation table.
That proves plans right (a step under any plan gives the same bits) and measures what a store holds; it hides no
transfer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.memory.limit import host_budget
from minidl.memory.plan import Plan, human
from minidl.memory.simulate import check
from minidl.memory.trace import Trace
from minidl.store import Slot, TensorStore

__all__ = ["PlannedStore"]


@dataclass
class _HostSlot(Slot):
    """A slot whose content lies on the host until somebody asks for it."""

    host: np.ndarray | None = None
    ops: ModuleType | None = None


class PlannedStore(TensorStore):
    """Keeps what the plan keeps; copies what it offloads to the host when saved and back when first taken.

    Args:
        trace: of the step that will run.
        plan: for this trace, without tensors to rebuild.
        host_limit: bytes that may lie on the host; default: what the system leaves (`minidl.memory.limit.host_budget`).

    Attributes:
        moved_out, moved_in: bytes copied so far.
        held_bytes: bytes of saved tensors on the device now.
        peak_bytes: the most there ever were.

    Raises:
        Violation: for a plan that does not fit the trace.
        ValueError: for a plan that rebuilds tensors or moves parameters, or needs more host memory than there is.
    """

    capturable = False

    resident = False

    def __init__(self, trace: Trace, plan: Plan, host_limit: int | None = None):
        super().__init__()
        needed = check(trace, plan).host_peak
        budget = host_budget() if host_limit is None else host_limit
        if budget is not None and needed > budget:
            text = f"at most {human(budget)} on the host"
            remedy = "take a higher limit for the GPU, or a smaller batch"
            raise checks.bad_value("store", "plan", text, f"one that needs {human(needed)} there", remedy)
        if plan.chosen("recompute"):
            remedy = "plan without rebuilding: pin(...) or best(..., rebuild=False)"
            raise checks.bad_value("store", "plan", "one that only keeps and moves", plan.policy, remedy)
        moved = {d.tensor for d in plan.chosen("offload")}
        if any(not trace.tensors[i].saved for i in moved):
            raise checks.bad_value("store", "plan", "one that moves saved tensors only", "one that moves parameters")
        self._planned = {saver: (i in moved, t.bytes) for i, t in enumerate(trace.tensors) for saver in t.savers}
        self._saving: dict[int, str] = {}
        self.moved_out = self.moved_in = self.held_bytes = self.peak_bytes = 0

    def save(self, owner: str, items: Mapping[str, Any]) -> None:
        """As `TensorStore.save`.

        Raises:
            RuntimeError: when the layer saves what the trace does not know, or more bytes than planned.
        """
        self._saving = {id(item): f"{owner}.{name}" for name, item in items.items()}
        try:
            super().save(owner, items)
        finally:
            self._saving = {}

    def hold(self, array: Any) -> Slot:
        """A new slot: on the device, or on the host if the plan moves it."""
        name = self._saving[id(array)]
        if name not in self._planned:
            raise checks.order(
                "store", f"{name} is saved, which the plan's trace does not know", "trace and plan again"
            )
        moves, planned = self._planned[name]
        if array.nbytes > planned:
            text = f"{name} has {human(array.nbytes)}, planned were {human(planned)}"
            raise checks.order("store", text, "plan for the largest batch")
        if not moves:
            self._count(array.nbytes)
            return Slot(array)
        self.moved_out += array.nbytes
        ops = backend.ops_of(array)
        return _HostSlot(None, host=ops.to_host(array), ops=ops)

    def fetch(self, slot: Slot) -> Any:
        """The slot's array, copied back if it was away; the other layers that saved it get the same array."""
        if isinstance(slot, _HostSlot) and slot.host is not None:
            slot.array, slot.host = slot.ops.from_host(slot.host), None
            self.moved_in += slot.array.nbytes
            self._count(slot.array.nbytes)
        return slot.array

    def clear(self) -> None:
        """Forget everything: a step was abandoned between forward and backward."""
        super().clear()
        self.held_bytes = 0

    @property
    def saved_bytes(self) -> int:
        """Bytes of the distinct tensors now held on the device."""
        return self.held_bytes

    def _release(self, key: Any, slot: Slot) -> None:
        super()._release(key, slot)
        if slot.savers == 0 and slot.array is not None:
            self.held_bytes -= slot.array.nbytes

    def _count(self, count: int) -> None:
        self.held_bytes += count
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
