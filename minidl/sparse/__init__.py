"""Sparse weights in Compressed Sparse Blocks: the matrix, layers that train on it, and pruning."""

from minidl.sparse.compress import Compressed, load_compressed, save_compressed
from minidl.sparse.csb import CSBMatrix
from minidl.sparse.layers import CSBConv2d, CSBLinear
from minidl.sparse.masks import Granularity, magnitude_mask
from minidl.sparse.pattern import CSBPattern, Occupancy
from minidl.sparse.prune import CubicSchedule, PrunedSGD, Pruning, pruned, sparse_state, to_sparse, without_masks
from minidl.sparse.search import MaskSearch, Sensitivity, masked, random_mask_search, sensitivity
from minidl.sparse.share import SharedSGD, SharedWeight, share_weights
from minidl.sparse.shrink import ShrinkRecord, resized, shrink

__all__ = [
    "CSBConv2d",
    "CSBLinear",
    "CSBMatrix",
    "CSBPattern",
    "Compressed",
    "CubicSchedule",
    "Granularity",
    "MaskSearch",
    "Occupancy",
    "PrunedSGD",
    "Pruning",
    "Sensitivity",
    "SharedSGD",
    "SharedWeight",
    "ShrinkRecord",
    "load_compressed",
    "magnitude_mask",
    "masked",
    "pruned",
    "random_mask_search",
    "resized",
    "save_compressed",
    "sensitivity",
    "share_weights",
    "shrink",
    "sparse_state",
    "to_sparse",
    "without_masks",
]
