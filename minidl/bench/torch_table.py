"""The table of layers for any torch module: each pass of each module that calls no other, timed alone.

It is what ``minidl bench layers --torch`` shows.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.bench.layers import ISOLATED, budget_on, empty_row, require_ways
from minidl.bench.setup import device_of
from minidl.bench.torch_calls import Operands, arithmetic, mapped, separate, tensors, time_calls
from minidl.bench.torch_twin import cast, from_nhwc, layer_of, nn, storage, torch
from minidl.config import named
from minidl.dist.communicator import SOLO
from minidl.precision import Precision, precision_on
from minidl.profile import ceilings as measured_ceilings
from minidl.profile import roofline
from minidl.profile.cost import Cost, PassCost
from minidl.profile.results import Row, result
from minidl.profile.timing import Budget, Timing, input_sets

CONVENTIONS = (
    "Modules of PyTorch that call no other, each pass alone. FLOP: 2 per multiply-add, whole batch; bytes: the fewest "
    "a pass must move; both as of minidl's layer of the kind, unknown where there is none. Where PyTorch computes all "
    "gradients in one call, its time and work stand at backward_data. A step is a forward pass and all gradients of "
    "parameters, without loss and update."
)
_IMAGE_SIZE, _CHANNELS = 224, 3
_MOST_SETS = 64


@dataclass(frozen=True)
class Executed:
    """One execution of a leaf module: what it was given and gave. Tensors are detached; `asks` says which had a
    gradient to pass on.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    options: dict[str, Any]
    asks: tuple[bool, ...]
    output_shape: list[int] | None


def bench_module(
    module: nn.Module,
    x: Any,
    *,
    precision: str | Precision = "fp32",
    device: str = "cpu",
    case: str | None = None,
    ways: Sequence[str] = ISOLATED,
    budget: Budget | None = None,
    ceilings: Mapping[str, Any] | None = None,
) -> list[Row]:
    """The table of layers for a torch module: rows with arm "torch" for each pass of each leaf, in order of execution.
    A leaf is a module that calls no other.

    A leaf's passes are timed alone, on the inputs it had in the network; equal leaves are measured once. Where torch
    computes all gradients in one call (anything but convolutions and linear layers), the time stands at
    backward_data, and the row of backward_weight is "in" this layer. FLOP and bytes are those of minidl's layer of
    the same kind, None where there is none. What happens between leaves (sums, functional calls) is in the row
    "unaccounted": the step less all leaves, below 0 where they are faster together. A step is a forward pass and the
    gradients of all parameters, without loss and update.

    Args:
        module: not changed: a copy of it is measured, in the mode (training or evaluation) it is in.
        x: the input: an NHWC array, a tensor as the module takes it, or a tuple of tensors.
        precision: storage of weights and activations and use of TF32; batch norms keep float32 parameters.
        case: the rows' case; default: the module's class and the input's shape.
        budget: of each timing; default: `minidl.bench.layers.budget_on` the device.
        ways: of "replayed", "cold" and "hot"; those that torch cannot do on the device are left out.
        ceilings: of this machine, for floors and shares of the roof.

    Raises:
        ValueError: for TF32 on the CPU; for ways of which torch can do none on the device.
    """
    precision = precision_on(device, precision, "bench")
    require_ways(ways, ("cold" if device == "cpu" else "replayed", "hot"))
    network = cast(copy.deepcopy(module), precision, device)
    inputs = _inputs(x, precision, device)
    title = case or f"{type(module).__name__}/{'+'.join('x'.join(map(str, t.shape)) for t in tensors(inputs))}"
    bench = _Bench(title, precision, device, tuple(ways), budget or budget_on(device), ceilings)
    with arithmetic(precision, device):
        executed = _executions(network, inputs)
        if [one.module for one in executed] == [network]:
            # A leaf by itself stands for a layer inside some network: its input has a gradient.
            _keep_inputs(network)
            inputs = mapped(inputs, lambda tensor: tensor.requires_grad_(tensor.is_floating_point()))
            executed = _executions(network, inputs)
        step = bench.step(Operands(network, inputs))
        _keep_inputs(network)
        rows, known = [], {}
        for index, one in enumerate(executed):
            key = _work_of(one) or index
            if key not in known:
                known[key] = bench.leaf(one)
            for row in known[key]:
                place = {"layer": one.name, "index": index, "in": one.name if row["in"] else None}
                rows.append({**row, **place, "timings": dict(row["timings"]), "peers": {}})
    return rows + bench.closing(rows, step)


