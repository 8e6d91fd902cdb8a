"""Twins in PyTorch: layers and graphs of minidl as torch.nn modules with the same weights and arithmetic.

Filters are converted from KRSC to KCRS; images go in as NCHW tensors in channels_last memory, which is NHWC. Used by
benchmarks (PyTorch beside minidl in the same run) and by the tests that compare a training step with PyTorch's.

PyTorch is optional and nothing else of minidl needs it: import this module where a baseline is asked for.
"""

from __future__ import annotations

import inspect
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


class _BatchNorm(nn.BatchNorm2d):
    """For (N, C) too, as minidl's."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


# What torch calls the same and constructs by arguments of the same names.
_TWINS: dict[type[Layer], type[nn.Module]] = {
    m.Conv2d: nn.Conv2d, m.ConvTranspose2d: nn.ConvTranspose2d, m.Linear: nn.Linear, m.BatchNorm2d: _BatchNorm,
    m.GroupNorm: nn.GroupNorm, m.LayerNorm: _LayerNorm, m.ReLU: nn.ReLU, m.ReLU6: nn.ReLU6, m.Sigmoid: nn.Sigmoid,
    m.Tanh: nn.Tanh, m.SiLU: nn.SiLU, m.Hardswish: nn.Hardswish, m.GELU: nn.GELU, m.MaxPool2d: nn.MaxPool2d,
    m.AvgPool2d: nn.AvgPool2d, m.AdaptiveAvgPool2d: nn.AdaptiveAvgPool2d, m.StochasticDepth: _StochasticDepth,
    m.Dropout: nn.Dropout, m.Flatten: _Flatten, m.Add: _Sum, m.Concat: _Concat, m.Mul: _Product,
}  # fmt: skip


def _shared(ours: type[Layer], theirs: type[nn.Module]) -> set[str]:
    """The arguments that both constructors have."""
    return inspect.signature(ours).parameters.keys() & inspect.signature(theirs).parameters.keys()


def twin(layer: Layer) -> nn.Module:
    """The torch module that computes what ``layer`` computes, with weights of its own.

    Raises:
        NotImplementedError: for a layer that torch has no module for.
    """
    match layer:
        case m.LeakyReLU():
            return nn.LeakyReLU(layer.slope)
        case m.Softmax():
            return nn.Softmax(dim=1)
        case m.Upsample():
            return _Upsample(layer)
        case m.Pad():
            return nn.ConstantPad2d(layer.padding, layer.value)
    own = {spec.name for spec in layer.specs}
    told = dict.fromkeys(("affine", "elementwise_affine"), bool(own)) | {"bias": "bias" in own}
    for ours, theirs in _TWINS.items():
        if isinstance(layer, ours):
            names = _shared(ours, theirs)
            module = theirs(**{name: told[name] if name in told else getattr(layer, name) for name in names})
            break
    else:
        raise NotImplementedError(f"no torch module for {layer!r}")
    if isinstance(module, _BatchNorm):
        module.num_batches_tracked = None  # a momentum is given: counting batches would only be one more kernel
    return module


def layer_of(module: nn.Module) -> Layer | None:
    """The layer whose least work is that of ``module``; None where minidl has none like it."""
    match module:
        case nn.Conv2d() if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return None
        case nn.MaxPool2d() if module.return_indices:
            return None
        case nn.AvgPool2d() if module.divisor_override is not None:
            return None
        case nn.AdaptiveAvgPool2d() if module.output_size is None or _open(module.output_size):
            return None
        case nn.Dropout() if module.p >= 1:
            return None
        case nn.BatchNorm1d() | nn.BatchNorm2d():
            affine = module.affine
            return m.BatchNorm2d(module.num_features, affine=affine) if module.track_running_stats else None
        case nn.LeakyReLU():
            return m.LeakyReLU(module.negative_slope) if module.negative_slope >= 0 else None
        case nn.Softmax():
            return m.Softmax() if module.dim == 1 else None
        case _Upsample():
            layer = module.layer
            return m.Upsample(layer.size, layer.scale or None, layer.mode, layer.align_corners)
        case nn.Flatten() | nn.Identity():
            return m.Flatten()  # of no work
        case nn.ConstantPad2d():
            return m.Pad(module.padding, module.value)
    for ours, theirs in _TWINS.items():
        if isinstance(module, theirs):
            given = {name: getattr(module, name) for name in _shared(ours, theirs)}
            told = {"bias": given.get("bias") is not None, "normalized_shape": given.get("normalized_shape", [0])[0]}
            return ours(**{name: told.get(name, value) for name, value in given.items()})
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
