"""What a site's passes cost in bytes: the model that ranks plans before any is measured.

A pass reads or writes every element of the site's tensor once. Counted is what comes on top of the convolutions: they
read their inputs and write their outputs in every plan. Parameters and statistics, vectors of C, are left out.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from minidl.fusion.sites import Site

__all__ = ["SiteCost", "site_cost"]


class SiteCost(NamedTuple):
    """Passes over the site's tensor, and bytes for a batch."""

    forward: int
    backward: int
    forward_bytes: int
    backward_bytes: int

    @property
    def bytes(self) -> int:
        return self.forward_bytes + self.backward_bytes


# (forward, backward) passes. Unfused: statistics 1, normalising 2, ReLU 2, sum 3; backward ReLU 3, sums 2, gradient 3.
# A join's sum and ReLU are counted at the site whose gradient comes first; its partner has none.
_PASSES = {
    ("alone", "none"): (3, 5),
    ("relu", "none"): (5, 8),
    ("relu", "elementwise"): (3, 5),  # mask recomputed from the input, which both backward passes read anyway
    ("join", "none"): (8, 8),
    ("join", "elementwise"): (4, 7),  # the first backward pass reads the output too, and writes the masked gradient
    ("sum", "none"): (6, 5),
    ("sum", "elementwise"): (4, 5),
    ("partner", "none"): (3, 5),
    ("partner", "elementwise"): (1, 5),  # normalised inside the join
}


def site_cost(site: Site, way: str, batch: int, itemsize: int) -> SiteCost:
    """What ``way`` of running ``site`` costs for ``batch`` samples of ``itemsize`` bytes per element."""
    kind = site.kind if site.first_back or site.kind == "alone" else "partner"
    reaches = way in ("statistics", "gradients", "bnff")  # into the convolutions around it
    forward, backward = _PASSES[kind, "none" if kind == "alone" else "elementwise" if reaches else way]
    forward -= reaches and site.producer is not None  # the statistics take no pass of their own
    # The gradient is masked where it is written, and its sums are taken, for a read of the input (and the output).
    backward -= (1 if site.kind == "relu" else 2) * (way in ("gradients", "bnff"))
    forward -= 2 * (way == "bnff")  # normalised where it is read
    size = batch * prod(site.shape) * itemsize
    return SiteCost(forward, backward, forward * size, backward * size)
