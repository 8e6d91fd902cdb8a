"""Sparse weights in Compressed Sparse Blocks: the matrix, layers that train on it, and pruning."""

from minidl.sparse.csb import CSBMatrix
from minidl.sparse.pattern import CSBPattern, Occupancy

__all__ = ["CSBMatrix", "CSBPattern", "Occupancy"]
