"""Where time goes, layer by layer."""

from minidl.profile.cost import Cost, PassCost
from minidl.profile.spans import NullProfiler, Profiler, SpanRecorder

__all__ = ["Cost", "NullProfiler", "PassCost", "Profiler", "SpanRecorder"]
