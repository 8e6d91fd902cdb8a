"""Convolution and its data gradient on Hopper's matrix units, for 16-bit types and for float32 in TF32.

Two kernels: conv2d_hopper.cu, planned here, and for windows with a halo conv2d_halo.cu. Everything is worked out from
sizes and the device record: `applies` says in one place which convolutions the family takes, `conv2d_hopper_tiles` with
which tile, `plan` what is launched for them.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from minidl.cuda.array import as_rows, copy_into, empty
from minidl.cuda.convolution.conv2d_divided import Division, divided
from minidl.cuda.convolution.conv2d_family import Choice
from minidl.cuda.convolution.conv2d_halo import HaloTile, plan_halo
from minidl.cuda.convolution.conv2d_hopper_tiles import SLAB, TILES, HopperTile, choose, normalizing_pays, taken
from minidl.cuda.convolution.conv2d_hopper_views import spread_out, views_of
from minidl.cuda.convolution.conv2d_plan import Convolution, argument, struct
from minidl.cuda.convolution.conv2d_walk import (
    CLASSES,
    PRODUCT,
    STAGE_ROW,
    Planned,
    Walk,
    blocks,
    bundle_of,
    columns_of,
    depth_of,
    filter_rows,
    group_columns_of,
    is_flat,
    itemsize_of,
    steps_of,
    tail_of,
    walks_of,
)
from minidl.cuda.convolution.tickets import TICKETS
from minidl.cuda.device import HOPPER, DeviceRecord, current_device
from minidl.cuda.hopper import TensorMaps
from minidl.cuda.launch import launch
from minidl.cuda.norm.statistics import Parts
from minidl.cuda.rows import ACCESS, DTYPE, alignment, rows
from minidl.precision import bfloat16, float32
from minidl.shapes import ceil_div, round_up

TURN = 32  # filters and channels that a block of conv2d_turn.cu turns
# The macro MASKED for a ReLU without a batch norm, where the signs of its output are read, and for two batch norms.
ALONE, SIGNED, PAIR = 3, 4, 5
OFFSETS = range(255)  # pixels from the first tap to any other, along one axis
ROW_LIMIT = 2**31 - 1024  # pixels of one launch: with what the last tile hangs over they are counted in 32 bits
GROUP_LIMIT = 2**30  # more tiles than there are: all blocks in one group
REACH = 2**40  # bytes, as far as the engine counts

# The structures Class and Problem of conv2d_hopper.cu.
_CLASS = struct("", "tiles rows height width first_h first_w taps_h taps_w offset_h offset_w tap")
_PROBLEM = struct(
    "",
    "tiles share group tiles_n columns depth source_h source_w step_h step_w delta_h delta_w tap_step_h tap_step_w "
    "added stage_bytes group_columns count cycles",
    ("classes", _CLASS, CLASSES),
)


class Below(NamedTuple):
    """The ReLU and the batch norm, if there is one, below a convolution, for its data gradient.

    Attributes:
        x: the batch norm's input, (N, H, W, C), or None.
        moments, gamma, beta: its (2, C) and (C,) float32, or None.
        y: the ReLU's output where it does not follow from ``x``, or None.
        signs: of ``y``, or None; they are read instead of it.
        other: input and moments of another batch norm under the same sum; with ``signs``, where `takes_pair`.
    """

    x: Any
    moments: Any
    gamma: Any
    beta: Any
    y: Any = None
    signs: Any = None
    other: tuple[Any, Any] | None = None


NOTHING = Below(None, None, None, None)


@functools.lru_cache(maxsize=1024)
def applies(conv: Convolution, code: int, backward: bool, device: DeviceRecord) -> bool:
    """Whether the family takes a convolution, wherever its arrays lie.

    It does on compute capability 9.0, for one group of a 16-bit type with channels and filters in multiples of eight,
    or of float32 (which it rounds to TF32) in multiples of four, as far as the copy engine can walk the pixels:
    paddings up to 128, strides up to 8, taps up to 254 pixels apart. For several groups of a 16-bit type that fill
    stages and tiles: of 64 channels or a multiple, or of 32, or 16 or 48 of the source alone.
    """
    if device.arch != HOPPER or conv.images == 0 or (conv.groups > 1 and not code):
        return False
    depth, chunk = depth_of(conv, backward), STAGE_ROW // itemsize_of(code)
    whole = depth % (PRODUCT // itemsize_of(code) if depth < chunk else chunk) == 0
    if conv.groups > 1 and not (whole and group_columns_of(conv, backward) % SLAB == 0):
        return False
    vector = ACCESS // itemsize_of(code)
    if conv.channels % vector or conv.out_channels % vector:
        return False
    walks = walks_of(conv, backward)
    if any(axis.farthest not in OFFSETS for pair in walks for axis in pair):
        return False
    pitches = conv.channels, conv.out_channels
    pitches, tile = pitches[::-1] if backward else pitches, TILES[-1]
    parts = (walks[i : i + CLASSES] for i in _firsts(walks))
    return all(views_of(conv, code, backward, part, pitches, tile, tile.rows).legal for part in parts)


def pays(conv: Convolution, code: int, backward: bool) -> bool:
    """Whether the family should be faster than the generic one on a convolution that it takes.

    In TF32 it is about twice as fast where stages are full; few channels leave most of each stage empty, which costs
    the copy engine more than values would (a quarter of it full, 5x5 8-128 on 64 images of 28x28 pixels takes 21 us, on
    the generic kernel 29). In 16 bits that matters where strided pixels are walked for each tap.
    """
    depth, channels = depth_of(conv, backward), STAGE_ROW // itemsize_of(code)
    if code and (backward or conv.kernel == (1, 1) or conv.stride == (1, 1)):
        return True
    return 2 * depth >= channels if code else 4 * depth >= round_up(depth, channels)


def aligned(x: Any) -> Any:
    """``x`` itself where the engine can walk it, else a dense copy: rows start at multiples of 16 bytes."""
    if _can_walk(x):
        return x
    out = empty(x.shape, x.dtype)
    copy_into(out, x)
    return out


def _can_walk(x: Any) -> bool:
    count, _, pitch = rows(x)
    step = pitch * x.itemsize
    return alignment(x, step) == ACCESS and count * step < REACH


def images_at_once(conv: Convolution) -> int:
    """Images that one launch can take."""
    return max(1, ROW_LIMIT // max(conv.height * conv.width, conv.out_height * conv.out_width))


@functools.lru_cache(maxsize=1024)
def plan(
    conv: Convolution,
    code: int,
    backward: bool,
    pitches: tuple[int, ...],
    added: bool,
    device: DeviceRecord,
    chosen: tuple[HopperTile | HaloTile, int] | None = None,
    statistics: bool = False,
    masked: int = 0,
    normalized: int = 0,
    relu: bool = False,
    parts: int = 0,
    written: int = 0,
    spaced: bool = False,
) -> list[Planned]:
    """The launches for a convolution that the family takes: one, or several when there are more than four classes.

    Args:
        pitches: elements per pixel of the source, of the array to be added, and of those that a masked gradient reads,
            of `aligned` arrays.
        added: whether there is one.
        chosen: the tile and the tiles per block; what `choose` says unless given.
        statistics: of a forward pass, leave those of its patches too; of a data gradient the sums.
        masked: of a data gradient, the macro MASKED: 0, or what is known of the ReLU below, whose arrays are read.
        normalized: of a forward pass, whether the source is the input of a batch norm with a ReLU over it: 0, 1 for
            float32 arithmetic, 2 for packed 16-bit.
        relu: of a forward pass, whether there is a ReLU over it.
        parts: blocks that share the depth of a tile of conv2d_divided_kernel (of `is_flat` ones); 0: the other kernel.
        written: elements per pixel of the output; 0: it is dense.
        spaced: whether what is to be added has but every second pixel of every second line; where `adds_spaced`.
    """
    tile, share = chosen or choose(conv, backward, device, code, normalized, statistics or masked > 0)
    if isinstance(tile, HaloTile):
        rest = statistics, masked, normalized, relu, written
        return [plan_halo(conv, code, backward, pitches, added, device, tile, share, *rest, signed=masked >= SIGNED)]
    share = share if tile.parts == 1 else 1  # clusters begin in turn
    walks = sorted(walks_of(conv, backward), key=lambda pair: pair[0].taps * pair[1].taps == 0)  # those with taps first
    group = GROUP_LIMIT if parts else device.multiprocessors * tile.resident
    if not added:
        pitches = pitches[0], columns_of(conv, backward), *pitches[2:]
    launches = []
    for i in _firsts(walks):
        part = walks[i : i + CLASSES]
        fetched = min(tile.rows, round_up(conv.images, 8)) if parts else tile.rows
        stage = STAGE_ROW * (fetched + filter_rows(conv, code, backward, tile.columns))
        views = views_of(conv, code, backward, part, pitches, tile, fetched, masked >= SIGNED, written)
        assert views.legal, (conv, pitches)
        problem = _problem(conv, backward, part, tile, share, group, pitches[1] if added else 0, parts, stage)
        spread = int(spread_out(part))
        defines = {"DTYPE": code, "BACKWARD": int(backward), "FLAT": int(is_flat(conv)), "SPREAD": spread}
        defines |= {"STATISTICS": int(statistics), "MASKED": masked, "NORMALIZED": int(normalized), "RELU": int(relu)}
        if normalized:
            defines["SINGLE"] = int(conv.kernel == (1, 1) and conv.padding == (0, 0))
        defines |= {"GROUPED": bundle_of(conv) if conv.groups > 1 else 0}
        defines |= {"SPACED": int(spaced), "DIVIDED": parts, "STEPS": steps_of(conv, backward, code)} | tile.defines
        defines["TAIL"] = 0 if normalized else tail_of(conv, backward, code)
        tiles = int(problem["tiles"][0])
        patches = tiles // (int(problem["tiles_n"][0]) * tile.parts) * tile.patches
        grid = blocks(tiles, share, group)
        rest = problem, defines, tile.shared_bytes(normalized > 0), patches, grid < tiles
        launches.append(Planned("conv2d_hopper", grid, tile.threads, views, *rest))
    return launches


def gather(
    conv: Convolution,
    code: int,
    backward: bool,
    source: Any,
    w: Any,
    bias: Any,
    add: Any,
    output: Any,
    choice: Choice | None = None,
    relu: bool = False,
) -> None:
    """Forward pass or data gradient into ``output``, in as many launches as the counters of one make necessary.

    With ``relu``, the output of a ReLU over that.
    """
    if backward and not code:
        w = turned(w)
    source, w, bias, add = [None if x is None else aligned(x) for x in (source, w, bias, add)]
    pitches = rows(source)[2], 0 if add is None else rows(add)[2]
    how = choice, relu, rows(output)[2], is_spaced(conv, add)
    division, launches = _launches(conv, code, backward, pitches, add is not None, current_device(), *how)
    if division is not None:
        _gather_divided(conv, code, backward, source, w, bias, add, output, division, relu)
    for images, one in launches:
        if images is None:
            start(one, w, source, output, add, bias)
        else:
            start(one, w, source[images], output[images], None if add is None else add[images], bias)


@functools.lru_cache(maxsize=1024)
def _launches(
    conv: Convolution, code: int, backward: bool, pitches: tuple[int, ...], added: bool, device: DeviceRecord,
    choice: Choice | None, relu: bool, written: int, spaced: bool,
) -> tuple[Division | None, list[tuple[slice | None, Planned]]]:  # fmt: skip
    """How `gather` goes about it: divided, or in launches with the images of each, None for all."""
    division = divided(choice, conv, backward, code)
    if division is not None:
        return division, []
    chosen, step, found = taken(choice, conv, backward, device, code), images_at_once(conv), []
    parts = choose(conv, backward, device, code)[0].parts
    for i in range(0, conv.images, step):
        part = conv._replace(images=min(step, conv.images - i))
        images = None if part.images == conv.images else slice(i, i + part.images)
        tile = chosen or choose(part, backward, device, code, 0, False, parts)
        how = {"relu": relu, "written": written, "spaced": spaced}
        found += [(images, one) for one in plan(part, code, backward, pitches, added, device, tile, **how)]
    return None, found


def _gather_divided(
    conv: Convolution,
    code: int,
    backward: bool,
    source: Any,
    w: Any,
    bias: Any,
    add: Any,
    output: Any,
    division: Division,
    relu: bool,
) -> None:
    """`gather` of a product whose depth is divided among the blocks of clusters, of `aligned` arrays."""
    tile, parts = division
    pitches, pitch = (rows(source)[2], 0), 0 if add is None else rows(add)[2]
    (one,) = plan(conv, code, backward, pitches, False, current_device(), (tile, 1), relu=relu, parts=parts)
    maps = TensorMaps(one.views, (w, source, output, None))
    launch(
        one.stem, "conv2d_divided_kernel", one.grid, one.block,
        maps, bias, add, output, np.int32(pitch), one.problem, defines=one.defines, shared=one.shared,
    )  # fmt: skip


def turned(w: Any) -> Any:
    """Dense filters (K, R, S, C) as (C, R, S, K); the kernel is in conv2d_turn.cu."""
    filters, *kernel, channels = w.shape
    out, taps = empty((channels, *kernel, filters), w.dtype), math.prod(kernel)
    grid = ceil_div(channels, TURN) * ceil_div(filters, TURN), taps
    sizes = np.int32(filters), np.int32(taps), np.int32(channels)
    launch("conv2d_turn", "conv2d_turn_kernel", grid, (TURN, 8), w, out, *sizes)
    return out


def _whole(conv: Convolution, code: int, backward: bool, choice: Choice | None) -> bool:
    """Whether one launch does it all: what is fused into it is then done in the order of sums that it has alone."""
    return conv.images <= images_at_once(conv) and divided(choice, conv, backward, code) is None


def writes(conv: Convolution, code: int, backward: bool, output: Any, choice: Choice | None = None) -> bool:
    """Whether the family's kernels can write their result where ``output`` lies, at a pitch perhaps."""
    return divided(choice, conv, backward, code) is None and _can_walk(output)


