"""Pictures of result files: ``minidl plot``. Drawn with matplotlib (extra ``plot``), which is imported at first use."""

from minidl.profile.plots.bars import bars
from minidl.profile.plots.command import KINDS, add_arguments, make, run
from minidl.profile.plots.communication import communication
from minidl.profile.plots.fusion import fusion
from minidl.profile.plots.layers import layers, series
from minidl.profile.plots.memory import memory
from minidl.profile.plots.roofline import roofline
from minidl.profile.plots.scaling import scaling
from minidl.profile.plots.share import share
from minidl.profile.plots.simulated import simulated
from minidl.profile.plots.style import render, save
from minidl.profile.runs import NotInFile, Run, runs

__all__ = [
    "KINDS", "NotInFile", "Run", "add_arguments", "bars", "communication", "fusion", "layers", "make", "memory",
    "render", "roofline", "run", "runs", "save", "scaling", "series", "share", "simulated",
]  # fmt: skip
