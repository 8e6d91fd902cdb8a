"""A device that does nothing and forgets nothing: runs a planned step on shapes, and judges what was issued.

Two things are watched at every kernel and copy, in blocks of the arena: that no other stream may still be using those
bytes (by events alone, whatever the speed of the streams), and that they hold the tensor that they should.
"""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np

from minidl.cuda.device import active_dry_run
from minidl.memory.placement import ALIGN

STREAMS = ("compute", "out", "in")


class Hazard(AssertionError):
    """Two streams that may use the same bytes at once, or a kernel that reads what is not there."""


class DryEngine:
    """`minidl.cuda.copies.CopyEngine` on shapes. ``calls`` is all that was issued, in order.

    Args:
        deaf: the number of the wait that is left out, to see that it is missed.
    """

    def __init__(self, arena_bytes: int, host_bytes: int, deaf: int | None = None):
        self.arena_bytes, self.host_bytes, self.deaf = arena_bytes, host_bytes, deaf
        self.memory = np.empty(arena_bytes + ALIGN, np.uint8)
        self.begin = self.memory.ctypes.data
        blocks = arena_bytes // ALIGN + 1
        self.tags = np.full(blocks, -1, np.int64)  # which array's content lies in a block
        self.away: dict[int, np.ndarray] = {}  # what lies on the host, as tags
        self.used = {stream: np.full(blocks, -1, np.int64) for stream in STREAMS}
        self.clock = {stream: dict.fromkeys(STREAMS, -1) for stream in STREAMS}
        self.events: dict[int, dict[str, int]] = {}
        self.calls: list[tuple] = []
        self.waits = self.made = self.drained = 0

    @contextmanager
    def allocating(self, place):
        dry = active_dry_run()

        def memory(count):
            offset = place(count)
            if offset is None:
                return None
            assert 0 <= offset <= self.arena_bytes - count and offset % ALIGN == 0
            self.tags[self._blocks(offset, count)] = self.made
            self.made += 1
            return self.memory[offset : offset + count]

        dry.memory = memory
        try:
            yield
        finally:
            dry.memory = None

    def view(self, offset, shape, strides, dtype):
        return np.ndarray(shape, dtype, self.memory, offset, strides)

    def offset(self, array):
        offset = array.ctypes.data - self.begin
        return offset if 0 <= offset < self.arena_bytes else None

    def copy_out(self, offset, host, count):
        self.calls.append(("copy_out", offset, host, count))
        self.use("out", offset, count)
        self.away[host] = self.tags[self._blocks(offset, count)].copy()

    def copy_in(self, offset, host, count):
        self.calls.append(("copy_in", offset, host, count))
        self.use("in", offset, count)
        if host not in self.away:  # what lies there from the start
            self.made += 1
            self.away[host] = np.full(-(-count // ALIGN), self.made - 1)
        self.tags[self._blocks(offset, count)] = self.away[host]

    def host(self, offset, count):
        return np.zeros(count, np.float32)

    def record(self, stream, event):
        self.calls.append(("record", stream, event))
        now = len(self.calls)
        self.clock[stream][stream] = now
        self.events[event] = dict(self.clock[stream])

    def wait(self, stream, event):
        self.calls.append(("wait", stream, event))
        self.waits += 1
        if self.waits - 1 == self.deaf:
            return
        for name, over in self.events[event].items():
            self.clock[stream][name] = max(self.clock[stream][name], over)

    def drain(self):
        self.drained += 1
        for clock in self.clock.values():
            clock.update(dict.fromkeys(STREAMS, len(self.calls)))

    def use(self, stream, offset, count):
        """A kernel or copy on ``stream`` reads or writes these bytes."""
        blocks = self._blocks(offset, count)
        for other in STREAMS:
            if other != stream and self.used[other][blocks].max(initial=-1) > self.clock[stream][other]:
                raise Hazard(f"{stream} may use bytes {offset}..{offset + count} while {other} still does")
        self.used[stream][blocks] = len(self.calls)

    @staticmethod
    def _blocks(offset, count):
        return slice(offset // ALIGN, -(-(offset + count) // ALIGN))


class Judge:
    """Watches the kernels of a dry run: which array each of their arguments belongs to."""

    def __init__(self, engine: DryEngine | None = None):
        self.engine = engine
        self.again = lambda: False  # whether a tensor is being made again
        self.kernels: list[tuple] = []
        self.roots: dict[int, tuple] = {}

    def allocated(self, array):
        if self.engine is None:
            self.roots[id(array)] = len(self.roots), array  # kept: an id is good while the array lives

    def launched(self, name, arguments):
        own = tuple(self._known(a) for a in arguments if isinstance(a, np.ndarray))
        if not self.again():
            self.kernels.append((name, own))

    def _known(self, array):
        if self.engine is None:
            root = array if array.base is None else array.base
            return (id(root), array.nbytes)
        offset = self.engine.offset(array)
        if offset is None:
            return None
        low, high = np.lib.array_utils.byte_bounds(array)
        self.engine.calls.append(("kernel", offset))
        self.engine.use("compute", offset, high - low)
        return int(self.engine.tags[offset // ALIGN]), array.nbytes


def require_apart(pieces, offsets, total):
    """Refuse a placement with two pieces on the same bytes at the same time, or one outside the arena."""
    held = []
    by_end = sorted(range(len(pieces)), key=lambda i: pieces[i].end)
    gone = 0
    for i in sorted(range(len(pieces)), key=lambda i: pieces[i].begin):
        while gone < len(by_end) and pieces[by_end[gone]].end < pieces[i].begin:
            if by_end[gone] in held:
                held.remove(by_end[gone])
            gone += 1
        low, high = offsets[i], offsets[i] + pieces[i].bytes
        if low < 0 or high > total or low % ALIGN:
            raise ValueError(f"piece {i} lies at {low}..{high} of an arena of {total} bytes")
        for j in held:
            if pieces[j].bytes and low < offsets[j] + pieces[j].bytes and offsets[j] < high:
                raise ValueError(f"pieces {i} and {j} hold the same bytes at the same time")
        held.append(i)
