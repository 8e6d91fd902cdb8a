"""Layer: explicit forward and backward, its own parameters, and four services that default to doing nothing.

A layer's author writes `output_shape`, `compute`, `backward_weight` and `backward_data`. The base class gives `forward`
and `backward`, which check at the door, keep the order *weight gradient → message → input gradient* (so that a layer's
own input gradient hides its all-reduce) and open the profiler's spans.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Sequence
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from minidl import backend, checkpoint, checks
from minidl.dist.communicator import SOLO, Communicator, Work
from minidl.initializers import Initializer
from minidl.params import Arena
from minidl.precision import Precision, bfloat16, float16, float32, precision_on
from minidl.precision import precision as parse_precision
from minidl.profile import Cost, PassCost, Profiler
from minidl.profile.spans import NULL_PROFILER
from minidl.random import RandomCounter
from minidl.segments import Gradient, InParams, NoParams, ParameterSpec
from minidl.shapes import Pair
from minidl.store import TensorStore
from minidl.value import MaskedGradient, Value, finished

_STORAGE = (float32, bfloat16, float16)
_NO_PARAMS = NoParams()


class Layer(checks.Told):
    """Base class of all layers.

    Args:
        name: what a graph calls it, behind the names of the scopes around it; default: the class's, in small letters.

    Attributes:
        name: dotted path in its graph ("layer1.0.conv1"), or the class name while it stands alone.
        params: named views of the parameters (see `minidl.segments.LayerParams`).
        buffers: arrays kept but not trained, float32.
        training: batch statistics or running ones, dropout on or off; nothing else depends on it.
        needs_input_grad: False where nothing below is trained; `backward` then skips `backward_data`.
        comm, store, profiler, random: services; alone, they communicate with nobody, keep everything, see nothing.
    """

    num_inputs = 1
    parted = False  # its parameters are a part of a layer's, the others are on other ranks
    accepts_add = False  # backward_data(dy, add=g) returns dx + g at no extra pass
    accepts_unfinished = False  # compute() takes `Value`s whose array may be missing
    accepts_masked = False  # backward takes a `MaskedGradient`
    accepts_owed: tuple[type, ...] = ()  # ... and gradients of these kinds to add
    modes: tuple[str, ...] = ("training",)  # attributes that change what a pass does: a compiled step notices
    factored = False  # may send factors of its gradients in their place
    folded: Any = None  # inference only: what stands in for the parameters or the work (`minidl.fusion.fold`)
    weight = InParams()
    bias = InParams()

    def __init__(self, name: str | None = None, **unknown: Any):
        if unknown:
            raise checks.unexpected(type(self).__name__, unknown)
        if name is not None and not isinstance(name, str):
            raise checks.bad_value(type(self).__name__, "name", "a string", name)
        checks.keeps_templates(type(self))
        self.name = name or type(self).__name__.lower()
        self.ops: ModuleType | None = None
        self.precision: Precision | None = None
        self.params: NoParams = _NO_PARAMS
        self.buffers: dict[str, Any] = {}
        self.training = True
        self.needs_input_grad = True
        self.seed = 0
        self.comm: Communicator = SOLO
        self.store = TensorStore()
        self.profiler: Profiler = NULL_PROFILER
        self.random = RandomCounter()
        self.specs: list[ParameterSpec] = []
        self.buffer_specs: dict[str, np.ndarray] = {}
        self._bound = False  # part of a model, which then counts the steps and owns the arena
        self._arena: Arena | None = None  # only a layer that works alone owns one
        self.keeps = True  # in the latest forward pass, what backward needs
        self._again = self._has_saved = False  # within `rerun`; in this forward pass
        self._taken: SimpleNamespace | None = None
        self._add: Any = None  # what the gradient of the input is added to, in the pass under way
        self._checked: Any = None  # facts of the last inputs that passed the door (`_enter`), and the output's shape
        self._kept: Any = None  # the same of the last forward pass that `backward` may go back through

    def __getattr__(self, name: str) -> Any:
        if "name" not in vars(self):
            remedy = "call super().__init__(name) at the start of its __init__"
            raise AttributeError(f"{type(self).__name__} has no {name} yet; {remedy}", name=name, obj=self)
        return super().__getattr__(name)

    # -- written by the author --------------------------------------------------------------------------------------

    def output_shape(self, *shapes: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the output for these input shapes, batch first. Pure.

        Raises:
            ValueError: for shapes the layer cannot take, naming the layer, what it expects and what came.
        """
        raise self._undefined("output_shape")

    def cost(self, *shapes: tuple[int, ...], itemsize: int = 4) -> Cost:
        """Least work of each pass for these input shapes, with ``itemsize`` bytes per stored element. Pure.

        Default: what passes through memory where a pass reads and writes each of its arrays once, and no FLOP.
        """
        x, y = sum(map(prod, shapes)), prod(self.output_shape(*shapes))
        weights = 4 * sum(prod(spec.shape) for spec in self.specs)
        both = PassCost(0, (x + y) * itemsize + weights)
        return Cost(both, both, both if weights else PassCost())

    def compute(self, *x: Any) -> Any:
        """The forward pass on arrays already checked; keeps what backward needs with `save`."""
        raise self._undefined("compute")

    def recompute(self, saved: SimpleNamespace, *x: Any) -> Any:
        """What `compute` gave on ``x`` in this step, bit for bit, once more: nothing is saved, no statistics move.

        Args:
            saved: what that forward pass saved.
        """
        return self.compute(*x)

    def backward_weight(self, dy: Any) -> None:
        """Write the parameter gradients into the views that `grad` names. Default: no parameters."""

    def send_factors(self, dy: Any) -> Work | None:
        """Start to give all ranks what the gradients of the parameters are products of, if that takes less than to add
        them up: `backward_weight`, after the wait, makes the sums over ranks by itself. Default: None, it does not."""
        return None

    def backward_weight_tile(self, dy: Any, rows: slice) -> None:
        """The part of `backward_weight` for one tile of the parameter declared with ``rows``, the first; the last tile
        comes with all that is left."""
        raise NotImplementedError

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        """The gradient of the input (a tuple for several inputs), plus ``add`` where `accepts_add` is declared."""
        raise self._undefined("backward_data")

    def _undefined(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{self.name}: class {type(self).__name__} does not define {method}")

    # -- for the author ---------------------------------------------------------------------------------------------

    def declare(self, name: str, shape: Sequence[int], init: Initializer, *, product: bool, rows: int = 0) -> None:
        """Declare a parameter.

        Args:
            product: it enters matrix products, so it is read in the storage dtype.
            rows: of a tile of its gradient, where `backward_weight_tile` computes that tile by tile; 0: at once. Only
                the first parameter may be so; a multiple of 64.
        """
        assert not rows or (not self.specs and rows % 64 == 0), (name, rows)
        self.specs.append(ParameterSpec(name, tuple(shape), init, product, rows))

    def save(self, **items: Any) -> None:
        """Keep arrays and facts for the backward pass: the only road to the store."""
        if self.keeps and not self._again:
            self.store.save(self.name, items)
            self._has_saved = True

    def rerun(self, saved: SimpleNamespace, *x: Any) -> Any:
        """`recompute` with saving switched off: for stores that make tensors again."""
        self._again = True
        try:
            return self.recompute(saved, *x)
        finally:
            self._again = False

    def saved(self) -> SimpleNamespace:
        """What `save` kept in the forward pass that this backward pass belongs to."""
        assert self._taken is not None, "saved() is for use inside backward"
        return self._taken

    def recall(self, saved: SimpleNamespace) -> None:
        """Make `saved` answer this: for those who call `backward_weight` and `backward_data` one by one."""
        self._taken = saved

    def grad(self, name: str, rows: slice | None = None) -> Gradient | None:
        """Where to write the gradient of a parameter, and whether to overwrite; None if it is absent or frozen.

        Args:
            rows: one tile of it, where it is made in tiles.
        """
        return self.params.grad(name, rows)

    @property
    def bound(self) -> bool:
        """Whether the layer belongs to a model."""
        return self._bound

    @property
    def has_backward_weight(self) -> bool:
        """Whether `backward_weight` does anything, be it only for `backward_data`."""
        return type(self).backward_weight is not Layer.backward_weight

    @property
    def tf32(self) -> int:
        """TF32 products that stand for one of float32 arrays: 0, 1 or 3 (`minidl.precision`)."""
        return 0 if self.precision is None else self.precision.tf32

    @property
    def stream(self) -> int:
        """A number of its own for every layer name: the random stream it draws from."""
        return zlib.crc32(self.name.encode())

    # -- the templates ----------------------------------------------------------------------------------------------

    def __call__(self, *x: Any) -> Any:
        """On graph nodes: add this layer to their graph. On arrays: `forward`."""
        if x and all(hasattr(item, "graph") for item in x):
            return x[0].graph.add(self, x)
        return self.forward(*x)

    def forward(self, *x: Any, grad: bool = True) -> Any:
        """Run the layer.

        Args:
            x: NHWC arrays (NumPy, CuPy, or anything that speaks DLPack, answered in kind). They and the result are kept
                for `backward` by reference, and the result may be a view of ``x``: do not write into them in between.
            grad: keep what `backward` needs, and forget what an earlier call kept; False for inference.

        Raises:
            ValueError: for a shape the layer cannot take.
            TypeError: for a dtype, array kind or device it cannot take.
        """
        if self.folded is not None and (grad or self.training):
            raise checks.order(self.name, "is folded for inference", "call model.train(), or forward(..., grad=False)")
        arrays = self._enter(x)
        self.keeps = grad
        if grad:
            self._kept = self._checked
        if grad and not self._bound:
            self.store.forget(self.name)
            if self.training:
                self.random.advance()
        self._has_saved = False
        with self.profiler.span(self.name, "forward"):
            y = self.store.run(self, arrays)
        if grad and not self._has_saved:
            self.save()  # nothing, but there is a pass to go back through
        return y if arrays is x or isinstance(y, Value) else backend.answer_in_kind(x[0])(y)

    def backward(self, dy: Any, add: Any = None) -> Any:
        """Back through the last forward pass: parameter gradients, their message, then the input gradient.

        Args:
            dy: gradient of the output, in its shape and dtype.
            add: a gradient to add to the result, in the input's shape.

        Returns:
            The gradient of the input; a tuple for several inputs; None when `needs_input_grad` is False.

        Raises:
            ValueError, TypeError: for another shape or dtype than the last forward pass gave.
            RuntimeError: without a forward pass to go back through.
        """
        array = self._enter_gradient(dy)
        if add is not None:
            add = self._enter_add(add)
        self._taken, self._add = self.store.take(self.name), add
        if self._arena is not None:
            self._arena.begin_step()
        params = self.params or None
        tiled = params is not None and params.tiled
        try:
            factors = self.send_factors(array)
            # Weights that are updated tile by tile must have served the input gradient before; and it hides factors.
            early = tiled or factors is not None
            dx = self._input_gradient(array, add) if early else None
            if factors is not None:
                with self.profiler.span(self.name, "wait"):
                    factors.wait()
            self._weight_gradients(array, params.tiles if tiled else None)
            if params is not None:
                with self.profiler.span(self.name, "message"):
                    params.ready(summed=factors is not None)
            if not early:
                dx = self._input_gradient(array, add)
        except BaseException:
            if self._arena is not None:
                self._arena.abandon()
            raise
        finally:
            self._taken = self._add = None
        if self._arena is not None:
            for _ in self._arena.finished():
                pass  # a layer alone hands over finished gradients
        if array is dy:
            return dx
        answer = backend.answer_in_kind(dy)
        return tuple(answer(part) for part in dx) if isinstance(dx, tuple) else answer(dx)

    def _weight_gradients(self, dy: Any, tiles: Sequence[slice] | None) -> None:
        """At once, or in tiles that are updated one after the other."""
        if tiles is None:
            if self.has_backward_weight:
                with self.profiler.span(self.name, "backward_weight"):
                    self.backward_weight(dy)
            return
        for rows in tiles:
            with self.profiler.span(self.name, "backward_weight"):
                self.backward_weight_tile(dy, rows)
            self.params.tile_ready(rows)

    def _input_gradient(self, dy: Any, add: Any) -> Any:
        if not self.needs_input_grad:
            return None
        with self.profiler.span(self.name, "backward_data"):
            if add is None:
                return self.backward_data(dy)
            if self.accepts_add:
                return self.backward_data(dy, add=add)
            return self.ops.add(finished(self.ops, self.backward_data(dy)), add)

    # -- at the door ------------------------------------------------------------------------------------------------

    def _enter(self, x: tuple[Any, ...]) -> tuple[Any, ...]:
        """The inputs as arrays of this layer's table, checked. ``x`` itself when nothing had to be converted."""
        if len(x) != (self.num_inputs or max(len(x), 1)):
            raise checks.bad_value(self.name, "number of inputs", str(self.num_inputs or "at least 1"), len(x))
        arrays, table = x, None
        for i, item in enumerate(x):
            if isinstance(item, Value):
                if not self.accepts_unfinished:
                    raise checks.order(self.name, "got an unfinished value", "call minidl.value.materialize first")
                continue
            array, ops = backend.take_in(item, self.name, "x")
            if array is not item:
                arrays = (*arrays[:i], array, *arrays[i + 1 :])
            if table is not None and ops is not table:
                raise checks.bad_dtype(self.name, "all inputs", f"on one device ({table.name})", f"one on {ops.name}")
            table = ops
        facts = [table, *[(a.shape, a.dtype) for a in arrays]]
        if self._checked is None or facts != self._checked[0]:
            for a in arrays:
                if a.dtype != arrays[0].dtype:
                    raise checks.bad_dtype(self.name, "all inputs", f"of one dtype ({arrays[0].dtype})", a.dtype)
            shape = self.output_shape(*(a.shape for a in arrays))
            self._adopt(table or self.ops, arrays[0].dtype)  # last: what is refused leaves no trace
            self._checked = facts, shape
        return arrays

    def _enter_gradient(self, dy: Any) -> Any:
        if isinstance(dy, MaskedGradient):
            if not self.accepts_masked:
                raise checks.order(self.name, "got a gradient whose mask is owed", "call its finish() first")
            array = dy
        else:
            array, ops = backend.take_in(dy, self.name, "dy")
            if self.ops is not None and ops is not self.ops:
                raise checks.bad_dtype(self.name, "dy", f"a {self.ops.name} array", f"a {ops.name} array")
        if self._kept is not None:
            (_, (_, dtype), *_), shape = self._kept
            self._require_alike("dy", array, shape, dtype)
        return array

    def _enter_add(self, add: Any) -> Any:
        """The gradient to add, in the shape and dtype of the one input."""
        owed = isinstance(add, self.accepts_owed)
        array, ops = (add, self.ops) if owed else backend.take_in(add, self.name, "add")
        if ops is not self.ops:
            raise checks.bad_dtype(self.name, "add", f"a {self.ops.name} array", f"a {ops.name} array")
        if self._kept is not None:
            _, first, *others = self._kept[0]
            if others:
                raise checks.bad_value(self.name, "add", "None, as it has several inputs", checks.describe(array))
            self._require_alike("add", array, *first)
        return array

    def _require_alike(self, argument: str, array: Any, shape: tuple[int, ...], dtype: Any) -> None:
        if array.shape != shape:
            raise checks.bad_shape(self.name, argument, str(shape), array.shape, "as in the last forward pass")
        if array.dtype != dtype:
            remedy = f"convert it with {argument}.astype({str(dtype)!r})"
            raise checks.bad_dtype(self.name, argument, dtype, array.dtype, remedy)

    def _adopt(self, ops: ModuleType, dtype: Any) -> None:
        """Take over the table and dtype of the first input; later inputs must agree where parameters live."""
        dtype = np.dtype(dtype)
        if dtype not in _STORAGE:
            known, remedy = "float32, bfloat16 or float16", "convert it with x.astype('float32')"
            raise checks.bad_dtype(self.name, "x", known, dtype, remedy)
        stateful = bool(self.specs or self.buffer_specs)
        if self.ops is None or not stateful:
            self.ops = ops
            self.precision = self.precision or parse_precision(dtype)
            if stateful:
                self._settle_alone()
        if ops is not self.ops:
            remedy = f"move the layer: .to({ops.name!r})"
            raise checks.bad_dtype(self.name, "x", f"a {self.ops.name} array", f"a {ops.name} array", remedy)
        if any(spec.product for spec in self.specs) and dtype != self.precision.storage:
            own = str(self.precision.storage)
            remedy = f"convert x with .astype({own!r}) or the layer with .to(precision={str(dtype)!r})"
            raise checks.bad_dtype(self.name, "x", f"{own} like its weights", dtype, remedy)

    # -- state ------------------------------------------------------------------------------------------------------

    def bind(self, arena: Arena, ops: ModuleType, **services: Any) -> None:
        """Give the layer its place in a model: views into the shared arena, its device and its services."""
        self.ops, self.precision, self._arena, self._bound = ops, arena.precision, None, True
        self.params = arena.layer(self.name)
        self.buffers = {name: ops.from_host(values) for name, values in self.buffer_specs.items()}
        for name, service in services.items():
            setattr(self, name, service)

    def _settle_alone(self) -> None:
        """Own parameters, in an arena of one layer."""
        self._arena = Arena(self.ops, [("", self.specs)], self.precision, seed=self.seed)
        self._arena.connect(self.comm)
        self.params = self._arena.layer("")
        self.buffers = {name: self.ops.from_host(values) for name, values in self.buffer_specs.items()}

    def unbound(self) -> Layer:
        """A layer of the same kind, sizes and modes that belongs to no model, talks to nobody and has no arrays."""
        other = copy.copy(self)
        Layer.__init__(other, self.name)
        vars(other).pop("folded", None)
        other.specs, other.buffer_specs, other.seed = list(self.specs), self.buffer_specs, self.seed
        return other

    def to(self, device: str | None = None, precision: Any = None) -> Layer:
        """Move a layer that works alone to ``"cpu"`` or ``"cuda"``, or give its products another precision."""
        if self._bound:
            raise checks.order(self.name, "it belongs to a model", "build the Model with device= and precision=")
        state = self.state_dict() if self._arena is not None else None
        ops = backend.open_device(device or "cpu") if device is not None or self.ops is None else self.ops
        self.precision = precision_on(ops.name, precision or self.precision or "fp32", self.name)
        self.ops, self._checked = ops, None
        if self.specs or self.buffer_specs:
            self._settle_alone()
            if state is not None:
                self.load_state_dict(state)
        return self

    def state_dict(self) -> dict[str, np.ndarray]:
        """Parameters (float32) and buffers by name, as host copies."""
        self._require_state()
        named = {s.name: self.params.master(s.name) for s in self.specs}
        return {name: self.ops.to_host(array) for name, array in {**named, **self.buffers}.items()}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        """Overwrite parameters and buffers; names, shapes and dtypes (float32) must match exactly."""
        self._require_state()
        own = {s.name: self.params.master(s.name) for s in self.specs} | self.buffers
        checkpoint.match(own, state, f"state of {self.name}")
        for name, target in own.items():
            self.ops.copy_into(target, self.ops.from_host(state[name]))
        if self._arena is not None:
            self._arena.refresh_working()

    def _require_state(self) -> None:
        """Settle on the CPU if no input has told yet where the layer lives."""
        if self.ops is None:
            self.to("cpu")

    def describe(self) -> str:
        """Constructor arguments as text, but for what tells how parameters begin: layers that do the same are equal."""
        return ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.describe()})"

    # -- for `output_shape`: what many layers ask of a shape ----------------------------------------------------------

    def require_image(self, shape: tuple[int, ...], channels: int | None = None) -> tuple[int, int, int, int]:
        """``shape`` as (N, H, W, C).

        Raises:
            ValueError: for other shapes, or where C is not ``channels``, if given.
        """
        wanted = f"(N, H, W, {channels if channels is not None else 'C'})"
        if len(shape) != 4:
            raise checks.bad_shape(self.name, "x", wanted, shape, "minidl's images are NHWC")
        if channels is not None and shape[3] != channels:
            raise checks.bad_shape(self.name, "x", wanted, shape, checks.images_first(shape, channels))
        return shape

    def require_output(self, shape: tuple[int, ...], out: Pair) -> Pair:
        """``out``, the height and width of the output for images of ``shape``.

        Raises:
            ValueError: where they are not positive.
        """
        if min(out) < 1:
            wanted, remedy = "(N, H, W, C), at least as large as the kernel", "enlarge the image or the padding"
            raise checks.bad_shape(self.name, "x", wanted, shape, remedy)
        return out
