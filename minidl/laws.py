"""The laws that every layer obeys, for layers of your own: gradients equal central differences, and good manners.

For a random direction v of the input (or of a parameter) and a random dy, the law of gradients is

    <dx, v> = d/dh <dy, f(x + h·v)>  at h = 0,

whose right side is taken by central differences with Richardson extrapolation, in float64 over float32 layers. One
direction tests every element at once: a wrong element shows unless it is orthogonal to v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from minidl import backend, checks
from minidl.layer import Layer
from minidl.random import RandomCounter

_STEP = 2.0**-6
_ROUNDING = 1e-4  # of the norm of dy·f(x): 2**-24, divided by the step, in sums of some hundred terms
_TRUNCATION = 2e-3  # of the slope itself: what Richardson's extrapolation leaves of fifth derivatives


def check_layer(layer: Layer, *shapes: Sequence[int], device: str = "cpu", seed: int = 0, directions: int = 3) -> None:
    """Hold ``layer`` to the laws, alone, in float32; return when it obeys them all.

    `output_shape` tells the shape; inputs and gradients are not written to; a pass repeated gives the same bits;
    ``grad=False`` saves nothing; an empty batch gives an empty answer and no gradient; gradients of micro-batches add
    up, as does a gradient that is to be added (`Layer.accepts_add`); and every gradient equals central differences.
    Inputs are spread so that no two values nearly coincide and none is nearly 0: kinks elsewhere must be avoided by
    another ``seed``.

    Args:
        layer: not part of a model; its parameters and buffers are left as they were.
        shapes: one for each input, batch first.
        directions: random directions for each gradient.

    Raises:
        AssertionError: naming the law and the input or parameter that breaks it.
        ValueError, TypeError: from the layer, for shapes that it cannot take; no shapes.
    """
    checks.instance("check_layer", "layer", layer, Layer, "a Layer")
    if not shapes:
        raise checks.bad_value("check_layer", "shapes", "one shape for each input, batch first", shapes)
    strange = next((shape for shape in shapes if not isinstance(shape, Sequence)), None)
    if strange is not None:
        raise checks.bad_value("check_layer", "shapes", "a tuple for each input, batch first", strange)
    if layer.bound:
        raise checks.order(layer.name, "check_layer on a layer of a model", "pass a layer of its own")
    ops, rng = backend.open_device(device), np.random.default_rng(seed)
    inputs = [spread(rng, tuple(shape)) for shape in shapes]
    layer.output_shape(*(x.shape for x in inputs))
    state = layer.to(device, "fp32").state_dict()
    try:
        _manners(layer, ops, inputs, rng)
        check_gradients(layer, ops, inputs, rng, directions=directions)
        _sums(layer, ops, inputs, rng)
        _empty_batch(layer, ops, [x.shape for x in inputs])
    finally:
        layer.load_state_dict(state)


def spread(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Values in ±2.1 whose neighbours differ by more than a step of differences where there are few, none near 0."""
    size = int(np.prod(shape))
    spaced = (np.arange(size) - size / 2 + 0.5) * (4.0 / max(size, 1))
    return rng.permutation(np.sign(spaced) * (np.abs(spaced) + 0.1)).reshape(shape).astype(np.float32)


def _require(law: bool, layer: Layer, text: str) -> None:
    if not law:
        raise AssertionError(f"{layer.name}: {text}")


def _require_array(layer: Layer, value: Any, shape: tuple[int, ...], what: str) -> None:
    fits = getattr(value, "shape", None) == shape and getattr(value, "dtype", None) == np.float32
    _require(fits, layer, f"{what} {checks.describe(value)}, expected float32 of shape {shape}")


def _parts(dx: Any) -> tuple[Any, ...]:
    return dx if isinstance(dx, tuple) else (dx,)


def _manners(layer: Layer, ops: ModuleType, inputs: list[np.ndarray], rng: np.random.Generator) -> None:
    """Everything but the values of gradients."""
    arrays = [ops.from_host(x) for x in inputs]
    layer.random = RandomCounter()
    y = layer.forward(*arrays)
    expected = layer.output_shape(*(x.shape for x in inputs))
    _require_array(layer, y, expected, "output_shape says otherwise: forward gives")
    first = ops.to_host(y)
    dy = ops.from_host(rng.standard_normal(y.shape).astype(np.float32))
    kept = ops.to_host(dy)
    results = _parts(layer.backward(dy))
    _require(len(results) == len(inputs), layer, f"{len(results)} gradients of inputs, expected {len(inputs)}")
    for i, (array, x) in enumerate(zip(arrays, inputs, strict=True)):
        _require(np.array_equal(ops.to_host(array), x), layer, f"input {i} was written to")
        _require_array(layer, results[i], x.shape, f"the gradient of input {i} is")
    results = [ops.to_host(part) for part in results]
    _require(np.array_equal(ops.to_host(dy), kept), layer, "the gradient of the output was written to")
    layer.random = RandomCounter()
    again = ops.to_host(layer.forward(*arrays))
    _require(np.array_equal(again, first, equal_nan=True), layer, "forward repeated gives other bits")
    repeated = [ops.to_host(part) for part in _parts(layer.backward(dy))]
    same = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(repeated, results, strict=True))
    _require(same, layer, "backward repeated gives other bits")
    layer.forward(*arrays, grad=False)
    _require(layer.store.saved_bytes == 0, layer, "forward(grad=False) saved something")


