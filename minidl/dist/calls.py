"""What this rank calls: every collective is numbered, the last ones are kept, and it is known which are under way."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

RECENT = 32
CHAINED = 8192  # checksums kept: a rank may be half as many calls ahead of another and still be compared with it
_KINDS = (
    "all_reduce", "start_all_reduce", "all_gather", "broadcast", "barrier", "share", "start_exchange", "split",
    "start_reduce_scatter", "start_all_gather",
)  # fmt: skip
_WITHOUT_ARRAY = ("barrier", "share", "start_exchange", "split")
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
        dtype_name = "" if known in _WITHOUT_ARRAY else _DTYPES[dtype] if dtype < len(_DTYPES) else "elements"
        return cls(number, known, size, dtype_name, root, name)


def describe(number: int, kind: str, array: Any = None, root: int = 0, name: str = "") -> Call:
    """The call on ``array``, or on none."""
    what = (0, "") if array is None else (array.size, dtype_name(array.dtype))
    return Call(number, kind, *what, root, name)


class Waiting(NamedTuple):
    """A collective under way on a rank, and the seconds it has taken so far."""

    call: Call
    seconds: float


class Passed(NamedTuple):
    """What a rank has called so far: how many calls, and a checksum of all of them in order."""

    number: int
    checksum: int


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
        self.passed = Passed(0, 0)
        self._checksums = [0] * CHAINED  # after call i, at i % CHAINED
        self._words: dict[tuple, bytes] = {}
        self._recent: deque[Call] = deque(maxlen=RECENT)
        self._under_way: dict[str, tuple[Call, float]] = {}
        self._ended = time.monotonic()

    @property
    def made(self) -> int:
        """Calls entered so far."""
        return self.passed.number

    @property
    def recent(self) -> tuple[Call, ...]:
        """The last calls, oldest first."""
        return tuple(self._recent)

    @property
    def last(self) -> str:
        """The kind of the last call."""
        return self._recent[-1].kind if self._recent else "no call"

    def enter(self, kind: str, array: Any = None, root: int = 0, name: str = "") -> Call:
        """Number a call."""
        call = describe(self.made + 1, kind, array, root, name)
        self._recent.append(call)
        checksum = zlib.crc32(self._in_words(call), self.passed.checksum)
        self._checksums[call.number % CHAINED] = checksum
        self.passed = Passed(call.number, checksum)
        return call

    def checksum(self, number: int) -> int | None:
        """Of the calls up to that number; None where there are not so many yet, or it is long past."""
        return self._checksums[number % CHAINED] if self.made - CHAINED // 2 < number <= self.made else None

    def _in_words(self, call: Call) -> bytes:
        """What must be equal on all ranks, in bytes: told once, for making it takes microseconds."""
        words = self._words.get(call[1:])
        if words is None:
            words = self._words[call[1:]] = str(call).encode()
        return words

    def begin(self, lane: str, call: Call) -> None:
        """The call waits for the other ranks from now on."""
        self._under_way[lane] = call, time.monotonic()

    def end(self, lane: str) -> None:
        """It is done."""
        self._under_way.pop(lane, None)
        self._ended = time.monotonic()

    @contextmanager
    def under_way(self, lane: str, call: Call) -> Iterator[None]:
        """The call waits for the other ranks in here."""
        self.begin(lane, call)
        try:
            yield
        finally:
            self.end(lane)

    def waiting(self) -> tuple[Waiting, ...]:
        """The calls under way, the longest first."""
        now = time.monotonic()
        found = [Waiting(call, now - since) for call, since in list(self._under_way.values())]
        return tuple(sorted(found, key=lambda waiting: -waiting.seconds))

    def position(self, **details: Any) -> Position:
        """Everything, to be told to the others."""
        idle = time.monotonic() - self._ended
        return Position(self.made, self.waiting(), self.recent, idle, **details)
