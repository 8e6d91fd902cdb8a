"""Where parameters and gradients lie in an arena, the messages they are cut into, and what a layer sees of them."""

from __future__ import annotations

import bisect
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from minidl import backend, checks
from minidl.dist.communicator import Work
from minidl.initializers import Initializer
from minidl.shapes import round_up

ALIGN = 64  # float32 elements: 256 bytes, and the chunk of the optimizer's segment table


@dataclass(frozen=True)
class ParameterSpec:
    """What a layer declares: ``product`` parameters enter matrix products and are read in the storage dtype.

    ``rows``: the layer computes the gradient in tiles of so many rows (of the first axis), one after the other, in
    `minidl.Layer.backward_weight_tile`; 0: at once.
    """

    name: str
    shape: tuple[int, ...]
    init: Initializer
    product: bool
    rows: int = 0


@dataclass(frozen=True)
class Segment:
    """One parameter's place: ``offset`` and ``size`` in elements of the arena."""

    layer: str
    name: str
    shape: tuple[int, ...]
    offset: int
    product: bool
    trainable: bool
    rows: int = 0

    @property
    def tile(self) -> int:
        """Elements of a tile of its gradient; 0 where that is made at once."""
        return self.rows * prod(self.shape[1:])

    @property
    def tiles(self) -> list[slice]:
        """The rows of each tile."""
        return [slice(i, min(i + self.rows, self.shape[0])) for i in range(0, self.shape[0], self.rows)]

    def span(self, rows: slice) -> tuple[int, int]:
        """Where in the arena these rows begin and end."""
        row = prod(self.shape[1:])
        return self.offset + rows.start * row, self.offset + rows.stop * row

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def stop(self) -> int:
        """End of the segment including its padding."""
        return self.offset + round_up(self.size, ALIGN)

    @property
    def full_name(self) -> str:
        return f"{self.layer}.{self.name}" if self.layer else self.name

    def describe(self) -> str:
        """One line that is equal on two ranks exactly when their plans agree here."""
        return f"{self.full_name} {self.shape} at {self.offset}{'' if self.trainable else ' frozen'}"


@dataclass
class Message:
    """A contiguous slice of gradients that is sent at once and updated at once: one layer or several neighbours."""

    begin: int
    end: int
    layers: tuple[str, ...]
    waiting: int = 0
    work: Work | None = None
    cuts: tuple[int, ...] = ()  # of a sharded arena: where the parts of the ranks begin and end, from ``begin``
    own: tuple[int, int] = (0, 0)  # begin and end in the arena of what this rank gets the sum of, and updates
    before: str = ""  # the layer whose backward pass it waits for, to start then; else it starts when it is complete
    summed: bool = False  # the layer makes sums over ranks itself in this step: nothing is sent
    readers: list[ref[Any]] = field(default_factory=list)  # of its parameters in this step, after its layers
    begun: bool = False  # to be updated in this step, within the backward pass
    updated: bool = False  # all of it

    @property
    def lent(self) -> bool:
        """Whether a parameter of it has still to be read in this step."""
        return any(reader is not None and reader.owed for reader in (known() for known in self.readers))

    @property
    def name(self) -> str:
        """The names of its layers, joined by ``+``, as profilers know it."""
        return "+".join(self.layers)


def by_name(flat: np.ndarray, segments: Iterable[Segment], prefix: str = "") -> dict[str, np.ndarray]:
    """Copies of what a flat host array holds of each parameter, by ``prefix`` and full name."""
    return {f"{prefix}{s.full_name}": flat[s.offset : s.offset + s.size].reshape(s.shape).copy() for s in segments}


def flattened(named: Mapping[str, np.ndarray], segments: Iterable[Segment], size: int, prefix: str = "") -> np.ndarray:
    """The flat host array, float32 (size,), that `by_name` gives ``named`` of; zeros elsewhere."""
    flat = np.zeros(size, np.float32)
    for s in segments:
        flat[s.offset : s.offset + s.size] = named[f"{prefix}{s.full_name}"].reshape(-1)
    return flat


def drawn(init: Initializer, rng: np.random.Generator, segment: Segment) -> np.ndarray:
    """Starting values of one parameter; zeros in a dry run, where nobody reads them.

    Raises:
        TypeError: when ``init`` is no function.
        ValueError: when it gives another shape.
    """
    if not callable(init):
        got, remedy = checks.describe(init), "see minidl.initializers; load_state_dict takes arrays"
        raise checks.bad_dtype(segment.full_name, "initializer", "a function (rng, shape) -> array", got, remedy)
    values = np.zeros(segment.shape, np.float32) if backend.dry() else np.asarray(init(rng, segment.shape))
    if values.shape != segment.shape:
        raise checks.bad_shape(segment.full_name, "starting values", str(segment.shape), values.shape)
    return values


