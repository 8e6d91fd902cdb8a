"""Sparse weights in Compressed Sparse Blocks: the matrix, layers that train on it, and pruning."""

from minidl.sparse.csb import CSBMatrix
from minidl.sparse.layers import CSBConv2d, CSBLinear
from minidl.sparse.pattern import CSBPattern, Occupancy
from minidl.sparse.prune import CubicSchedule, PrunedSGD, Pruning, magnitude_mask, sparse_state, to_sparse

__all__ = [
    "CSBConv2d",
    "CSBLinear",
    "CSBMatrix",
    "CSBPattern",
    "CubicSchedule",
    "Occupancy",
    "PrunedSGD",
    "Pruning",
    "magnitude_mask",
    "sparse_state",
    "to_sparse",
]
