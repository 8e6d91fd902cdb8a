"""What walking a step tells an executor, beside the trace: who asks for which array, and what each pass was given."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl.cuda.device import DeviceRecord
from minidl.layer import Layer
from minidl.memory.trace import Trace


@dataclass(frozen=True)
class Place:
    """An array seen as a part of a tensor of the trace: ``offset`` bytes from where that begins."""

    tensor: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype


@dataclass(frozen=True)
class Allocation:
    """One array that the step makes.

    Attributes:
        step: the pass that makes it.
        tensor: of the trace; None for what does not outlive the pass.
        begin, end: when it is made and dropped, counted in allocations and frees; see `Recording.ticks`.
        handed_out: the caller gets it, or it stays when the step is over: it must not lie where the next step writes.
    """

    nbytes: int
    step: int
    tensor: int | None
    begin: int
    end: int
    handed_out: bool


@dataclass(frozen=True)
class Run:
    """One forward pass of a layer: what it was given, saved and gave, arrays as `Place`s; parameters as they are."""

    layer: Layer
    given: tuple[Any, ...]
    saved: Mapping[str, Any]
    result: Any


@dataclass(frozen=True)
class Recording:
    """A step as it was walked: its trace, and what an executor must know to hand out the same memory again.

    Attributes:
        allocations: in order.
        ticks: for each step its first and last tick.
        runs: by forward step.
        device: the GPU that was imagined.
    """

    trace: Trace
    allocations: tuple[Allocation, ...]
    ticks: tuple[tuple[int, int], ...]
    runs: Mapping[int, Run]
    device: DeviceRecord


# -- arrays inside what layers hand to each other: tuples, dictionaries, and the records of `minidl.value` ------------


def mapped(item: Any, change: Callable[[Any], Any], kind: type | None = None) -> Any:
    """``item`` with ``change`` applied to every array in it, or to every object of class ``kind``."""
    array = hasattr(item, "strides") and not isinstance(item, np.generic)
    if isinstance(item, kind) if kind is not None else array:
        return change(item)
    if isinstance(item, tuple | list):
        inside = (mapped(part, change, kind) for part in item)
        return type(item)(*inside) if hasattr(item, "_fields") else type(item)(inside)
    if isinstance(item, dict):
        return {name: mapped(part, change, kind) for name, part in item.items()}
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        fields = {f.name: mapped(getattr(item, f.name), change, kind) for f in dataclasses.fields(item)}
        return dataclasses.replace(item, **fields)
    return item


def parts(item: Any, kind: type | None = None) -> Iterator[Any]:
    """The arrays in ``item``, or the objects of class ``kind``, in order."""
    found: list[Any] = []

    def note(part: Any) -> Any:
        found.append(part)
        return part

    mapped(item, note, kind)
    return iter(found)
