"""Gradients against central differences, for any layer, by directional derivatives.

For a random direction v of the input (or of a parameter) and a random dy, the law is

    <dx, v> = d/dh <dy, f(x + h·v)>  at h = 0,

and the right side is taken by central differences with Richardson extrapolation, in float64 over float32 layers. Inputs
are drawn away from kinks by the caller. One direction tests every element at once: a wrong element shows unless it
is orthogonal to v.
"""

from __future__ import annotations

import numpy as np

STEP = 2.0**-6
TOLERANCE = 2e-3  # float32 rounding of f, divided by the step, with room for third derivatives


def _objective(layer, inputs, dy):
    y = layer.ops.to_host(layer.forward(*[layer.ops.from_host(x) for x in inputs], grad=False))
    return float(np.sum(y.astype(np.float64) * dy))


def _difference(evaluate):
    coarse = (evaluate(STEP) - evaluate(-STEP)) / (2 * STEP)
    fine = (evaluate(STEP / 2) - evaluate(-STEP / 2)) / STEP
    return (4 * fine - coarse) / 3


def check_layer(layer, ops, inputs, rng, *, directions: int = 3):
    """Assert the law above for every input and every parameter of ``layer`` at float32 ``inputs``."""
    arrays = [ops.from_host(x) for x in inputs]
    y = ops.to_host(layer.forward(*arrays))
    assert y.shape == layer.output_shape(*(x.shape for x in inputs))
    dy = rng.standard_normal(y.shape).astype(np.float32)
    dx = layer.backward(ops.from_host(dy))
    dx = [ops.to_host(part) for part in (dx if isinstance(dx, tuple) else (dx,))]
    scale = float(np.linalg.norm(dy)) + 1e-6
    for i, gradient in enumerate(dx):
        assert gradient.shape == inputs[i].shape
        for _ in range(directions):
            v = rng.standard_normal(gradient.shape).astype(np.float32)
            v /= max(float(np.linalg.norm(v)), 1e-6)

            def at(h, i=i, v=v):
                moved = [x + np.float32(h) * v if j == i else x for j, x in enumerate(inputs)]
                return _objective(layer, moved, dy)

            _agree(float(np.sum(gradient.astype(np.float64) * v)), _difference(at), scale, f"input {i}")
    if not layer.specs:
        return
    state = layer.state_dict()
    for name, gradient in layer.params.gradients().items():
        gradient = ops.to_host(gradient)
        for _ in range(directions):
            v = rng.standard_normal(gradient.shape).astype(np.float32)
            v /= max(float(np.linalg.norm(v)), 1e-6)

            def at(h, name=name, v=v):
                layer.load_state_dict({**state, name: state[name] + np.float32(h) * v})
                return _objective(layer, inputs, dy)

            _agree(float(np.sum(gradient.astype(np.float64) * v)), _difference(at), scale, name)
        layer.load_state_dict(state)


def _agree(analytic, numeric, scale, what):
    assert abs(analytic - numeric) <= TOLERANCE * (scale + abs(numeric)), (
        f"{what}: gradient says {analytic}, central differences {numeric}"
    )
