"""What a captured CUDA graph says about order: its nodes and edges, read through the driver."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

KERNEL, MEMCPY = 0, 1


class Node(NamedTuple):
    """``source`` and ``target`` are the addresses of a copy."""

    kind: int
    source: int = 0
    target: int = 0


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY3D."""

    _fields_ = [
        *((f"source_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "level")),
        ("source_type", ctypes.c_int),
        ("source_host", ctypes.c_void_p),
        ("source_device", ctypes.c_uint64),
        ("source_array", ctypes.c_void_p),
        ("reserved0", ctypes.c_void_p),
        ("source_pitch", ctypes.c_size_t),
        ("source_height", ctypes.c_size_t),
        *((f"target_{name}", ctypes.c_size_t) for name in ("x", "y", "z", "level")),
        ("target_type", ctypes.c_int),
        ("target_host", ctypes.c_void_p),
        ("target_device", ctypes.c_uint64),
        ("target_array", ctypes.c_void_p),
        ("reserved1", ctypes.c_void_p),
        ("target_pitch", ctypes.c_size_t),
        ("target_height", ctypes.c_size_t),
        ("width", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
        ("depth", ctypes.c_size_t),
    ]


def call(name: str, *arguments: Any) -> None:
    """A function of the driver, which must succeed."""
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    assert status == 0, f"{name} failed with {status}"


def read(graph: int) -> tuple[list[Node], list[tuple[int, int]]]:
    """Nodes in the order of capture, and edges (earlier, later) between their numbers."""
    handles = _handles(graph)
    nodes = []
    for node in handles:
        kind = ctypes.c_int()
        call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value == MEMCPY:
            copy = _Copy()
            call("cuGraphMemcpyNodeGetParams", ctypes.c_void_p(node), ctypes.byref(copy))
            source, target = copy.source_host or copy.source_device, copy.target_host or copy.target_device
            nodes.append(Node(MEMCPY, source, target))
        else:
            nodes.append(Node(kind.value))
    return nodes, [edge for edge, _ in _edges(graph, handles)]


def overlaps(graph: int) -> list[bool]:
    """For each edge, by its nodes in the order of capture: whether the later may begin before the earlier ends."""
    return [overlap for _, overlap in sorted(_edges(graph, _handles(graph)))]


def _handles(graph: int) -> list[int]:
    count = ctypes.c_size_t()
    call("cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    handles = (ctypes.c_void_p * count.value)()
    call("cuGraphGetNodes", ctypes.c_void_p(graph), handles, ctypes.byref(count))
    return list(handles)


def _edges(graph: int, handles: list[int]) -> list[tuple[tuple[int, int], bool]]:
    """Numbers of (earlier, later) among ``handles``, and whether it is CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC."""
    handle, count = ctypes.c_void_p(graph), ctypes.c_size_t()
    call("cuGraphGetEdges_v2", handle, None, None, None, ctypes.byref(count))
    first, second = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
    notes = (ctypes.c_ubyte * 8 * count.value)()  # CUgraphEdgeData: ports of both, type
    call("cuGraphGetEdges_v2", handle, first, second, notes, ctypes.byref(count))
    number = {node: i for i, node in enumerate(handles)}
    return [((number[a], number[b]), note[2] == 1) for a, b, note in zip(first, second, notes, strict=True)]


def ancestors(count: int, edges: list[tuple[int, int]]) -> list[int]:
    """For each node the set (as bits) of all that come before it."""
    into: list[list[int]] = [[] for _ in range(count)]
    for a, b in edges:
        assert a < b, "capture gives nodes in an order that respects the edges"
        into[b].append(a)
    found = [0] * count
    for b in range(count):
        for a in into[b]:
            found[b] |= found[a] | 1 << a
    return found
