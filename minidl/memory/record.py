"""A training step walked on shapes alone: which arrays it makes, which kernels touch them, what layers save.

The model runs in a dry run of the CUDA table: the same Python code as on a GPU, with arrays nobody touches, seen by a
watcher (`minidl.memory.watch`). Whatever a later fusion saves or no longer saves shows up by itself.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from minidl import checks
from minidl.cuda.device import DeviceRecord, current_device
from minidl.cuda.launch import dry_run
from minidl.dist.communicator import SOLO
from minidl.dist.simulated import ImaginedCommunicator
from minidl.graph import Graph
from minidl.loss import SoftmaxCrossEntropy
from minidl.memory.recording import Allocation, Place, Recording, Run, mapped
from minidl.memory.trace import Step, Tensor, Trace
from minidl.memory.watch import Memory, NotingStore, Seen, Watcher
from minidl.model import Model
from minidl.optim import SGD
from minidl.precision import Precision
from minidl.profile import PassCost
from minidl.profile.cost import PASSES


def record(
    graph: Graph,
    batch: int,
    *,
    precision: str | Precision = "fp32",
    momentum: float = 0.9,
    gradients: str = "keep",
    ranks: int = 1,
    device: DeviceRecord | None = None,
    **facts: Any,
) -> Trace:
    """The trace of one training step: forward, cross entropy, backward, SGD.

    No GPU and no CuPy are needed; no array is touched, so a batch may be far larger than this machine's memory.

    Args:
        graph: a network built for this call: its layers belong to the walked model afterwards.
        batch: samples.
        precision: as `minidl.Model`.
        momentum: 0 leaves the optimizer without state.
        ranks: that train together, each with ``batch`` samples.
        gradients: ``"keep"`` all of them; ``"ring"``, a few messages' (`minidl.SGD.update_in_backward`);
            ``"momentum"``, none (`minidl.SGD.gradients_in_momentum`).
        device: the imagined GPU, which decides workspaces; default an H200.
        facts: kept in the trace, JSON-able (the model's name, image size, ...).

    Raises:
        ValueError: for a batch below one or an unknown precision.
        RuntimeError: when the graph's layers belong to a model already.
    """
    checks.instance("record", "graph", graph, Graph, "a Graph", "of a model: model.graph.unbound()")
    modes = {"keep": {}, "ring": {"slots": None}, "momentum": {"in_momentum": True}}
    if gradients not in modes:
        raise checks.unknown("gradients", gradients, modes)
    options = {"precision": precision, "momentum": momentum, "ranks": ranks, "device": device, "facts": facts}
    options |= modes[gradients]
    return record_step(graph, batch, **options).trace


def record_step(
    graph: Graph,
    batch: int,
    *,
    precision: str | Precision = "fp32",
    momentum: float = 0.9,
    device: DeviceRecord | None = None,
    facts: Mapping[str, Any] | None = None,
    ranks: int = 1,
    slots: int | None = 0,
    in_momentum: bool = False,
    **options: Any,
) -> Recording:
    """As `record`, with all that an executor needs beside the trace.

    Args:
        ranks: that train together, each with ``batch`` samples.
        slots: of a ring of gradients (`minidl.SGD.update_in_backward`); None: as many as that has by default; 0: all
            are kept.
        in_momentum: gradients are added to the momentum (`minidl.SGD.gradients_in_momentum`).
        options: those of `minidl.Model`, but for ``factors``: limits do not go with them.
    """
    batch = checks.at_least("record", "batch", batch, 1)
    blank(graph)
    watcher = Watcher()
    with dry_run(device, watcher) as log:
        store = NotingStore(watcher)
        comm = ImaginedCommunicator(ranks) if ranks > 1 else SOLO
        services = {"comm": comm, "store": store, "profiler": watcher, "factors": False}  # whose rows no store moves
        model = Model(graph, device="cuda", precision=precision, **services, **options)
        optimizer = SGD(model, 0.1, momentum)
        if slots != 0:
            optimizer.update_in_backward(slots)
        if in_momentum:
            optimizer.gradients_in_momentum()
        loss = SoftmaxCrossEntropy(comm=comm)
        loss.profiler = watcher
        ops, storage = model.ops, model.precision.storage
        x = ops.empty((batch, *graph.nodes[0].shape), storage)
        labels = ops.empty((batch, *graph.output_node.shape[:-1]), np.int32)
        _name_arenas(watcher, model, optimizer)
        before = len(watcher.all)
        logits = model.forward(x)
        totals = loss.forward(logits, labels)
        model.backward(loss.backward(optimizer.loss_scale))
        optimizer.step()
        steps = _steps(watcher, model, loss, optimizer, batch)
        tensors, numbers = _tensors(watcher, watcher.find(x))
        allocations = _allocations(watcher, watcher.all[before:], numbers)
        del logits, totals
    first_gradient = watcher.passes.index(("loss", "backward_data"))
    known = {"batch": batch, "precision": model.precision.name, "device": log.device.name, **(facts or {})}
    trace = Trace(tuple(steps), tuple(tensors), first_gradient, known)
    return Recording(trace, allocations, tuple(watcher.ticks), _runs(watcher, numbers), log.device)


def _allocations(watcher: Watcher, made: list[Memory], numbers: Mapping[int, int]) -> tuple[Allocation, ...]:
    """What the step makes; nobody asks for memory for empty arrays."""
    found = []
    for memory in made:
        end = memory.freed if memory.freed is not None else watcher.now
        stays = memory.freed is None or memory.step < 0
        number = numbers.get(id(memory))
        if memory.nbytes:
            found.append(Allocation(memory.nbytes, memory.step, number, memory.order, end, stays))
    return tuple(found)


def _runs(watcher: Watcher, numbers: Mapping[int, int]) -> dict[int, Run]:
    """The forward passes, with the numbers of the tensors; what lives within one pass only has none.

    In a result an empty array stands for that, as another pass will give it again.
    """

    def told(what: Any, gone: Any = None) -> Any:
        def place(item: Any) -> Any:
            if not isinstance(item, Seen):
                return item
            memory, *rest = item
            return Place(numbers[id(memory)], *rest) if id(memory) in numbers else gone

        return mapped(what, place, Seen)

    return {
        t: Run(layer, told(given), told(saved), told(result, np.empty(0)))
        for t, (layer, given, saved, result) in watcher.runs.items()
    }


def record_model(model: Model, batch: int, momentum: float = 0.9) -> Recording:
    """A step of ``model`` as it is: its modes, ways to hold gradients, number of ranks.

    Args:
        batch: samples of this rank.
    """
    arena, graph = model.arena, model.graph.unbound()
    if model.training:  # but for layers whose statistics are constants
        for layer, own in zip(graph.layers, model.layers, strict=True):
            layer.training = own.training
    return record_step(
        graph, batch, precision=model.precision, momentum=momentum, device=current_device(),
        ranks=model.comm.size, slots=arena.slots, in_momentum=arena.adds, input_grad=model.input_grad,
        frozen=[s.full_name for s in arena.segments if not s.trainable], group_bytes=arena.group_bytes,
        message_dtype="bf16" if arena.wire.dtype != np.float32 else "fp32",
    )  # fmt: skip


def blank(graph: Graph) -> Graph:
    """The same graph, with starting weights of zero: for walks, where drawing them would take seconds."""
    for layer in graph.layers:
        layer.specs = [dataclasses.replace(spec, init=_nothing) for spec in layer.specs]
    return graph


def _nothing(rng: Any, shape: tuple[int, ...]) -> np.ndarray:
    return np.broadcast_to(np.float32(0), shape)


def _name_arenas(watcher: Watcher, model: Model, optimizer: SGD) -> None:
    arena = model.arena
    own = [(s.full_name, s) for s in arena.segments]

    def parts(itemsize: int, trained: bool) -> list[tuple[str, int, int]]:
        return [(n, s.offset * itemsize, s.stop * itemsize) for n, s in own if s.trainable or not trained]

    watcher.divide(arena.master, "weight", parts(4, False))
    if arena.working is not arena.master:
        watcher.divide(arena.working, "working", parts(arena.working.itemsize, False))
    if not arena.adds:
        watcher.divide(arena.grad, "gradient", [("ring", 0, arena.grad.nbytes)] if arena.slots else parts(4, True))
    messages = [(message.name, message.begin * 4, message.end * 4) for message in arena.messages]
    watcher.divide(optimizer.velocity, "momentum", messages)


def _tensors(watcher: Watcher, batch: Memory) -> tuple[list[Tensor], dict[int, int]]:
    """Everything that lives beyond one step, and the numbers of those that the step makes.

    What is made before the first step and never moves comes last.
    """
    tensors, numbers, company = [], {}, 0
    made = Counter()
    for memory in watcher.all:
        if watcher.is_arena(memory) or memory.local:
            continue
        if memory.freed is not None and memory.freed < watcher.ticks[0][0]:
            continue  # gone before the step
        if memory.step < 0 and memory is not batch and not memory.saved:
            company += memory.nbytes
            continue
        if not memory.touches:
            continue  # nobody reads it on the device
        given = memory.step < 0
        touches = tuple(sorted(memory.touches if given else memory.touches | {memory.step}))
        owner = "input" if given else watcher.passes[memory.step][0]
        what = _what(memory, owner, given, watcher)
        name = f"{owner}:{what}"
        made[name] += 1
        if made[name] > 1:
            name = f"{name}.{made[name]}"
        forward = watcher.passes[memory.step][1] == "forward"
        kind = "input" if given else "activation" if forward else "gradient_of_activation"
        savers = tuple(f"{layer}.{item}" for layer, item in memory.saved)
        numbers[id(memory)] = len(tensors)
        reread = memory.reread and not memory.again
        tensors.append(
            Tensor(name, kind, memory.nbytes, touches, bool(savers), given, savers, memory.again, reread=reread)
        )
    tensors += watcher.arena_tensors()
    rest = watcher.arena_bytes - sum(t.bytes for t in tensors if t.resident)
    return [*tensors, Tensor("model:buffers and tables", "buffer", company + rest, (), given=True)], numbers


def _what(memory: Memory, owner: str, given: bool, watcher: Watcher) -> str:
    if given:
        return "x"
    if watcher.passes[memory.step][1] != "forward":
        return "dx"
    own = dict(memory.saved).get(owner)
    return own if own not in (None, "x") else "y"


def _steps(watcher: Watcher, model: Model, loss: SoftmaxCrossEntropy, optimizer: SGD, batch: int) -> list[Step]:
    """The passes with their workspaces and model work; a second span of one pass gets what its operands weigh."""
    itemsize = model.precision.storage.itemsize
    costs: dict[tuple[str, str], PassCost] = {}
    kinds: dict[str, tuple[str, bool]] = {}
    for node, cost in model.graph.costs(batch, itemsize):
        kinds[node.name] = type(node.layer).__name__, any(spec.product for spec in node.layer.specs)
        costs |= {(node.name, pass_name): getattr(cost, pass_name) for pass_name in PASSES}
    cost = loss.cost((batch, *model.output_node.shape), itemsize)
    costs |= {("loss", "forward"): cost.forward, ("loss", "backward_data"): cost.backward_data}
    costs["optimizer", "update"] = optimizer.cost()
    shared = {  # by as many spans: updates, gradients of weights in tiles
        key: count for key, count in Counter(watcher.passes).items() if key[1] in ("update", "backward_weight")
    }
    for key, count in shared.items():
        costs[key] = PassCost(costs[key].flop // count, costs[key].bytes // count)
    read = [0] * len(watcher.passes)
    for memory in watcher.all:
        for t in memory.touches:
            read[t] += memory.nbytes
    steps, seen = [], set()
    for t, (key, workspace) in enumerate(zip(watcher.passes, watcher.workspaces(), strict=True)):
        cost = costs[key]
        if key in seen and key not in shared:
            cost = PassCost(0, read[t])
        seen.add(key)
        kind, matrix = kinds.get(key[0], ("", False))
        steps.append(Step(*key, workspace, cost.flop, cost.bytes, watcher.traffic[t], matrix, kind))
    return steps
