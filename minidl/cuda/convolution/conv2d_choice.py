"""Which kernel does a pass of a convolution: the families that can, those that should, and what a tuner may try."""

from __future__ import annotations

import functools
from math import prod

from minidl.cuda.convolution import (
    conv2d_divided,
    conv2d_generic,
    conv2d_grouped,
    conv2d_hopper,
    conv2d_hopper_tiles,
    conv2d_small,
    conv2d_stem,
    conv2d_stem_lines,
    conv2d_thin,
    conv2d_turned,
    conv2d_weight_hopper,
    conv2d_weight_tiles,
    depthwise,
)
from minidl.cuda.convolution.conv2d_family import Choice, Question, choose_family
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.widen import wide_channels
from minidl.cuda.device import DeviceRecord
from minidl.shapes import round_up

# Of a weight gradient by the generic kernel, whose tiles have at least 64 rows and columns, taps side by side:
# microseconds to start and end; in one, bytes of both images, those of the gradient, of one in 16 bits that the L2
# cache does not hold (5x5 1384-584 on 2 images of 7x5 pixels: 48.8 us, Hopper's 35.9), and products in 16 bits, of
# which one takes half in TF32.
START, BYTES, WRITTEN, OVERFLOWING, PRODUCTS, TILE = 8.1, 3.07e6, 2.8e6, 2.0e6, 9.5e7, 64


def widened(conv: Convolution, code: int) -> Convolution:
    """With the channels that x and w should be padded to before a product over them; groups stay as they are."""
    wide = wide_channels(conv.channels, 2 if code else 4)
    return conv if conv.groups > 1 or wide == conv.channels else conv._replace(channels=wide)


@functools.lru_cache(maxsize=4096)
def choice(who: str, question: Question, device: DeviceRecord, wanted: Choice | None, forced: str | None) -> Choice:
    """The kernel that is wanted, where it can do this; else the first family that should."""
    fits, unwanted = _families(question, device)
    name = choose_family(who, fits, unwanted, wanted.family if wanted is not None else None, forced)
    return wanted if wanted is not None and wanted.family == name else Choice(name)


@functools.lru_cache(maxsize=4096)
def _families(question: Question, device: DeviceRecord) -> tuple[dict[str, bool], tuple[str, ...]]:
    """Whether each family can do it, the fastest first; and those that can, but would be slower."""
    which, conv, code, tf32 = question
    backward, weight = which == "backward_data", which == "backward_weight"
    units = tf32 == 1 or code > 0  # matrix units would round float32
    wide, fastest = conv if backward else widened(conv, code), 0.0
    if weight:
        grouped = conv2d_grouped.applies_to_weight(conv, code, device)
        hopper = conv2d_weight_hopper.applies(wide, code, device, tf32)
        if hopper:
            fastest = min(by_hopper := conv2d_weight_tiles.microseconds(wide, tf32), _by_generic(wide, tf32))
        pays = hopper and by_hopper == fastest
    else:
        grouped = conv2d_grouped.applies(conv, code, backward, device)
        hopper = units and conv2d_hopper.applies(wide, code, backward, device)
        pays = conv2d_hopper.pays(wide, code, backward)
    stem = conv2d_stem.applies(conv, which, code, tf32)
    thin = conv2d_thin.applies(conv, code, which)
    small = conv2d_small.applies(conv, tf32)
    fits = {"thin": thin, "stem": stem, "grouped": grouped, "small": small, "hopper": hopper, "generic": True}
    rather = conv2d_thin.pays(conv, code, tf32, which, hopper and pays, fastest)
    tiled = (hopper and pays and wide is conv) or not conv2d_small.pays(conv)
    slower = {
        "thin": not rather,
        "grouped": not conv2d_grouped.pays(conv, weight, hopper and pays),
        "small": tiled,
        "hopper": not pays,
    }
    return fits, tuple(name for name, slow in slower.items() if slow)


def _by_generic(conv: Convolution, tf32: int) -> float:
    """How long the generic kernel should take for a weight gradient, microseconds on a chip as fast as an H200."""
    rows, columns = conv.out_channels // conv.groups, conv.channels // conv.groups * prod(conv.kernel)
    products = conv.pixels * conv.groups * round_up(rows, TILE) * round_up(columns, TILE)
    rate = OVERFLOWING if conv2d_weight_tiles.overflows(conv) and not tf32 else WRITTEN
    written = 4 * rows * columns * conv.groups / rate
    return START + max(conv2d_weight_tiles.moved(conv, tf32) / BYTES, products * (2 * tf32 or 1) / PRODUCTS, written)


def options(question: Question, device: DeviceRecord) -> list[Choice]:
    """Every kernel that a tuner may try, the one that is chosen without tuning first; one alone leaves no choice."""
    which, conv, code, tf32 = question
    backward = which == "backward_data"
    if conv.depthwise and (which == "backward_weight" or depthwise.fits(conv, backward)):
        return [Choice("generic")]
    fits, unwanted = _families(question, device)
    names = sorted((name for name, fit in fits.items() if fit), key=lambda name: name in unwanted)
    wide = conv if backward else widened(conv, code)
    found: list[Choice] = []
    for name in names:
        if name in ("thin", "stem", "grouped", "small"):
            found.append(Choice(name))
            if name == "stem" and which == "forward" and conv2d_stem_lines.applies(conv, code, device):
                found.append(Choice(name, "registers"))
        elif name == "generic":
            found += conv2d_generic.options(question._replace(conv=wide), device)
        elif which == "backward_weight":
            found += conv2d_weight_hopper.options(wide, tf32)
        else:
            parts = conv2d_divided.options(wide, backward, code)
            whole = conv2d_hopper_tiles.options(wide, backward, device, code)
            found += [Choice(name)] if backward and conv2d_turned.fits(wide, code, Choice(name), device) else []
            found += parts + whole if conv2d_divided.divided(None, wide, backward, code) else whole + parts
    return found
