"""Who times pieces of a network, and the network as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import ModuleType
from typing import Protocol

from minidl.cuda import capture
from minidl.fusion.contest import Whole, can_run_alone
from minidl.fusion.groups import Switches
from minidl.fusion.piece import Cut, Piece
from minidl.graph import Graph
from minidl.precision import Precision
from minidl.profile.timing import Budget, Timing, timer

BUDGET = Budget(samples=7, seconds=float("inf"), sample_ms=1.0)
# Of whole networks: samples so long that it shows what power slows them down, so many that they tell one in forty.
WHOLE = Budget(samples=12, seconds=float("inf"), sample_ms=100.0)


class Clock(Protocol):
    """Whoever times pieces."""

    def __call__(self, cut: Cut, which: str, variants: Sequence[Switches]) -> list[Timing]:
        """A pass of a piece with each of these sets of modes on, in turns."""

    def whole(self, graph: Graph, batch: int, variants: Sequence[Switches]) -> list[Timing] | None:
        """Both passes of a network with each of these sets of modes on, in turns; None where it cannot be run."""


class DeviceClock:
    """Times pieces on the device of an operation table, and whole networks by a budget of their own."""

    def __init__(self, ops: ModuleType, precision: Precision, budget: Budget = BUDGET, whole: Budget = WHOLE):
        self._ops, self._precision, self._budget, self._whole = ops, precision, budget, whole
        self._timer = timer(ops)
        self._piece: Piece | None = None

    def __call__(self, cut: Cut, which: str, variants: Sequence[Switches]) -> list[Timing]:
        if self._piece is None or self._piece.cut is not cut:
            self.release()
            self._piece = Piece(cut, self._ops, self._precision, self._timer.cache_bytes)
        return self._timer.in_turns([self._piece.calls(which, on) for on in variants], self._budget)

    def whole(self, graph: Graph, batch: int, variants: Sequence[Switches]) -> list[Timing] | None:
        self.release()
        if not can_run_alone(graph):
            return None
        try:
            network = Whole(graph, batch, self._ops, self._precision)
            with network.held():
                return self._timer.in_turns([[partial(network, on)] for on in variants], self._whole)
        except MemoryError:  # as where activations are to travel in training
            return None
        finally:
            self.release()

    def release(self) -> None:
        """Let go of the piece and of the memory that its timing took."""
        self._piece = None
        if self._ops.name == "cuda":
            capture.release()
