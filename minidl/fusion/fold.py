"""Inference: batch norms folded into the convolutions before them.

In evaluation a batch norm is a scale and a shift per channel, constants of the trained network. A convolution whose
output only the batch norm reads takes them over: ``w[k] * s[k]`` and ``b[k] * s[k] + t[k]``, with ``s = gamma * rstd``
and ``t = beta - mean * s``, computed in float64 and rounded once. Where a ReLU alone reads the batch norm, the
convolution does its work, too.
"""

from __future__ import annotations

import numpy as np

from minidl import checks
from minidl.layers import BatchNorm2d, Conv2d, ReLU, RowParallelConv2d
from minidl.model import Model
from minidl.precision import float32

_FOLDABLE = (Conv2d, RowParallelConv2d)  # which hold all filters of their output


def fold(model: Model) -> list[str]:
    """Fold what can be folded, for `Model.forward` with ``grad=False``; `Model.train` undoes it.

    Parameters, buffers and state dict stay as they are: loading another state undoes the folding too.

    Returns:
        The names of the batch norms that cost nothing any more.

    Raises:
        RuntimeError: in training mode.
    """
    if model.training:
        raise checks.order("fold", "the model is in training mode", "call model.eval() first")
    readers, folded = model.graph.consumers(), []
    for node in model.graph.nodes:
        if not isinstance(node.layer, BatchNorm2d):
            continue
        source = model.graph.nodes[node.inputs[0]]
        if type(source.layer) in _FOLDABLE and len(readers[source.index]) == 1:
            above = [model.graph.nodes[i].layer for i in readers[node.index]]
            relu = len(above) == 1 and type(above[0]) is ReLU and node is not model.output_node
            source.layer.folded = *_filters(model, source.layer, node.layer), relu and type(source.layer) is Conv2d
            node.layer.folded = True
            folded.append(node.name)
    return folded


def _filters(model: Model, conv: Conv2d, norm: BatchNorm2d) -> tuple:
    """The convolution's weight and bias with the batch norm in them, on the device."""
    state = {f"conv.{name}": array for name, array in conv.state_dict().items()}
    state |= {f"norm.{name}": array for name, array in norm.state_dict().items()}
    wide = {name: array.astype(np.float64) for name, array in state.items()}
    scale = wide.get("norm.weight", 1.0) / np.sqrt(wide["norm.running_var"] + norm.eps)
    shift = wide.get("norm.bias", 0.0) - wide["norm.running_mean"] * scale
    weight = wide["conv.weight"] * scale[:, None, None, None]
    bias = wide.get("conv.bias", 0.0) * scale + shift
    return model.ops.from_host(weight.astype(model.precision.storage)), model.ops.from_host(bias.astype(float32))
