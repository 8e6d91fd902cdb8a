"""minidl: a standalone deep-learning library for convolutional networks, with explicit backward passes."""

from minidl import extensions  # noqa: F401  (first: the others need what it asks for)
from minidl.adaptive import LAMB, LARS, AdamW
from minidl.average import WeightAverage
from minidl.backend import get_ops
from minidl.graph import Graph, Node, scope
from minidl.laws import check_layer
from minidl.layer import Layer
from minidl.layers import (
    GELU,
    AdaptiveAvgPool2d,
    Add,
    AvgPool2d,
    BatchNorm2d,
    Concat,
    Conv2d,
    ConvTranspose2d,
    Dropout,
    Flatten,
    GroupNorm,
    Hardswish,
    LayerNorm,
    LeakyReLU,
    Linear,
    MaxPool2d,
    Mul,
    Pad,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    StochasticDepth,
    Tanh,
    Upsample,
)
from minidl.loss import BCEWithLogitsLoss, DiceLoss, FocalLoss, MSELoss, SoftmaxCrossEntropy
from minidl.metrics import Confusion, TopK
from minidl.model import Model
from minidl.optim import SGD, ParameterGroup

__version__ = "0.1.0"

__all__ = [
    "AdamW", "AdaptiveAvgPool2d", "Add", "AvgPool2d", "BCEWithLogitsLoss", "BatchNorm2d", "Concat", "Confusion",
    "Conv2d", "ConvTranspose2d", "DiceLoss", "Dropout", "Flatten", "FocalLoss", "GELU", "Graph", "GroupNorm",
    "Hardswish", "LAMB", "LARS", "Layer", "LayerNorm", "LeakyReLU", "Linear", "MSELoss", "MaxPool2d", "Model", "Mul",
    "Node", "Pad", "ParameterGroup", "ReLU", "ReLU6", "SGD", "SiLU", "Sigmoid", "Softmax", "SoftmaxCrossEntropy",
    "StochasticDepth", "Tanh", "TopK", "Upsample", "WeightAverage", "check_layer", "get_ops", "scope",
]  # fmt: skip


def __getattr__(name: str) -> None:
    from minidl import checks

    raise checks.elsewhere(name, __all__)
