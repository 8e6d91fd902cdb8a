"""Random training steps, and programs that lack an operation, for laws of memory plans."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

import minidl as m
from minidl import models
from minidl.memory import Operation, Step, Tensor, Trace, record


def random_trace(
    rng: np.random.Generator, layers: int, *, jitter: int = 0, tied: bool = False, state: bool = False
) -> Trace:
    """A network of ``layers``: layer k makes tensor k at step k, read by layer k + 1 and, going back, by both.

    Args:
        jitter: the last touch before the loss and the first behind it move by up to so many steps, as joins do.
        tied: some tensors are read by far layers too.
        state: some layers have a weight, read both ways, and a momentum, touched at the end only.
    """
    loss = layers + 1
    last = 2 * loss
    sizes = rng.integers(0, 9, layers) * int(rng.choice([1, 3, 64]))
    tensors = [Tensor("weights", "weight", int(rng.integers(0, 20)), (), given=True)]
    for k in range(layers):
        leave = min(k + 1 + int(rng.integers(0, jitter + 1)), loss - 1)
        back = max(last - k - 1 - int(rng.integers(0, jitter + 1)), loss + 1)
        touches = {k, leave, back, last - k}
        if tied and rng.random() < 0.2:
            touches.add(int(rng.integers(k, last - k + 1)))
        tensors.append(Tensor(f"t{k}", "activation", int(sizes[k]), tuple(sorted(touches)), saved=True))
        if rng.random() < 0.5:
            tensors.append(Tensor(f"u{k}", "activation", int(rng.integers(0, 9)), (k, k + 1)))
        if state and rng.random() < 0.3:
            size = int(rng.integers(1, 9))
            tensors.append(Tensor(f"w{k}", "weight", size, (k, last - k, last + 1), given=True))
            tensors.append(Tensor(f"m{k}", "momentum", size, (last + 1,), given=True))
    last += state
    steps = [
        Step(f"layer{t}", "forward" if t < loss else "backward_data", int(rng.integers(0, 9))) for t in range(last + 1)
    ]
    return Trace(tuple(steps), tuple(tensors), loss)


def small_graph(name: str, image: int, *, width: int = 8) -> m.Graph:
    """A library model, a U-Net of ``width``, or "mixed": dropout, a view, a dense join and linear layers in one; or
    "bare": convolutions and ReLUs without batch norms, with a pooling; or "dense": dense layers whose joins share a
    buffer; or "gated": inverted residuals with squeeze and excitation.
    """
    if name == "unet":
        return models.build(name, (image, image, 3), 2, width=width, depth=3)
    if name == "dense":
        return _dense_graph(image, width)
    if name == "gated":
        return _gated_graph(image, width)
    if name not in ("mixed", "bare"):
        return models.build(name, (image, image, 3), 10)
    graph = m.Graph()
    x = graph.input((image, image, 3))
    if name == "bare":
        for i in range(6):
            x = m.ReLU(name=f"r{i}")(m.Conv2d(x.shape[-1], width, 3, padding=1, name=f"c{i}")(x))
            x = m.MaxPool2d(2, name="pool")(x) if i == 2 else x
        return graph.output(m.Linear(width * (image // 2) ** 2, 10, name="l")(m.Flatten(name="f")(x)))
    y = m.ReLU(name="r1")(m.Conv2d(3, 8, 3, padding=1, name="c1")(x))
    z = m.Dropout(0.3, name="d1")(m.Conv2d(8, 8, 3, padding=1, name="c2")(y))
    y = m.MaxPool2d(2, name="p1")(m.BatchNorm2d(16, name="b1")(m.Concat(name="cat")(y, z)))
    y = m.Linear(16 * (image // 2) ** 2, 32, name="l1")(m.Flatten(name="f")(y))
    return graph.output(m.Linear(32, 10, name="l2")(m.Dropout(0.5, name="d2")(m.ReLU(name="r2")(y))))


def _dense_graph(image: int, width: int) -> m.Graph:
    """Two blocks of dense layers as in a DenseNet, and what is between and behind them."""
    graph = m.Graph()

    def normed(x, name: str):
        return m.ReLU(name=f"relu_{name}")(m.BatchNorm2d(x.shape[-1], name=f"norm_{name}")(x))

    x = m.Conv2d(3, width, 3, padding=1, bias=False, name="conv0")(graph.input((image, image, 3)))
    for block in ("a", "b"):
        for i in range(3):
            y = normed(x, f"{block}{i}1")
            y = m.Conv2d(y.shape[-1], 2 * width, 1, bias=False, name=f"conv_{block}{i}1")(y)
            y = normed(y, f"{block}{i}2")
            y = m.Conv2d(2 * width, width, 3, padding=1, bias=False, name=f"conv_{block}{i}2")(y)
            x = m.Concat(name=f"join_{block}{i}")(x, y)
        x = m.Conv2d(x.shape[-1], 2 * width, 1, bias=False, name=f"conv_{block}")(normed(x, block))
        x = m.AvgPool2d(2, name=f"pool_{block}")(x)
    x = m.Flatten(name="flat")(m.AdaptiveAvgPool2d(1, name="pool")(x))
    return graph.output(m.Linear(x.shape[-1], 10, name="linear")(x))


def _gated_graph(image: int, width: int) -> m.Graph:
    """Blocks as in an EfficientNet: SiLUs over batch norms, gates, and sums that several layers read."""
    graph = m.Graph()
    x = m.Conv2d(3, width, 3, padding=1, bias=False, name="stem")(graph.input((image, image, 3)))
    x = m.BatchNorm2d(width, name="norm")(x)
    for i in range(3):
        with m.scope(f"{i}"):
            y = m.Conv2d(width, 2 * width, 1, bias=False, name="wide")(x)
            y = m.SiLU(name="act1")(m.BatchNorm2d(2 * width, name="norm1")(y))
            y = m.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False, name="depth")(y)
            y = m.SiLU(name="act2")(m.BatchNorm2d(2 * width, name="norm2")(y))
            y = models.squeeze_excitation(y, width // 2, activation=m.SiLU)
            y = m.BatchNorm2d(width, name="norm3")(m.Conv2d(2 * width, width, 1, bias=False, name="narrow")(y))
            x = m.Add(name="add")(x, y)
    x = m.Flatten(name="flat")(m.AdaptiveAvgPool2d(1, name="pool")(x))
    return graph.output(m.Linear(width, 10, name="linear")(x))


@functools.cache
def real_trace(name: str, image: int = 64, batch: int = 2, **options) -> Trace:
    """The trace of a small training step of a library model."""
    graph = models.build(name, (image, image, 3), 2 if name == "unet" else 10, **options)
    return record(graph, batch, model=name, image=image)


def without(operations: list[Operation], k: int) -> list[Operation]:
    """The program without operation k; waits still mean the same operations."""
    return [
        dataclasses.replace(o, index=o.index - 1) if o.kind == "wait" and o.index > k else o
        for i, o in enumerate(operations)
        if i != k
    ]
