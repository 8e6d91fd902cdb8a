"""Which kernels a product with a matrix in Compressed Sparse Blocks runs on, and how a test or a benchmark says so itself.

A route depends on sizes, density, storage type and device, never on alignment, so the bits of a product do not change
with where an array happens to lie.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from minidl import checks
from minidl.cuda import csb_rows, csb_skinny, csb_tensor
from minidl.cuda.device import DeviceRecord
from minidl.shapes import Pair

__all__ = ["ROUTES", "Product", "choose_route", "route"]

ROUTES = ("rows", "split", "skinny", "dense", "generic")

# Density from which three TF32 products of the expanded matrix are faster than float32 ones of its elements.
SPLIT_FROM = 0.085

_forced: ContextVar[str | None] = ContextVar("minidl_csb_route", default=None)


class Product(NamedTuple):
    """What a route depends on: ``A x`` of `minidl.cuda.csb.csb_matmul`."""

    shape: Pair
    side: int
    nnz: int
    dtype: Any
    samples: int
    transposed: bool
    features_last: bool
    tf32x3: bool

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

    def fits(self, device: DeviceRecord) -> dict[str, bool]:
        """Whether each route can do it."""
        wide = self.dtype.itemsize == 4
        return {
            "rows": not self.tf32x3 and csb_rows.applies(self.side, self.dtype, device),
            "split": self.tf32x3 and csb_tensor.applies(self.side, self.dtype, device),
            "skinny": self.features_last and csb_skinny.applies(self.side, self.dtype, self.samples, self.depth),
            "dense": self.features_last and not wide,
            "generic": not self.tf32x3,
        }


def choose_route(product: Product, device: DeviceRecord) -> str:
    """The forced route; else the first that fits, rows before split where the matrix is sparse enough.

    Raises:
        ValueError: when the forced route cannot do it.
    """
    fits = product.fits(device)
    name = _forced.get()
    if name is None:
        return next(route for route in ROUTES if fits[route])
    if not fits[name]:
        raise checks.bad_value("csb_matmul", "route", "one that can do this product on this device", name)
    return name


@contextmanager
def route(name: str) -> Iterator[None]:
    """Inside, products run on these kernels.

    Args:
        name: "rows" (float32 on CUDA cores, sm_90), "split" (float32 as three TF32 products, sm_90), "skinny" (few
            samples in 16-bit types), "dense" (16-bit types: expanded, then a 1×1 convolution) or "generic". A product
            that the route cannot do raises ValueError.
    """
    if name not in ROUTES:
        raise checks.bad_value("route", "name", " or ".join(ROUTES), name)
    token = _forced.set(name)
    try:
        yield
    finally:
        _forced.reset(token)
