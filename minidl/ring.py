"""Where gradients lie: all of them, each at its parameter's place, or those of a few messages at a time, in a ring."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence

from minidl.segments import Message, Segment


class Whole:
    """All gradients: each lies where its parameter lies in the arena."""

    slots = 0
    tiled: Mapping[str, Segment] = {}

    def at(self, begin: int) -> int:
        """The place of element ``begin`` of the arena."""
        return begin

    def held(self, message: Message) -> int:
        """Elements that are held of a message."""
        return message.end - message.begin


class Ring:
    """The gradients of ``slots`` neighbouring messages: the next ones take their places once they are used.

    Args:
        messages: all of an arena, in its order.
        slots: at least 1.
        tiled: by layer, the parameter whose gradient is held one tile at a time; the first of its message.
        most: elements of all gradients; a ring that would be as large holds them all.

    Attributes:
        size: elements of the array that holds the gradients.
    """

    def __init__(self, messages: Sequence[Message], slots: int, tiled: Mapping[str, Segment], most: int):
        self.slots, self.tiled = slots, tiled
        self._begins = [message.begin for message in messages]
        self._segments = [tiled.get(message.layers[0]) for message in messages]
        sizes = [self.held(message) for message in messages]
        self._places = ring_places(sizes, slots)
        self.size = max((place + size for place, size in zip(self._places, sizes, strict=True)), default=0)
        if self.size >= most:
            self._places, self.size = self._begins, most

    def at(self, begin: int) -> int:
        """The place of element ``begin`` of the arena, while its message, and its tile, has one."""
        number = bisect.bisect_right(self._begins, begin) - 1
        inside, segment = begin - self._begins[number], self._segments[number]
        if segment is not None:
            behind = begin - segment.stop
            inside = inside % segment.tile if behind < 0 else segment.tile + behind
        return self._places[number] + inside

    def held(self, message: Message) -> int:
        """Elements that are held of a message at a time."""
        segment = self.tiled.get(message.layers[0])
        return message.end - message.begin - (0 if segment is None else segment.stop - segment.offset - segment.tile)


def ring_places(sizes: Sequence[int], slots: int) -> list[int]:
    """Offsets for messages of which any ``slots`` neighbours live at a time: largest first, as low as they fit."""
    places: dict[int, int] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lowest = 0
        for j in sorted((j for j in places if abs(i - j) < slots), key=places.__getitem__):
            if places[j] - lowest >= sizes[i]:
                break
            lowest = max(lowest, places[j] + sizes[j])
        places[i] = lowest
    return [places[i] for i in range(len(sizes))]
