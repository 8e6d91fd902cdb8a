"""What a layer sees of its parameters: their values, and where each gradient is to be written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from minidl import checks
from minidl.segments import Segment


class Gradient(NamedTuple):
    """Where a layer writes a parameter gradient: float32 ``view``; ``first``: overwrite it, else add to it."""

    view: Any
    first: bool


class LayerParams(Mapping[str, Any]):
    """One layer's views: ``params["weight"]`` is what its forward pass reads.

    Args:
        arena: the `minidl.params.Arena` that makes them.
    """

    def __init__(self, arena: Any, layer: str, segments: Sequence[Segment]):
        self._arena = arena
        self._layer = layer
        self._segments = {s.name: s for s in segments}
        self._views = {s.name: arena.view(s, arena.working if s.product else arena.master) for s in segments}

    def __getitem__(self, name: str) -> Any:
        return self._views[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._views.get(name, default)  # the base class tries, and catches

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def master(self, name: str) -> Any:
        """The float32 value that the optimizer updates."""
        return self._arena.view(self._segments[name], self._arena.master)

    def trainable(self, name: str) -> bool:
        """Whether the layer has this parameter and it is not frozen."""
        return name in self._segments and self._segments[name].trainable

    def grad(self, name: str, rows: slice | None = None) -> Gradient | None:
        """Where to write the gradient of ``name``, or a tile of it, now; None when it is absent or frozen."""
        segment = self._segments.get(name)
        if segment is None or not segment.trainable:
            return None
        return self._arena.claim(segment, rows)

    @property
    def tiled(self) -> bool:
        """Whether each tile of the gradient is updated before the next one is made, in the same memory."""
        return self._layer in self._arena.tiled

    @property
    def tiles(self) -> list[slice]:
        """Their rows."""
        return self._arena.tiled[self._layer].tiles

    def tile_ready(self, rows: slice) -> None:
        """A tile's gradient is written, and the weights have served the input gradient: they are updated."""
        self._arena.tile_ready(self._layer, rows)

    def gradients(self) -> dict[str, Any]:
        """The gradients as they stand, float32, by name (trainable parameters only)."""
        if self._arena.slots:
            raise checks.order("gradients", "they are gone when their update is done", "read them without a ring")
        if self._arena.adds:
            raise checks.order("gradients", "they are added to the momentum", "read them where they are kept apart")
        return {s.name: self._arena.view(s, self._arena.grad) for s in self._segments.values() if s.trainable}

    def restart(self) -> None:
        """The next gradients overwrite: for those who run backward passes of a layer one by one."""
        self._arena.begin_step()

    def ready(self, *, summed: bool = False) -> None:
        """All gradients of this layer are written: its all-reduce may start, unless they are sums already."""
        self._arena.ready(self._layer, summed=summed)

    def shares(self, rows: int) -> list[int] | None:
        """Rows of the batch on each rank, where factors travel in the place of this layer's gradients; a collective.

        Args:
            rows: on this rank.
        """
        return self._arena.shares(self._layer, rows)
