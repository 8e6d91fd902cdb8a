"""The passes of PyTorch's layers, each alone, and how long they take.

On a GPU calls are captured in a CUDA graph and replayed, over as many input sets as minidl's own: no time of the host
is in them. Autograd starts a backward kernel on the stream of its forward pass, which must then be the stream that is
captured; so the forward pass that is kept is made anew when calls come from another stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from typing import Any

import numpy as np

from minidl import checks
from minidl import layers as m
from minidl.bench.isolated import Case
from minidl.bench.layers import budget_on
from minidl.bench.torch_twin import cast, from_nhwc, load_state, nn, storage, torch, twin
from minidl.layer import Layer
from minidl.precision import Precision, precision_on
from minidl.profile.timing import Budget, HostTimer, Timing

JOINT = (
    "PyTorch computes all gradients of a normalisation in one call: its time stands at backward_data, "
    "and backward_weight has none"
)
_EMPTY = "CUDA Graph is empty"

Call = Callable[[], Any]


@contextmanager
def arithmetic(precision: Precision, device: str) -> Iterator[None]:
    """TF32 for float32 products as ``precision`` says, and cuDNN's fastest algorithms; as before afterwards."""
    if device == "cpu":
        yield
        return
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = precision.tf32 == 1, precision.tf32 == 1, True
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def separate(module: nn.Module) -> bool:
    """Whether torch computes the gradients of the input and of the weights apart: products are two."""
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.modules.conv._ConvTransposeNd, nn.Linear))


def tensors(found: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, Mapping):
        for value in found.values():
            yield from tensors(value)
    elif isinstance(found, (tuple, list)):
        for value in found:
            yield from tensors(value)


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """``value`` with every tensor in it changed, in the order of `tensors`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(mapped(item, change) for item in value)
    return value


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a new leaf of autograd's graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class Operands:
    """A module and one set of its inputs; the gradients asked for are those of inputs that require one.

    Args:
        dy: gradients of the outputs; default: normal values.
    """

    def __init__(
        self,
        module: nn.Module,
        inputs: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        dy: Sequence[torch.Tensor] | None = None,
    ):
        self.module, self.args, self.options, self.dy = module, tuple(inputs), dict(options or {}), dy
        self.inputs = tuple(t for t in tensors([self.args, self.options]) if t.requires_grad)
        self.parameters = tuple(p for p in module.parameters() if p.requires_grad)
        self._outputs: tuple[torch.Tensor, ...] | None = None
        self._leaves: tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]] = (), ()
        self._stream: Any = None

    def forward(self) -> Any:
        """As in training: what the backward pass needs is kept with the result."""
        with torch.enable_grad():
            return self.module(*self.args, **self.options)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Of a forward pass on the current stream, those that have a gradient."""
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        if self._outputs is None or stream != self._stream:
            self._stream, self._outputs = stream, tuple(y for y in tensors(self._kept_forward()) if y.requires_grad)
            if self.dy is None:
                self.dy = tuple(torch.randn_like(y) for y in self._outputs)
        return self._outputs

    def _kept_forward(self) -> Any:
        """A forward pass from leaves of its own: autograd ties a leaf to the stream that first used it."""
        args, options = mapped([self.args, self.options], _leaf)
        weights = {name: _leaf(p) for name, p in self.module.named_parameters()}
        wanted = [[t for t in tensors(found) if t.requires_grad] for found in ([args, options], weights)]
        self._leaves = tuple(wanted[0]), tuple(wanted[1])
        with torch.enable_grad():
            return torch.func.functional_call(self.module, weights, args, options)

    def gradients(self, *, inputs: bool = False, parameters: bool = False) -> tuple[torch.Tensor | None, ...]:
        """Gradients of the inputs, the parameters or both, through the kept forward pass."""
        outputs = self.outputs()
        wanted = self._leaves[0] * inputs + self._leaves[1] * parameters
        return torch.autograd.grad(outputs, wanted, self.dy, retain_graph=True, allow_unused=True)


# -- the passes of a twin ---------------------------------------------------------------------------------------------


