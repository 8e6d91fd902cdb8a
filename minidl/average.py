"""Averages of weights over training."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from minidl import checkpoint, checks
from minidl.model import Model
from minidl.segments import by_name, flattened


class WeightAverage:
    """The exponential moving average of a model's parameters: ``average = decay·average + (1 − decay)·weights``.

    Polyak and Juditsky, 1992, in the form of Tan and Le, "EfficientNet", 2019. Buffers (running statistics) are not
    averaged: they are averages already, and `applied` leaves them as they are. Every rank averages alike.

    Args:
        model: whose parameters are averaged, from what they are now.
        decay: in [0, 1).
    """

    def __init__(self, model: Model, decay: float = 0.9999):
        self.model = checks.instance("WeightAverage", "model", model, Model, "a Model")
        self.decay = checks.number("WeightAverage", "decay", decay, "in [0, 1)", lambda v: 0 <= v < 1)
        self.average = model.ops.cast(model.arena.master, np.float32)
        self._inside = False

    def update(self) -> None:
        """Take in the weights; one kernel. Call it after ``optimizer.step()``: once a step, not once a micro-batch.

        Raises:
            RuntimeError: inside `applied`.
        """
        if self._inside:
            raise checks.order("WeightAverage", "update inside applied()", "leave the block first")
        self.model.ops.blend(self.average, self.model.arena.master, self.decay)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Inside the block the model has the averaged weights: for evaluation and export."""
        if self._inside:
            raise checks.order("WeightAverage", "applied() inside applied()", "leave the block first")
        arena, ops = self.model.arena, self.model.ops
        own, self._inside = ops.cast(arena.master, np.float32), True
        try:
            self._write(self.average)
            yield
        finally:
            self._write(own)
            self._inside = False

    def _write(self, weights: Any) -> None:
        self.model.ops.copy_into(self.model.arena.master, weights)
        self.model.arena.refresh_working()
        self.model.unfold()

    def state_dict(self) -> dict[str, np.ndarray]:
        """The averages by full parameter name, as host copies."""
        return by_name(self.model.ops.to_host(self.average), self.model.arena.segments)

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state_dict`.

        Raises:
            ValueError: when names or shapes do not match this model.
        """
        checkpoint.match(self.state_dict(), state, "averaged weights")
        host = flattened(state, self.model.arena.segments, self.average.size)
        self.model.ops.copy_into(self.average, self.model.ops.from_host(host))
