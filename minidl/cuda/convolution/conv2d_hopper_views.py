"""How the copy engine sees the arrays of conv2d_hopper.cu: its structure Maps."""

from __future__ import annotations

from minidl.cuda.convolution.conv2d_hopper_tiles import SLAB, HopperTile
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.convolution.conv2d_walk import (
    CLASSES,
    STAGE_ROW,
    Walk,
    columns_of,
    filter_view,
    is_flat,
    itemsize_of,
)
from minidl.cuda.hopper import BYTES, TF32, View, Views
from minidl.cuda.norm.signs import CHUNK, signs_pitch


def spread_out(walks: list[tuple[Walk, Walk]]) -> bool:
    """Whether the output pixels of a class lie apart."""
    return max(walks[0][0].spread, walks[0][1].spread) > 1


def views_of(
    conv: Convolution,
    code: int,
    backward: bool,
    walks: list[tuple[Walk, Walk]],
    pitches: tuple[int, ...],
    tile: HopperTile,
    fetched: int,
    signed: bool = False,
    written: int = 0,
) -> Views:
    """The structure Maps: filter, then source, output, addend and what a masked gradient reads of each class; unused
    places repeat the first. ``fetched``: rows of the source in a box; ``signed``: the last array read is of signs;
    ``written``: as of `plan`."""
    spread = spread_out(walks)
    walks = [*walks, *[walks[0]] * (CLASSES - len(walks) if spread else 0)]
    columns, itemsize = columns_of(conv, backward), itemsize_of(code)
    channels = STAGE_ROW // itemsize

    def source(h: Walk, w: Walk) -> View:
        depth, pixel = conv.out_channels if backward else conv.channels, pitches[0] * itemsize
        if is_flat(conv):
            # Of many pixels all blocks begin at once: what is fetched with a first stage, for the next, delays it
            # (512-256 at 28x28 pixels, 32 images: 16.1 us, so 15.5).
            sizes, few = (depth, conv.images * h.source * w.source), h.source * w.source == 1
            return View(code or TF32, sizes, (pixel,), (channels, fetched), neighbours=few)
        corners = tuple(zip(w.corners, h.corners, strict=True))
        apart = pixel, w.source * pixel, h.source * w.source * pixel
        sizes = depth, w.source, h.source, conv.images
        # A pixel's next chunk is read after all taps of this one; of strided walks over large images it has left the
        # cache by then, if it was fetched with this one.
        soon = h.taps * w.taps == 1 or max(h.step, w.step) == 1
        return View(code or TF32, sizes, apart, (channels, fetched), corners, (w.step, h.step), neighbours=soon)

    def pixels(kind: int, inner: int, pixel: int, box: int, h: Walk, w: Walk) -> View:
        height, width = (conv.height, conv.width) if backward else (conv.out_height, conv.out_width)
        if not spread:
            return View(kind, (inner, conv.images * height * width), (pixel,), (box, SLAB))
        apart = w.spread * pixel, h.spread * width * pixel, height * width * pixel
        offset = (h.start * width + w.start) * pixel
        sizes, none = (inner, w.count, h.count, conv.images), (0, 0)
        return View(kind, sizes, apart, (box, SLAB), (none, none), (1, 1), offset)

    def output(h: Walk, w: Walk, pitch: int) -> View:
        return pixels(code, columns, pitch * itemsize, channels, h, w)

    below = [[output(*pair, pitch) for pair in walks] for pitch in pitches[2:]]
    if signed:
        row, box = signs_pitch(columns), CHUNK if tile.own <= 8 * CHUNK else 2 * CHUNK
        below[-1] = [pixels(BYTES, row, row, box, *pair) for pair in walks]
    return Views(
        (filter_view(conv, code, backward, tile.columns), 0),
        *((source(*pair), 1) for pair in walks),
        *((output(*pair, written or columns), 2) for pair in walks),
        *((output(*pair, pitches[1]), 3) for pair in walks),
        *((view, 4 + i) for i, views in enumerate(below) for view in views),
    )