def layer_calls(
    layer: Layer,
    input_shapes: Sequence[tuple[int, ...]],
    precision: str | Precision,
    device: str,
    sets: int,
    *,
    adds: Sequence[bool] = (),
    given: Sequence[tuple[Sequence[np.ndarray], np.ndarray]] | None = None,
) -> dict[str, list[Call]]:
    """What PyTorch does for ``layer``: calls of each pass, one for each of ``sets`` input sets.

    Args:
        layer: not changed; its weights are copied if it has any yet.
        input_shapes: NHWC, batch first.
        device: ``"cpu"`` or ``"cuda"``.
        adds: for each input whether its gradient is added to another (a fan-out), which torch does by itself.
        given: values (inputs, dy) of the sets, NHWC; default: normal ones.

    Returns:
        Lists under "forward" (the output), "backward_data" (a tuple of input gradients) and, with parameters,
        "backward_weight" (a tuple, in the order of the layer's specs). For a normalisation, both gradients are under
        "backward", the input's first: see `JOINT`. Tensors are NCHW, in the storage dtype and channels_last.

    Raises:
        ValueError: for TF32 on the CPU, or shapes that the layer cannot take.
    """
    precision = precision_on(device, precision, "the PyTorch baseline")
    module = twin(layer)
    if layer.ops is not None and (layer.specs or layer.buffer_specs):
        load_state(module, layer.state_dict())
    cast(module, precision, device).train(layer.training)
    shape = layer.output_shape(*input_shapes)
    values = given or [_drawn(input_shapes, shape, device, seed) for seed in range(sets)]
    operands = [_operands(module, x, dy, precision, device) for x, dy in values]
    extra = [x.detach().clone() if add else None for x, add in zip(operands[0].inputs, adds, strict=False)]

    found: dict[str, list[Call]] = {}
    for one in operands:
        for name, call in _passes(layer, one, extra).items():
            found.setdefault(name, []).append(partial(_under, precision, device, call))
    return found


def _under(precision: Precision, device: str, call: Call) -> Any:
    with arithmetic(precision, device):
        return call()


def _drawn(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...], device: str, seed: int) -> Any:
    source = torch.Generator(device).manual_seed(seed)
    *x, dy = (torch.randn(shape, generator=source, device=device) for shape in (*shapes, out))
    return x, dy


def _operands(module: nn.Module, inputs: Sequence[Any], dy: Any, precision: Precision, device: str) -> Operands:
    def tensor(values: Any) -> torch.Tensor:
        if isinstance(values, np.ndarray):
            return from_nhwc(values, device, storage(precision))
        return (values.permute(0, 3, 1, 2) if values.ndim == 4 else values).to(storage(precision))

    return Operands(module, [tensor(x).requires_grad_() for x in inputs], dy=(tensor(dy),))


