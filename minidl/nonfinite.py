"""Which rank and which layer made the first NaN: gradients are looked at before they are summed.

After the sum every rank has it, and after the update every layer. Looking costs a pass over each gradient, and the host
waits for every step: it is for runs that went wrong once.
"""

from __future__ import annotations

import numpy as np

from minidl.dist.agree import by_value
from minidl.dist.communicator import Communicator
from minidl.params import Arena

_RECORD, _FOUND = 8, 3  # floats of the record that `ops.find_nonfinite` writes, and where it says so


class GradientWatch:
    """Looks at the gradients of each layer of an arena as soon as its backward pass has written them.

    Make it before steps are compiled: looking is a part of them.
    """

    def __init__(self, arena: Arena):
        self._arena = arena
        trainable = [segment for segment in arena.segments if segment.trainable]
        self._parts: dict[str, tuple[int, int]] = {}  # of each layer, in the order of the backward pass
        for segment in trainable:
            begin, _ = self._parts.get(segment.layer, (segment.offset, 0))
            self._parts[segment.layer] = begin, segment.stop
        self._records = arena.ops.zeros((len(self._parts), _RECORD), np.dtype(np.float32))
        self._row = {layer: row for row, layer in enumerate(self._parts)}
        arena.watch(self._look)

    def _look(self, layer: str) -> None:
        if layer in self._parts:
            self._arena.ops.find_nonfinite(self._arena.gradient(*self._parts[layer]), self._records[self._row[layer]])

    def check(self, comm: Communicator, step: int) -> None:
        """After a step, waited for; a collective.

        Raises:
            FloatingPointError: on every rank, naming for each the layer in which its backward pass first made an Inf
                or a NaN.
        """
        found = self._arena.ops.to_host(self._records)[:, _FOUND] != 0
        firsts = comm.share(next((layer for layer, bad in zip(self._parts, found, strict=True) if bad), ""))
        if not any(firsts):
            return
        told = [f"in layer {layer}" if layer else "finite" for layer in firsts]
        raise FloatingPointError(f"gradients of step {step} are not finite before they are summed: {by_value(told)}")