def takes_statistics(conv: Convolution, code: int, choice: Choice | None = None) -> bool:
    """Whether `forward_fused` takes them of a convolution that the family takes: in bfloat16, whose squares float32
    adds up without loss, and in one launch."""
    return code == DTYPE[bfloat16] and _whole(conv, code, False, choice)


def normalizes(
    conv: Convolution, code: int, statistics: bool = False, choice: Choice | None = None, packed: bool = False
) -> bool:
    """Whether `forward_fused` should normalise the input of a convolution that the family takes: of a 16-bit type, one
    group, in one launch, and where that should be faster than a pass of its own."""
    statistics = statistics and takes_statistics(conv, code, choice)
    whole = code > 0 and conv.groups == 1 and _whole(conv, code, False, choice)
    return whole and normalizing_pays(conv, current_device(), code, statistics, 2 if packed else 1)


def forward_fused(
    conv: Convolution,
    code: int,
    x: Any,
    w: Any,
    bias: Any,
    output: Any,
    choice: Choice | None = None,
    statistics: bool = False,
    below: Below | None = None,
    packed: bool = False,
    relu: bool = False,
) -> Any:
    """Forward pass into ``output`` together with what lies around it.

    Args:
        statistics: return those of the output, as `Parts`; where `takes_statistics`.
        below: the batch norm and the ReLU that make the input of ``x``; where `normalizes`.
        packed: make it in packed 16-bit arithmetic, relu(x*s + t) with s = rstd*gamma and t = beta - mean*s rounded to
            the dtype of x: before its one rounding off by at most u (|s*x| + |t|), u = 2^-8 of bfloat16, 2^-11 of
            float16.
        relu: as of `gather`.
    """
    x, w, bias = (None if array is None else aligned(array) for array in (x, w, bias))
    device, normalized = current_device(), 0 if below is None else 2 if packed else 1
    chosen = taken(choice, conv, False, device, code, normalized, statistics)
    rest = statistics, 0, normalized, relu, 0, rows(output)[2]
    (one,) = plan(conv, code, False, (rows(x)[2], 0), False, device, chosen, *rest)
    partial = empty((one.patches, 2, conv.out_channels), float32) if statistics else None
    start(one, w, x, output, None, bias, partial, below or NOTHING)
    return Parts(partial, math.prod(conv.y_shape[:3])) if statistics else None


