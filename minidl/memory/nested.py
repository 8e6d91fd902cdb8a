"""Arrays inside what layers hand to each other: tuples, dictionaries, and the records of `minidl.value`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


def _is_array(item: Any) -> bool:
    return hasattr(item, "strides") and not isinstance(item, np.generic)


def mapped(item: Any, change: Callable[[Any], Any], kind: type | None = None) -> Any:
    """``item`` with ``change`` applied to every array in it, or to every object of class ``kind``."""
    if isinstance(item, kind) if kind is not None else _is_array(item):
        return change(item)
    if isinstance(item, tuple | list):
        return type(item)(mapped(part, change, kind) for part in item)
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
