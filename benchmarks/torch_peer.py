"""The peer of a network: a minidl graph as a torch.nn.Module with the same layers, weights and arithmetic.

Weights are converted from KRSC to KCRS; images go in as NCHW tensors in channels_last memory, which is NHWC. Used by
benchmarks (PyTorch beside minidl in the same run) and by the tests that compare a training step with PyTorch's.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import minidl as m
from minidl import Graph

__all__ = ["TorchGraph", "from_nhwc"]


def from_nhwc(images: np.ndarray, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(N, H, W, C) as an (N, C, H, W) tensor in channels_last memory; (N, C) stays."""
    tensor = torch.from_numpy(np.asarray(images, np.float32))
    if tensor.ndim == 4:
        tensor = tensor.permute(0, 3, 1, 2)
    return tensor.to(device=device, dtype=dtype)


class _Flatten(nn.Module):
    """Flattens in memory order, as minidl does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1).flatten(1)


class _Sum(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class _Concat(nn.Module):
    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts, dim=1)


def _module(layer: m.Layer) -> nn.Module:
    """The torch module that computes what ``layer`` computes."""
    bias = any(spec.name == "bias" for spec in layer.specs)
    match layer:
        case m.Conv2d():
            return nn.Conv2d(
                layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding, layer.dilation,
                layer.groups, bias,
            )  # fmt: skip
        case m.ConvTranspose2d():
            return nn.ConvTranspose2d(
                layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, layer.padding,
                layer.output_padding, layer.groups, bias, layer.dilation,
            )  # fmt: skip
        case m.Linear():
            return nn.Linear(layer.in_features, layer.out_features, bias)
        case m.BatchNorm2d():
            return nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, bool(layer.specs))
        case m.ReLU():
            return nn.ReLU()
        case m.MaxPool2d():
            return nn.MaxPool2d(
                layer.kernel_size, layer.stride, layer.padding, layer.dilation, ceil_mode=layer.ceil_mode
            )
        case m.AvgPool2d():
            return nn.AvgPool2d(
                layer.kernel_size, layer.stride, layer.padding, layer.ceil_mode, layer.count_include_pad
            )
        case m.AdaptiveAvgPool2d():
            return nn.AdaptiveAvgPool2d(layer.output_size)
        case m.Dropout():
            return nn.Dropout(layer.p)
        case m.Flatten():
            return _Flatten()
        case m.Add():
            return _Sum()
        case m.Concat():
            return _Concat()
        case m.Pad():
            return nn.ConstantPad2d(layer.padding, layer.value)
    raise NotImplementedError(f"no torch module for {layer!r}")


class TorchGraph(nn.Module):
    """Runs the nodes of ``graph`` in order."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.steps = [(node.index, node.inputs) for node in graph.nodes if node.layer is not None]
        self.keys = [layer.name for layer in graph.layers]
        # torch refuses dots in the names of modules
        self.layers = nn.ModuleDict({name.replace(".", "/"): _module(layer) for name, layer in self._named(graph)})
        self.output = graph.output_node.index
        readers = graph.consumers()
        self.last = [max(r, default=len(graph.nodes)) for r in readers]
        self.to(memory_format=torch.channels_last)

    @staticmethod
    def _named(graph: Graph) -> list[tuple[str, m.Layer]]:
        return [(layer.name, layer) for layer in graph.layers]

    def load(self, state: dict[str, np.ndarray]) -> TorchGraph:
        """Copy the weights and buffers of a minidl model (`Model.state_dict`)."""
        own = self.state_dict()
        for name, values in state.items():
            layer, _, field = name.rpartition(".")
            key = f"layers.{layer.replace('.', '/')}.{field}"
            tensor = torch.from_numpy(np.array(values))
            if tensor.ndim == 4:
                tensor = tensor.permute(0, 3, 1, 2)
            own[key].copy_(tensor)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = {0: x}
        for (index, inputs), name in zip(self.steps, self.keys, strict=True):
            values[index] = self.layers[name.replace(".", "/")](*(values[i] for i in inputs))
            for i in inputs:
                if self.last[i] == index and i != self.output:
                    values.pop(i, None)
        return values[self.output]