def masks(conv: Convolution, code: int, choice: Choice | None = None, backward: bool = True) -> bool:
    """Whether `masked_gradient` takes the data gradient of a convolution that the family takes: in one launch."""
    return _whole(conv, code, backward, choice) and len(walks_of(conv, backward)) <= CLASSES


def takes_pair(conv: Convolution, code: int, choice: Choice | None = None) -> bool:
    """Whether `masked_gradient` takes sums for two batch norms, besides that it `masks`: of 1x1 filters without stride
    and padding, by a tile whose stages are enough."""
    if not is_flat(conv) or not masks(conv, code, choice):
        return False
    device = current_device()
    chosen = taken(choice, conv, True, device, code, 0, True) or choose(conv, True, device, code, 0, True)
    return isinstance(chosen[0], HopperTile) and chosen[0].takes_pairs


def masked_gradient(
    conv: Convolution, code: int, dy: Any, w: Any, add: Any, below: Below, output: Any, choice: Choice | None = None,
    backward: bool = True,
) -> Any:  # fmt: skip
    """Data gradient into ``output``, masked by the ReLU below; the parts of its sums, float32.

    Where `masks`. With ``backward`` false that of a transposed convolution, hence a forward pass of ``dy``. ``below``:
    of a batch norm, which gets (R, 2, C), of two (2, R, 2, C); a ReLU's output, or nothing (without stride and
    ``add``): (R, C).
    """
    dy, w, add = (None if array is None else aligned(array) for array in (dy, w, add))
    device = current_device()
    chosen = taken(choice, conv, backward, device, code, 0, True)
    signed = below.signs is not None
    second = below.other[0] if below.other is not None else None if signed else below.y
    arrays = [aligned(as_rows(array)) for array in (below.x, second) if array is not None]
    if signed:
        masked = SIGNED if below.other is None else PAIR
    else:
        masked = len(arrays) if below.x is not None else ALONE if arrays else 0
    if signed:
        arrays.append(below.signs)
    pitches = rows(dy)[2], 0 if add is None else rows(add)[2], *(rows(array)[2] for array in arrays)
    how = {"statistics": not masked, "masked": masked, "spaced": is_spaced(conv, add)}
    (one,) = plan(conv, code, backward, pitches, add is not None, device, chosen, **how)
    shape = one.patches, *(() if below.x is None else (2,)), columns_of(conv, backward)
    partial = empty(shape if below.other is None else (2, *shape), float32)
    start(one, w, dy, output, add, None, partial, below, tuple(arrays))
    return partial