def _inputs(x: Any, precision: Precision, device: str) -> tuple[Any, ...]:
    def placed(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return from_nhwc(value, device, storage(precision))
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().to(device, storage(precision) if value.is_floating_point() else value.dtype)
        return value.contiguous(memory_format=torch.channels_last) if value.ndim == 4 else value

    return tuple(map(placed, x)) if isinstance(x, tuple) else (placed(x),)


def _keep_inputs(network: nn.Module) -> None:
    """Let nothing work in place: alone, a module's input is a leaf of autograd's graph, not to be overwritten."""
    for part in network.modules():
        if getattr(part, "inplace", False):
            part.inplace = False


def _executions(network: nn.Module, inputs: tuple[Any, ...]) -> list[Executed]:
    """All executions of leaf modules in a forward pass, in order. A leaf is one that calls no other module."""
    found: list[Executed] = []
    open_calls: list[bool] = []  # of the modules being executed: whether they have called another

    def begin(module: nn.Module, args: tuple[Any, ...]) -> None:
        open_calls[-1:] = [True] if open_calls else []
        open_calls.append(False)

    def end(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            if open_calls.pop():
                return
            asks = tuple(t.requires_grad for t in tensors([args, options]))
            first = next(tensors(output), None)
            shape = None if first is None else list(first.shape)
            found.append(Executed(name, module, _detached(args), _detached(options), asks, shape))

        return hook

    hooks: list[Any] = []
    for name, part in network.named_modules():
        hooks.append(part.register_forward_pre_hook(begin))
        hooks.append(part.register_forward_hook(end(name or type(part).__name__), with_kwargs=True))
    try:
        with torch.enable_grad():
            network(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _work_of(one: Executed) -> tuple[Any, ...] | None:
    """Equal for executions that do the same work; None for a module whose text does not tell all of it."""
    if layer_of(one.module) is None:
        return None
    given = tuple((tuple(t.shape), t.dtype, t.stride()) for t in tensors([one.args, one.options]))
    return type(one.module), repr(one.module), one.module.training, given, one.asks


def _detached(value: Any) -> Any:
    return mapped(value, lambda tensor: tensor.detach())


@dataclass(frozen=True)
class _Bench:
    """Makes the rows of one module."""

    title: str
    precision: Precision
    device: str
    ways: tuple[str, ...]
    budget: Budget
    ceilings: Mapping[str, Any] | None

    def row(self, layer: str, pass_name: str) -> Row:
        return empty_row(self.title, layer, pass_name, self.precision, self.device, 1) | {"arm": "torch"}

    # -- one leaf -----------------------------------------------------------------------------------------------------

    def leaf(self, one: Executed) -> list[Row]:
        """The rows of one execution."""
        shapes, out, cost = _known_cost(one, self.precision.storage.itemsize)
        operands = [self._operands(one) for _ in range(self._sets(one))]
        facts = {
            "type": type(one.module).__name__, "input_shapes": shapes, "output_shape": out,
            "parameters": sum(p.numel() for p in one.module.parameters()),
        }  # fmt: skip
        rows = []
        for name, calls in _leaf_calls(operands).items():
            row = self.row(one.name, name) | facts
            if calls is None:
                rows.append(row | {"ms": 0.0, "spread": 0.0, "in": one.name})
                continue
            joint = name == "backward_data" and not separate(one.module) and bool(operands[0].parameters)
            if cost is not None:
                work: PassCost = getattr(cost, name) + (cost.backward_weight if joint else PassCost())
                row |= {"flop": work.flop, "bytes": work.bytes}
            self._time(row, calls)
            roofline.fill(row, self.ceilings, matrix=separate(one.module))
            rows.append(row)
        return rows

    def _operands(self, one: Executed) -> Operands:
        asks = iter(one.asks)
        args, options = mapped([one.args, one.options], lambda t: t.clone().requires_grad_(next(asks)))
        return Operands(one.module, args, options)

    def _sets(self, one: Executed) -> int:
        """Input sets to rotate among: more than the cache holds, on a GPU."""
        if self.device == "cpu":
            return 1
        size = sum(t.numel() * t.element_size() for t in tensors([one.args, one.options]))
        output = prod(one.output_shape or []) * self.precision.storage.itemsize
        fitting = max(1, torch.cuda.mem_get_info()[0] // (6 * max(size + output, 1)))
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        return min(input_sets(size + output, cache), _MOST_SETS, fitting)

    def _time(self, row: Row, calls: Sequence[Callable[[], Any]]) -> None:
        """Enter the timings; the first is the main figure. A call that cannot be captured has none "replayed"."""
        for way in self.ways:
            timing = self._timed(calls, way)
            if timing is None:
                continue
            row["timings"][way] = timing.record()
            if row["timing"] is None:
                row |= {"timing": way, "ms": timing.ms, "spread": timing.spread}

    def _timed(self, calls: Sequence[Callable[[], Any]], way: str) -> Timing | None:
        if way == ("replayed" if self.device == "cpu" else "cold"):
            return None
        if way != "replayed":
            return time_calls(calls, self.budget, way, self.device)
        try:
            return time_calls(calls, self.budget, way, self.device)
        except RuntimeError:  # it waits for the device or draws on the host
            torch.cuda.synchronize()
            return None

    # -- the whole ----------------------------------------------------------------------------------------------------

    def step(self, whole: Operands) -> dict[str, Timing | None]:
        """The timings of a step: launched by the host, and as a CUDA graph where it can be one."""

        def step() -> Any:
            outputs = [y for y in tensors(whole.forward()) if y.requires_grad]
            if not outputs:
                return outputs
            wanted, ones = (*whole.inputs, *whole.parameters), [torch.ones_like(y) for y in outputs]
            return torch.autograd.grad(outputs, wanted, ones, allow_unused=True)

        captured = self._timed([step], "replayed")
        return {"step": time_calls([step], self.budget, "hot", self.device), "graph_step": captured}

    def closing(self, rows: Sequence[Row], step: Mapping[str, Timing | None]) -> list[Row]:
        """The rows "unaccounted" and "step"."""
        whole, rest = self.row("step", "step"), self.row("step", "unaccounted")
        for way, timing in step.items():
            whole["timings"][way] = timing.record() if timing else None
        way = "graph_step" if step["graph_step"] else "step"
        main = step[way]
        whole |= {"timing": way, "ms": main.ms, "spread": main.spread}
        work = [row for row in rows if row["in"] is None]
        if all(row["flop"] is not None for row in work):
            whole |= {"flop": sum(row["flop"] for row in work), "bytes": sum(row["bytes"] for row in work)}
            roofline.fill(whole, None, matrix=True)
        rest |= {"timing": way, "ms": main.ms - sum(map(_in_a_step, work))}
        return [rest, whole]


def _in_a_step(row: Row) -> float:
    """The time of a leaf that stands for its time within a step, whose operands were just written."""
    for way in ("replayed", "hot"):
        if row["timings"][way] is not None:
            return row["timings"][way]["ms"]
    return row["ms"]


def _leaf_calls(operands: Sequence[Operands]) -> dict[str, list[Callable[[], Any]] | None]:
    """The calls of each pass of a leaf; None for a pass that another one includes."""
    first = operands[0]
    calls: dict[str, list[Callable[[], Any]] | None] = {"forward": [one.forward for one in operands]}
    if not first.outputs():
        return calls

    def asking(**wanted: bool) -> list[Callable[[], Any]]:
        return [partial(one.gradients, **wanted) for one in operands]

    if first.inputs and first.parameters and not separate(first.module):
        return calls | {"backward_data": asking(inputs=True, parameters=True), "backward_weight": None}
    if first.inputs:
        calls["backward_data"] = asking(inputs=True)
    if first.parameters:
        calls["backward_weight"] = asking(parameters=True)
    return calls


def _known_cost(one: Executed, itemsize: int) -> tuple[list[list[int]], list[int] | None, Cost | None]:
    """(input shapes, output shape, least work) of a leaf, images as NHWC; shapes as torch has them and no work known
    where minidl has no such layer.
    """
    shapes = [list(t.shape) for t in tensors([one.args, one.options])]
    layer = layer_of(one.module)
    if layer is None or len(shapes) != (layer.num_inputs or len(shapes)):
        return shapes, one.output_shape, None
    layer.training = one.module.training
    if isinstance(one.module, nn.Linear):
        rows = prod(shapes[0][:-1]), shapes[0][-1]
        return shapes, one.output_shape, layer.cost(rows, itemsize=itemsize)
    images, out = [_nhwc(shape) for shape in shapes], _nhwc(one.output_shape or [])
    try:
        return images, out, layer.cost(*map(tuple, images), itemsize=itemsize)
    except ValueError:  # a shape that torch takes and minidl does not: no batch, or one axis
        return shapes, one.output_shape, None


def _nhwc(shape: list[int]) -> list[int]:
    return [shape[0], *shape[2:], shape[1]] if len(shape) == 4 else shape


# -- the command -------------------------------------------------------------------------------------------------------


def bench_command(a: argparse.Namespace) -> dict[str, Any]:
    """The content of a result file for ``minidl bench layers --torch``, from that command's options.

    The module is given ``a.batch`` images of three channels; without ``a.image_size``, of 224 x 224 pixels.

    Raises:
        ValueError, TypeError: as `load`; for a size, batch or number of samples that cannot be.
    """
    size = checks.at_least("", "--image-size", _IMAGE_SIZE if a.image_size is None else a.image_size, 1)
    batch = checks.at_least("", "--batch", a.batch, 1)
    samples = checks.at_least("", "--samples", a.samples, 2)
    module, device = load(a.torch), device_of(a.device, SOLO)
    known = measured_ceilings.find(backend.get_ops(device), remeasure=a.remeasure)
    name = a.torch.partition(":")[2]
    images = torch.randn((batch, _CHANNELS, size, size), generator=torch.Generator().manual_seed(0))
    rows = bench_module(
        module, images, precision=a.precision, device=device, case=f"torch {name}/{size}x{size}/b{batch}", ways=a.ways,
        budget=budget_on(device, samples), ceilings=known,
    )  # fmt: skip
    setup = {
        "model": a.torch, "batch": batch, "precision": a.precision, "device": device, "ranks": 1, "image_size": size,
        "classes": None, "torch": torch.__version__,
    }  # fmt: skip
    whole = rows[-1]["timings"]
    step = {"eager": whole["step"], "graph": whole["graph_step"], "compute_only": None, "exposed_ms": 0.0}
    step["images_per_s"] = batch / rows[-1]["ms"] * 1e3
    nothing: dict[str, list] = {"warnings": [], "spans": [], "memory": []}
    return result("layers", rows, setup=setup, ceilings=known, conventions=CONVENTIONS, step=step, **nothing)


def load(spec: str) -> nn.Module:
    """The module that ``spec`` names (`minidl.config.named`), or that the function of this name returns.

    Raises:
        ValueError: from `named`.
        TypeError: when no torch.nn.Module is found there.
    """
    found = named("--torch", spec)
    if callable(found) and not isinstance(found, nn.Module):
        try:
            found = found()
        except TypeError as error:
            remedy = "name a function that takes no arguments"
            raise TypeError(f"--torch {spec}: calling it failed ({error}); {remedy}") from error
    if not isinstance(found, nn.Module):
        raise checks.bad_dtype(
            "--torch", spec, "a torch.nn.Module, or a function that returns one", checks.describe(found)
        )
    return found
