"""What a site's passes cost in bytes, and in time by a model: what ranks ways before any is measured.

A pass reads or writes every element of the site's tensor once. Counted is what comes on top of the convolutions: they
read their inputs and write their outputs in every plan. Parameters and statistics, vectors of C, are left out. In time,
passes run at the memory's rate, and what convolutions do on the way costs them a part of a pass, as measured once. So
the model's choice is the same for every batch and on every day.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from minidl.cuda.convolution import conv2d_both, conv2d_both_wide, conv2d_join, conv2d_stem
from minidl.cuda.device import DeviceRecord
from minidl.fusion.plans import MODES, Plan, candidates, fingerprint, modes_of, way_of
from minidl.fusion.sites import Site
from minidl.graph import Graph
from minidl.layer import Layer
from minidl.layers import BatchNorm2d, Conv2d, ConvTranspose2d, ReLU
from minidl.precision import Precision, bfloat16

HOPPER = (9, 0)
STEM = 4  # channels that a network's first convolution has at most
LABELS = 8  # that its last one has, at most, where it labels pixels and rather runs on kernels for few filters
# The prologue of a convolution that waits for memory: its costs in passes, and where, from what the batch norms of
# ResNet-50, DenseNet-121, U-Net and VGG-16 take on an H200 (docs/fusion_sites.md), and the map of docs/fusion.md.
# Windows of 3x3 make a value several times: they need large images. With 1024 filters of 1x1 it gains up to 3 % at
# batch 256, but cost a step of ResNet-50 0.3 % at batch 32, and the choice is the same for both.
CHEAP, MOST_PRODUCTS, LARGE = (0.1, 0.3), 9 * 64, 28 * 28
# A lazy batch norm whose input gradient is written all the same (conv2d_join.cu): of three passes one is spared.
WRITTEN = (0.0, 2.1)


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
    ("alone", False): (3, 5),
    ("relu", False): (5, 8),
    ("relu", True): (3, 5),  # mask recomputed from the input, which both backward passes read anyway
    ("activation", False): (5, 8),
    ("activation", True): (3, 5),  # likewise the slope
    ("join", False): (8, 8),
    ("join", True): (4, 6),  # the first backward pass writes the masked gradient; signs of the output are no pass
    ("sum", False): (6, 5),
    ("sum", True): (4, 5),
    ("partner", False): (3, 5),
    ("partner", True): (1, 5),  # normalised inside the join
    ("bare", False): (2, 3),
}


def site_cost(site: Site, way: str, batch: int, itemsize: int) -> SiteCost:
    """What ``way`` of running ``site`` costs for ``batch`` samples of ``itemsize`` bytes per element."""
    kind = site.kind if site.first_back or site.kind == "alone" else "partner"
    modes = modes_of(way)
    forward, backward = _PASSES[kind, "elementwise" in modes]
    backward += kind == "join" and "elementwise" in modes and itemsize > 2  # without signs it reads the output, too
    forward -= "statistics" in modes or "joined" in modes  # which take no pass of their own
    forward -= "join" in modes  # the convolution does not read what it makes
    forward -= 2 * bool({"prologue", "pooled", "rectified"} & {*modes})  # done where it is read, or written
    backward -= 3 * ("pooled" in modes)  # sums of what was pooled; the pooling writes no gradient
    if "gated" in modes:  # what is gated is neither written nor read, nor its gradient; one pass takes all sums
        forward, backward = forward - 2, backward - 4
    # The gradient is masked where it is written, and its sums are taken, for a read of the input; over
    # a bare ReLU for a read of that, by a pooling before it makes it large.
    backward -= (1 if site.kind == "relu" else 2) * ("gradients" in modes)
    if "lazy" in modes:  # of the pass for the input's gradient the two reads take the place of the convolution's own
        backward -= 1 if "pooled" in modes else 3
        # Who takes the other's sums, unless a 1x1 convolution above does, too.
        backward += site.kind == "join" and site.partner is not None and site.first_back
    size = batch * prod(site.shape) * itemsize
    return SiteCost(forward, backward, forward * size, backward * size)


class Machine(NamedTuple):
    """What the model of time knows of a device: how fast its memory is, and what its convolutions can do on the way."""

    bytes_per_ms: float
    arch: tuple[int, int] | None

    @classmethod
    def of(cls, device: DeviceRecord | None) -> Machine:
        """Of a GPU, or None for the CPU: usual rates of its kind."""
        if device is None:
            return cls(5e7, None)
        return cls(4.2e9 if device.arch >= HOPPER else 1.7e9, device.arch)

    def does(
        self, layer: Layer, mode: str, precision: Precision, *, activated: bool = False, adds: bool = False
    ) -> bool:
        """Whether a convolution, or a pooling, has kernels for a mode; else the work is done in passes of its own.

        Args:
            activated, adds: of "lazy": whether it reads a ReLU over a batch norm alone; whether its input's gradient is
                added to that of others who read it.
        """
        if not isinstance(layer, (Conv2d, ConvTranspose2d)):
            return True
        if mode == "rectified" and layer.in_channels <= STEM and precision.storage.itemsize == 2:
            return self.arch is not None
        if mode == "statistics" and layer.in_channels <= STEM:
            return self.arch == HOPPER and precision.storage == bfloat16
        if mode == "statistics" and 1 < layer.groups == layer.in_channels == layer.out_channels:
            return self.arch is not None and precision.storage == bfloat16
        if mode == "prologue" and _labels(layer):
            return self.arch is not None and precision.storage.itemsize == 2
        if mode == "lazy" and layer.in_channels <= STEM and isinstance(layer, Conv2d):
            fits = conv2d_stem.undoes_pooling(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride)
            return self.arch == HOPPER and precision.storage.itemsize == 2 and fits
        joins = not adds and conv2d_join.fits(layer.in_channels, layer.out_channels, True)
        if mode == "lazy" and not (_makes_both(layer, activated, adds) or joins):
            return False
        if mode == "join" and not conv2d_join.fits(layer.in_channels, layer.out_channels):
            return False
        aligned = layer.groups == 1 and layer.in_channels % 8 == 0 and layer.out_channels % 8 == 0
        narrow = precision.storage == bfloat16 or (mode != "statistics" and precision.storage.itemsize == 2)
        return self.arch == HOPPER and aligned and narrow


def _makes_both(conv: Conv2d | ConvTranspose2d, activated: bool, adds: bool) -> bool:
    """Whether one kernel makes both gradients of what a batch norm's is made of; else the one that is made on the way
    into the data gradient is written for the weight's."""
    sizes = conv.in_channels, conv.out_channels
    return (not adds and conv2d_both.pays(*sizes)) or (not activated and conv2d_both_wide.pays(*sizes))


