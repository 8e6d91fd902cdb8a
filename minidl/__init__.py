"""minidl: a standalone deep-learning library for convolutional networks, with explicit backward passes."""

from minidl.backend import get_ops
from minidl.graph import Graph, Node, scope
from minidl.layer import Layer
from minidl.layers import (
    AdaptiveAvgPool2d,
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Flatten,
    Linear,
    MaxPool2d,
    Pad,
    ReLU,
)
from minidl.loss import SoftmaxCrossEntropy
from minidl.model import Model
from minidl.optim import SGD, ParameterGroup

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdaptiveAvgPool2d",
    "Add",
    "AvgPool2d",
    "BatchNorm2d",
    "Concat",
    "Conv2d",
    "ConvTranspose2d",
    "Dropout",
    "Flatten",
    "Graph",
    "Layer",
    "Linear",
    "MaxPool2d",
    "Model",
    "Node",
    "Pad",
    "ParameterGroup",
    "ReLU",
    "SoftmaxCrossEntropy",
    "get_ops",
    "scope",
]
