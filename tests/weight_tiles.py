"""The variants of weight gradients on Hopper's matrix units, tile by tile, and which of them are compiled."""

from __future__ import annotations

import functools

from minidl.cuda.convolution import conv2d_weight_hopper as hopper
from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.convolution.conv2d_weight_tiles import taken
from tests.test_conv2d_weight_hopper import TILES
from tests.variants import covering_each


def _planned_for(tile, tf32) -> dict:
    """The variants of one tile, each with the threads that a multiprocessor is to hold and a block's shared bytes: with
    and without a stride, both types, one partial sum or several, clusters; partial sums that hold little of a tile,
    gradients that overflow the L2 cache."""
    found, kernel = {}, (3, 3) if tile is hopper.HALO else (1, 1)
    resident = tile.resident if isinstance(tile, hopper.WeightTile) else 1
    much, little, vast = (512, 64), (40, 24), (4096, 4096)
    kinds = (
        (1, 1, (1, 1), much), (2, 1, (2, 2), much), (1, 2, (2, 1), much), (2, 2, (1, 2), much),
        (1, 1, (3, 1, 2), much), (1, 1, (2, 2), little), (2, 1, (4, 1), little), (1, 1, (1, 1, 2), vast),
    )  # fmt: skip
    for code, stride, division, (filters, channels) in kinds:
        if len(division) > 2 and not hopper.shares(tile, tf32):
            continue
        strides = (1, 1) if tile is hopper.HALO else (stride, stride)
        conv = convolution("test", (4, 16, 16, channels), (filters, *kernel, channels), strides, (0, 0), (1, 1), 1)
        pitches = channels, filters
        for normalized in {False, not tf32}:
            forced = taken(Choice("hopper", tile.name, division), conv, normalized, tf32)
            if forced is None:
                assert normalized or division[1] > 2, "only what registers do not suffice for"
                continue
            planned = hopper.plan(conv, 0 if tf32 else code, pitches, False, forced, normalized, tf32)
            found[planned.stem, tuple(planned.defines.items())] = planned.block * resident, planned.shared
            if planned.summed:
                found["conv2d_weight_sum", tuple(planned.summed.defines.items())] = planned.summed.block * resident, 0
    assert len(found) >= 3
    return found


@functools.cache
def planned() -> dict[str, dict]:
    """Of all tiles of a name, for any type of operands."""
    found: dict[str, dict] = {}
    for tile, tf32 in TILES:
        found.setdefault(tile.name, {}).update(_planned_for(tile, tf32))
    return found


@functools.cache
def covering_tiles() -> dict[str, list]:
    return covering_each(planned())
