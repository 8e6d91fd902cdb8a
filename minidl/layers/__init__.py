"""The layers, one file per family. Names and arguments follow torch.nn; arrays are NHWC, filters KRSC."""

from minidl.layers.activation import GELU, Hardswish, LeakyReLU, ReLU, ReLU6, Sigmoid, SiLU, Softmax, Tanh
from minidl.layers.batch_norm import BatchNorm2d
from minidl.layers.conv2d import Conv2d, ConvTranspose2d
from minidl.layers.dropout import Dropout, StochasticDepth
from minidl.layers.flatten import Flatten
from minidl.layers.group_norm import GroupNorm, LayerNorm
from minidl.layers.join import Add, Concat, Mul
from minidl.layers.linear import Linear
from minidl.layers.pad2d import Pad
from minidl.layers.parallel_conv2d import ChannelParallelConv2d, RowParallelConv2d
from minidl.layers.pool2d import AdaptiveAvgPool2d, AvgPool2d, MaxPool2d
from minidl.layers.upsample2d import Upsample

__all__ = [
    "AdaptiveAvgPool2d", "Add", "AvgPool2d", "BatchNorm2d", "ChannelParallelConv2d", "Concat", "Conv2d",
    "ConvTranspose2d", "Dropout", "Flatten", "GELU", "GroupNorm", "Hardswish", "LayerNorm", "LeakyReLU", "Linear",
    "MaxPool2d", "Mul", "Pad", "ReLU", "ReLU6", "RowParallelConv2d", "SiLU", "Sigmoid", "Softmax", "StochasticDepth",
    "Tanh", "Upsample",
]  # fmt: skip