def _labels(layer: Conv2d | ConvTranspose2d) -> bool:
    """Whether a convolution labels pixels: to few channels, of many (conv2d_thin.cu)."""
    point = layer.kernel_size == layer.stride == (1, 1) and layer.padding == (0, 0) and layer.groups == 1
    return type(layer) is Conv2d and point and layer.out_channels <= LABELS and layer.in_channels > layer.out_channels


class Predicted(NamedTuple):
    """Milliseconds of a site's passes, with what its modes cost the convolutions around it."""

    forward_ms: float
    backward_ms: float

    @property
    def ms(self) -> float:
        return self.forward_ms + self.backward_ms


def runs_as(graph: Graph, site: Site, way: str, precision: Precision, machine: Machine) -> str:
    """The way whose kernels ``way`` comes to here: modes that a convolution has no kernel for fall away."""

    def does(mode: str) -> bool:
        return machine.does(graph[getattr(site, MODES[mode].by)].layer, mode, precision, **_around(graph, site, mode))

    return way_of(mode for mode in modes_of(way) if MODES[mode].by is None or does(mode))


def _around(graph: Graph, site: Site, mode: str) -> dict[str, bool]:
    """What a convolution's kernels for a mode depend on beside it."""
    if mode != "lazy":
        return {}
    source = graph.nodes[graph[site.producer].inputs[0]]
    below = graph.nodes[source.inputs[0]].layer if isinstance(source.layer, ReLU) else None
    return {"activated": isinstance(below, BatchNorm2d), "adds": site.adds}


def predict(graph: Graph, site: Site, way: str, batch: int, precision: Precision, machine: Machine) -> Predicted:
    """The model's time of a way."""
    way = runs_as(graph, site, way, precision, machine)
    cost = site_cost(site, way, batch, precision.storage.itemsize)
    of_pass = batch * prod(site.shape) * precision.storage.itemsize / machine.bytes_per_ms
    costs = [_costs(graph, site, mode) for mode in modes_of(way)]
    forward, backward = (sum(cost[i] for cost in costs) for i in range(2))
    return Predicted(of_pass * (cost.forward + forward), of_pass * (cost.backward + backward))


def _costs(graph: Graph, site: Site, mode: str) -> tuple[float, float]:
    """What a mode costs the convolution that does it, forward and backward, in passes over the site's tensor."""
    if mode == "prologue" and _waits_for_memory(graph[site.taker].layer, site):
        return CHEAP
    if mode == "lazy" and not site.pooled:
        both = _makes_both(graph[site.producer].layer, **_around(graph, site, mode))
        return MODES[mode].costs if both else WRITTEN
    return MODES[mode].costs


def _waits_for_memory(conv: Conv2d, site: Site) -> bool:
    """Whether a convolution has time to normalise what it reads: few products for each value, 3x3 on large images."""
    taps = prod(conv.kernel_size)
    few = taps * conv.out_channels <= MOST_PRODUCTS * prod(conv.stride)
    return few and (taps == 1 or site.shape[0] * site.shape[1] >= LARGE)


def heuristic(graph: Graph, sites: Sequence[Site], precision: Precision, machine: Machine) -> Plan:
    """The plan that the model thinks fastest; no clock is read. Of equals the way with fewest modes."""
    ways = {}
    for site in sites:
        times = {way: predict(graph, site, way, 1, precision, machine).ms for way in candidates(site)}
        ways[site.name] = min(times, key=times.__getitem__)
    return Plan(ways, fingerprint(sites))
