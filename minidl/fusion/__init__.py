"""Batch-norm fusion: which batch norms a network has, what each could share a pass with, and what a plan saves.

    from minidl import fusion
    plan = fusion.fuse(model, "elementwise")      # or a Plan, or the path of one that was saved

Plans set modes of layers, nothing else: every layer keeps its name, parameters, messages and rows in a profile, and any
plan computes the same network (values are finished where a layer cannot take them unfinished, see `minidl.value`).

After Jung et al., "Restructuring Batch Normalization to Accelerate CNN Training" (MLSys 2019), whose fission this takes
up, and Hwang, "Adaptive Kernel Fusion" (Seoul National University, 2023), who found that the best plan depends on the
size of the feature maps.
"""

from minidl.fusion.apply import fuse
from minidl.fusion.cost import SiteCost, site_cost
from minidl.fusion.fold import fold
from minidl.fusion.plans import PLANS, Plan, choose
from minidl.fusion.sites import Site, find_sites

__all__ = ["PLANS", "Plan", "Site", "SiteCost", "choose", "find_sites", "fold", "fuse", "site_cost"]