def start(
    planned: Planned,
    w: Any,
    source: Any,
    output: Any,
    add: Any = None,
    bias: Any = None,
    partial: Any = None,
    below: Below = NOTHING,
    arrays: tuple[Any, ...] = (),
) -> None:
    """Start a planned launch on `aligned` arrays.

    Args:
        partial: for what patches leave, (R, 2, C) or (R, C), or of two batch norms (2, R, 2, C) float32.
        below, arrays: what is known of the batch norm below, and the arrays that a masked gradient reads of it.
    """
    norm: tuple[Any, ...] = below.moments, below.gamma, below.beta
    spaced, more = planned.defines.get("SPACED"), ()
    if spaced is not None:  # of conv2d_hopper.cu
        norm += (None, None) if below.other is None else (below.other[1], partial[1])
        more = (add if spaced else None,)
    maps = TensorMaps(planned.views, (w, source, output, None if spaced else add, *arrays))
    tickets = TICKETS if planned.several else None
    launch(
        planned.stem, f"{planned.stem}_kernel", planned.grid, planned.block,
        maps, bias, partial, *norm, planned.problem, tickets, *more,
        defines=planned.defines, shared=planned.shared,
    )  # fmt: skip


def adds_spaced(conv: Convolution, code: int, choice: Choice | None = None) -> bool:
    """Whether a data gradient that the family takes may add an array of every second pixel: a product of pixels as they
    lie, in one launch."""
    return code > 0 and is_flat(conv) and _whole(conv, code, True, choice)


