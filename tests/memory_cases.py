"""Random training steps for laws of memory plans."""

from __future__ import annotations

import functools

import numpy as np

from minidl import models
from minidl.memory import Step, Tensor, Trace, record


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


@functools.cache
def real_trace(name: str, image: int = 64, batch: int = 2, **options) -> Trace:
    """The trace of a small training step of a library model."""
    graph = models.build(name, (image, image, 3), 2 if name == "unet" else 10, **options)
    return record(graph, batch, model=name, image=image)
