"""Twins in PyTorch: layers and graphs of minidl as torch.nn modules with the same weights and arithmetic.

Filters are converted from KRSC to KCRS; images go in as NCHW tensors in channels_last memory, which is NHWC. Used by
benchmarks (PyTorch beside minidl in the same run) and by the tests that compare a training step with PyTorch's.

PyTorch is optional and nothing else of minidl needs it: import this module where a baseline is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

try:
    import torch
    from torch import nn
except ImportError as error:
    raise ImportError(
        f"the PyTorch baseline is not available ({error}); install PyTorch with: pip install torch"
    ) from error

from minidl import layers as m
from minidl.graph import Graph
from minidl.layer import Layer
from minidl.precision import Precision

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NORMS = nn.modules.batchnorm._BatchNorm


def from_nhwc(images: np.ndarray, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(N, H, W, C) as an (N, C, H, W) tensor in channels_last memory; (N, C) stays."""
    tensor = torch.from_numpy(np.asarray(images, np.float32))
    if tensor.ndim == 4:
        tensor = tensor.permute(0, 3, 1, 2)
    return tensor.to(device=device, dtype=dtype)


def storage(precision: Precision) -> torch.dtype:
    """The dtype of activations and of the weights that enter products."""
    return _DTYPES[precision.name]


def cast(module: nn.Module, precision: Precision, device: str) -> nn.Module:
    """``module`` itself, on ``device``, channels_last, its weights stored in ``precision``; batch norms in float32."""
    module.to(device=device, dtype=storage(precision)).to(memory_format=torch.channels_last)
    for part in module.modules():
        if isinstance(part, _NORMS):
            part.float()
    return module


class _Flatten(nn.Module):
    """Flattens in memory order, as minidl does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.permute(0, 2, 3, 1) if x.ndim == 4 else x).flatten(1)


class _Sum(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class _StochasticDepth(nn.Module):
    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        return x * x.new_empty((len(x), *[1] * (x.ndim - 1))).bernoulli_(1 - self.p).div_(1 - self.p)


class _Concat(nn.Module):
    def forward(self, *parts: torch.Tensor) -> torch.Tensor:
        return torch.cat(parts, dim=1)


class _Product(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * b


class _LayerNorm(nn.LayerNorm):
    """Of the channels, which torch's images have in front."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if x.ndim == 4 else super().forward(x)


class _Upsample(nn.Module):
    """Positions from the two sizes."""

    def __init__(self, layer: m.Upsample):
        super().__init__()
        self.layer, self.align = layer, layer.align_corners if layer.mode == "bilinear" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        size = self.layer.output_shape((n, h, w, c))[1:3]
        return nn.functional.interpolate(x, size, mode=self.layer.mode, align_corners=self.align)


_ACTIVATIONS = {
    m.ReLU: nn.ReLU, m.ReLU6: nn.ReLU6, m.Sigmoid: nn.Sigmoid, m.Tanh: nn.Tanh, m.SiLU: nn.SiLU,
    m.Hardswish: nn.Hardswish,
}  # fmt: skip


def twin(layer: Layer) -> nn.Module:
    """The torch module that computes what ``layer`` computes, with weights of its own.

    Raises:
        NotImplementedError: for a layer that torch has no module for.
    """
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
            return _batch_norm(layer)
        case m.GroupNorm():
            return nn.GroupNorm(layer.num_groups, layer.num_channels, layer.eps, bool(layer.specs))
        case m.LayerNorm():
            return _LayerNorm(layer.normalized_shape, layer.eps, bool(layer.specs))
        case _ if type(layer) in _ACTIVATIONS:
            return _ACTIVATIONS[type(layer)]()
        case m.LeakyReLU():
            return nn.LeakyReLU(layer.slope)
        case m.GELU():
            return nn.GELU(layer.approximate)
        case m.Softmax():
            return nn.Softmax(dim=1)
        case m.Upsample():
            return _Upsample(layer)
        case m.Mul():
            return _Product()
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
        case m.StochasticDepth():
            return _StochasticDepth(layer.p)
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