def _sums(layer: Layer, ops: ModuleType, inputs: list[np.ndarray], rng: np.random.Generator) -> None:
    """What is to be added is added: gradients of a second micro-batch, and of an input that others read, too."""
    arrays = [ops.from_host(x) for x in inputs]
    y = layer.forward(*arrays)
    frame, dy = layer.store.take(layer.name), ops.from_host(rng.standard_normal(y.shape).astype(np.float32))
    once: dict[str, np.ndarray] = {}
    for accumulate in (False, True) if layer.specs else ():
        layer.recall(frame)
        layer.params.restart(accumulate=accumulate)
        layer.backward_weight(dy)
        found = {name: ops.to_host(gradient) for name, gradient in layer.params.gradients().items()}
        for name, before in once.items():
            text = f"{name}: the gradient of a second micro-batch is not added; see `first` of grad({name!r})"
            _require(_near(found[name], before + before), layer, text)
        once = {name: gradient.copy() for name, gradient in found.items()}
    if layer.accepts_add and len(arrays) == 1:
        add = rng.standard_normal(inputs[0].shape).astype(np.float32)
        results = []
        for extra in (None, ops.from_host(add)):
            layer.random = RandomCounter()
            layer.forward(*arrays)
            results.append(ops.to_host(layer.backward(dy, extra)))
        _require(_near(results[1], results[0] + add), layer, "backward(dy, add) is not the gradient plus add")


def _near(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.linalg.norm(a - b) <= _ROUNDING * np.linalg.norm(b))


def _empty_batch(layer: Layer, ops: ModuleType, shapes: list[tuple[int, ...]]) -> None:
    """No samples: a rank may run out of them."""
    training, layer.training = layer.training, False
    try:
        empty = [ops.zeros((0, *shape[1:]), np.dtype(np.float32)) for shape in shapes]
        y = layer.forward(*empty)
        expected = layer.output_shape(*(x.shape for x in empty))
        _require(y.shape == expected, layer, f"an empty batch gives the shape {y.shape}, output_shape says {expected}")
        for part, x in zip(_parts(layer.backward(y)), empty, strict=True):
            _require(part.shape == x.shape, layer, f"an empty batch has a gradient of shape {part.shape}")
        for name, gradient in (layer.params.gradients() if layer.specs else {}).items():
            _require(not ops.to_host(gradient).any(), layer, f"an empty batch has a gradient of {name}")
    finally:
        layer.training = training


def check_gradients(
    layer: Layer, ops: ModuleType, inputs: Sequence[np.ndarray], rng: np.random.Generator, *, directions: int = 3
) -> None:
    """Assert the law of gradients for every input and every parameter of ``layer`` at float32 ``inputs``."""
    y = ops.to_host(layer.forward(*[ops.from_host(x) for x in inputs]))
    dy = rng.standard_normal(y.shape).astype(np.float32)
    dx = [ops.to_host(part) for part in _parts(layer.backward(ops.from_host(dy)))]
    noise = _ROUNDING * float(np.linalg.norm(y.astype(np.float64) * dy))
    gradients = {name: ops.to_host(gradient) for name, gradient in layer.params.gradients().items()}

    def objective(values: Sequence[np.ndarray]) -> float:
        out = ops.to_host(layer.forward(*[ops.from_host(x) for x in values], grad=False))
        return float(np.sum(out.astype(np.float64) * dy))

    def check(gradient: np.ndarray, what: str, at: Callable[[np.ndarray], float]) -> None:
        for _ in range(directions):
            v = rng.standard_normal(gradient.shape).astype(np.float32)
            v /= max(float(np.linalg.norm(v)), 1e-6)
            analytic = float(np.sum(gradient.astype(np.float64) * v))
            numeric = _difference(lambda h, v=v: at(np.float32(h) * v))
            close = abs(analytic - numeric) <= noise + _TRUNCATION * abs(numeric)
            _require(close, layer, f"{what}: gradient says {analytic}, central differences {numeric}")

    for i, gradient in enumerate(dx):
        check(gradient, f"input {i}", lambda d, i=i: objective([x + d if j == i else x for j, x in enumerate(inputs)]))
    if not layer.specs:
        return
    state = layer.state_dict()

    def with_parameter(name: str, moved: np.ndarray) -> float:
        layer.load_state_dict({**state, name: state[name] + moved})
        return objective(inputs)

    for name, gradient in gradients.items():
        check(gradient, name, lambda d, name=name: with_parameter(name, d))
    layer.load_state_dict(state)


def _difference(evaluate: Callable[[float], float]) -> float:
    coarse = (evaluate(_STEP) - evaluate(-_STEP)) / (2 * _STEP)
    fine = (evaluate(_STEP / 2) - evaluate(-_STEP / 2)) / _STEP
    return (4 * fine - coarse) / 3
