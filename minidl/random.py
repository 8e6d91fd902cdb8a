"""Random numbers inside a step, by counter: the same whatever the number of ranks or the device.

Dropout draws from Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), keyed by the
run's seed and counted by training step, *global* sample and element. No generator state exists, so nothing has to be
saved but the step, and a rank that holds samples 32..63 of a batch draws what a single rank would have drawn for them.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

__all__ = ["RandomCounter"]


class RandomCounter:
    """The Philox key of the current training step.

    Attributes:
        seed: of the run.
        step: counts forward passes in training mode.
        first_sample: global index of this rank's first sample in the current batch.
    """

    def __init__(self, seed: int = 0):
        self.seed = seed
        self.step = 0
        self.first_sample = 0
        self._key: tuple[ModuleType, Any] | None = None

    def advance(self, first_sample: int = 0) -> None:
        """Start the next step."""
        self.step += 1
        self.first_sample = first_sample
        self._key = None

    def key(self, ops: ModuleType) -> Any:
        """uint32[4] on the device of ``ops``: seed (low, high), step, first sample."""
        if self._key is None or self._key[0] is not ops:
            words = [self.seed, self.seed >> 32, self.step, self.first_sample]
            self._key = ops, ops.from_host(np.array([word & 0xFFFFFFFF for word in words], np.uint32))
        return self._key[1]
