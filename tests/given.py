"""What the text of a page takes as given when a fragment of its code begins: names, and files in the folder it runs in.

The smallest that is what the page says: a network, its loss and optimizer, loaders of a few generated images.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import minidl as m
from minidl import backend, data, models
from minidl.interchange import export_weights
from minidl.schedule import Constant
from minidl.train import Trainer


def _network(classes: int = 3, size: int = 8) -> m.Graph:
    graph = m.Graph()
    x = graph.input((size, size, 3))
    for i, inside, channels in ((1, 3, 8), (2, 8, 16)):
        x = m.Conv2d(inside, channels, 3, padding=1, bias=False, name=f"conv{i}")(x)
        x = m.ReLU(name=f"relu{i}")(m.BatchNorm2d(channels, name=f"norm{i}")(x))
    x = m.Flatten()(m.AdaptiveAvgPool2d(1)(x))
    graph.output(m.Linear(16, classes, name="head")(x))
    return graph


def _images(device: str) -> dict[str, Any]:
    sets = [data.synthetic(48, (8, 8, 3), 3, split=split) for split in ("train", "test")]
    train, test = (data.Loader(images, 12, transfer=backend.get_ops(device).from_host) for images in sets)
    return {"train_loader": train, "loader": train, "test_loader": test, "train_set": sets[0]}


def _training(device: str) -> dict[str, Any]:
    """A model of three classes on the device, and what trains it."""
    model = m.Model(_network(), device=device)
    names = {"model": model, "build": _network, "Model": m.Model, "SGD": m.SGD, "Trainer": Trainer, "minidl": m}
    names |= {"optimizer": m.SGD(model, 0.1, 0.9), "loss": m.SoftmaxCrossEntropy(), "comm": m.dist.SOLO, "np": np}
    return names | {"schedule": Constant(0.05)} | _images(device)


def _memory(device: str) -> dict[str, Any]:
    """A network of some depth: of two layers none can wait elsewhere."""
    model, images = m.Model(models.resnet20(), device=device), data.synthetic(128)
    loader = data.Loader(images, 64, transfer=backend.get_ops(device).from_host)
    return {"model": model, "optimizer": m.SGD(model, 0.1, 0.9), "loss": m.SoftmaxCrossEntropy(), "loader": loader}


def _breadth(device: str) -> dict[str, Any]:
    names = _training(device)
    batch = next(iter(names["loader"]))
    names |= {"logits": names["model"].forward(batch.images), "labels": batch.labels}
    export_weights(m.Model(models.resnet18()), "resnet18.safetensors")
    return names | {"batches": [(batch.images, batch.labels)]}


def _sparse(device: str) -> dict[str, Any]:
    rng, ops = np.random.default_rng(0), backend.get_ops(device)
    weight = rng.standard_normal((40, 64), np.float32)
    mask = rng.random(weight.shape) < 0.1
    draw = lambda *shape: ops.from_host(rng.standard_normal(shape, np.float32))  # noqa: E731
    names = {"weight": ops.from_host(weight * mask), "mask": mask, "bias": np.zeros(40, np.float32)}
    names |= {"X": draw(64, 9), "dY": draw(40, 9), "rows": draw(9, 64), "drows": draw(9, 40)}
    names |= _training(device)
    model, batch = names["model"], next(iter(names["test_loader"]))

    def evaluate() -> float:
        return 1 - m.SoftmaxCrossEntropy().forward(model.forward(batch.images, grad=False), batch.labels).accuracy

    return names | {"evaluate": evaluate}


# By page; the others take nothing as given.
GIVEN: dict[str, Callable[[str], dict[str, Any]]] = {
    "breadth.md": _breadth,
    "fusion.md": _training,
    "memory.md": _memory,
    "sparse.md": _sparse,
}
