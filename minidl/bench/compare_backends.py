"""``minidl compare-backends``: the same network on two devices or in two precisions, layer by layer.

Every layer of the second gets what the first's layer got, forward and backward, so that a difference is its own and
not inherited; the first one that differs by more than rounding is named.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl import backend, checks, models
from minidl.bench.setup import Setup, add_images
from minidl.loss import SoftmaxCrossEntropy
from minidl.model import Model
from minidl.precision import precision
from minidl.profile.tables import show
from minidl.value import Value, finished, materialize

# What the worse of the two precisions may be off, relative to the largest value of a tensor: some roundings of storage,
# and of products in TF32.
TOLERANCES = {"fp32": 1e-4, "tf32x3": 1e-4, "tf32": 4e-3, "bf16": 2e-2, "fp16": 3e-3}
_SHOWN = 10
_DIFFERS = 1  # exit status


@dataclass(frozen=True)
class Difference:
    """The largest difference of one tensor, relative to its largest value.

    ``what``: output, input gradient (numbered where there are several), or a parameter's name.
    """

    layer: str
    what: str
    relative: float


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Options of ``minidl compare-backends``."""
    p.add_argument("--model", default="resnet20", help=models.CHOICES)
    p.add_argument("--batch", type=int, default=4)
    add_images(p)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--left", default="cpu:fp32", metavar="DEVICE:PRECISION", help="what is right by definition")
    p.add_argument("--right", default="cuda:fp32", metavar="DEVICE:PRECISION", help="what is held against it")
    p.add_argument(
        "--tolerance", type=float, help="largest relative difference; 0: the same bits; default: by the precisions"
    )


def run(a: argparse.Namespace) -> int:
    """Print what differs most; 1 where a layer differs by more than the tolerance.

    Raises:
        ValueError: unknown names or sizes, a device that is not there.
    """
    if a.tolerance is not None:
        checks.number("", "--tolerance", a.tolerance, "of at least 0", lambda value: value >= 0)
    sides = [_side(option, text) for option, text in (("--left", a.left), ("--right", a.right))]
    setup = Setup(a.model, a.batch, "fp32", "cpu", image_size=a.image_size, classes=a.classes)
    both = [Model(setup.graph(), device=device, precision=mode, seed=a.seed) for device, mode in sides]
    found = compare(*both, a.batch, seed=a.seed)
    tolerance = max(TOLERANCES[model.precision.name] for model in both) if a.tolerance is None else a.tolerance
    worst = sorted(found, key=lambda d: -d.relative)[:_SHOWN]
    title = f"{a.model}, batch {a.batch}: {a.right} against {a.left}, largest differences of {len(found)} tensors"
    show(title, ["layer", "tensor", "difference / largest"], [[d.layer, d.what, f"{d.relative:.2e}"] for d in worst])
    first = next((d for d in found if not d.relative <= tolerance), None)
    if first is None:
        print(f"all within {tolerance:g}")
        return 0
    print(f"first beyond {tolerance:g}: {first.what} of {first.layer} ({first.relative:.2e})")
    return _DIFFERS


def _side(option: str, text: str) -> tuple[str, str]:
    """Device and precision of ``"cuda:bf16"``; either may be left out."""
    device, _, mode = text.partition(":")
    if device not in ("cpu", "cuda") and not mode:
        device, mode = "cpu", device
    mode = precision(mode or "fp32").name
    if device not in ("cpu", "cuda"):
        raise checks.bad_value("", option, "DEVICE:PRECISION, such as cuda:bf16", text)
    try:
        backend.open_device(device)
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"{option} {text}: {error}") from error
    return device, mode


def compare(left: Model, right: Model, batch: int, *, seed: int = 0) -> list[Difference]:
    """Differences of all outputs in order, then of all gradients in order backward.

    Args:
        left, right: of one graph function, in training mode; ``right`` gets the weights of ``left``, and both get the
            tensors of ``left``, rounded to the coarser storage of the two.
    """
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((batch, *left.graph.nodes[0].shape)).astype(np.float32)
    right.load_state_dict(left.state_dict())
    coarser = max((left.precision, right.precision), key=lambda mode: TOLERANCES[mode.name]).storage
    walks = [_Walk(model, coarser) for model in (left, right)]
    found: list[Difference] = []
    values = {0: x}
    for node in left.graph.nodes[1:]:
        inputs = [values[i] for i in node.inputs]
        ours, theirs = (walk.forward(node.index, inputs) for walk in walks)
        found.append(_difference(node.name, "output", ours, theirs))
        values[node.index] = ours
    found += _backward(left, walks, values, rng)
    return found


def _backward(left: Model, walks: Sequence[_Walk], values: dict[int, np.ndarray], rng: Any) -> list[Difference]:
    output = left.output_node
    logits = values[output.index]
    labels = rng.integers(0, logits.shape[-1], logits.shape[:-1])
    loss = SoftmaxCrossEntropy()
    loss.forward(logits.astype(np.float32), labels)
    grads, found = {output.index: loss.backward() * np.float32(labels.size)}, []
    for walk in walks:
        walk.model.arena.begin_step()
    for node in reversed(left.graph.nodes[1:]):
        dy = grads.pop(node.index)
        (ours, mine), (theirs, other) = (walk.backward(node.index, dy) for walk in walks)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            name = "input gradient" + (f" {i}" if len(ours) > 1 else "")
            found.append(_difference(node.name, name, a, b))
            at = node.inputs[i]
            grads[at] = grads[at] + a.astype(np.float32) if at in grads else a.astype(np.float32)
        found += [_difference(node.name, f"gradient of {name}", mine[name], other[name]) for name in mine]
    return found


class _Walk:
    """Runs single layers of a model on host arrays, which are rounded to ``coarser`` first."""

    def __init__(self, model: Model, coarser: np.dtype):
        self.model, self.coarser = model, coarser
        model.random.advance(0)
        for layer in model.layers:
            layer.needs_input_grad = True

    def _to_device(self, x: np.ndarray) -> Any:
        return self.model.ops.from_host(x.astype(self.coarser).astype(self.model.precision.storage))

    def forward(self, index: int, inputs: Sequence[np.ndarray]) -> np.ndarray:
        layer = self.model.graph.nodes[index].layer
        y, ops = layer.forward(*map(self._to_device, inputs), grad=True), self.model.ops
        return ops.to_host(materialize(ops, y).array if isinstance(y, Value) else y)

    def backward(self, index: int, dy: np.ndarray) -> tuple[list[np.ndarray], dict[str, np.ndarray]]:
        """Input gradients, and parameter gradients by name."""
        layer, ops = self.model.graph.nodes[index].layer, self.model.ops
        dx = layer.backward(self._to_device(dy))
        gradients = layer.params.gradients() if layer.specs else {}
        parts = dx if isinstance(dx, tuple) else (dx,)
        dense = [ops.to_host(finished(ops, part)) for part in parts]
        return dense, {name: ops.to_host(g) for name, g in gradients.items()}


def _difference(layer: str, what: str, ours: np.ndarray, theirs: np.ndarray) -> Difference:
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    if a.shape != b.shape:
        return Difference(layer, what, float("inf"))
    largest = float(np.max(np.abs(a), initial=0.0))
    return Difference(layer, what, float(np.max(np.abs(a - b), initial=0.0)) / (largest or 1.0))
