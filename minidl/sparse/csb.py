"""CSBMatrix: a sparse matrix whose products, transposed products and gradient all run from one copy."""

from __future__ import annotations

import importlib
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.precision import bfloat16, float16, float32
from minidl.shapes import Pair
from minidl.sparse.pattern import CSBPattern, Occupancy
from minidl.sparse.profile import ProductProfile, profile_product

_STORAGE = (float32, bfloat16, float16)
GPU_SIDE = 64


class CSBMatrix:
    """An (M, K) matrix in Compressed Sparse Blocks: an immutable `CSBPattern` and mutable values.

        A = CSBMatrix.from_dense(weight)          # or from_coo, from_scipy (SciPy's and CuPy's CSR, CSC, COO)
        A @ X,  A.T @ X                           # features first: X is (features, samples)
        X @ A.T,  X @ A                           # features last: X is (samples, features)
        A.sampled(dY, X)                          # (dY @ X.T) at the pattern only

    ``A.T`` shares everything with ``A``: nothing is transposed or sorted for it. ``X`` is row-major with any row
    pitch, in the dtype of the values, on their device; a column-major one is read as the other orientation. Sums are
    taken in float32 in a fixed order, so results are the same bits each time, with any number of threads, and in
    float32 in both orientations. Elements that are not stored are not multiplied: an infinity or NaN in ``X`` reaches
    only outputs that have an element for it, and zeros that *are* stored count as elements. (On a GPU that holds for
    float32 without ``split``; tensor cores multiply zeros, too.)

    Args:
        pattern: where the elements are.
        data: (nnz,) values in the pattern's order, float32, bfloat16 or float16, NumPy or CuPy; kept by reference.
        transposed: the matrix is the transpose of what pattern and data say.

    Attributes named as in scipy.sparse: ``shape``, ``dtype``, ``nnz``, ``data``, ``indptr``, ``indices``,
    ``blocksize``, ``T``, ``nbytes``, ``format``, ``ndim``.
    """

    format = "csb"
    ndim = 2
    __array_ufunc__ = None  # so that `X @ A` of a NumPy or CuPy array comes here
    __array_priority__ = 1000.0

    def __init__(self, pattern: CSBPattern, data: Any, *, transposed: bool = False):
        remedy = "CSBMatrix.from_dense, from_coo and from_scipy make one"
        self.pattern = checks.instance("CSBMatrix", "pattern", pattern, CSBPattern, "a CSBPattern", remedy)
        self._transposed = bool(transposed)
        self._ops = _table("data", data)
        _storage("data", data)
        if data.shape != (pattern.nnz,):
            raise checks.bad_shape("CSBMatrix", "data", f"({pattern.nnz},), a value per element", data.shape)
        self._data = data

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(CSBMatrix, transposed=self._transposed), (self.pattern, self._data)

    # -- making one -------------------------------------------------------------------------------------------------

    @classmethod
    def from_dense(cls, dense: Any, blocksize: int | Pair | None = None, *, mask: Any = None) -> CSBMatrix:
        """The nonzeros of a dense (M, K) array, NaN included; with ``mask``, its true elements instead, zeros and all.

        Args:
            blocksize: side of a block, a power of two up to 256, or a pair of it, as the attribute is; None chooses, on
                a GPU 64.
            mask: (M, K) booleans.

        Raises:
            ValueError, TypeError: another rank, dtype, block side or mask.
        """
        ops = _table("dense", dense)
        _storage("dense", dense)
        if dense.ndim != 2:
            raise checks.bad_shape("CSBMatrix", "dense", "(M, K)", dense.shape)
        host = ops.to_host(dense)
        kept = host != 0 if mask is None else _mask(mask, host.shape)
        row, column = np.nonzero(kept)
        pattern, position = CSBPattern.from_coo(row, column, host.shape, _blocksize(ops, blocksize))
        data = np.empty(pattern.nnz, host.dtype)
        data[position] = host[row, column]
        return cls(pattern, ops.from_host(data))

    @classmethod
    def from_coo(
        cls, data: Any, coordinates: tuple[Any, Any], shape: Pair, blocksize: int | Pair | None = None
    ) -> CSBMatrix:
        """From values and their (rows, columns), in any order. Values at one place are summed; zeros are kept.

        Raises:
            ValueError: lengths that differ, indices out of range, a block side that is no power of two up to 256.
            TypeError: values that are not float32, bfloat16 or float16, indices that are no integers.
        """
        ops = _table("data", data)
        _storage("data", data)
        if len(coordinates) != 2:
            raise checks.bad_value("CSBMatrix", "coordinates", "(rows, columns)", f"{len(coordinates)} arrays")
        row, column = (on_host(part) for part in coordinates)
        pattern, position = CSBPattern.from_coo(row, column, shape, _blocksize(ops, blocksize))
        host = ops.to_host(data)
        if host.shape != position.shape:
            raise checks.bad_shape("CSBMatrix", "data", f"{position.shape} like its coordinates", host.shape)
        values = host
        if pattern.nnz == position.size:
            values = np.empty(pattern.nnz, host.dtype)
            values[position] = host
        else:  # summed in float64, in the order given, and rounded once
            values = np.bincount(position, host.astype(np.float64), minlength=pattern.nnz).astype(host.dtype)
        return cls(pattern, ops.from_host(values))

    @classmethod
    def from_scipy(cls, matrix: Any, blocksize: int | Pair | None = None, *, dtype: Any = None) -> CSBMatrix:
        """From any sparse matrix or array of SciPy or CuPy, on its device; ``dtype`` converts the values.

        Raises:
            TypeError: no sparse matrix; values that are not float32, bfloat16 or float16, without ``dtype``.
        """
        if not hasattr(matrix, "tocoo"):
            raise checks.bad_dtype("CSBMatrix", "matrix", "a sparse matrix of SciPy or CuPy", checks.describe(matrix))
        coo = matrix.tocoo()
        data = coo.data if dtype is None else coo.data.astype(dtype)
        return cls.from_coo(data, (coo.row, coo.col), coo.shape, blocksize)

    # -- what it is -------------------------------------------------------------------------------------------------

    @property
    def shape(self) -> Pair:
        return self.pattern.shape[::-1] if self._transposed else self.pattern.shape

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self._data.dtype)

    @property
    def nnz(self) -> int:
        """Stored elements, zeros among them included."""
        return self.pattern.nnz

    @property
    def blocksize(self) -> Pair:
        return self.pattern.side, self.pattern.side

    @property
    def indptr(self) -> Any:
        """Where each block begins (see `CSBPattern`); of the untransposed matrix."""
        return self.pattern.on(self._ops)[0]

    @property
    def indices(self) -> Any:
        """Packed row and column in the block of each element; of the untransposed matrix."""
        return self.pattern.on(self._ops)[1]

    @property
    def data(self) -> Any:
        """The values, (nnz,), in the order of ``indices``. Write into them freely."""
        return self._data

    @property
    def T(self) -> CSBMatrix:
        """The transpose, sharing pattern and values."""
        return CSBMatrix(self.pattern, self._data, transposed=not self._transposed)

    def transpose(self) -> CSBMatrix:
        """``A.T``."""
        return self.T

    @property
    def nbytes(self) -> int:
        """Bytes of pattern and values."""
        return self.pattern.nbytes + self._data.nbytes

    def occupancy(self) -> Occupancy:
        """How the elements spread over blocks, rows and columns of the untransposed matrix."""
        return self.pattern.occupancy()

    def picture(self, width: int = 64) -> str:
        """The untransposed pattern as text, see `CSBPattern.picture`."""
        return self.pattern.picture(width)

    def __repr__(self) -> str:
        m, k = self.shape
        share = 100 * self.nnz / max(m * k, 1)
        text = f"{m}x{k} {self.dtype}, {self.nnz} elements ({share:.3g} %), blocks of {self.pattern.side}"
        return f"<CSBMatrix {text}, {self._ops.name}>"

    # -- as something else ------------------------------------------------------------------------------------------

    @property
    def transposed(self) -> bool:
        """Whether this is the transpose of what `pattern` and `data` say."""
        return self._transposed

    def with_data(self, data: Any) -> CSBMatrix:
        """Other values, (nnz,), on the same pattern."""
        return CSBMatrix(self.pattern, data, transposed=self._transposed)

    def copy(self) -> CSBMatrix:
        """A matrix with values of its own; the pattern is shared."""
        return self.with_data(self._ops.cast(self._data, self.dtype))

    def astype(self, dtype: Any) -> CSBMatrix:
        """The same in another storage dtype, values rounded to nearest even."""
        if np.dtype(dtype) not in _STORAGE:
            raise checks.bad_dtype("CSBMatrix", "dtype", "float32, bfloat16 or float16", np.dtype(dtype))
        return self.with_data(self._ops.cast(self._data, np.dtype(dtype)))

    def to(self, device: str) -> CSBMatrix:
        """A copy on ``"cpu"`` or ``"cuda"``."""
        ops = backend.open_device(device)
        return self.with_data(ops.from_host(self._ops.to_host(self._data)))

    def toarray(self) -> Any:
        """The dense (M, K) array."""
        dense = self._ops.csb_expand(self.indptr, self.indices, self._data, self.pattern.shape, self.pattern.side)
        return dense.T if self._transposed else dense

    def tocoo(self) -> Any:
        """A COO matrix of SciPy, or of CuPy on a GPU; float32 whatever the dtype here, as both lack bfloat16."""
        return self._sparse().coo_matrix(self._parts(), shape=self.shape)

    def tocsr(self) -> Any:
        """A CSR matrix of SciPy or CuPy, see `tocoo`."""
        return self.tocoo().tocsr()

    def tocsc(self) -> Any:
        """A CSC matrix of SciPy or CuPy, see `tocoo`."""
        return self.tocoo().tocsc()

    def _parts(self) -> tuple[Any, tuple[Any, Any]]:
        row, column = (self._ops.from_host(part) for part in self.pattern.coordinates())
        data = self._ops.cast(self._data, float32)
        return data, (column, row) if self._transposed else (row, column)

    def _sparse(self) -> ModuleType:
        package = "scipy.sparse" if self._ops.name == "cpu" else "cupyx.scipy.sparse"
        try:
            return importlib.import_module(package)
        except ImportError as error:
            raise checks.missing_extra(package, "data", error) from error

    # -- products ---------------------------------------------------------------------------------------------------

    def __matmul__(self, x: Any) -> Any:
        return self.matmul(x)

    def __rmatmul__(self, x: Any) -> Any:
        return self.T.matmul(x, features_last=True)

    def matmul(
        self, x: Any, *, features_last: bool = False, bias: Any = None, relu: bool = False, split: str | None = None
    ) -> Any:
        """``A @ x`` with x (K, N), giving (M, N); with ``features_last`` ``x @ A.T`` with x (N, K), giving (N, M).

        Args:
            x: as above, or a vector (K,); the dtype and device of the values.
            bias: (M,) float32, added to each output feature.
            relu: the result is max(·, 0).
            split: on a Hopper GPU float32 products may be taken as three products of narrower numbers where `route`
                says so: faster for all but the sparsest matrices, and structural zeros are multiplied. ``"tf32x3"``
                is off by some 2^-20 of ``|A||x|`` and what tensor cores lose in sums, ``"bf16x3"``, twice as fast, by
                up to 2^-14.

        Raises:
            ValueError: shapes that do not fit; ``split`` of 16-bit arrays or on the CPU.
            TypeError: another dtype, device or kind of array.
        """
        x = self._operand("x", x)
        if x.ndim == 1:
            self._require("x", x, (self.shape[1],))
            return self.matmul(x[:, None], bias=bias, relu=relu, split=split).reshape(-1)
        if x.ndim != 2 or x.shape[1 if features_last else 0] != self.shape[1]:
            wanted = f"(N, {self.shape[1]})" if features_last else f"({self.shape[1]}, N)"
            raise checks.bad_shape("CSBMatrix", "x", wanted, x.shape, f"the matrix is {self.shape}")
        if bias is not None:
            if _table("bias", bias) is not self._ops or bias.dtype != float32:
                expected = f"a float32 {self._ops.name} array"
                raise checks.bad_dtype("CSBMatrix", "bias", expected, checks.describe(bias))
            self._require("bias", bias, (self.shape[0],))
        if x.flags.f_contiguous and not x.flags.c_contiguous:
            return self._product(x.T, not features_last, bias, relu, split).T
        return self._product(x, features_last, bias, relu, split)

    def _product(self, x: Any, features_last: bool, bias: Any, relu: bool, split: str | None) -> Any:
        return self._ops.csb_matmul(
            self.indptr, self.indices, self._data, x, self.pattern.shape, self.pattern.side,
            transposed=self._transposed, features_last=features_last, bias=bias, relu=relu, split=split,
            order=self.pattern.order(self._ops, self._transposed, features_last),
        )  # fmt: skip

    def route(self, samples: int, *, features_last: bool = False, split: str | None = None) -> str:
        """Which kernels `matmul` of so many samples runs on: "cpu", or one of `csb_routes.ROUTES`."""
        if self._ops.name == "cpu":
            return "cpu"
        from minidl.cuda.device import current_device
        from minidl.cuda.sparse.csb_routes import Product, choose_route

        where = self.pattern.shape, self.pattern.side, self.nnz
        product = Product(*where, self.dtype, samples, self._transposed, features_last, split)
        return choose_route(product, current_device())

    def profile(self, x: Any, *, features_last: bool = False, split: str | None = None) -> ProductProfile:
        """Time `matmul` and its parts, loads, index decoding and multiply-adds, and say what is uneven; to be printed.

        See `minidl.sparse.profile`.
        """
        return profile_product(self, self._operand("x", x), features_last=features_last, split=split)

    def sampled(
        self, dy: Any, x: Any, *, features_last: bool = False, out: Any = None, accumulate: bool = False,
        split: str | None = None,
    ) -> Any:  # fmt: skip
        """``dy @ x.T`` at the pattern: the gradient of ``data`` when ``dy`` is that of ``A @ x``. No dense product.

        Args:
            dy: (M, N), or (N, M) with ``features_last``; or a vector, as ``x`` then is.
            x: (K, N), or (N, K).
            out: (nnz,) float32 to write to, or with ``accumulate`` to add to; None allocates.
            split: as `matmul`; ``"tf32x3"`` changes nothing here.

        Returns:
            (nnz,) float32, in the order of ``data``.

        Raises:
            ValueError, TypeError: as `matmul`.
        """
        dy, x = self._operand("dy", dy), self._operand("x", x)
        if dy.ndim == x.ndim == 1:
            dy, x, features_last = dy[None], x[None], True
        samples = x.shape[0 if features_last else 1] if x.ndim == 2 else -1
        for name, array, features in (("dy", dy, self.shape[0]), ("x", x, self.shape[1])):
            self._require(name, array, (samples, features) if features_last else (features, samples))
        if out is None:
            if accumulate:
                raise checks.bad_value("CSBMatrix", "out", "given with accumulate=True", out)
            out = self._ops.empty((self.nnz,), float32)
        elif _table("out", out) is not self._ops or out.dtype != float32 or not out.flags.c_contiguous:
            raise checks.bad_dtype("CSBMatrix", "out", f"a dense float32 {self._ops.name} array", checks.describe(out))
        self._require("out", out, (self.nnz,))
        left, right = (x, dy) if self._transposed else (dy, x)
        self._ops.csb_sampled(
            self.indptr, self.indices, left, right, self.pattern.shape, self.pattern.side,
            features_last=features_last, out=out, accumulate=accumulate, split=split,
        )  # fmt: skip
        return out

    def _operand(self, name: str, array: Any) -> Any:
        if _table(name, array) is not self._ops:
            remedy = f"move the matrix: .to({'cuda' if self._ops.name == 'cpu' else 'cpu'!r})"
            raise checks.bad_dtype("CSBMatrix", name, f"a {self._ops.name} array", checks.describe(array), remedy)
        if array.dtype != self.dtype:
            remedy = f"convert it with {name}.astype({str(self.dtype)!r})"
            raise checks.bad_dtype("CSBMatrix", name, f"{self.dtype} like the values", array.dtype, remedy)
        return array

    def _require(self, name: str, array: Any, shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            raise checks.bad_shape("CSBMatrix", name, str(shape), array.shape, f"the matrix is {self.shape}")


def _blocksize(ops: ModuleType, blocksize: int | Pair | None) -> int | Pair | None:
    return GPU_SIDE if blocksize is None and ops.name == "cuda" else blocksize


def _table(name: str, array: Any) -> ModuleType:
    ops = backend.ops_of(array)
    if ops is None:
        raise checks.bad_dtype("CSBMatrix", name, "a NumPy or CuPy array", checks.describe(array))
    return ops


def _storage(name: str, array: Any) -> None:
    if array.dtype not in _STORAGE:
        remedy = "convert it to float32" if array.dtype.kind in "fiu" else None
        raise checks.bad_dtype("CSBMatrix", name, "float32, bfloat16 or float16", array.dtype, remedy)


def on_host(array: Any) -> Any:
    """``array`` itself, or a copy of one that lies on a GPU."""
    ops = backend.ops_of(array)
    return array if ops is None or ops.name == "cpu" else ops.to_host(array)


def _mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    host = np.asarray(on_host(mask))
    if host.dtype != np.bool_:
        raise checks.bad_dtype("CSBMatrix", "mask", "booleans", host.dtype, "pass weight != 0, for instance")
    if host.shape != shape:
        raise checks.bad_shape("CSBMatrix", "mask", f"{shape} like the dense array", host.shape)
    return host