def _passes(layer: Layer, one: Operands, extra: Sequence[torch.Tensor | None]) -> dict[str, Call]:
    """The calls of one set; what torch has an operation for is called without autograd."""

    def summed(gradients: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        more = zip_longest(gradients, extra)  # parameters and inputs without another reader have none
        return tuple(g if other is None else g + other for g, other in more)

    calls: dict[str, Call] = {"forward": one.forward}
    if isinstance(layer, (m.BatchNorm2d, m.GroupNorm, m.LayerNorm)):
        return calls | {"backward": lambda: summed(one.gradients(inputs=True, parameters=True))}
    special = {m.Conv2d: _convolution, m.ConvTranspose2d: _convolution, m.Linear: _linear,
               m.ReLU: _relu, m.MaxPool2d: _max_pool}.get(type(layer))  # fmt: skip
    data, weight = special(one) if special else (partial(one.gradients, inputs=True), None)
    calls["backward_data"] = lambda: summed(data())
    return calls | ({"backward_weight": weight} if weight else {})


def _convolution(one: Operands) -> tuple[Call, Call]:
    module, x, dy = one.module, one.inputs[0].detach(), one.dy[0]
    bias = [module.out_channels] if module.bias is not None else None
    geometry = (
        module.stride, module.padding, module.dilation, isinstance(module, nn.ConvTranspose2d), module.output_padding,
        module.groups,
    )  # fmt: skip

    def gradients(*mask: bool) -> tuple[torch.Tensor, ...]:
        weight = module.weight.detach()
        found = torch.ops.aten.convolution_backward(dy, x, weight, bias, *geometry, mask)
        return tuple(g for g, asked in zip(found, mask, strict=True) if asked)

    return partial(gradients, True, False, False), partial(gradients, False, True, bias is not None)


def _linear(one: Operands) -> tuple[Call, Call]:
    module, x, dy = one.module, one.inputs[0].detach(), one.dy[0]
    weight = module.weight.detach()
    if module.bias is None:
        return lambda: (dy.mm(weight),), lambda: (dy.t().mm(x),)
    return lambda: (dy.mm(weight),), lambda: (dy.t().mm(x), dy.sum(0))


def _relu(one: Operands) -> tuple[Call, None]:
    y, dy = one.inputs[0].detach().relu(), one.dy[0]
    return lambda: (torch.ops.aten.threshold_backward(dy, y, 0),), None


def _max_pool(one: Operands) -> tuple[Call, None]:
    module, x, dy = one.module, one.inputs[0].detach(), one.dy[0]
    window = (module.kernel_size, module.stride, module.padding, module.dilation, module.ceil_mode)
    index = torch.ops.aten.max_pool2d_with_indices(x, *window)[1]
    return lambda: (torch.ops.aten.max_pool2d_with_indices_backward(dy, x, *window, index),), None


# -- timing -----------------------------------------------------------------------------------------------------------


def time_calls(
    calls: Sequence[Call], budget: Budget | None = None, way: str | None = None, device: str | None = None
) -> Timing:
    """Time per call, over all ``calls`` in turn.

    Args:
        way: see `minidl.profile.timing`. On a GPU "replayed" (default) or "hot", launched by the host; on the CPU
            "cold" (default), of the first call, or "hot". The defaults are the ways of a row's main figure.
        device: ``"cuda"`` or ``"cpu"``; default: that of the tensors that a call gives.

    Raises:
        ValueError: for a way that the device does not know.
        RuntimeError: from torch, when calls cannot be captured.
    """
    device = device or next((t.device.type for t in tensors(calls[0]())), "cpu")
    known, budget = ("replayed", "hot") if device == "cuda" else ("cold", "hot"), budget or Budget()
    way = way or known[0]
    if way not in known:
        raise checks.bad_value("the PyTorch baseline", "way", f"one of {', '.join(known)} on {device}", way)
    if device != "cuda":
        timer = HostTimer()
        return timer.cold(calls[0], budget) if way == "cold" else timer.in_turns([calls], budget)[0]
    if way == "hot":
        return _repeated(lambda: [call() for call in calls], len(calls), budget)
    with captured(calls) as replay:
        return _repeated(replay, len(calls), budget) if replay else Timing((0.0, 0.0))


@contextmanager
def captured(calls: Sequence[Call], side: Any = None) -> Iterator[Call | None]:
    """A function that launches all ``calls`` as one graph on torch's current stream; None where they launch nothing.

    Args:
        side: the stream on which they are captured; default: one of their own.
    """
    side = side or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:  # algorithms are chosen and forward passes kept now
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):  # watchdogs ask for their events
            results = [call() for call in calls]  # kept to the end, so that outputs rotate like inputs
    empty = [w for w in caught if _EMPTY in str(w.message)]
    for warning in caught:
        if warning not in empty:
            warnings.warn(warning.message, warning.category, stacklevel=2)
    yield None if empty else graph.replay  # views only: no kernel was launched
    torch.cuda.synchronize()  # before what the graph writes to is let go
    graph.reset()
    del results


def _repeated(body: Call, calls: int, budget: Budget) -> Timing:
    """Time per call where ``body`` makes ``calls`` of them."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    body()

    def elapsed(repeats: int) -> float:
        start.record()
        for _ in range(repeats):
            body()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    return budget.per_call(elapsed, calls)


def peer_ms(
    case: Case, precision: Precision, device: str, sets: int, budget: Budget | None = None
) -> dict[str, float | None]:
    """Milliseconds of PyTorch by pass, for a layer where it stands: a baseline of `minidl.bench.layers.Options`.

    Of a batch norm, backward_data holds both gradients (backward_weight, where it is the only one asked for).
    """
    budget = budget or budget_on(device)
    calls = layer_calls(case.layer, case.shapes, precision, device, sets, adds=case.adds)
    times: dict[str, float | None] = {}
    for name in [name for name in calls if case.needs_input_grad or name != "backward_data"]:
        ms = time_calls(calls[name], budget).ms
        if name == "backward":
            times |= (
                {"backward_data": ms, "backward_weight": None} if case.needs_input_grad else {"backward_weight": ms}
            )
        else:
            times[name] = ms
    del calls
    if device == "cuda":
        torch.cuda.empty_cache()
    return times
