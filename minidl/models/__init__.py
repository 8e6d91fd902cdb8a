"""Networks as functions that build a `Graph`, with the parameter names of torchvision where it has the network.

Wherever a network is called by its name, ``"mynet:build"`` calls the function ``build`` of the user's mynet.py, which
takes ``num_classes`` and ``image_shape`` as those here do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from minidl import checks
from minidl.config import named
from minidl.graph import Graph
from minidl.layers import BatchNorm2d
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

__all__ = [
    "CHOICES", "MODELS", "build", "by_rows", "depthwise_separable", "parse_options", "squeeze_excitation", "usual_task",
    *MODELS,
]  # fmt: skip

CHOICES = f"one of {', '.join(sorted(MODELS))}, or MODULE:FUNCTION of your own"
_USUAL = {"image_shape": (224, 224, 3), "num_classes": 1000}  # where a function of the user's does not say
_SMALL = {"lenet": 32, "mlp": 32}  # they are for images of one channel and measured on those of three


def usual_task(name: str, side: int | None = None, classes: int | None = None) -> tuple[int, int]:
    """(side of the images, classes): for None what the network called ``name`` is usually measured on."""
    given = inspect.signature(_builder(name)).parameters.values()
    usual = _USUAL | {p.name: p.default for p in given if p.default is not p.empty}
    side = _SMALL.get(name, usual["image_shape"][0]) if side is None else side
    return side, usual["num_classes"] if classes is None else classes


def _builder(name: str | Callable[..., Graph]) -> Callable[..., Graph]:
    """The function called ``name``, or given in its place.

    Raises:
        ValueError: no such function, or one of other arguments.
    """
    if not isinstance(name, str):
        remedy = "pass the function, not its result" if isinstance(name, Graph) else None
        return _fitting("network", name, checks.wording(name), remedy)
    if ":" not in name and name not in MODELS:
        error = checks.unknown("model", name, MODELS)
        error.add_note("mynet:build names the function build of your mynet.py")
        raise error
    return _fitting("model", named("model", name) if ":" in name else MODELS[name], name)


def _fitting(argument: str, found: Any, name: str, remedy: str | None = None) -> Callable[..., Graph]:
    wanted = {"num_classes", "image_shape"}
    if not callable(found) or not wanted <= set(inspect.signature(found).parameters):
        expected = "a function of num_classes and image_shape, as models.resnet20"
        raise checks.bad_value("", argument, expected, name, remedy)
    return found


def __getattr__(name: str) -> None:
    raise AttributeError(str(checks.unknown("model", name, MODELS)), name=name)


def build(
    name: str | Callable[..., Graph],
    image_shape: tuple[int, int, int],
    num_classes: int,
    *,
    sync_batch_norm: bool = False,
    **options: Any,
) -> Graph:
    """The network called ``name``, a known one or ``"module:function"``, for images of (H, W, C) and some classes.

    Args:
        name: or the function itself.
        sync_batch_norm: batch norms take their statistics over all ranks.

    Raises:
        ValueError: unknown name, listing the known ones; an option that the network does not have; image too
            small, naming the layer it does not fit; a shape of (C, H, W).
        TypeError: a function that returns no `Graph`.
    """
    builder = _builder(name)
    name = name if isinstance(name, str) else getattr(name, "__name__", "network")
    unknown = set(options) - set(inspect.signature(builder).parameters)
    if unknown:
        raise checks.bad_value(name, "options", "arguments that this model has", sorted(unknown), "leave them out")
    if len(image_shape) == 3 and image_shape[0] in (1, 3) and image_shape[1] == image_shape[2] > 8:
        height, width = image_shape[1:]
        remedy = f"channels come last: {(height, width, image_shape[0])}"
        raise checks.bad_value(name, "image_shape", "(height, width, channels)", tuple(image_shape), remedy)
    graph = builder(num_classes=num_classes, image_shape=image_shape, **options)
    if not isinstance(graph, Graph) or not graph.finished:
        expected, remedy = "a Graph that knows its output", "return graph.output(node)"
        raise checks.bad_dtype(name, "result", expected, checks.describe(graph), remedy)
    norms = [layer for layer in graph.layers if isinstance(layer, BatchNorm2d)] if sync_batch_norm else ()
    if sync_batch_norm and not norms:
        raise checks.bad_value(name, "sync_batch_norm", "False for a network without batch norms", True)
    for layer in norms:
        layer.sync = layer.sync or True
    return graph


def parse_options(text: str | None) -> dict[str, int | float]:
    """Arguments of a network from ``"width=16 depth=3"``, as ``--model-options`` takes them.

    Raises:
        ValueError: for anything but NAME=NUMBER words.
    """
    options: dict[str, int | float] = {}
    for word in (text or "").split():
        name, _, value = word.partition("=")
        try:
            options[name] = int(value) if value.lstrip("-").isdecimal() else float(value)
        except ValueError as error:
            expected = "NAME=NUMBER words, such as 'width=16 depth=3'"
            raise checks.bad_value("--model-options", "text", expected, text) from error
    return options
