"""Where the elements of a matrix in Compressed Sparse Blocks are: an immutable pattern that values are laid over."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Any

import numpy as np

from minidl import checks
from minidl.shapes import Pair, ceil_div

MOST_SIDE = 256
SIDES = (64, 128, 256)  # to choose from: smaller blocks waste pointers, larger ones do not fit eight bits
FULL_ROW = 12  # elements that a row of a block should hold, so that walking blocks costs little beside them
_SHADES = " .:-=+*#%@"


@dataclass(frozen=True)
class Occupancy:
    """How the elements of a pattern spread.

    Attributes:
        density: elements over size of the matrix; 0 of an empty one.
        blocks, empty_blocks: number of blocks, and of those without an element.
        block_min, block_mean, block_max: elements of a block.
        empty_rows, empty_columns: rows and columns of the matrix without an element.
        row_variation: standard deviation over mean of the elements of a row; 0 where all rows are alike.
        index_bits: bits of indices and pointers for each element.
    """

    density: float
    blocks: int
    empty_blocks: int
    block_min: int
    block_mean: float
    block_max: int
    empty_rows: int
    empty_columns: int
    row_variation: float
    index_bits: float


def choose_side(shape: Pair, nnz: int) -> int:
    """The smallest of 64, 128 and 256 at which a row of a block holds twelve elements on average, else 256.

    Never more than twice what the longer side of the matrix needs.
    """
    density = nnz / max(shape[0] * shape[1], 1)
    side = next((s for s in SIDES if s * density >= FULL_ROW), MOST_SIDE)
    while side > SIDES[0] and side // 2 >= max(shape):
        side //= 2
    return side


class CSBPattern:
    """Rows and columns of the elements of an (M, K) matrix, in Compressed Sparse Blocks.

    A. Buluç et al., "Parallel sparse matrix-vector and matrix-transpose-vector multiplication using compressed sparse
    blocks", SPAA 2009. The matrix is cut into square blocks; elements lie block by block in row-major order of blocks
    and, within a block, of elements.

    Attributes:
        shape: (M, K).
        side: rows and columns of a block, a power of two up to 256.
        indptr: (block rows * block columns + 1,) int32, where each block begins; the two-dimensional table of the
            format, flat. As every block has its place, a column of blocks is a strided walk: that is all the transposed
            product needs.
        indices: (nnz,) uint16, row in block * 256 + column in block.

    Both arrays are on the host and read-only; `on` gives them on a device. Equal patterns compare equal.
    """

    def __init__(self, indptr: Any, indices: Any, shape: Pair, side: int):
        self.shape = _shape(shape)
        self.side = side_of(side)
        self.indptr = _indices("indptr", indptr, 2**31).astype(np.int32)
        self.indices = _indices("indices", indices, 2**16).astype(np.uint16)
        self._check()
        for array in (self.indptr, self.indices):
            array.setflags(write=False)
        self._on: dict[tuple[Any, ...], Any] = {}

    def _check(self) -> None:
        """Refuse arrays that are no such pattern: kernels trust them."""
        blocks = self.grid[0] * self.grid[1]
        if self.indptr.shape != (blocks + 1,):
            raise checks.bad_shape("CSBPattern", "indptr", f"({blocks + 1},), a pointer per block and the end",
                                   self.indptr.shape)  # fmt: skip
        ends = int(self.indptr[0]), int(self.indptr[-1])
        if ends != (0, self.indices.size) or (np.diff(self.indptr) < 0).any():
            raise checks.bad_value("CSBPattern", "indptr", f"rising from 0 to {self.indices.size}, the indices", ends)
        rows, columns = self.coordinates()
        in_block = (self.rows < self.side) & (self.columns < self.side)
        if not (in_block & (rows < self.shape[0]) & (columns < self.shape[1])).all():
            raise checks.bad_value("CSBPattern", "indices", f"within the blocks of {self.shape}", "one outside")
        same = np.repeat(np.arange(blocks), np.diff(self.indptr))
        if ((np.diff(self.indices.astype(np.int32)) <= 0) & (np.diff(same) == 0)).any():
            raise checks.bad_value("CSBPattern", "indices", "rising within each block, each once", "others")

    @classmethod
    def from_coo(cls, row: Any, column: Any, shape: Pair, side: int | None = None) -> tuple[CSBPattern, np.ndarray]:
        """The pattern of elements at (row, column), in any order, several at one place allowed.

        Args:
            row, column: (n,) integers.
            shape: (M, K).
            side: of a block; None chooses.

        Returns:
            The pattern, and for each of the n elements the position in it, (n,) int64.

        Raises:
            ValueError: arrays of different lengths, indices out of range, a side that is no power of two up to 256,
                2**31 elements or blocks and more.
            TypeError: indices that are no integers.
        """
        shape = _shape(shape)
        row, column = _indices("row", row, shape[0]), _indices("column", column, shape[1])
        if row.shape != column.shape:
            raise checks.bad_shape("CSBPattern", "column", f"{row.shape} like row", column.shape)
        side = choose_side(shape, row.size) if side is None else side_of(side)
        grid = ceil_div(shape[0], side), ceil_div(shape[1], side)
        if max(row.size, grid[0] * grid[1]) >= 2**31:
            raise checks.bad_value("CSBPattern", "elements and blocks", "fewer than 2**31", (row.size, grid))
        block = row // side * grid[1] + column // side
        key = block * side**2 + row % side * side + column % side
        key, position = np.unique(key, return_inverse=True)
        indptr = np.searchsorted(key, np.arange(grid[0] * grid[1] + 1) * side**2)
        inside = key % side**2
        indices = inside // side * 256 + inside % side
        return cls(indptr, indices, shape, side), position.reshape(-1)

    @property
    def nnz(self) -> int:
        """Elements, stored zeros included."""
        return self.indices.size

    @property
    def grid(self) -> Pair:
        """Block rows and block columns."""
        return ceil_div(self.shape[0], self.side), ceil_div(self.shape[1], self.side)

    @property
    def rows(self) -> np.ndarray:
        """(nnz,) uint8: the row of each element within its block."""
        return (self.indices >> 8).astype(np.uint8)

    @property
    def columns(self) -> np.ndarray:
        """(nnz,) uint8: the column of each element within its block."""
        return (self.indices & 255).astype(np.uint8)

    @property
    def nbytes(self) -> int:
        """Bytes of the two arrays."""
        return self.indptr.nbytes + self.indices.nbytes

    def coordinates(self) -> tuple[np.ndarray, np.ndarray]:
        """Row and column of each element in the matrix, (nnz,) int64."""
        across = max(self.grid[1], 1)
        block = np.repeat(np.arange(self.indptr.size - 1), np.diff(self.indptr))
        return block // across * self.side + self.rows, block % across * self.side + self.columns

    def on(self, ops: ModuleType) -> tuple[Any, Any]:
        """``indptr`` and ``indices`` as arrays of an operation table; copied there once."""
        if ops.name == "cpu":
            return self.indptr, self.indices
        key = ops.name, ops.Array  # in a dry run the table's arrays are of another class, and empty
        if key not in self._on:
            self._on[key] = ops.from_host(self.indptr), ops.from_host(self.indices)
        return self._on[key]

    def order(
        self, ops: ModuleType, transposed: bool, features_last: bool, taps: int = 1, features: int | None = None
    ) -> Any | None:
        """How a GPU shares output features among warps, so that all have as much to do: `csb_matmul`'s ``order``.

        Found when it is first asked for and kept, 4 bytes a feature; None where the table's products need none.

        Args:
            transposed, features_last: of which product.
            taps: of a convolution's kernel, each with as many columns; output features of its transposed product are
                columns of a tap,
            features: so many of them; None takes all.
        """
        if ops.name == "cpu":
            return None
        key = ops.name, ops.Array, transposed, features_last, taps, features
        if key not in self._on:
            from minidl.cuda.sparse.csb_order import deal, line

            row, column = self.coordinates()
            room = self.shape[1] // taps
            which, count = (column % max(room, 1), features or room) if transposed else (row, self.shape[0])
            self._on[key] = ops.from_host(deal(np.bincount(which, minlength=count), line(features_last)))
        return self._on[key]

    @cached_property
    def fingerprint(self) -> int:
        """A number (CRC-32) that differs, all but surely, between patterns that differ."""
        facts = np.array([*self.shape, self.side], np.int64)
        return zlib.crc32(self.indices, zlib.crc32(self.indptr, zlib.crc32(facts)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CSBPattern):
            return NotImplemented
        same = self.shape == other.shape and self.side == other.side
        return same and np.array_equal(self.indptr, other.indptr) and np.array_equal(self.indices, other.indices)

    def __hash__(self) -> int:
        return self.fingerprint

    def __repr__(self) -> str:
        m, k = self.shape
        share = 100 * self.nnz / max(m * k, 1)
        text = f"{m}x{k}, {self.nnz} elements ({share:.3g} %), {self.grid[0]}x{self.grid[1]} blocks of {self.side}"
        return f"<CSBPattern {text}>"

    def occupancy(self) -> Occupancy:
        """How the elements spread over blocks, rows and columns."""
        counts = np.diff(self.indptr)
        row, column = self.coordinates()
        per_row, per_column = np.bincount(row, minlength=self.shape[0]), np.bincount(column, minlength=self.shape[1])
        mean = per_row.mean() if per_row.size else 0.0
        return Occupancy(
            density=self.nnz / max(self.shape[0] * self.shape[1], 1),
            blocks=counts.size,
            empty_blocks=int((counts == 0).sum()),
            block_min=int(counts.min(initial=MOST_SIDE**2)) if counts.size else 0,
            block_mean=float(counts.mean()) if counts.size else 0.0,
            block_max=int(counts.max(initial=0)),
            empty_rows=int((per_row == 0).sum()),
            empty_columns=int((per_column == 0).sum()),
            row_variation=float(per_row.std() / mean) if mean else 0.0,
            index_bits=8 * self.nbytes / self.nnz if self.nnz else 0.0,
        )

    def picture(self, width: int = 64) -> str:
        """The pattern as text: each character shades the density of its part of the matrix, ``@`` the fullest.

        Args:
            width: characters per line, at most; as many columns of the matrix share one as that needs.
        """
        width = checks.at_least("picture", "width", width, 1)
        if 0 in self.shape:
            return ""
        across = ceil_div(self.shape[1], width)
        down = 2 * across if across > 1 else 1  # a character is about twice as tall as wide
        lines, marks = ceil_div(self.shape[0], down), ceil_div(self.shape[1], across)
        row, column = self.coordinates()
        count = np.bincount(row // down * marks + column // across, minlength=lines * marks).reshape(lines, marks)
        shade = np.ceil(count / max(count.max(), 1) * (len(_SHADES) - 1)).astype(int)
        return "\n".join("".join(_SHADES[s] for s in line) for line in shade)


def _shape(shape: Any) -> Pair:
    if not hasattr(shape, "__len__") or len(shape) != 2:
        raise checks.bad_value("CSBPattern", "shape", "(rows, columns)", shape)
    rows, columns = (checks.at_least("CSBPattern", "shape", size, 0) for size in shape)
    return rows, columns


def side_of(side: Any) -> int:
    """The side of a block, given as such, or as `CSBMatrix.blocksize` is: a pair of it, as in SciPy.

    Raises:
        ValueError: for what is no power of two up to 256, or two of them.
    """
    if isinstance(side, tuple) and len(side) == 2 and side[0] == side[1]:
        side = side[0]
    size = checks.at_least("CSBPattern", "block side", side, 1)
    if size > MOST_SIDE or size & (size - 1):
        raise checks.bad_value("CSBPattern", "block side", f"a power of two up to {MOST_SIDE}", side)
    return size


def _indices(name: str, values: Any, size: int) -> np.ndarray:
    """``values`` as (n,) int64 in [0, size)."""
    try:
        array = np.asarray(values)
    except ValueError as error:  # ragged lists
        raise checks.bad_value("CSBPattern", name, "a vector of integers", "ragged lists") from error
    if array.size == 0:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise checks.bad_dtype("CSBPattern", name, "a vector of integers", array.dtype)
    if array.ndim != 1:
        raise checks.bad_shape("CSBPattern", name, "(n,)", array.shape)
    if array.size and (int(array.min()) < 0 or int(array.max()) >= size):
        worst = int(array.min()) if array.min() < 0 else int(array.max())
        raise checks.bad_value("CSBPattern", name, f"in [0, {size})", worst)
    return array.astype(np.int64)
