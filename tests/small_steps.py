"""A few training steps of small networks, and everything that they leave behind, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import minidl as m
from minidl import models
from minidl.step import EagerStep


def small_model(name: str, precision: str, device: str, **options: Any) -> m.Model:
    """A network for images of 32 x 32: ten classes, or a U-Net of two."""
    width = {"width": 8, "depth": 3} if name == "unet" else {}
    graph = models.build(name, (32, 32, 3), 2 if name == "unet" else 10, **width)
    return m.Model(graph, device=device, precision=precision, seed=5, **options)


def batches(model: m.Model, name: str, steps: int, samples: int = 6) -> Iterator[tuple[Any, Any]]:
    """(images, labels) for steps of it; always the same."""
    rng = np.random.default_rng(3)
    for _ in range(steps):
        x = rng.standard_normal((samples, 32, 32, 3), np.float32).astype(model.precision.storage)
        labels = rng.integers(0, 2, (samples, 32, 32) if name == "unet" else (samples,)).astype(np.int32)
        yield model.ops.from_host(x), model.ops.from_host(labels)


def state(model: m.Model, optimizer: m.SGD) -> dict[str, np.ndarray]:
    """What a checkpoint holds, and the arena with what lies between the parameters."""
    return model.state_dict() | optimizer.state_dict() | {"arena": model.ops.to_host(model.arena.master)}


def bits(
    model: m.Model, optimizer: m.SGD, name: str, steps: int = 3, make: Callable[..., Any] = EagerStep
) -> dict[str, bytes]:
    """Train on `batches`; the totals of each step and the `state` after the last."""
    step, seen = make(model, optimizer, m.SoftmaxCrossEntropy()), {}
    for i, (x, labels) in enumerate(batches(model, name, steps)):
        optimizer.set_lr(0.05 / (i + 1))
        seen[f"totals {i}"] = model.ops.to_host(step(x, labels).array).tobytes()
    return seen | {key: value.tobytes() for key, value in state(model, optimizer).items()}
