"""Where time goes, layer by layer: costs, spans, timers, ceilings, result files, reports and pictures."""

from minidl.profile.cost import Cost, PassCost
from minidl.profile.results import load, result, write
from minidl.profile.spans import Profiler, SpanRecorder
from minidl.profile.timing import Budget, Timing, timer

__all__ = ["Budget", "Cost", "PassCost", "Profiler", "SpanRecorder", "Timing", "load", "result", "timer", "write"]
