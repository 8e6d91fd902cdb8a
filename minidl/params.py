"""Parameters in flat arenas: layers hold named views, neighbours in the backward pass are neighbours in memory.

One arena serves a whole model (or one layer working alone). Its trainable part is laid out in *backward order*, each
segment aligned to 256 bytes, so the gradients of any run of neighbouring layers are one contiguous message and one
update, whatever parameter groups they belong to. Frozen parameters lie behind it and have no gradient.

    master   float32   every parameter                     | trainable, backward order | frozen |
    working  storage   what products read; is ``master`` for float32
    grad     float32   trainable part only; with `Arena.ring`, a few messages of it at a time; with `Arena.add_to`, what
                       an update needs anyway, to which gradients are added
    wire     what is sent of it; is ``grad`` unless messages are rounded
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any
from weakref import ref

import numpy as np

from minidl import checks, legality
from minidl.dist.communicator import SOLO, Communicator, place
from minidl.initializers import generator
from minidl.messages.neighbourhood import Departures, cut
from minidl.precision import Precision, float32
from minidl.profile.spans import NULL_PROFILER, Profiler
from minidl.segments import ALIGN, Gradient, LayerParams, Message, ParameterSpec, Ring, Segment, Whole, drawn, lay_out


class Arena:
    """All parameters of a set of layers in flat arrays of one operation table.

    Args:
        ops: the operation table that owns the arrays.
        layers: (name, specs) in forward order.
        precision: storage dtype of the working copy.
        seed: starting weights are a function of it and each parameter's name.
        frozen: patterns (``fnmatch``) of full parameter names that are not trained.
    """

    def __init__(
        self,
        ops: ModuleType,
        layers: Sequence[tuple[str, Sequence[ParameterSpec]]],
        precision: Precision,
        *,
        seed: int = 0,
        frozen: Sequence[str] = (),
    ):
        if isinstance(frozen, str):
            raise checks.bad_value("arena", "frozen", "a list of patterns", frozen, f"pass [{frozen!r}]")
        self.ops = ops
        self.precision = precision
        self.segments = lay_out(layers, frozen)
        self.trainable_size = max((s.stop for s in self.segments if s.trainable), default=0)
        size = max((s.stop for s in self.segments), default=0)
        host = np.zeros(size, np.float32)
        inits = {(name, spec.name): spec.init for name, specs in layers for spec in specs}
        for s in self.segments:
            values = drawn(inits[s.layer, s.name], generator(seed, s.full_name), s)
            host[s.offset : s.offset + s.size] = values.reshape(-1)
        self.master = ops.from_host(host)
        self.grad = ops.zeros((self.trainable_size,), np.dtype(np.float32))
        mixed = precision.storage != np.float32
        self.working = ops.cast(self.master, precision.storage) if mixed else self.master
        self._written: set[tuple[str, str, int]] = set()  # layer, parameter, where a tile begins
        self._abandoned = False
        self._places: Whole | Ring = Whole()  # what ``grad`` holds at a time, and where
        self.factored: Mapping[str, int] = {}  # layers that may send factors: up to so many rows on all ranks
        self.departures: Departures = lambda messages: {}  # which messages wait to start, and for which layer
        self._waiting: deque[Message] = deque()  # complete, not started yet
        self._shares: list[int] | None = None  # rows of the batch on each rank, in this step
        self.adds = False  # gradients to what ``grad`` holds when a backward pass begins
        self._update: Callable[[int, int], None] | None = None
        self._early: Callable[[int, int], bool] | None = None  # see `update_early`
        self._prepare: Callable[[], None] = lambda: None
        self._ready: deque[Message] = deque()  # started, not updated yet; with slots, or where updates are early
        self._begun: set[str] = set()  # first layers of messages that have gradients; only with slots
        self.connected = 0  # how often: each time messages, or who reads gradients, are others
        self._layers = {name: [s for s in self.segments if s.layer == name] for name, _ in layers}
        self.messages: list[Message] = []
        self.profiler: Profiler = NULL_PROFILER
        self._look: Callable[[str], None] | None = None
        self.sharded = False
        self.connect(SOLO)

    def layer(self, name: str) -> LayerParams:
        """The views of one layer."""
        return LayerParams(self, name, self._layers[name])

    def view(self, segment: Segment, arena: Any) -> Any:
        """The part of a flat array that belongs to ``segment``, in its shape."""
        return arena[segment.offset : segment.offset + segment.size].reshape(segment.shape)

    def refresh_working(self) -> None:
        """Round the master weights again into the working copy, after they were written from outside."""
        if self.working is not self.master:
            self.ops.copy_into(self.working, self.master)

    def table(self, values: Callable[[Segment], Sequence[float]]) -> tuple[Any, Any]:
        """The optimizer's segment table: (segment of each 64-element chunk, int32; ``values`` per segment, float32)."""
        trainable = [s for s in self.segments if s.trainable]
        chunk = np.zeros(self.trainable_size // ALIGN, np.int32)
        for i, s in enumerate(trainable):
            chunk[s.offset // ALIGN : s.stop // ALIGN] = i
        rows = np.array([values(s) for s in trainable], np.float32, ndmin=2)
        return self.ops.from_host(chunk), self.ops.from_host(rows)

    def settle(self) -> None:
        """Move what is sent to where the communicator adds up fastest; a collective."""
        shared = self.wire is self.grad
        self.wire = place(self.comm, self.wire)
        if shared:
            self.grad = self.wire

    def ring(self, slots: int, update: Callable[[int, int], None]) -> None:
        """Hold the gradients of ``slots`` neighbouring messages: each message is updated within the backward pass.

        ``update(begin, end)`` is called between two layers, when all layers of the message have run backward and its
        all-reduce is over, before another message takes its slot. Weights, momentum and their bits are those of updates
        after the backward pass. After an error within one, part of the weights are those of the next step. On one rank
        a gradient that its layer makes in tiles takes the place of one tile.

        Raises:
            ValueError: for less than one slot, or an arena that is sharded.
        """
        legality.refuse("gradients", ring=True, sharded=self.sharded, in_momentum=self.adds)
        slots, self._update = checks.at_least("gradients", "slots", slots, 1), update
        self.connected += 1
        rounded, tiled = self.wire is not self.grad, {}
        if self.comm.size == 1 and self._look is None:  # what is sent, or looked at, is held whole
            tiled = {s.layer: s for s in self.segments if s.rows and s.trainable}
        for message in self.messages:
            segment, message.before = tiled.get(message.layers[0]), ""  # a slot is wanted again soon
            message.own = message.begin if segment is None else segment.stop, message.end
        self._places = Ring(self.messages, slots, tiled, self.trainable_size)
        size = (self._places.size,)
        self.grad = self.ops.zeros(size, np.dtype(np.float32))
        self.wire = self.ops.empty(size, self.wire.dtype) if rounded else self.grad
        self.settle()
        self.begin_step()

    @property
    def slots(self) -> int:
        """Messages whose gradients are held at a time; 0: all."""
        return self._places.slots

    @property
    def read_at_the_end(self) -> bool:
        """Whether nobody reads gradients before a backward pass is over."""
        return self.comm.size == 1 and not self.slots and self._look is None

    @property
    def tiled(self) -> Mapping[str, Segment]:
        """By layer, the parameters whose gradients are held one tile at a time."""
        return self._places.tiled

    def watch(self, look: Callable[[str], None]) -> None:
        """Call ``look(layer)`` when the gradients of a layer are complete, before they are sent."""
        self._look = look
        self.connected += 1
        self.factored = {}  # by which a NaN would reach all ranks before anybody looks
        if self.slots:
            self.ring(self.slots, self._update)

    def sum_all(self) -> None:
        """Send no factors from now on, for those who count on what one rank does; a collective."""
        if self.factored:
            self.factored = {}
            self.connect(self.comm, self.group_bytes, self.wire.dtype)
            self.settle()

    def add_to(self, sums: Any, prepare: Callable[[], None]) -> None:
        """Add gradients to ``sums``, which an update needs anyway, instead of holding them apart.

        Args:
            sums: (trainable_size,) float32; what was ``grad`` is given up.
            prepare: called when the first backward pass of a step begins: makes of ``sums`` what gradients are added
                to. On several ranks what all make, and their gradients, are added up.
        """
        legality.refuse("gradients", ring=self.slots, sharded=self.sharded, in_momentum=True)
        self.adds, self._prepare = True, prepare
        self.factored = {}  # what all ranks bring is added up
        self.connected += 1
        self.grad = self.wire = sums
        self.begin_step()

    @property
    def grad(self) -> Any:
        """The gradients, flat."""
        return self._grad

    @grad.setter
    def grad(self, array: Any) -> None:
        self._grad, self._views = array, {}

    def gradient(self, begin: int, end: int, shape: tuple[int, ...] | None = None) -> Any:
        """The gradients of elements ``begin`` to ``end``, which belong to one message; flat, or in ``shape``."""
        at, shape = self._places.at(begin), (end - begin,) if shape is None else shape
        view = self._views.get((at, shape))
        if view is None:  # to cut it takes the host longer than to launch a kernel
            view = self._views[at, shape] = self.grad[at : at + end - begin].reshape(shape)
        return view

    # -- one backward pass ------------------------------------------------------------------------------------------

    def connect(self, comm: Communicator, group_bytes: int = 0, message_dtype: np.dtype = float32) -> None:
        """Cut the gradients into messages: neighbouring layers share one until it holds ``group_bytes``.

        Args:
            message_dtype: bfloat16 sends each gradient rounded to it, half the bytes; the sums are rounded as well.
                With u = 2^-8 the error of a sum over ranks is at most u (sum |g| + |sum g|) (1 + 2u) where the engine
                adds in float32 and rounds once (mpi, and shm on one host; on several hosts sum |g| counts twice);
                NCCL rounds at every hop. One rank alone rounds nothing.
        """
        self.comm, self.group_bytes = comm, group_bytes
        self.connected += 1
        rounded = message_dtype != float32 and comm.size > 1
        self.wire = self.ops.empty(self.grad.shape, message_dtype) if rounded else self.grad
        held = {name: [s for s in self._layers[name] if s.trainable] for name in reversed(self._layers)}
        spans = {name: (mine[0].offset, mine[-1].stop) for name, mine in held.items() if mine}
        sizes = [(name, 4 * (end - begin)) for name, (begin, end) in spans.items()]
        tiled = {name for name in spans if held[name][0].rows}
        groups = cut(sizes, group_bytes, tiled, self.factored if comm.size > 1 else ())
        self.messages = [Message(spans[names[0]][0], spans[names[-1]][1], names) for names in groups]
        self._message_of = {name: m for m in self.messages for name in m.layers}
        self._depart()
        self._share_out()
        if self.slots:
            self.ring(self.slots, self._update)
        self.begin_step()

    def wait_by(self, departures: Departures) -> None:
        """Let messages wait as ``departures`` has it from the next step on: nothing moves and no bit changes."""
        self.departures = departures
        self.connected += 1
        self._depart()

    def _depart(self) -> None:
        several = self.comm.size > 1 and not self.slots  # a ring wants its slots back: nothing waits
        before = self.departures([message.layers for message in self.messages]) if several else {}
        for message in self.messages:
            message.before = before.get(message.layers[-1], "")

    def shard(self) -> None:
        """From now on each rank gets the sum of its part of every message only, in chunks of the segment table.

        Raises:
            ValueError: for an arena that is a ring.
        """
        legality.refuse("gradients", ring=self.slots, sharded=True, in_momentum=self.adds)
        self.sharded = True
        self._share_out()

    def _share_out(self) -> None:
        ranks, rank = self.comm.size, self.comm.rank
        for message in self.messages:
            message.own = message.begin, message.end
            if self.sharded:
                chunks = (message.end - message.begin) // ALIGN
                message.cuts = tuple(ALIGN * (chunks * r // ranks) for r in range(ranks + 1))
                message.own = message.begin + message.cuts[rank], message.begin + message.cuts[rank + 1]

    def begin_step(self, *, accumulate: bool = False, send: bool = True) -> None:
        """Before each backward pass.

        Args:
            accumulate: add to the gradients of the backward pass before (micro-batches) instead of overwriting them;
                after an update there are none to add to.
            send: start messages; False for all micro-batches of a step but the last.
        """
        if not self._abandoned and any(m.work is not None or m.updated for m in self.messages):
            text = "a new backward pass started while messages are under way"
            raise checks.order("gradients", text, "call optimizer.step()")
        if self._abandoned and accumulate:
            text = "those of the micro-batches before were lost when a backward pass failed"
            raise checks.order("gradients", text, "take the step from its first micro-batch on")
        for message in self.messages:
            if message.work is not None:  # of the pass that failed
                message.work.wait()
                message.work = None
            message.waiting, message.begun, message.updated = len(message.layers), False, False
            message.readers.clear()
        if self.slots and (accumulate or not send):
            remedy = "make the optimizer without update_in_backward(), or take whole batches"
            raise checks.order("gradients", "micro-batches add up what a ring of slots does not hold", remedy)
        if self.half_added and self._abandoned:
            text = "the momentum holds gradients of a backward pass that failed"
            raise checks.order("gradients", text, "load_state_dict, or go on from a checkpoint")
        self._ready.clear()
        self._waiting.clear()
        self._begun.clear()
        self._shares = None
        self._abandoned = False
        self._send, self._parts = send, accumulate or not send
        if not accumulate:
            self._written.clear()

    def prepare(self) -> None:
        """At the start of the first backward pass of a step, for arenas that add (`add_to`)."""
        self._prepare()

    @property
    def half_added(self) -> bool:
        """Whether ``grad`` holds gradients of an unfinished step beside what it is for."""
        return self.adds and bool(self._written)

    def claim(self, segment: Segment, rows: slice | None = None) -> Gradient:
        """The gradient's view, or that of a tile of it, and whether this is the first contribution of the step."""
        begin, end, shape = segment.offset, segment.offset + segment.size, segment.shape
        if rows is not None:
            begin, end = segment.span(rows)
            shape = rows.stop - rows.start, *shape[1:]
        key = segment.layer, segment.name, begin
        first = key not in self._written and not self.adds
        self._written.add(key)
        if self.slots:
            self._clear_padding(self._message_of[segment.layer])
        return Gradient(self.gradient(begin, end, shape), first)

    def tile_ready(self, layer: str, rows: slice) -> None:
        """Update one tile of a tiled layer, and the padding behind the last one."""
        segment = self.tiled[layer]
        begin, end = segment.span(rows)
        if rows.stop == segment.shape[0] and end < segment.stop:  # where another tile lay
            self.gradient(end, segment.stop).fill(0)
            end = segment.stop
        self._message_of[layer].begun = True
        self._update(begin, end)

    def _clear_padding(self, message: Message) -> None:
        """Before a message's first gradient: what another one left between the segments is no gradient of theirs."""
        if message.waiting == len(message.layers) and message.layers[0] not in self._begun:
            self._begun.add(message.layers[0])
            if any(s.stop - s.offset > s.size for name in message.layers for s in self._layers[name]):
                at = self._places.at(message.begin)
                self.grad[at : at + self._places.held(message)].fill(0)

    def shares(self, layer: str, rows: int) -> list[int] | None:
        """See `LayerParams.shares`."""
        most = self.factored.get(layer, 0)
        if self.comm.size == 1 or not most or self._parts:
            return None
        if self._shares is None:
            self._shares = self.comm.share(rows)
        return self._shares if sum(self._shares) <= most else None

    def ready(self, layer: str, *, summed: bool = False) -> None:
        """Count a layer as done and start its message when it was the last of it, unless gradients are sums already."""
        message = self._message_of.get(layer)
        if message is None:
            return
        if self._look is not None:
            self._look(layer)
        message.waiting -= 1
        if message.waiting < 0:
            raise checks.order(layer, "backward ran twice in one step", "start each step with begin_step()")
        if message.waiting == 0 and self._send:
            message.summed = summed
            if message.before:
                self._waiting.append(message)
                return
            self._start(message)
            if self.slots or self._early:
                self._ready.append(message)

    def reach(self, layer: str | None) -> None:
        """Before a layer's backward pass, and with None behind the last one: start the messages that waited for it."""
        while self._waiting and layer in (None, self._waiting[0].before):
            self._start(self._waiting.popleft())

    def _start(self, message: Message) -> None:
        """Send the message's gradients; those that are sums already need no journey."""
        held = self._places.held(message)
        if self.wire is self.grad:
            part = self.gradient(message.begin, message.begin + held)
        else:
            at = self._places.at(message.begin)
            part = self.wire[at : at + held]
        if message.summed:
            message.work = SOLO.start_all_reduce(part)
            return
        if self.wire is not self.grad:
            self.ops.copy_into(part, self.gradient(message.begin, message.end))
        span = partial(self.profiler.span, message.name, "all_reduce")
        if self.sharded:
            message.work = self.comm.start_reduce_scatter(part, message.cuts, span, message.name)
        else:
            message.work = self.comm.start_all_reduce(part, span, message.name)

    def make_room(self) -> None:
        """Between two layers of a backward pass: with a ring, update messages until the next one has a slot; early, all
        whose parameters nobody has yet to read."""
        while self.slots and len(self._ready) >= self.slots:
            message = self._ready.popleft()
            self._arrive(message)
            message.begun = message.updated = True
            self._update(*message.own)
        for message in [m for m in self._ready if self._early and not m.lent]:
            self._ready.remove(message)
            if self._early(*message.own):
                self._arrive(message)
                message.begun = message.updated = True

    @contextmanager
    def update_early(self, update: Callable[[int, int], bool]) -> Iterator[None]:
        """Within, ``update(begin, end)`` is called of messages that are complete, between two layers of the last
        backward pass of a step, once for each, and tells whether it has updated them; not before what they have lent
        is read.

        Where `read_at_the_end`.
        """
        self._early = update
        try:
            yield
        finally:
            self._early = None

    def lend(self, layer: str, value: Any, reader: Any) -> Any:
        """See `LayerParams.lend`. A ring cannot wait with an update: what is lent is a copy."""
        if self.slots:
            kept = self.ops.empty(value.shape, value.dtype)
            self.ops.copy_into(kept, value)
            return kept
        if self._early and layer in self._message_of:
            self._message_of[layer].readers.append(ref(reader))
        return value

    @property
    def updating(self) -> bool:
        """Whether part of the present step's update is done."""
        return not self._abandoned and any(message.begun for message in self.messages)

    def abandon(self, *, started: bool = True) -> None:
        """A backward pass failed half-way: no update may use its gradients, and the next pass starts afresh.

        Args:
            started: False when its messages never were (the pass was captured in a graph that will not run).
        """
        self._abandoned = True
        if not started:
            self._written.clear()
            for message in self.messages:
                message.work = None

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Within, it is decided whether ``grad``'s content beside gradients will be written from outside: those of a
        failed pass are gone then, and still there where this fails."""
        written, self._written = self._written, set()
        try:
            yield
        except BaseException:
            self._written = written
            raise

    def finished(self) -> Iterator[Message]:
        """The messages in the order they were started, each waited for (on the device's stream, not the host).

        Raises:
            RuntimeError: at once, where gradients are missing.
        """
        left = [message for message in self.messages if self._abandoned or not message.updated]
        for message in left:
            if message.work is None or self._abandoned:
                layers = checks.some(message.layers, 2)
                raise checks.order(f"message of {layers}", "update before backward", "call model.backward() first")
        return self._arriving(left)

    def _arriving(self, left: Sequence[Message]) -> Iterator[Message]:
        self._written.clear()  # once used, gradients are not added to
        for message in left:
            self._arrive(message)
            yield message
        for message in self.messages:
            message.begun = message.updated = False
        self._ready.clear()

    def _arrive(self, message: Message) -> None:
        """Wait for a message, on the device's stream."""
        with self.profiler.span(message.name, "wait"):
            message.work.wait()
        message.work = None
        if self.wire is not self.grad and not message.summed:
            begin, end = message.own
            at = self._places.at(begin)
            self.ops.copy_into(self.gradient(begin, end), self.wire[at : at + end - begin])
