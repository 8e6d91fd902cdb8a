"""Weights in and out: checkpoints, and state dicts as torchvision and timm name them, without PyTorch.

Filters of state dicts are converted between KCRS and KRSC, the columns of a Linear behind a Flatten between (C, H, W)
and (H, W, C) order; nothing else changes, so a file written by `export_weights` and read again gives the same bits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from minidl import checkpoint, checks
from minidl.graph import Graph
from minidl.layers import Add, BatchNorm2d, Concat, Dropout, Flatten, LayerNorm, Linear, Mul, ReLU, Softmax
from minidl.layers.activation import Activation
from minidl.model import Model

# Layers whose outputs have the order of their inputs, and with them their parameters.
_KEEP_PLACES = (Activation, Add, BatchNorm2d, Dropout, Flatten, LayerNorm, Mul, ReLU, Softmax)
_IGNORED = re.compile(r"(^|\.)num_batches_tracked$")
# Other spellings of names, tried in turn: wrappers around a whole network, DenseNets of 2017, timm's VGGs.
_SPELLINGS = (
    (re.compile(r"^(module|model|_orig_mod)\."), ""),
    (re.compile(r"(denselayer\d+)\.(norm|conv)\.(\d)\."), r"\1.\2\3."),
    (re.compile(r"^pre_logits\.fc1\."), "classifier.0."),
    (re.compile(r"^pre_logits\.fc2\."), "classifier.3."),
    (re.compile(r"^head\.fc\."), "classifier.6."),
)


# timm's names of what torchvision numbers: in the first stage of MobileNetV2 and EfficientNet, and in the others.
_FIRST_STAGE = {
    "conv_dw": ("0.0", "0.0"), "bn1": ("0.1", "0.1"), "conv_pw": ("2.0", "1"), "bn2": ("2.1", "2"),
    "se.conv_reduce": ("1.fc1", ""), "se.conv_expand": ("1.fc2", ""),
}  # fmt: skip
_STAGES = {
    "conv_pw": ("0.0", "0.0"), "bn1": ("0.1", "0.1"), "conv_dw": ("1.0", "1.0"), "bn2": ("1.1", "1.1"),
    "se.conv_reduce": ("2.fc1", ""), "se.conv_expand": ("2.fc2", ""), "conv_pwl": ("3.0", "2"), "bn3": ("3.1", "3"),
}  # fmt: skip
_ENDS = {"conv_stem": "0.0", "bn1": "0.1", "conv_head": "{last}.0", "bn2": "{last}.1"}
_BLOCK = re.compile(r"^blocks\.(\d+)\.(\d+)\.(.+)\.(\w+)$")
_MOBILENET_DEPTHS = (1, 2, 3, 4, 3, 3, 1)


@dataclass(frozen=True)
class ImportReport:
    """What became of the tensors of a file, by name.

    Attributes:
        loaded: of the model, in its order.
        missing: of the model, not in the file.
        unexpected: of the file, not in the model.
        mismatched: of the model, with what was expected and what came.
        ignored: of the file, of no use here (counters of batches).
    """

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether every tensor of the model was found, and no other."""
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        parts = [f"{len(self.loaded)} loaded"]
        for kind in ("missing", "unexpected", "mismatched"):
            names = getattr(self, kind)
            if names:
                parts.append(f"{len(names)} {kind}: {checks.some(names)}")
        return "; ".join(parts)


