"""The two smallest networks: a multilayer perceptron and LeNet-5."""

from __future__ import annotations

from collections.abc import Sequence

from minidl import checks
from minidl.graph import Graph
from minidl.layers import Conv2d, Flatten, Linear, MaxPool2d, ReLU


def mlp(num_classes: int = 10, image_shape: tuple[int, ...] = (28, 28, 1), hidden: Sequence[int] = (128, 128)) -> Graph:
    """Fully connected layers with ReLU between them on flattened images."""
    if not isinstance(hidden, Sequence):
        raise checks.bad_value("mlp", "hidden", "a sequence of widths, such as (128, 128)", hidden)
    graph = Graph()
    x = Flatten()(graph.input(image_shape))
    for i, width in enumerate(hidden, start=1):
        x = ReLU(name=f"relu{i}")(Linear(x.shape[-1], width, name=f"fc{i}")(x))
    return graph.output(Linear(x.shape[-1], num_classes, name=f"fc{len(hidden) + 1}")(x))


def lenet(num_classes: int = 10, image_shape: tuple[int, int, int] = (28, 28, 1)) -> Graph:
    """LeNet-5 (LeCun et al. 1998) with ReLU and max pooling: two 5×5 convolutions and three fully connected layers."""
    graph = Graph()
    x = graph.input(image_shape)
    for i, channels in ((1, 6), (2, 16)):
        x = Conv2d(x.shape[-1], channels, 5, padding=2 if i == 1 else 0, name=f"conv{i}")(x)
        x = MaxPool2d(2, name=f"pool{i}")(ReLU(name=f"relu{i}")(x))
    x = Flatten()(x)
    for i, width in ((1, 120), (2, 84)):
        x = ReLU(name=f"relu{i + 2}")(Linear(x.shape[-1], width, name=f"fc{i}")(x))
    return graph.output(Linear(x.shape[-1], num_classes, name="fc3")(x))
