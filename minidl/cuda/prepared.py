"""Operations that are called again and again: what they decide is worked out once and kept.

An operation decides by the shapes, types and settings that it is given, and by how its arrays are aligned: checks,
which kernel, its grid and its structures, the workspaces. `prepared` runs it once for each of these, notes the arrays
that it makes and the launches that it asks for, and starts them; a call like it makes such arrays and starts the same
launches with the addresses of its own (`Call` in _launch.pyx). Nothing is remembered by an array's identity, and no
array is kept.

What an operation is told by any other object than an array, a number, a word, a dtype or a dataclass of these, it sees
anew each time; as does every call in a dry run, beside a profiler of kernels, with MINIDL_DEBUG=1, or in `unprepared`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from minidl.cuda import launch
from minidl.cuda._launch import MOST_ARRAYS, Call, Calls
from minidl.cuda.device import RECORDING, Recorded, import_cupy, recording

Operation = TypeVar("Operation", bound=Callable[..., Any])

_known: list[Calls] = []


class _Elsewhere(Exception):
    """An array is neither an input nor made by the operation, nor a part of just one; or there are too many."""


def prepared(operation: Operation) -> Operation:
    """``operation`` with its calls prepared.

    It decides by its arguments, and by what calls `forget` when it changes; all of its work is kernels that `launch`
    starts, on arrays that it is given or makes by ``empty`` and ``zeros``.
    """
    calls = Calls(operation, launch, recording, _prepare, lambda: import_cupy().ndarray)
    _known.append(calls)

    @functools.wraps(operation)
    def call(*args: Any, **named: Any) -> Any:
        return calls(args, named)

    return call


def forget() -> None:
    """Prepare all calls anew: something has changed that operations decide by."""
    for calls in _known:
        calls.forget()


def _prepare(
    operation: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], inputs: list[Any]
) -> tuple[Call | None, Any]:
    """The call, once it has been made this time; None where its arrays do not tell where those of its launches lie."""
    recorded = Recorded()
    token = RECORDING.set(recorded)
    try:
        result = operation(*args, **named)
    finally:
        RECORDING.reset(token)
    arrays = [*inputs, *recorded.arrays]
    try:
        if len(arrays) > MOST_ARRAYS:
            raise _Elsewhere
        places = [[_place(array, arrays) for array in start.arrays] for start in recorded.starts]
        call = Call(recorded.made, recorded.starts, _result(result, arrays))
    except _Elsewhere:
        for start in recorded.starts:
            launch.start(start)
        return None, result
    for start, where in zip(recorded.starts, places, strict=True):
        start.place(where)
    launch.start_all(call, arrays)
    return call, result


def _place(array: Any, arrays: Sequence[Any]) -> tuple[int, int]:
    """Which of ``arrays`` one is or is a part of, and how many bytes behind its address it begins."""
    for i, whole in enumerate(arrays):
        if whole is array:
            return i, 0
    address, end = array.data.ptr, array.data.ptr + _span(array)
    found = [i for i, a in enumerate(arrays) if a.data.ptr <= address and end <= a.data.ptr + _span(a)]
    if not array.size or len({arrays[i].data.ptr for i in found}) != 1:  # of none, or of one of several
        raise _Elsewhere
    return found[0], address - arrays[found[0]].data.ptr


def _span(array: Any) -> int:
    """Bytes from the first to the last element."""
    if not array.size:
        return 0
    return sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True)) + array.itemsize


def _result(result: Any, arrays: Sequence[Any]) -> Any:
    """How a `Call` makes its result, by the arrays' places."""
    if result is None:
        return None
    for i, array in enumerate(arrays):
        if array is result:
            return i
    if isinstance(result, bool):
        return lambda made: result
    if type(result) is tuple:
        return tuple(_result(part, arrays) for part in result)
    if is_dataclass(result):
        kind, parts = type(result), [getattr(result, field.name) for field in fields(result)]
        places = [part if isinstance(part, int) else (_result(part, arrays),) for part in parts]
        return lambda made: kind(*[_built(place, made) for place in places])
    raise _Elsewhere


def _built(place: Any, made: Sequence[Any]) -> Any:
    if type(place) is not tuple:
        return place
    (where,) = place
    return None if where is None else made[where]