def import_weights(
    model: Model, weights: str | os.PathLike | Mapping[str, np.ndarray], *, strict: bool = True
) -> ImportReport:
    """Load a PyTorch state dict, or the model of a checkpoint, into ``model``.

    Averaged weights, where the run had any, take the place of the others, as in its evaluation.

    Args:
        weights: a safetensors file, a folder of checkpoints, of which the newest counts, or arrays by name, as PyTorch
            has them. Names are torchvision's; timm's and those of wrapped models (``module.``) are understood for the
            networks of `minidl.models`. Any floating dtype; stored as float32.
        strict: refuse what is missing, unexpected or of another shape; else load the rest and leave it as it is.

    Raises:
        FileNotFoundError: no such file.
        TypeError: neither a path nor a mapping.
        ValueError: no safetensors file; with ``strict`` a state that does not fit, of which nothing is loaded then.
    """
    state, ours = _read(weights) if isinstance(weights, (str, os.PathLike)) else (weights, False)
    if not isinstance(state, Mapping):
        raise checks.bad_dtype("weights", "weights", "a safetensors file or arrays by name", checks.describe(state))
    own = model.state_dict()
    found, report = convert_state(model.graph, own, state, ours)
    if strict and not report.complete:
        remedy = "pass strict=False to load the rest"
        raise ValueError(f"weights do not fit the model: {report}; {remedy}")
    model.load_state_dict(own | found)
    return report


def convert_state(
    graph: Graph, own: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray], ours: bool = False
) -> tuple[dict[str, np.ndarray], ImportReport]:
    """Arrays of a PyTorch ``state`` in minidl's names and layouts, those that fit ``own`` (`Model.state_dict`).

    Args:
        ours: the layouts of ``state`` are minidl's already.
    """
    report, found = ImportReport(), {}
    places, sparse = _places(graph), _sparse(graph)
    for name, values in state.items():
        if _IGNORED.search(name):
            report.ignored.append(name)
            continue
        own_name = _own_name(name, own)
        if own_name is None:
            report.unexpected.append(name)
            continue
        expected = own[own_name].shape
        axes = sparse[own_name].dense_axes if own_name in sparse else len(expected)
        array = values if ours else _to_minidl(np.asarray(values), places.get(own_name), axes)
        if own_name in sparse and array.shape != expected:
            array = _at_pattern(sparse[own_name], array)
        if array.shape != expected:
            report.mismatched.append(f"{own_name} (expected {expected}, got {array.shape})")
        elif own_name in found:
            report.unexpected.append(name)
        else:
            found[own_name] = array
    wrong = {text.split(" ", 1)[0] for text in report.mismatched}
    report.loaded.extend(name for name in own if name in found)
    report.missing.extend(name for name in own if name not in found and name not in wrong)
    return found, report


def torch_state(model: Model) -> dict[str, np.ndarray]:
    """Parameters and buffers of ``model`` with torchvision's names and layouts, float32, dense: sparse ones with their
    zeros.
    """
    places, state = _places(model.graph), model.state_dict()
    state |= {name: layer.dense(state[name]) for name, layer in _sparse(model.graph).items()}
    return {name: _to_torch(values, places.get(name)) for name, values in state.items()}


def export_weights(model: Model, path: str | os.PathLike) -> Path:
    """Write `torch_state` to a safetensors file, which ``load_state_dict(strict=False)`` of PyTorch takes.

    PyTorch's counters of batches are not among them. The file replaces an older one in one step.

    Raises:
        OSError: when it cannot be written.
    """
    checkpoint.write_whole(path, serialize(torch_state(model), {"format": "pt"}))
    return Path(path)


def _read(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], bool]:
    """The arrays of a file, and whether minidl wrote it for itself: a model's state, alone or in a checkpoint."""
    path = checkpoint.latest(path) if Path(path).is_dir() else Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            if (file.metadata() or {}).get("format") != "minidl":
                return {name: file.get_tensor(name) for name in file.keys()}, False
        tensors, _ = checkpoint.load(path)
        if tensors.keys() == {"header", "codes", "plain"}:
            remedy = "sparse.load_compressed reads it, model.load_state_dict takes what that gives"
            raise checks.bad_value("weights", "path", "a file of arrays by name", f"a compressed one, {path}", remedy)
        return checkpoint.evaluated(tensors) or tensors, True
    except SafetensorError as error:
        remedy = "a PyTorch file is converted by safetensors.torch.save_file(torch.load(path), ...)"
        raise checks.bad_value("weights", "path", "a safetensors file", str(path), f"{error}; {remedy}") from error


