"""Random numbers inside a step, by counter: the same whatever the number of ranks or the device.

Dropout draws from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the
run's seed and counted by training step, *global* sample and element. No generator state exists, so nothing has to be
saved but the step, and a rank that holds samples 32..63 of a batch draws what a single rank would have drawn for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np


class RandomCounter:
    """The Philox key of the current training step.

    Attributes:
        seed: of the run.
        step: counts forward passes in training mode.
        first_sample: global index of this rank's first sample in the current batch.
        held: `advance` does nothing, see `hold`.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.step = 0
        self.first_sample = 0
        self.held = False
        self._key: tuple[ModuleType, Any] | None = None
        self._written = False

    def advance(self, first_sample: int = 0, new_step: bool = True) -> None:
        """Start the next step, or with ``new_step=False`` a further micro-batch of this one."""
        if self.held:
            return
        self.step += new_step
        self.first_sample = first_sample
        self._written = False

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Within, steps draw by the key as it is, and do not count: they are captured, and replayed by another."""
        self.write()
        self.held = True
        try:
            yield
        finally:
            self.held = False

    def key(self, ops: ModuleType) -> Any:
        """uint32[4] on the device of ``ops``: seed (low, high), step, first sample. Every step has it in one place."""
        if self._key is None or self._key[0] is not ops:
            self._key, self._written = (ops, ops.empty(4, np.uint32)), False
        self.write()
        return self._key[1]

    def write(self) -> None:
        """Bring the key up to date where somebody draws: before a captured step is replayed."""
        if self._key is not None and not self._written:
            words = [self.seed, self.seed >> 32, self.step, self.first_sample]
            self._key[0].assign(self._key[1], [word & 0xFFFFFFFF for word in words])
            self._written = True