class _BatchNorm(nn.BatchNorm2d):
    """For (N, C) too, as minidl's."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def _batch_norm(layer: m.BatchNorm2d) -> nn.Module:
    norm = _BatchNorm(layer.num_features, layer.eps, layer.momentum, bool(layer.specs))
    norm.num_batches_tracked = None  # a momentum is given: counting batches would only be one more kernel
    return norm


def layer_of(module: nn.Module) -> Layer | None:
    """The layer whose least work is that of ``module``; None where minidl has none like it."""
    match module:
        case nn.Conv2d() if module.padding_mode == "zeros" and not isinstance(module.padding, str):
            return m.Conv2d(
                module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding,
                module.dilation, module.groups, module.bias is not None,
            )  # fmt: skip
        case nn.ConvTranspose2d():
            return m.ConvTranspose2d(
                module.in_channels, module.out_channels, module.kernel_size, module.stride, module.padding,
                module.output_padding, module.groups, module.bias is not None, module.dilation,
            )  # fmt: skip
        case nn.Linear():
            return m.Linear(module.in_features, module.out_features, module.bias is not None)
        case nn.BatchNorm1d() | nn.BatchNorm2d() if module.track_running_stats:
            return m.BatchNorm2d(module.num_features, affine=module.affine)
        case nn.GroupNorm():
            return m.GroupNorm(module.num_groups, module.num_channels, module.eps, module.affine)
        case _LayerNorm():
            return m.LayerNorm(module.normalized_shape[0], module.eps, module.elementwise_affine)
        case nn.ReLU() | nn.ReLU6() | nn.Sigmoid() | nn.Tanh() | nn.SiLU() | nn.Hardswish():
            return next(ours() for ours, theirs in _ACTIVATIONS.items() if isinstance(module, theirs))
        case nn.LeakyReLU() if module.negative_slope >= 0:
            return m.LeakyReLU(module.negative_slope)
        case nn.GELU():
            return m.GELU(module.approximate)
        case nn.Softmax() if module.dim == 1:
            return m.Softmax()
        case _Upsample():
            layer = module.layer
            return m.Upsample(layer.size, layer.scale or None, layer.mode, layer.align_corners)
        case _Product():
            return m.Mul()
        case nn.MaxPool2d() if not module.return_indices:
            window = (module.kernel_size, module.stride, module.padding, module.dilation)
            return m.MaxPool2d(*window, ceil_mode=module.ceil_mode)
        case nn.AvgPool2d() if module.divisor_override is None:
            window = (module.kernel_size, module.stride, module.padding)
            return m.AvgPool2d(*window, module.ceil_mode, module.count_include_pad)
        case nn.AdaptiveAvgPool2d() if module.output_size is not None:
            return None if _open(module.output_size) else m.AdaptiveAvgPool2d(module.output_size)
        case nn.Dropout() if module.p < 1:
            return m.Dropout(module.p)
        case _StochasticDepth():
            return m.StochasticDepth(module.p)
        case _Sum():
            return m.Add()
        case _Concat():
            return m.Concat()
        case nn.Flatten() | nn.Identity() | _Flatten():
            return m.Flatten()  # of no work
        case nn.ConstantPad2d():
            return m.Pad(module.padding, module.value)
    return None


def _open(size: int | tuple[int | None, ...]) -> bool:
    return isinstance(size, tuple) and None in size


def load_state(module: nn.Module, state: Mapping[str, np.ndarray]) -> None:
    """Copy a layer's parameters and buffers (`Layer.state_dict`) into its twin."""
    own = module.state_dict()
    for name, values in state.items():
        tensor = torch.from_numpy(np.array(values))
        own[name].copy_(tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor)


class TorchGraph(nn.Module):
    """Runs the nodes of ``graph`` in order."""

    def __init__(self, graph: Graph):
        super().__init__()
        self.steps = [(node.index, node.inputs) for node in graph.nodes if node.layer is not None]
        self.keys = [layer.name.replace(".", "/") for layer in graph.layers]  # torch refuses dots in names of modules
        self.layers = nn.ModuleDict({key: twin(layer) for key, layer in zip(self.keys, graph.layers, strict=True)})
        self.output = graph.output_node.index
        self.last = [max(readers, default=len(graph.nodes)) for readers in graph.consumers()]
        self.to(memory_format=torch.channels_last)

    def load(self, state: Mapping[str, np.ndarray]) -> TorchGraph:
        """Copy the weights and buffers of a minidl model (`Model.state_dict`)."""
        for name, values in state.items():
            layer, _, field = name.rpartition(".")
            load_state(self.layers[layer.replace(".", "/")], {field: values})
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = {0: x}
        for (index, inputs), key in zip(self.steps, self.keys, strict=True):
            values[index] = self.layers[key](*(values[i] for i in inputs))
            for i in inputs:
                if self.last[i] == index and i != self.output:
                    values.pop(i, None)
        return values[self.output]
