"""Which kernels a product with a matrix in Compressed Sparse Blocks runs on, unless a test or benchmark says so itself.

A route depends on sizes, density, storage type and device, never on alignment, so the bits of a product do not change
with where an array happens to lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from minidl import checks
from minidl.cuda.device import DeviceRecord
from minidl.cuda.sparse import csb_rows, csb_skinny, csb_tensor
from minidl.shapes import Pair

ROUTES = ("split", "rows", "skinny", "dense", "generic")

# Density and samples from which three narrower products of the expanded matrix beat float32 ones of its elements.
SPLIT_FROM, SPLIT_SAMPLES = {"tf32x3": 0.07, "bf16x3": 0.03}, 128

_forced: ContextVar[str | None] = ContextVar("minidl_csb_route", default=None)


class Product(NamedTuple):
    """What a route depends on: ``A x`` of `minidl.cuda.sparse.csb.csb_matmul`."""

    shape: Pair
    side: int
    nnz: int
    dtype: Any
    samples: int
    transposed: bool
    features_last: bool
    split: str | None
    bias: bool = False

    @property
    def features(self) -> int:
        """Of the output."""
        return self.shape[1] if self.transposed else self.shape[0]

    @property
    def depth(self) -> int:
        """Summed features."""
        return self.shape[0] if self.transposed else self.shape[1]

    @property
    def density(self) -> float:
        return self.nnz / max(self.shape[0] * self.shape[1], 1)

    @property
    def _as_filter(self) -> bool:
        """Whether features first x can be the filter of a convolution: its biases are not the product's."""
        return not self.bias and 0 < self.samples * max(self.features, self.depth) < 2**31

    def fits(self, device: DeviceRecord) -> dict[str, bool]:
        """Whether each route can do it, the fastest first.

        ``split`` is a permission: it opens the split products to matrices that are not too sparse for them.
        """
        where = self.side, self.dtype, device
        return {
            "split": self.split is not None and csb_tensor.applies(*where),
            "rows": csb_rows.applies(*where),
            "skinny": self.features_last and csb_skinny.applies(*where, self.samples, self.depth),
            "dense": self.dtype.itemsize == 2 and (self.features_last or self._as_filter),
            "generic": True,
        }


def choose_route(product: Product, device: DeviceRecord) -> str:
    """The forced route; else the first that fits, split products from a density and a number of samples on.

    Raises:
        ValueError: when the forced route cannot do it.
    """
    fits = product.fits(device)
    name = _forced.get()
    if name is None:
        worth = product.density >= SPLIT_FROM.get(product.split, 0) and product.samples >= SPLIT_SAMPLES
        return next(r for r, fit in fits.items() if fit and (r != "split" or worth))
    if not fits[name]:
        raise checks.bad_value("csb_matmul", "route", "one that can do this product on this device", name)
    return name


def conv_routes(side: int, dtype: Any, tf32: int, device: DeviceRecord) -> list[str]:
    """The routes of a convolution, `minidl.cuda.sparse.csb_conv2d`, the fastest first."""
    dense = dtype.itemsize == 2 or tf32 > 0
    fits = {"dense": dense, "rows": csb_rows.applies(side, dtype, device), "generic": True}
    return [name for name, fit in fits.items() if fit]


def choose_conv_route(side: int, dtype: Any, tf32: int, density: float, device: DeviceRecord) -> str:
    """The forced route; else the fastest, three TF32 products of dense filters from a density on.

    Raises:
        ValueError: when the forced route cannot do it.
    """
    names, forced = conv_routes(side, dtype, tf32, device), _forced.get()
    if forced is None:
        sparse = tf32 == 3 and density < SPLIT_FROM["tf32x3"]
        return names[1] if sparse else names[0]
    if forced not in names:
        raise checks.bad_value("csb_conv2d", "route", "one that can do this convolution on this device", forced)
    return forced


@contextmanager
def route(name: str) -> Iterator[None]:
    """Inside, products run on these kernels.

    Args:
        name: "rows" (float32 on CUDA cores, sm_90), "split" (float32 as three narrower products, sm_90), "skinny" (few
            samples in 16-bit types), "dense" (16-bit types: expanded, then a dense convolution) or "generic". A product
            that the route cannot do raises ValueError.
    """
    if name not in ROUTES:
        raise checks.bad_value("route", "name", " or ".join(ROUTES), name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
