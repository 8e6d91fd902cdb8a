"""Least work of a layer's passes. FLOP: 2 per multiply-add, batch included. Bytes: every operand once."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Cost", "PassCost"]


@dataclass(frozen=True)
class PassCost:
    """One pass: floating-point operations and the fewest bytes it must move through device memory."""

    flop: int = 0
    bytes: int = 0

    @property
    def intensity(self) -> float:
        """Arithmetic intensity, FLOP per byte; 0 for a pass that moves nothing."""
        return self.flop / self.bytes if self.bytes else 0.0

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(self.flop + other.flop, self.bytes + other.bytes)


@dataclass(frozen=True)
class Cost:
    """The three passes of a layer."""

    forward: PassCost = field(default_factory=PassCost)
    backward_data: PassCost = field(default_factory=PassCost)
    backward_weight: PassCost = field(default_factory=PassCost)

    @property
    def total(self) -> PassCost:
        return self.forward + self.backward_data + self.backward_weight
