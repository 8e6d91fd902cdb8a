"""The one place where tensors saved for the backward pass live.

Layers put arrays in with `TensorStore.save` and take them back with `TensorStore.take`; what happens in between is the
store's business. This one keeps everything where it is. A memory planner's store moves tensors to the host and back, or
recomputes them, without any layer noticing: any store must give back the same bits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np

from minidl import checks


def tensor_key(array: Any) -> Hashable:
    """Identity of a saved tensor: (address, shape, strides, dtype).

    A ReLU's output is the next convolution's input: both save one buffer, which must be counted once.
    """
    address = array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr
    return address, array.shape, array.strides, array.dtype


def arrays_of(items: Iterable[Any]) -> Iterator[Any]:
    """Those of what a layer saved that take memory: not facts, nor empty arrays."""
    return (item for item in items if hasattr(item, "itemsize") and not isinstance(item, np.generic) and item.size)


def nothing_saved(owner: str) -> RuntimeError:
    """`forward` did not run, or ran with ``grad=False``."""
    return checks.order(owner, "backward without a forward pass to go back through", "call forward() first")


class Saved(SimpleNamespace):
    """What a layer saved in one forward pass, by name."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"nothing was saved as {name!r}; saved: {checks.some(vars(self)) or 'nothing'}", name=name)


class TensorStore:
    """Keeps every saved tensor on its device. Each layer's saves form a stack: last saved, first taken."""

    capturable = True  # a step of this store can be captured in a CUDA graph

    def __init__(self) -> None:
        self._stacks: dict[str, list[Mapping[str, Any]]] = {}

    def save(self, owner: str, items: Mapping[str, Any]) -> None:
        """Keep ``items``, arrays and facts, of the layer named ``owner``; nobody changes the mapping afterwards."""
        self._stacks.setdefault(owner, []).append(items)

    def step(self, samples: int) -> AbstractContextManager[None]:
        """A context around forward, loss and backward of one training step of so many samples."""
        return nullcontext()

    def run(self, layer: Any, inputs: tuple[Any, ...]) -> Any:
        """``layer``'s forward pass on ``inputs``. Subclasses that run it once more later note what it was given."""
        return layer.compute(*inputs)

    def watch(self, profiler: Any) -> Any:
        """The profiler that layers are to call: ``profiler``, or one that tells this store where the step is, too."""
        return profiler

    def take(self, owner: str) -> Saved:
        """What ``owner`` saved last, by name; the store lets go of it.

        Raises:
            RuntimeError: when nothing is saved, because forward did not run (or ran with ``grad=False``).
        """
        stack = self._stacks.get(owner)
        if not stack:
            raise nothing_saved(owner)
        return Saved(**stack.pop())

    def require(self, owner: str) -> None:
        """RuntimeError where there is nothing of ``owner`` to take."""
        if not self._stacks.get(owner):
            raise nothing_saved(owner)

    def forget(self, owner: str) -> None:
        """Let go of everything ``owner`` saved: it runs forward again, and nobody went back through the last time."""
        self._stacks.pop(owner, None)

    def clear(self) -> None:
        """Forget everything: a step was abandoned between forward and backward."""
        self._stacks.clear()

    def fork(self) -> TensorStore:
        """A store with the same content, for going back through one forward pass more than once."""
        twin = TensorStore()
        twin._stacks = {owner: list(stack) for owner, stack in self._stacks.items()}
        return twin

    @property
    def saved_bytes(self) -> int:
        """Bytes of memory from the first to the last of each tensor now held; what several share counts once."""
        frames = (frame for stack in self._stacks.values() for frame in stack)
        held = {tensor_key(array): array.itemsize for frame in frames for array in arrays_of(frame.values())}
        end, total = 0, 0
        for (address, shape, strides, _), itemsize in sorted(held.items(), key=lambda item: item[0][0]):
            last = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + itemsize
            total += max(address + last - max(end, address), 0)
            end = max(end, address + last)
        return total


class LastPass(TensorStore):
    """Keeps what each layer saved last, to be taken any number of times: where passes are timed one by one."""

    def save(self, owner: str, items: Mapping[str, Any]) -> None:
        self._stacks[owner] = [items]

    def take(self, owner: str) -> Saved:
        """What ``owner`` saved last, by name; nothing where it saves nothing."""
        return Saved(**self._stacks.get(owner, [{}])[-1])

    def forget(self, owner: str) -> None:
        """Its next pass replaces what it saved."""
