"""Networks as functions that build a `Graph`, with the parameter names of torchvision where it has the network."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from minidl import checks
from minidl.graph import Graph
from minidl.models.blocks import depthwise_separable, squeeze_excitation
from minidl.models.densenet import densenet121
from minidl.models.efficientnet import efficientnet_b0
from minidl.models.mlp import lenet, mlp
from minidl.models.mobilenet import mobilenet_v2
from minidl.models.resnet import (
    resnet18,
    resnet20,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnext50_32x4d,
    wide_resnet50_2,
)
from minidl.models.rows import by_rows
from minidl.models.unet import unet
from minidl.models.vgg import vgg16, vgg16_bn

MODELS: dict[str, Callable[..., Graph]] = {
    function.__name__: function
    for function in (
        densenet121, efficientnet_b0, lenet, mlp, mobilenet_v2, resnet18, resnet20, resnet34, resnet50, resnet101,
        resnet152, resnext50_32x4d, unet, vgg16, vgg16_bn, wide_resnet50_2,
    )
}  # fmt: skip

__all__ = ["MODELS", "build", "by_rows", "depthwise_separable", "squeeze_excitation", "usual_task", *MODELS]

_TASKS = {"lenet": (32, 10), "mlp": (32, 10), "resnet20": (32, 10), "unet": (256, 2)}


def usual_task(name: str, side: int | None = None, classes: int | None = None) -> tuple[int, int]:
    """(side of the images, classes): for None what the network called ``name`` is usually measured on."""
    usual = _TASKS.get(name, (224, 1000))
    return usual[0] if side is None else side, usual[1] if classes is None else classes


def __getattr__(name: str) -> None:
    raise AttributeError(str(checks.unknown("model", name, MODELS)), name=name)


def build(name: str, image_shape: tuple[int, int, int], num_classes: int, **options: Any) -> Graph:
    """The network called ``name`` for images of (H, W, C) and ``num_classes`` classes.

    Raises:
        ValueError: unknown name, listing the known ones; an option that the network does not have; image too
            small, naming the layer it does not fit; a shape of (C, H, W).
    """
    if name not in MODELS:
        raise checks.unknown("model", name, MODELS)
    unknown = set(options) - set(inspect.signature(MODELS[name]).parameters)
    if unknown:
        raise checks.bad_value(name, "options", "arguments that this model has", sorted(unknown), "leave them out")
    if len(image_shape) == 3 and image_shape[0] in (1, 3) and image_shape[1] == image_shape[2] > 8:
        height, width = image_shape[1:]
        remedy = f"channels come last: {(height, width, image_shape[0])}"
        raise checks.bad_value(name, "image_shape", "(height, width, channels)", tuple(image_shape), remedy)
    return MODELS[name](num_classes=num_classes, image_shape=image_shape, **options)
