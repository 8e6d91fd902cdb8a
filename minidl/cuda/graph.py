"""CUDA graphs in which a kernel may take its place while the one before it ends.

Of two kernels on a stream, the second is set up only when the first is over and its memory is written. Kernels that
include overlap.cuh wait for that themselves; between two of them an edge of the graph is made programmatic (CUDA
Programming Guide, "Programmatic Dependent Launch"), and the setting up is hidden. Results cannot differ: who waits sees
all that was written before, and a kernel that has ended says that all kernels before it have.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from typing import Any

from minidl.cuda.device import import_cupy
from minidl.cuda.launch import waits_itself

__all__ = ["Graph"]

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL
_PORT_PROGRAMMATIC = _TYPE_PROGRAMMATIC = 1

Edge = tuple[int, int]


class Graph:
    """A captured graph, ready to be launched; it owns ``handle``.

    Attributes:
        overlapping: kernels that may be set up before the one before them is over.
    """

    def __init__(self, handle: int):
        self._runtime = import_cupy().cuda.runtime
        self._handle, self._executable = handle, 0
        self.overlapping = overlap(handle)
        self._executable = self._runtime.graphInstantiate(handle)

    def launch(self, stream: Any = None) -> None:
        """Start it on a stream, by default CuPy's current one."""
        stream = stream or import_cupy().cuda.get_current_stream()
        self._runtime.graphLaunch(self._executable, stream.ptr)

    def __del__(self) -> None:
        if self._executable:
            self._runtime.graphExecDestroy(self._executable)
        self._runtime.graphDestroy(self._handle)


class _EdgeData(ctypes.Structure):
    """CUgraphEdgeData."""

    _fields_ = [(name, ctypes.c_ubyte) for name in ("from_port", "to_port", "type")] + [("zero", ctypes.c_ubyte * 5)]


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        *((f"{kind}_{axis}", ctypes.c_uint) for kind in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        *((name, ctypes.c_void_p) for name in ("parameters", "extra", "kernel", "context")),
    ]


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def overlap(graph: int) -> int:
    """Make the edges between kernels that wait themselves programmatic; how many there are.

    A kernel with several edges keeps them as they are. None are made by a driver that does not know them (before 12.3).
    """
    if not hasattr(_driver(), "cuGraphAddDependencies_v2"):
        return 0
    edges = _edges(graph)
    before = Counter(node for _, node in edges)
    waits = {node: _waits(node) for node in {node for edge in edges for node in edge}}
    chosen = [(a, b) for a, b in edges if before[b] == 1 and waits[a] and waits[b]]
    if chosen:
        plain, programmatic = (_EdgeData * len(chosen))(), (_EdgeData * len(chosen))()
        for data in programmatic:
            data.from_port, data.type = _PORT_PROGRAMMATIC, _TYPE_PROGRAMMATIC
        ends = [(ctypes.c_void_p * len(chosen))(*nodes) for nodes in zip(*chosen, strict=True)]
        for call, data in (("Remove", plain), ("Add", programmatic)):
            _call(f"cuGraph{call}Dependencies_v2", ctypes.c_void_p(graph), *ends, data, ctypes.c_size_t(len(chosen)))
    return len(chosen)


def _edges(graph: int) -> list[Edge]:
    count = ctypes.c_size_t()
    _call("cuGraphGetEdges_v2", ctypes.c_void_p(graph), None, None, None, ctypes.byref(count))
    before, after = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    data = (_EdgeData * count.value)()
    if count.value:
        _call("cuGraphGetEdges_v2", ctypes.c_void_p(graph), before, after, data, ctypes.byref(count))
    return list(zip(before, after, strict=True))


def _waits(node: int) -> bool:
    """Whether a node is a kernel that waits for its inputs itself."""
    kind = ctypes.c_int()
    _call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    if kind.value != _KERNEL:
        return False
    facts = _KernelNode()
    _call("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(facts))
    return waits_itself(facts.function)


def _call(name: str, *arguments: Any) -> None:
    status = getattr(_driver(), name)(*arguments)
    if status:
        raise RuntimeError(f"{name} failed with CUDA driver error {status}")
