"""The names that ``import minidl`` offers, and nothing else."""

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

__all__ = [
    "AdamW", "AdaptiveAvgPool2d", "Add", "AvgPool2d", "BCEWithLogitsLoss", "BatchNorm2d", "Concat", "Confusion",
    "Conv2d", "ConvTranspose2d", "DiceLoss", "Dropout", "Flatten", "FocalLoss", "GELU", "Graph", "GroupNorm",
    "Hardswish", "LAMB", "LARS", "Layer", "LayerNorm", "LeakyReLU", "Linear", "MSELoss", "MaxPool2d", "Model", "Mul",
    "Node", "Pad", "ParameterGroup", "ReLU", "ReLU6", "SGD", "SiLU", "Sigmoid", "Softmax", "SoftmaxCrossEntropy",
    "StochasticDepth", "Tanh", "TopK", "Upsample", "WeightAverage", "check_layer", "get_ops", "scope",
]  # fmt: skip