def is_spaced(conv: Convolution, add: Any) -> bool:
    """Whether what is to be added to a data gradient has but every second pixel of every second line."""
    half = conv.images, ceil_div(conv.height, 2), ceil_div(conv.width, 2), conv.channels
    return add is not None and add.shape == half != conv.x_shape


def _firsts(walks: list[tuple[Walk, Walk]]) -> range:
    return range(0, len(walks), CLASSES)


def _problem(
    conv: Convolution,
    backward: bool,
    walks: list[tuple[Walk, Walk]],
    tile: HopperTile,
    share: int,
    group: int,
    added: int,
    parts: int,
    stage_bytes: int,
) -> np.ndarray:
    columns, row = columns_of(conv, backward), conv.kernel[1]
    table = np.zeros(CLASSES, _CLASS)
    for i, (h, w) in enumerate(walks):
        count = conv.images * h.count * w.count
        walk = h.first, w.first, h.taps, w.taps, h.offset, w.offset, h.tap * row + w.tap
        table[i] = (ceil_div(count, tile.rows), count, h.count, w.count, *walk)
    h, w = walks[0]
    tiles_n, count = ceil_div(columns, tile.columns), max(1, sum(h.taps * w.taps > 0 for h, w in walks))
    return argument(
        _PROBLEM,
        tiles=int(table["tiles"].sum()) * tiles_n * max(parts, tile.parts),
        share=share,
        group=group,
        tiles_n=tiles_n,
        columns=columns,
        depth=depth_of(conv, backward),
        source_h=h.source,
        source_w=w.source,
        step_h=h.step,
        step_w=w.step,
        delta_h=h.delta,
        delta_w=w.delta,
        tap_step_h=h.tap_step * row,
        tap_step_w=w.tap_step,
        added=added,
        stage_bytes=stage_bytes,
        group_columns=group_columns_of(conv, backward),
        count=count,
        cycles=int(table["tiles"][:count].min()) * tiles_n // group,
        classes=table,
    )
