"""Which kernel a convolution runs on, when a test, a benchmark or a tuner wants to say so itself.

Left alone, each pass takes the first family that applies; which one depends on the sizes, the storage type and the
device, never on alignment: arrays whose address or pitch a family cannot take are copied first. So the order of every
sum, and with it every bit, is the same wherever an array happens to lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from minidl import checks
from minidl.cuda.convolution.conv2d_plan import Convolution
from minidl.cuda.device import unprepared

TEXTBOOK = ("direct", "tiled")
FAMILIES = ("generic", "grouped", "hopper", "small", "stem", "thin", *TEXTBOOK)

_forced: ContextVar[str | None] = ContextVar("minidl_conv2d_family", default=None)
forced_family = _forced.get


class Question(NamedTuple):
    """One pass of one convolution, which some kernel must do.

    Attributes:
        which: forward, backward_data or backward_weight.
        conv: its sizes, as the operation was asked for them.
        code: the macro DTYPE of its arrays.
        tf32: TF32 products that stand for one of float32: 1, 3, or 0 where it is exact.
    """

    which: str
    conv: Convolution
    code: int
    tf32: int


class Choice(NamedTuple):
    """A kernel that can answer a question.

    Attributes:
        family: one of `FAMILIES`.
        tile: its name within the family; empty: the one that the family's model of time says.
        split: how the work is cut: tiles of a block (hopper, forward and data gradient), or partial sums, blocks of a
            cluster, and if it is not one the tiles that share these (hopper, weight gradient).
    """

    family: str
    tile: str = ""
    split: tuple[int, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.family, self.tile, "/".join(map(str, self.split))]).rstrip()


_kernel: ContextVar[Choice | None] = ContextVar("minidl_conv2d_kernel", default=None)
forced_kernel = _kernel.get


@contextmanager
def kernel(choice: Choice) -> Iterator[None]:
    """Inside, every convolution that can be done so runs on just this kernel; others run as they would outside."""
    token = _kernel.set(choice)
    try:
        with unprepared():
            yield
    finally:
        _kernel.reset(token)


def choose_family(
    who: str,
    fits: Mapping[str, bool],
    unwanted: tuple[str, ...] = (),
    preferred: str | None = None,
    forced: str | None = None,
) -> str:
    """The forced family; else the preferred one, if it fits; else the first that fits and is wanted.

    Args:
        who: the operation, for the error.
        fits: whether each family can do it, the fastest first.
        unwanted: those that can but would be slower; forced, they are taken all the same.
        preferred: by a tuner.
        forced: `forced_family`.

    Raises:
        ValueError: when the forced family cannot do it.
    """
    if forced is None or forced in TEXTBOOK:
        if preferred is not None and fits.get(preferred):
            return preferred
        return next(family for family, fit in fits.items() if fit and family not in unwanted)
    if not fits.get(forced):
        raise checks.bad_value(who, "family", "one that can do this convolution on this device", forced)
    return forced


def textbook() -> str | None:
    """The textbook's kernel that a forward pass must take, if any."""
    name = forced_family()
    return name if name in TEXTBOOK else None


@contextmanager
def family(name: str) -> Iterator[None]:
    """Inside, every convolution runs on kernels of this family.

    Args:
        name: "generic" (fits everything), "grouped" (groups of few channels), "hopper" (wgmma and TMA, sm_90),
            "small" (fully connected, few rows and channels), "stem" (few input channels) or "thin" (1x1 between many
            channels and few); "direct" and "tiled" are the textbook's kernels of a forward pass in float32, baselines
            that leave other passes alone. A convolution that the family cannot do raises ValueError.
    """
    if name not in FAMILIES:
        raise checks.bad_value("family", "name", " or ".join(FAMILIES), name)
    token = _forced.set(name)
    try:
        with unprepared():
            yield
    finally:
        _forced.reset(token)
