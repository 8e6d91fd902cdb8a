"""Batch-norm fusion: which batch norms a network has, what each could share a pass with, and which plan is fastest.

    from minidl import fusion
    plan = fusion.fuse(model, "adaptive", batch=256)      # or "auto", "elementwise", ..., a Plan, or a file's path

Plans set modes of layers, nothing else: every layer keeps its name, parameters, messages and rows in a profile, and any
plan computes the same network (values are finished where a layer cannot take them unfinished, see `minidl.value`).

After Jung et al., "Restructuring Batch Normalization to Accelerate CNN Training" (MLSys 2019), whose fission this takes
up, and Hwang, "Adaptive Kernel Fusion" (Seoul National University, 2023), who found that the best plan depends on the
size of the feature maps.
"""

from minidl.fusion.apply import CHOICES, fuse, fuse_by_default, fuse_graph
from minidl.fusion.cost import SiteCost, site_cost
from minidl.fusion.fold import fold
from minidl.fusion.plans import MODES, PLANS, Plan, candidates, choose
from minidl.fusion.sites import Site, find_sites

__all__ = [
    "CHOICES",
    "MODES",
    "PLANS",
    "Plan",
    "Site",
    "SiteCost",
    "candidates",
    "choose",
    "find_sites",
    "fold",
    "fuse",
    "fuse_by_default",
    "fuse_graph",
    "site_cost",
]