def _own_name(name: str, own: Mapping[str, np.ndarray]) -> str | None:
    """The model's name of a tensor called ``name``: itself, or another spelling of it."""
    for pattern, replacement in ((re.compile("^"), ""), *_SPELLINGS):
        name = pattern.sub(replacement, name)
        if name in own:
            return name
    return next((other for other in _names_of_timm(name) if other in own), None)


def _names_of_timm(name: str) -> Iterator[str]:
    """What a tensor of timm's EfficientNet-B0 or MobileNetV2 may be called by torchvision."""
    layer, _, field = name.rpartition(".")
    if layer == "classifier":
        yield f"classifier.1.{field}"
    if layer in _ENDS:
        yield from (f"features.{_ENDS[layer].format(last=last)}.{field}" for last in (8, 18))
    if match := _BLOCK.match(name):
        stage, block, layer, field = int(match[1]), int(match[2]), match[3], match[4]
        efficient, mobile = (_STAGES if stage else _FIRST_STAGE).get(layer, ("", ""))
        yield f"features.{stage + 1}.{block}.block.{efficient}.{field}"
        yield f"features.{1 + sum(_MOBILENET_DEPTHS[:stage]) + block}.conv.{mobile}.{field}"


def _sparse(graph: Graph) -> dict[str, Any]:
    """The layers that have the elements at a pattern only (`minidl.sparse`), by the names of their weights."""
    return {f"{layer.name}.weight": layer for layer in graph.layers if hasattr(layer, "at_pattern")}


def _at_pattern(layer: Any, dense: np.ndarray) -> np.ndarray:
    """The elements that the layer has of a dense weight; the weight as it is where it has others, or another shape."""
    try:
        values = layer.at_pattern(dense)
    except ValueError:
        return dense
    return values if np.count_nonzero(values) == np.count_nonzero(dense) else dense


def _places(graph: Graph) -> dict[str, np.ndarray]:
    """By the names of parameters and buffers that meet flattened images: which column, or element, of PyTorch's each of
    ours is. There images are flattened channel by channel, here pixel by pixel.
    """
    found, orders, sparse = {}, {}, _sparse(graph)
    for node in graph.nodes[1:]:
        layer, inputs = node.layer, [graph.nodes[i] for i in node.inputs]
        given = [orders.get(i) for i in node.inputs]
        if isinstance(layer, Flatten) and len(inputs[0].shape) == 3:
            height, width, channels = inputs[0].shape
            order = np.arange(height * width * channels).reshape(channels, height, width)
            orders[node.index] = order.transpose(1, 2, 0).reshape(-1)
        elif all(order is None for order in given):
            continue
        elif isinstance(layer, Concat):
            sizes = [below.shape[-1] for below in inputs]
            parts = [np.arange(size) if order is None else order for size, order in zip(sizes, given, strict=True)]
            orders[node.index] = np.concatenate([part + sum(sizes[:i]) for i, part in enumerate(parts)])
        elif isinstance(layer, _KEEP_PLACES) and all(np.array_equal(order, given[0]) for order in given):
            orders[node.index] = given[0]
            found |= {f"{node.name}.{name}": given[0] for name in (*(s.name for s in layer.specs), *layer.buffer_specs)}
        elif isinstance(layer, Linear) or f"{node.name}.weight" in sparse:
            found[f"{node.name}.weight"] = given[0]
    return found


def _to_minidl(values: np.ndarray, places: np.ndarray | None, axes: int) -> np.ndarray:
    """Float32, channels last; ``axes`` of the result."""
    values = values.astype(np.float32)
    if places is not None and values.ndim <= 2 and values.shape[-1:] == places.shape:
        values = values[..., places]
    if values.ndim == 4:
        values = values.transpose(0, 2, 3, 1)
        if axes == 2:  # a convolution over the whole image stands for a Linear
            values = values.reshape(values.shape[0], -1)
    return np.ascontiguousarray(values)


def _to_torch(values: np.ndarray, places: np.ndarray | None) -> np.ndarray:
    if places is not None:
        return np.ascontiguousarray(values[..., np.argsort(places)])
    return np.ascontiguousarray(values.transpose(0, 3, 1, 2) if values.ndim == 4 else values)