def lay_out(layers: Sequence[tuple[str, Sequence[ParameterSpec]]], frozen: Sequence[str]) -> list[Segment]:
    """Segments with offsets: trainable ones in backward order, then the frozen ones."""
    found = [
        Segment(name, spec.name, spec.shape, 0, spec.product, True, spec.rows)
        for name, specs in reversed(layers)
        for spec in specs
    ]
    names = [s.full_name for s in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise checks.impossible("", f"parameter {twice!r} is declared twice", "give it another name")
    for pattern in frozen:
        if not any(fnmatch.fnmatchcase(s.full_name, pattern) for s in found):
            raise checks.unknown("parameter pattern", pattern, names)
    placed: list[Segment] = []
    offset = 0
    held = [any(fnmatch.fnmatchcase(s.full_name, p) for p in frozen) for s in found]
    for want_frozen in (False, True):
        for s, is_frozen in zip(found, held, strict=True):
            if is_frozen is want_frozen:
                placed.append(replace(s, offset=offset, trainable=not is_frozen))
                offset = placed[-1].stop
    return placed


# -- where gradients lie: all of them, or those of a few messages at a time -------------------------------------------


class Whole:
    """All gradients: each lies where its parameter lies in the arena."""

    slots = 0
    tiled: Mapping[str, Segment] = {}

    def at(self, begin: int) -> int:
        """The place of element ``begin`` of the arena."""
        return begin

    def held(self, message: Message) -> int:
        """Elements that are held of a message."""
        return message.end - message.begin


class Ring:
    """The gradients of ``slots`` neighbouring messages: the next ones take their places once they are used.

    Args:
        messages: all of an arena, in its order.
        slots: at least 1.
        tiled: by layer, the parameter whose gradient is held one tile at a time; the first of its message.
        most: elements of all gradients; a ring that would be as large holds them all.

    Attributes:
        size: elements of the array that holds the gradients.
    """

    def __init__(self, messages: Sequence[Message], slots: int, tiled: Mapping[str, Segment], most: int):
        self.slots, self.tiled = slots, tiled
        self._begins = [message.begin for message in messages]
        self._segments = [tiled.get(message.layers[0]) for message in messages]
        sizes = [self.held(message) for message in messages]
        self._places = ring_places(sizes, slots)
        self.size = max((place + size for place, size in zip(self._places, sizes, strict=True)), default=0)
        if self.size >= most:
            self._places, self.size = self._begins, most

    def at(self, begin: int) -> int:
        """The place of element ``begin`` of the arena, while its message, and its tile, has one."""
        number = bisect.bisect_right(self._begins, begin) - 1
        inside, segment = begin - self._begins[number], self._segments[number]
        if segment is not None:
            behind = begin - segment.stop
            inside = inside % segment.tile if behind < 0 else segment.tile + behind
        return self._places[number] + inside

    def held(self, message: Message) -> int:
        """Elements that are held of a message at a time."""
        segment = self.tiled.get(message.layers[0])
        return message.end - message.begin - (0 if segment is None else segment.stop - segment.offset - segment.tile)


def ring_places(sizes: Sequence[int], slots: int) -> list[int]:
    """Offsets for messages of which any ``slots`` neighbours live at a time: largest first, as low as they fit."""
    places: dict[int, int] = {}
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lowest = 0
        for j in sorted((j for j in places if abs(i - j) < slots), key=places.__getitem__):
            if places[j] - lowest >= sizes[i]:
                break
            lowest = max(lowest, places[j] + sizes[j])
        places[i] = lowest
    return [places[i] for i in range(len(sizes))]


# -- what a layer sees ------------------------------------------------------------------------------------------------


class Gradient(NamedTuple):
    """Where a layer writes a parameter gradient: float32 ``view``; ``first``: overwrite it, else add to it."""

    view: Any
    first: bool


class NoParams(Mapping[str, Any]):
    """Of a layer that has none, or knows no device yet; and what may not be done to those of others."""

    def __getitem__(self, name: str) -> Any:
        remedy = "one that stands alone has its parameters from .to('cpu'), .to('cuda') or its first input on"
        raise KeyError(f"this layer has no parameter {name!r}; {remedy}")

    def __setitem__(self, name: str, value: Any) -> None:
        remedy = f"write layer.load_state_dict({{**layer.state_dict(), {name!r}: values}})"
        raise checks.impossible("params", f"{name!r} cannot be put in the place of another array", remedy)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def grad(self, name: str, rows: slice | None = None) -> Gradient | None:
        """See `LayerParams.grad`: none."""
        return None

    def gradients(self) -> dict[str, Any]:
        """None."""
        return {}

    def lend(self, name: str, reader: Any) -> Any:
        """See `LayerParams.lend`: None."""
        return None


class LayerParams(NoParams):
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
        if name not in self._views:
            raise KeyError(str(checks.unknown(f"parameter of {self._layer or 'the layer'}", name, self._views)))
        return self._views[name]

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def get(self, name: str, default: Any = None) -> Any:
        return self._views.get(name, default)  # the base class tries, and catches

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def lend(self, name: str, reader: Any) -> Any:
        """As `get` gives it, for what is read after this layer's backward pass: while ``reader`` lives and is ``owed``
        it stays as it is, also where updates are within the backward pass."""
        value = self.get(name)
        return value if value is None else self._arena.lend(self._layer, value, reader)

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

    def restart(self, *, accumulate: bool = False) -> None:
        """The next gradients overwrite, or add: for those who run backward passes of a layer one by one."""
        self._arena.begin_step(accumulate=accumulate)

    def ready(self, *, summed: bool = False) -> None:
        """All gradients of this layer are written: its all-reduce may start, unless they are sums already."""
        self._arena.ready(self._layer, summed=summed)

    def shares(self, rows: int) -> list[int] | None:
        """Rows of the batch on each rank, where factors travel in the place of this layer's gradients; a collective.

        Args:
            rows: on this rank.
        """
        return self._arena.shares(self._layer, rows)


class InParams:
    """A name that parameters have: who reads it is told where they are, who sets it how they are set."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: Any, owner: type | None = None) -> Any:
        if layer is None:
            return self
        if self._name not in vars(layer):
            raise AttributeError(self._name)  # then `Layer.__getattr__` is asked
        return vars(layer)[self._name]

    def __set__(self, layer: Any, value: Any) -> None:
        if any(spec.name == self._name for spec in vars(layer).get("specs", ())):
            layer.params[self._name] = value  # which tells how it is done
        vars(layer)[self._name] = value
