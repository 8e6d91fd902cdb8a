"""Compressed Sparse Blocks in plain loops and float64."""

from __future__ import annotations

import numpy as np


def from_mask(mask, side):
    """(indptr, indices) of the true elements of a boolean matrix, block by block, element by element."""
    indptr, indices = [0], []
    for top in range(0, mask.shape[0], side):
        for left in range(0, mask.shape[1], side):
            for row, column in np.argwhere(mask[top : top + side, left : left + side]):
                indices.append(row * 256 + column)
            indptr.append(len(indices))
    return np.array(indptr, np.int32), np.array(indices, np.uint16)


def expand(indptr, indices, values, shape, side):
    """The dense float64 matrix."""
    dense = np.zeros(shape)
    across = -(-shape[1] // side)
    for block in range(len(indptr) - 1):
        for i in range(indptr[block], indptr[block + 1]):
            row, column = divmod(int(indices[i]), 256)
            dense[block // across * side + row, block % across * side + column] = values[i]
    return dense


def matmul(dense, x, *, transposed=False, features_last=False, bias=None, relu=False):
    """Features first or last, in float64."""
    a = np.asarray(dense, np.float64).T if transposed else np.asarray(dense, np.float64)
    x = np.asarray(x, np.float64)
    y = a @ (x.T if features_last else x)
    if bias is not None:
        y = y + np.asarray(bias, np.float64)[:, None]
    if relu:
        y = np.maximum(y, 0)
    return y.T if features_last else y


def sampled(mask, dy, x, side, *, features_last=False):
    """(nnz,) the elements of dy @ x.T at the true elements of ``mask``, in block order."""
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    full = dy.T @ x if features_last else dy @ x.T
    found = []
    for top in range(0, mask.shape[0], side):
        for left in range(0, mask.shape[1], side):
            part = np.s_[top : top + side, left : left + side]
            found.append(full[part][mask[part]])
    return np.concatenate(found) if found else np.zeros(0)
