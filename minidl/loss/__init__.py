"""Losses. `forward` gives totals that are already joined over ranks, `backward` the first gradient.

A loss is divided by what *all* ranks counted, and gradient messages are sums; so N ranks equal one rank on the joined
batch, also with uneven shards, ignored labels or class weights.
"""

from minidl.loss.base import Loss, Sums, Totals
from minidl.loss.cross_entropy import SoftmaxCrossEntropy
from minidl.loss.dice import DiceLoss
from minidl.loss.pointwise import BCEWithLogitsLoss, FocalLoss, MSELoss

__all__ = ["BCEWithLogitsLoss", "DiceLoss", "FocalLoss", "Loss", "MSELoss", "SoftmaxCrossEntropy", "Sums", "Totals"]
