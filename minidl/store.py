"""The one place where tensors saved for the backward pass live.

Layers put arrays in with `TensorStore.save` and take them back with `TensorStore.take`; what happens in between is the
store's business. This one keeps everything where it is. A memory planner's store moves slots to the host and back, or
recomputes them, without any layer noticing: any store must give back the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidl import checks

__all__ = ["Slot", "TensorStore", "slot_key"]


def slot_key(array: Any) -> Hashable:
    """Identity of a saved tensor: (address, shape, strides, dtype).

    A ReLU's output is the next convolution's input: both save one buffer, which must be counted and moved once.
    """
    address = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return address, array.shape, array.strides, array.dtype


@dataclass
class Slot:
    """One tensor and the number of layers that still need it.

    ``source`` refers weakly to the array as it was saved. Once a store has moved its content away and the array is
    gone, another tensor may lie at the same address: it is not this one.
    """

    array: Any
    savers: int = 0
    source: Any = None


def _is_slot(item: Any) -> bool:
    """Whether an entry of a frame is (key, slot), not a fact kept as it is."""
    return isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Slot)


class TensorStore:
    """Keeps every saved tensor on its device. Each layer's saves form a stack: last saved, first taken."""

    capturable = True  # a step of this store can be captured in a CUDA graph

    def __init__(self) -> None:
        self._slots: dict[Hashable, Slot] = {}
        self._stacks: dict[str, list[dict[str, Any]]] = {}

    def save(self, owner: str, items: Mapping[str, Any]) -> None:
        """Keep ``items`` of the layer named ``owner``. Arrays become shared slots, anything else is kept as it is."""
        frame = {}
        for name, item in items.items():
            if hasattr(item, "itemsize") and not isinstance(item, np.generic) and item.size:
                key = slot_key(item)
                slot = self._slots.get(key)
                if slot is None or slot.source() is None:
                    slot = self._slots[key] = self.hold(item)
                    slot.source = weakref.ref(item)
                slot.savers += 1
                frame[name] = (key, slot)
            else:
                frame[name] = item
        self._stacks.setdefault(owner, []).append(frame)

    def step(self, samples: int) -> AbstractContextManager[None]:
        """A context around forward, loss and backward of one training step of so many samples."""
        return nullcontext()

    def run(self, layer: Any, inputs: tuple[Any, ...]) -> Any:
        """``layer``'s forward pass on ``inputs``. Subclasses that run it once more later note what it was given."""
        return layer.compute(*inputs)

    def watch(self, profiler: Any) -> Any:
        """The profiler that layers are to call: ``profiler``, or one that tells this store where the step is, too."""
        return profiler

    def take(self, owner: str) -> SimpleNamespace:
        """What ``owner`` saved last, by name; its slots are released when no other layer needs them.

        Raises:
            RuntimeError: when nothing is saved, because forward did not run (or ran with ``grad=False``).
        """
        stack = self._stacks.get(owner)
        if not stack:
            raise checks.order(owner, "backward without a forward pass to go back through", "call forward() first")
        taken = {}
        for name, item in stack.pop().items():
            if _is_slot(item):
                key, slot = item
                taken[name] = self.fetch(slot)
                self._release(key, slot)
            else:
                taken[name] = item
        return SimpleNamespace(**taken)

    def forget(self, owner: str) -> None:
        """Release everything ``owner`` saved: it runs forward again, and nobody went back through the last time."""
        for frame in self._stacks.pop(owner, ()):
            for item in frame.values():
                if _is_slot(item):
                    self._release(*item)

    def _release(self, key: Hashable, slot: Slot) -> None:
        slot.savers -= 1
        if slot.savers == 0 and self._slots.get(key) is slot:
            del self._slots[key]

    def hold(self, array: Any) -> Slot:
        """A new slot for ``array``. Subclasses start moving it here."""
        return Slot(array)

    def fetch(self, slot: Slot) -> Any:
        """The slot's array on the device. Subclasses bring it back here."""
        return slot.array

    def clear(self) -> None:
        """Forget everything: a step was abandoned between forward and backward."""
        self._slots.clear()
        self._stacks.clear()

    def fork(self) -> TensorStore:
        """A store with the same content, for going back through one forward pass more than once."""
        twin = TensorStore()
        slots = {id(slot): Slot(slot.array, slot.savers, slot.source) for slot in self._all_slots()}
        twin._slots = {key: slots[id(slot)] for key, slot in self._slots.items()}
        for owner, stack in self._stacks.items():
            twin._stacks[owner] = [
                {name: (item[0], slots[id(item[1])]) if _is_slot(item) else item for name, item in frame.items()}
                for frame in stack
            ]
        return twin

    def _all_slots(self) -> Iterator[Slot]:
        """Those that a newer tensor at the same address has replaced, too."""
        yield from self._slots.values()
        for stack in self._stacks.values():
            yield from (item[1] for frame in stack for item in frame.values() if _is_slot(item))

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory from the first to the last of each tensor now held; what several share counts once."""
        end, total = 0, 0
        for (address, shape, strides, _), slot in sorted(self._slots.items(), key=lambda item: item[0][0]):
            last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + slot.array.itemsize
            total += max(address + last - max(end, address), 0)
            end = max(end, address + last)
        return total
