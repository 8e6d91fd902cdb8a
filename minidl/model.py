"""Model: a graph with its parameters on a device. The one place where layers are called.

Forward, nodes run in order, and an activation is dropped after its last reader (what backward needs is in the store).
Backward, they run in reverse; where several layers read one value their gradients are summed, each visited layer
getting the sum so far to add in its own kernel if it can.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from minidl import backend, checkpoint, checks
from minidl.dist.agree import require_same, require_same_arrays
from minidl.dist.communicator import Communicator, by_kernels
from minidl.dist.world import given
from minidl.graph import Graph, Node
from minidl.layer import Layer
from minidl.layers.join import leave_strided, leave_sums, share_buffers, sum_for_biases
from minidl.layers.pool2d import pool_beside
from minidl.messages.factors import most_rows
from minidl.messages.neighbourhood import ABSORBED, FEW, Departures, Neighbour, departures
from minidl.params import Arena
from minidl.precision import Precision, float32, precision_on
from minidl.precision import precision as parse_precision
from minidl.profile import Profiler, grouping, tuned
from minidl.profile.spans import NULL_PROFILER
from minidl.random import RandomCounter
from minidl.segments import by_name, flattened
from minidl.store import TensorStore
from minidl.summary import Summary, summarize
from minidl.value import MaskedGradient, Value, finished, materialize


class Model(checks.Told):
    """A network ready to train.

    Args:
        graph: the network; its layers are bound to this model and to no other.
        device: ``"cpu"`` or ``"cuda"``.
        precision: ``"fp32"``, ``"tf32"``, ``"tf32x3"`` (GPU), ``"bf16"`` or ``"fp16"``.
        comm: communicator over the ranks that train this model together; may be left out where there is one.
        seed: starting weights and dropout are functions of it.
        frozen: patterns of parameter names that are not trained (``"layer1.*"``).
        store: where tensors saved for backward live.
        profiler: sees every pass of every layer.
        group_bytes: neighbouring layers share a gradient message until it holds this many bytes; 0: one per layer.
            None: between the GPUs of a host that see each other's memory 25 MiB; else what `minidl tune comm` measured
            on this machine, or 4 MiB, on GPUs 25 MiB.
        factors: on several GPUs, the rows whose product a large fully connected layer's gradient is may travel in its
            place, where they take less (`minidl.messages.factors`); sums then differ in their last bits. They are not
            used with micro-batches, gradients in the momentum, gradients looked at for NaN, or a limit of memory.
        message_dtype: of gradients on their way: ``"fp32"``, or ``"bf16"``: half the bytes, with the error that
            `minidl.params.Arena.connect` states.
        input_grad: `backward` returns the gradient of the input, too.

    Raises:
        ValueError: unknown names, a plan or starting weights that differ between ranks.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: str = "cpu",
        precision: str | Precision = "fp32",
        comm: Communicator | None = None,
        seed: int = 0,
        frozen: Sequence[str] = (),
        store: TensorStore | None = None,
        profiler: Profiler = NULL_PROFILER,
        group_bytes: int | None = None,
        factors: bool = True,
        message_dtype: str = "fp32",
        input_grad: bool = False,
    ):
        checks.instance("model", "graph", graph, Graph, "a Graph", "models.build(name, ...) makes one")
        if checks.at_least("model", "seed", seed, 0) >= 1 << 64:
            raise checks.bad_value("model", "seed", "below 2**64", seed)
        self.graph = graph
        self.output_node = graph.output_node
        self.ops = backend.open_device(device)
        self.precision = precision_on(device, precision, "model")
        self.comm = comm = given(comm, "model")
        self._kernels = tuned.settle(self.ops, comm)
        self.store = store or TensorStore()
        self.observer = profiler
        self.profiler = profiler = self.store.watch(profiler)
        self.random = RandomCounter(seed)
        taken = [layer.name for layer in graph.layers if layer.ops is not None]
        if taken:
            text = f"layers {taken[:3]} belong to another model, or were used alone"
            raise checks.order("model", text, "build the graph again")
        self.arena = Arena(
            self.ops, [(layer.name, layer.specs) for layer in graph.layers], self.precision, seed=seed, frozen=frozen
        )
        services = {"comm": comm, "store": self.store, "profiler": profiler, "random": self.random}
        for layer in graph.layers:
            layer.bind(self.arena, self.ops, **services)
        self._places = share_buffers(graph)
        leave_strided(graph)
        leave_sums(graph)
        pool_beside(graph)
        sum_for_biases(graph)
        if message_dtype not in ("fp32", "bf16"):
            raise checks.unknown("message_dtype", message_dtype, ("fp32", "bf16"))
        if group_bytes is None:
            group_bytes = grouping.group_bytes(self.ops, comm)
        sent = parse_precision(message_dtype).storage
        self.arena.factored = self._factored(sent.itemsize) if factors and comm.size > 1 else {}
        if by_kernels(comm):
            self.arena.departures = self.departures(FEW)
        self.arena.connect(comm, group_bytes, sent)
        self.arena.profiler = profiler
        self._readers = graph.consumers()
        self.input_grad = input_grad
        needs = self._needs_grad = [True] * len(graph.nodes) if input_grad else _needs_grad(graph)
        self._needs_input_grad = [any(needs[i] for i in node.inputs) for node in graph.nodes]
        self._modes = [(attrgetter(*layer.modes), layer) for layer in graph.layers]
        self._shapes: tuple[int, ...] | None = None
        self.training = True
        self.fusion: Any = None  # the plan that `minidl.fusion.fuse` set last
        self._agree()
        self.arena.settle()

    def _factored(self, sent_itemsize: int) -> dict[str, int]:
        """Layers that may send factors, and up to how many rows over all ranks."""
        itemsize, found = self.precision.storage.itemsize, {}
        for layer in self.layers:
            if layer.factored and layer.params.trainable("weight"):
                outputs, inputs = layer.params["weight"].shape
                found[layer.name] = most_rows(inputs, outputs, itemsize, sent_itemsize, self.ops.name)
        return {name: rows for name, rows in found.items() if rows}

    def neighbours(self) -> list[Neighbour]:
        """The layers in the order of the backward pass, each with the gradients that it sends and its work."""
        sent = Counter()
        for segment in self.arena.segments:
            sent[segment.layer] += 4 * (segment.stop - segment.offset) * segment.trainable
        found = []
        for node, cost in reversed([*self.graph.costs(FEW, self.precision.storage.itemsize)]):
            alone = type(node.layer).__name__ not in ABSORBED
            work = cost.backward_weight + cost.backward_data
            found.append(Neighbour(node.layer.name, sent[node.layer.name], work.flop, work.bytes, alone))
        return found

    def departures(self, samples: float) -> Departures:
        """When gradient messages that may wait start, with so many samples on each rank."""
        itemsize = self.precision.storage.itemsize
        return partial(departures, self.neighbours(), itemsize=itemsize, samples=samples)

    def expect(self, samples: int) -> None:
        """Let messages start as suits steps of so many samples on each rank: no bit changes. A collective.

        Until then they start as suits 32. Between the GPUs of a host a message may wait for a pass that is long enough
        to bear it, see `minidl.messages.neighbourhood.departures`. Where ranks say different numbers the least counts.
        """
        if by_kernels(self.comm):
            self.arena.wait_by(self.departures(min(self.comm.share(samples))))

    def _agree(self) -> None:
        """Refuse to train when ranks disagree about the plan or the starting weights."""
        plan = [segment.describe() for segment in self.arena.segments]
        plan += [f"{layer.name} {layer!r}" for layer in self.layers]
        plan += [f"message {m.begin}..{m.end} {m.before and f'before {m.before}'}" for m in self.arena.messages]
        plan += [f"factors of {name} up to {rows} rows" for name, rows in self.arena.factored.items()]
        plan.append(f"tuned kernels {self._kernels}")
        require_same(
            self.comm, "parameter plan", [f"precision {self.precision.name}, messages {self.arena.wire.dtype}", *plan]
        )
        if self.comm.size > 1:
            weights = self.ops.to_host(self.arena.master)
            held = {s.full_name: weights[s.offset : s.offset + s.size] for s in self.arena.segments}
            remedy = "give all ranks one seed, or one checkpoint"
            require_same_arrays(self.comm, "starting weights", held, remedy)

    # -- the two passes ---------------------------------------------------------------------------------------------

    def __call__(self, x: Any, **options: Any) -> Any:
        """`forward`."""
        return self.forward(x, **options)

    def forward(self, x: Any, *, grad: bool | None = None, first_sample: int = 0, new_step: bool = True) -> Any:
        """Run the network.

        Args:
            x: (N, H, W, C) or (N, C) array of the model's device and storage dtype.
            grad: keep what backward needs; default: in training mode.
            first_sample: global index of ``x[0]``, so that dropout does not depend on how a batch is sharded.
            new_step: False for the micro-batches of a step but the first.

        Returns:
            The output array.
        """
        grad = self.training if grad is None else grad
        self._check_input(x)
        if self.training and grad:
            self.random.advance(first_sample, new_step)
        self.store.clear()
        values: list[Value | None] = [None] * len(self.graph.nodes)
        left = [len(readers) for readers in self._readers]
        for node in self.graph.nodes:
            keep = grad and self._needs_grad[node.index]
            y = Value(x) if node.layer is None else self._run(node, values, keep)
            if y.given is not None:
                values[node.inputs[0]], y = y.given, replace(y, given=None)
            values[node.index] = y
            for i in node.inputs:
                left[i] -= 1
                if left[i] == 0:
                    values[i] = None
        return self._filled(self.output_node.index, values[self.output_node.index]).array

    def _run(self, node: Node, values: list[Value | None], grad: bool) -> Value:
        """One layer on its inputs, which are filled in first unless the layer takes them unfinished."""
        layer = node.layer
        if node.index in self._places:
            values = self._with_place(node, values)
        if layer.accepts_unfinished:
            y = layer.forward(*(values[i] for i in node.inputs), grad=grad)
        else:
            for i in node.inputs:
                values[i] = self._filled(i, values[i])
            y = layer.forward(*(values[i].array for i in node.inputs), grad=grad)
        return y if isinstance(y, Value) else Value(y)

    def _filled(self, index: int, value: Value) -> Value:
        """``value`` of a node with its array; where that is owed, making it is work of the node's forward pass."""
        if value.array is not None:
            return value
        with self.profiler.span(self.graph.nodes[index].name, "forward"):
            return materialize(self.ops, value)

    def _with_place(self, node: Node, values: list[Value | None]) -> list[Value | None]:
        """``values`` with a note for a convolution where its output is to lie, if there is a buffer."""
        owner, first = self._places[node.index]
        buffer, (source,) = values[owner].buffer, node.inputs
        if buffer is None:
            return values
        noted = replace(values[source], place=buffer[..., first : first + node.shape[-1]])
        return [*values[:source], noted, *values[source + 1 :]]

    def backward(self, dy: Any, *, accumulate: bool = False, send: bool = True) -> Any:
        """Back through the last forward pass; gradients land in the arena and their messages start.

        Args:
            dy: gradient of the output.
            accumulate, send: see `minidl.params.Arena.begin_step`.

        Returns:
            The gradient of the input with ``input_grad``, else None.
        """
        self.arena.begin_step(accumulate=accumulate, send=send)
        try:
            if not accumulate:
                self.arena.prepare()
            return self._walk_back(dy)
        except BaseException:
            self.arena.abandon()
            raise

    def abandon(self) -> None:
        """Forget a step whose capture in a graph failed half-way; nothing of it will run."""
        self.store.clear()
        self.arena.abandon(started=False)

    def _walk_back(self, dy: Any) -> Any:
        """The layers in reverse, each on the sum of its readers' gradients; the gradient that reaches the input."""
        grads: list[Any] = [None] * len(self.graph.nodes)
        grads[self.output_node.index] = dy
        for node in reversed(self.graph.nodes):
            if node.layer is None or not self._needs_grad[node.index]:
                continue
            layer, dy = node.layer, grads[node.index]
            grads[node.index] = None
            if not layer.accepts_masked:
                dy = self._finished(node, dy)
            layer.needs_input_grad = self._needs_input_grad[node.index]
            self.arena.reach(layer.name)
            single = node.inputs[0] if len(node.inputs) == 1 else None
            add = grads[single] if single is not None else None
            if not isinstance(add, layer.accepts_owed):
                add = self._finished(node, add)
            dx = layer.backward(dy, add=add)
            self.arena.make_room()
            if not layer.needs_input_grad:
                continue
            if single is not None:
                grads[single] = dx
            else:
                self._spread(node, dx, grads)
        self.arena.reach(None)
        self.ops.rejoin()
        return self._finished(self.graph.nodes[1], grads[0]) if self.input_grad else None

    def _finished(self, node: Node, gradient: Any) -> Any:
        """A gradient as an array; where something is owed, doing it is work of the backward pass of ``node``."""
        if not isinstance(gradient, MaskedGradient) or gradient.array is not None:
            return finished(self.ops, gradient)
        with self.profiler.span(node.name, "backward_data"):
            return finished(self.ops, gradient)

    def _spread(self, node: Node, dx: Sequence[Any], grads: list[Any]) -> None:
        """Add the gradients of a join's inputs to what other readers contributed."""
        for i, part in zip(node.inputs, dx, strict=True):
            if self._needs_grad[i]:
                if grads[i] is None:
                    grads[i] = part
                    continue
                with self.profiler.span(node.name, "backward_data"):
                    grads[i] = self.ops.add(finished(self.ops, grads[i]), finished(self.ops, part))

    def _check_input(self, x: Any) -> None:
        if backend.ops_of(x) is not self.ops:
            raise checks.bad_dtype(
                "model", "x", f"a {self.ops.name} array", checks.describe(x), "copy it with model.ops.from_host(x)"
            )
        if x.dtype != self.precision.storage:
            remedy = "convert it with model.ops.cast(x, model.precision.storage)"
            raise checks.bad_dtype("model", "x", self.precision.storage, x.dtype, remedy)
        # One of several ranks may run out of samples, one alone may not.
        if x.shape[:1] == (0,) and self.comm.size == 1:
            raise checks.bad_shape("model", "x", "(N, ...) with at least one sample", x.shape)
        if x.shape != self._shapes:
            self.graph.shapes(x.shape)
            self._shapes = x.shape

    def modes(self) -> tuple[Any, ...]:
        """What decides, beside shapes, on the work of a step: equal values, equal work."""
        folded = any(layer.folded is not None for _, layer in self._modes)
        return self.arena.connected, self.store, folded, *(read(layer) for read, layer in self._modes)

    # -- modes and state --------------------------------------------------------------------------------------------

    @property
    def layers(self) -> list[Layer]:
        """All layers in execution order."""
        return self.graph.layers

    def train(self, mode: bool = True) -> Model:
        """Training mode: batch statistics, dropout; folded layers are unfolded."""
        self.training = mode
        for layer in self.layers:
            layer.training = mode
        if mode:
            self.unfold()
        return self

    def unfold(self) -> None:
        """What `minidl.fusion.fold` computed is no longer that of the parameters."""
        for layer in self.layers:
            layer.folded = None

    def observe(self, profiler: Profiler) -> None:
        """Let ``profiler`` see every pass and message from now on."""
        self.observer = profiler
        profiler = self.profiler = self.arena.profiler = self.store.watch(profiler)
        for layer in self.layers:
            layer.profiler = profiler

    def eval(self) -> Model:
        """Evaluation mode: running statistics, no dropout; forward saves nothing unless asked."""
        return self.train(False)

    def average_buffers(self, trained: bool = True) -> None:
        """Replace running statistics by their mean over the ranks, which see different shards.

        Args:
            trained: whether this rank has had samples since the last time; of ranks that had none, where batches are
                smaller than ranks are many, they are left out.
        """
        if self.comm.size == 1:
            return
        count = sum(self.comm.share(trained, "samples since the last mean")) or self.comm.size
        for layer in self.layers:
            for array in layer.buffers.values():
                if count < self.comm.size and not trained:
                    array.fill(0)
                self.comm.all_reduce(array)
                self.ops.copy_into(array, array / np.float32(count))

    def state_dict(self) -> dict[str, np.ndarray]:
        """Parameters (float32) and buffers by full name, as host copies."""
        state = by_name(self.ops.to_host(self.arena.master), self.arena.segments)
        for layer in self.layers:
            state |= {f"{layer.name}.{name}": self.ops.to_host(array) for name, array in layer.buffers.items()}
        return state

    def load_state_dict(self, state: Mapping[str, np.ndarray], strict: bool = True) -> list[str]:
        """Overwrite all parameters and buffers; the names of those that were left as they are.

        Args:
            strict: refuse a state that does not fit; else take what has a name of this model, and the shape.

        Raises:
            ValueError: listing what is missing, unexpected, or of another shape or dtype.
            TypeError: no mapping of names to arrays.
        """
        checkpoint.require_mapping(state, "state")
        left = []
        if not strict:
            own = self.state_dict()
            left = [name for name in own if name not in state or np.shape(state[name]) != own[name].shape]
            state = {name: own[name] if name in left else state[name] for name in own}
        buffers = {f"{layer.name}.{name}": array for layer in self.layers for name, array in layer.buffers.items()}
        parameters = {s.full_name: (s.shape, float32) for s in self.arena.segments}
        remedy = "strict=False loads what fits; interchange.import_weights reads states of PyTorch"
        checkpoint.match(parameters | buffers, state, "state", remedy)
        self.unfold()
        weights = flattened(state, self.arena.segments, self.arena.master.size)
        self.ops.copy_into(self.arena.master, self.ops.from_host(weights))
        self.arena.refresh_working()
        for name, array in buffers.items():
            self.ops.copy_into(array, self.ops.from_host(state[name]))
        return left

    def summary(self, batch: int = 1) -> Summary:
        """Shapes, parameters, FLOP and saved bytes of every layer for ``batch`` samples; ``print(model.summary())``.

        Runs one forward pass on zeros to see what is saved; nothing of the model changes.
        """
        return summarize(self, batch)

    @property
    def num_parameters(self) -> int:
        """Number of trained and frozen parameters."""
        return sum(s.size for s in self.arena.segments)


def _needs_grad(graph: Graph) -> list[bool]:
    """Which nodes a gradient must reach: those with something trained at or below them."""
    needs = [False] * len(graph.nodes)
    for node in graph.nodes:
        trained = node.layer is not None and any(node.layer.params.trainable(s.name) for s in node.layer.specs)
        needs[node.index] = trained or any(needs[i] for i in node.inputs)
    return needs
