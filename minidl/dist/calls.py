"""What this rank calls: every collective is numbered, the last ones are kept, and it is known which are under way."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Call", "CallLog", "Position", "Waiting", "dtype_name"]

RECENT = 32
_KINDS = ("all_reduce", "start_all_reduce", "all_gather", "broadcast", "barrier", "share")
_DTYPES = (
    "float32", "float64", "int32", "int64", "bfloat16", "float16", "bool", "uint8", "int8", "uint16", "int16", "uint32",
    "uint64", "complex64", "complex128",
)  # fmt: skip
_OTHER_DTYPE = 255
_SIZE_BITS, _ROOT_BITS = 40, 12

_names: dict[np.dtype, str] = {}


def dtype_name(dtype: np.dtype) -> str:
    """``dtype.name``, for which NumPy takes microseconds."""
    name = _names.get(dtype)
    if name is None:
        name = _names[dtype] = dtype.name
    return name


class Call(NamedTuple):
    """One collective of one rank.

    Attributes:
        number: counted from 1 by each rank over all its collectives, which are the same everywhere.
        kind: the method's name.
        size: elements of the array; 0 where there is none.
        dtype: its name; empty where there is none.
        root: of a broadcast.
        name: of the message: the layers whose gradients it is.
    """

    number: int
    kind: str
    size: int = 0
    dtype: str = ""
    root: int = 0
    name: str = ""

    def __str__(self) -> str:
        what = f" of {self.size} {self.dtype}" if self.dtype else ""
        root = f" from rank {self.root}" if self.kind == "broadcast" else ""
        return f"{self.kind}{what}{root}{f' ({self.name})' if self.name else ''}"

    @property
    def code(self) -> int:
        """Kind, dtype, root and size in 64 bits: equal on ranks that make the same call. Other kinds count as 0."""
        kind = _KINDS.index(self.kind) + 1 if self.kind in _KINDS else 0
        dtype = _DTYPES.index(self.dtype) if self.dtype in _DTYPES else _OTHER_DTYPE
        place = (kind << 8 | dtype) << _ROOT_BITS | self.root % (1 << _ROOT_BITS)
        return place << _SIZE_BITS | self.size % (1 << _SIZE_BITS)

    @classmethod
    def decode(cls, code: int, number: int, name: str) -> Call:
        """The call behind a `code`, as far as it tells."""
        size, place = code % (1 << _SIZE_BITS), code >> _SIZE_BITS
        root, place = place % (1 << _ROOT_BITS), place >> _ROOT_BITS
        kind, dtype = place >> 8, place & 0xFF
        known = _KINDS[kind - 1] if 0 < kind <= len(_KINDS) else "unknown call"
        dtype_name = "" if known in ("barrier", "share") else _DTYPES[dtype] if dtype < len(_DTYPES) else "elements"
        return cls(number, known, size, dtype_name, root, name)


class Waiting(NamedTuple):
    """A collective under way on a rank, and the seconds it has taken so far."""

    call: Call
    seconds: float


@dataclass(frozen=True)
class Position:
    """Where a rank stands, as it tells the others.

    Attributes:
        made: calls entered so far.
        waiting: those under way, the longest first.
        recent: the last ones, oldest first.
        idle_seconds: since the last one ended.
        place: the main thread's innermost line outside of this package's ``dist``; ``stack``: all its lines.
        context: step and whatever the training loop keeps in `minidl.dist.abort.context`.
    """

    made: int
    waiting: tuple[Waiting, ...]
    recent: tuple[Call, ...]
    idle_seconds: float
    place: str = ""
    stack: str = ""
    context: dict[str, object] = field(default_factory=dict)

    def call(self, number: int) -> Call | None:
        """The call of that number, if it is still remembered."""
        return next((call for call in self.recent if call.number == number), None)


class CallLog:
    """Counts the calls of this rank. They run in lanes: those that block, and the messages beside them."""

    def __init__(self) -> None:
        self.made = 0
        self._recent: deque[Call] = deque(maxlen=RECENT)
        self._under_way: dict[str, tuple[Call, float]] = {}
        self._ended = time.monotonic()

    @property
    def last(self) -> str:
        """The kind of the last call."""
        return self._recent[-1].kind if self._recent else "no call"

    def enter(self, kind: str, array: Any = None, root: int = 0, name: str = "") -> Call:
        """Number a call."""
        self.made += 1
        what = () if array is None else (array.size, dtype_name(array.dtype), root, name)
        call = Call(self.made, kind, *what)
        self._recent.append(call)
        return call

    def begin(self, lane: str, call: Call) -> None:
        """The call waits for the other ranks from now on."""
        self._under_way[lane] = call, time.monotonic()

    def end(self, lane: str) -> None:
        """It is done."""
        self._under_way.pop(lane, None)
        self._ended = time.monotonic()

    def waiting(self) -> tuple[Waiting, ...]:
        """The calls under way, the longest first."""
        now = time.monotonic()
        found = [Waiting(call, now - since) for call, since in list(self._under_way.values())]
        return tuple(sorted(found, key=lambda waiting: -waiting.seconds))

    def position(self, **details: Any) -> Position:
        """Everything, to be told to the others."""
        idle = time.monotonic() - self._ended
        return Position(self.made, self.waiting(), tuple(self._recent), idle, **details)
