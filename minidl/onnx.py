"""Export to ONNX: a trained network for the runtimes that serve it.

    export_onnx(model, "net.onnx")

The file holds inference: batch norm with its running statistics, no dropout, float32 throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidl import checkpoint, checks, layers
from minidl.graph import Node
from minidl.layer import Layer
from minidl.model import Model
from minidl.shapes import ceil_div

_OPSET, _IR = 17, 8  # of 2022: what runtimes in use have
_LAYOUTS = ("NHWC", "NCHW")
_TO_NCHW, _TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)

State = Mapping[str, np.ndarray]


def export_onnx(model: Model, path: str | Path, *, layout: str = "NHWC") -> None:
    """Write ``model`` as an ONNX file; see `to_onnx`."""
    checkpoint.write_whole(path, to_onnx(model, layout=layout).SerializeToString())


def to_onnx(model: Model, *, layout: str = "NHWC") -> Any:
    """``model`` as an ``onnx.ModelProto`` of opset 17, checked by onnx, whatever mode it is in.

    Args:
        layout: of images on the way in and out: "NHWC" as in minidl, or "NCHW".

    Its input is ``input``, its output ``output``, float32, of any batch and the graph's image size. Parameters have the
    names that they have in checkpoints.

    Raises:
        ImportError: onnx is not installed.
        ValueError: another layout, or a layer that has no counterpart in ONNX.
    """
    checks.instance("to_onnx", "model", model, Model, "a Model", "Model(graph) has the weights")
    if layout not in _LAYOUTS:
        raise checks.unknown("layout", layout, _LAYOUTS)
    with checks.needs("export to ONNX", "onnx"):
        import onnx
    return _Writer(onnx, model, layout).model()


class _Writer:
    """Collects the nodes and constants of one file; images are NCHW inside."""

    def __init__(self, onnx: ModuleType, network: Model, layout: str):
        self.onnx, self.network, self.images_first = onnx, network, layout == "NHWC"
        self.state: State = network.state_dict()
        self.nodes: list[Any] = []
        self.constants: dict[str, np.ndarray] = {}

    def model(self) -> Any:
        graph, helper = self.network.graph, self.onnx.helper
        last = graph.output_node
        values: dict[int, str] = {}
        for node in graph.nodes[: last.index + 1]:
            if node.layer is None:
                values[node.index] = self._turned("input", node, _TO_NCHW, "input")
                continue
            form = _FORMS.get(type(node.layer))
            if form is None:
                known = ", ".join(sorted(kind.__name__ for kind in _FORMS))
                raise checks.bad_value(
                    node.name, "layer", f"one that ONNX export knows ({known})", type(node.layer).__name__
                )
            values[node.index] = form(self, node, *(values[i] for i in node.inputs))
        self.add("Identity", [self._turned(values[last.index], last, _TO_NHWC, "output")], "output")
        body = helper.make_graph(
            self.nodes,
            "minidl",
            [self._declared("input", graph.nodes[0])],
            [self._declared("output", last)],
            [self.onnx.numpy_helper.from_array(array, name) for name, array in self.constants.items()],
        )
        opset = [helper.make_opsetid("", _OPSET)]
        model = helper.make_model(body, opset_imports=opset, ir_version=_IR, producer_name="minidl")
        self.onnx.checker.check_model(model, full_check=True)
        return model

    def add(self, kind: str, inputs: list[str], name: str, **attributes: Any) -> str:
        """A node with one output, which has its name."""
        self.nodes.append(self.onnx.helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, array: np.ndarray) -> str:
        self.constants[name] = np.ascontiguousarray(array)
        return name

    def parameter(self, layer: Layer, name: str, axes: tuple[int, ...] | None = None) -> str:
        full = f"{layer.name}.{name}"
        array = self.state[full]
        return self.constant(full, array if axes is None else array.transpose(axes))

    def shape_before(self, node: Node) -> tuple[int, ...]:
        return self.network.graph.nodes[node.inputs[0]].shape

    def _turned(self, value: str, node: Node, axes: tuple[int, ...], name: str) -> str:
        """Images in the other layout, where the file's own is NHWC."""
        if len(node.shape) != 3 or not self.images_first:
            return value
        return self.add("Transpose", [value], f"{name}.turned", perm=axes)

    def _declared(self, name: str, node: Node) -> Any:
        shape = node.shape
        if len(shape) == 3 and not self.images_first:
            shape = shape[2], *shape[:2]
        return self.onnx.helper.make_tensor_value_info(name, self.onnx.TensorProto.FLOAT, ["N", *shape])


# --------------------------------------------------------------------------------------------------------------- layers


def _bias(to: _Writer, layer: Layer) -> list[str]:
    return [to.parameter(layer, "bias")] if f"{layer.name}.bias" in to.state else []


def _window(layer: Any) -> dict[str, Any]:
    """Attributes of convolutions and pools; padding is the same on both sides."""
    return {"kernel_shape": layer.kernel_size, "strides": layer.stride, "pads": layer.padding * 2}


def _convolution(to: _Writer, node: Node, x: str) -> str:
    layer = node.layer
    inputs = [x, to.parameter(layer, "weight", _TO_NCHW), *_bias(to, layer)]
    more = {**_window(layer), "dilations": layer.dilation, "group": layer.groups}
    if isinstance(layer, layers.ConvTranspose2d):
        return to.add("ConvTranspose", inputs, node.name, **more, output_padding=layer.output_padding)
    return to.add("Conv", inputs, node.name, **more)


def _batch_norm2d(to: _Writer, node: Node, x: str) -> str:
    layer, channels = node.layer, node.layer.num_features
    affine = {"weight": np.ones(channels, np.float32), "bias": np.zeros(channels, np.float32)}
    if layer.specs:
        scale, shift = (to.parameter(layer, name) for name in affine)
    else:
        scale, shift = (to.constant(f"{layer.name}.{name}", array) for name, array in affine.items())
    running = [to.parameter(layer, f"running_{name}") for name in ("mean", "var")]
    return to.add("BatchNormalization", [x, scale, shift, *running], node.name, epsilon=layer.eps)


def _group_norm(to: _Writer, node: Node, x: str) -> str:
    layer, shape = node.layer, to.shape_before(node)
    groups, name = layer.num_groups, node.name
    parts = to.constant(f"{name}.parts", np.array([0, groups, -1], np.int64))
    whole = to.constant(f"{name}.whole", np.array([0, shape[-1], *shape[:-1]], np.int64))
    one, zero = (to.constant(f"{name}.{v}", np.full(groups, v, np.float32)) for v in (1, 0))
    y = to.add("Reshape", [x, parts], f"{name}.grouped")
    y = to.add("InstanceNormalization", [y, one, zero], f"{name}.normalised", epsilon=layer.eps)
    y = to.add("Reshape", [y, whole], name if not layer.specs else f"{name}.joined")
    if not layer.specs:
        return y
    column = (shape[-1], *[1] * (len(shape) - 1))
    scale, shift = (to.constant(f"{name}.{p}", to.state[f"{name}.{p}"].reshape(column)) for p in ("weight", "bias"))
    return to.add("Add", [to.add("Mul", [y, scale], f"{name}.scaled"), shift], name)


def _layer_norm(to: _Writer, node: Node, x: str) -> str:
    layer, images = node.layer, len(to.shape_before(node)) == 3
    if images:
        x = to.add("Transpose", [x], f"{node.name}.turned", perm=_TO_NHWC)
    channels = to.shape_before(node)[-1]
    if layer.specs:
        affine = [to.parameter(layer, "weight"), to.parameter(layer, "bias")]
    else:
        affine = [to.constant(f"{node.name}.weight", np.ones(channels, np.float32))]
    name = f"{node.name}.normalised" if images else node.name
    y = to.add("LayerNormalization", [x, *affine], name, axis=-1, epsilon=layer.eps)
    return to.add("Transpose", [y], node.name, perm=_TO_NCHW) if images else y


def _elementwise(kind: str, **attributes: Any) -> Callable[..., str]:
    return lambda to, node, *inputs: to.add(kind, list(inputs), node.name, **attributes)


def _relu6(to: _Writer, node: Node, x: str) -> str:
    bounds = [to.constant(f"{node.name}.{word}", np.float32(v)) for word, v in (("least", 0), ("most", 6))]
    return to.add("Clip", [x, *bounds], node.name)


def _gelu(to: _Writer, node: Node, x: str) -> str:
    """``x (1 + erf(x / sqrt(2))) / 2``, or its approximation by tanh: opset 17 has no operator of its own."""
    name = node.name
    number = lambda word, value: to.constant(f"{name}.{word}", np.float32(value))  # noqa: E731
    if node.layer.approximate == "none":
        inner = to.add("Mul", [x, number("root", 0.5**0.5)], f"{name}.inner")
        curve = to.add("Erf", [inner], f"{name}.curve")
    else:
        cube = to.add("Mul", [to.add("Mul", [x, x], f"{name}.square"), x], f"{name}.cube")
        bent = to.add("Mul", [cube, number("cubic", 0.044715)], f"{name}.bent")
        inner = to.add(
            "Mul", [to.add("Add", [x, bent], f"{name}.sum"), number("root", (2 / np.pi) ** 0.5)], f"{name}.inner"
        )
        curve = to.add("Tanh", [inner], f"{name}.curve")
    half = to.add("Mul", [x, number("half", 0.5)], f"{name}.halved")
    return to.add("Mul", [half, to.add("Add", [curve, number("one", 1)], f"{name}.share")], name)


def _upsample(to: _Writer, node: Node, x: str) -> str:
    layer, name = node.layer, node.name
    batch = to.add("Shape", [x], f"{name}.batch", end=1)
    rest = to.constant(f"{name}.rest", np.array([node.shape[2], *node.shape[:2]], np.int64))
    sizes = to.add("Concat", [batch, rest], f"{name}.sizes", axis=0)
    if layer.mode == "nearest":
        how = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    else:
        corners = "align_corners" if layer.align_corners else "half_pixel"
        how = {"mode": "linear", "coordinate_transformation_mode": corners}
    return to.add("Resize", [x, "", "", sizes], name, **how)


def _max_pool2d(to: _Writer, node: Node, x: str) -> str:
    layer, window = node.layer, _window(node.layer)
    if layer.ceil_mode:
        # As padding at the end, for ceil_mode of ONNX keeps a last window that lies in the padding alone; runtimes
        # refuse as much padding as the kernel has rows, which dilated windows may need.
        sizes, out = to.shape_before(node)[:2], node.shape[:2]
        axes = zip(sizes, out, layer.kernel_size, layer.stride, layer.padding, layer.dilation, strict=True)
        ends = tuple(max((q - 1) * s + d * (k - 1) + 1 - n - p, 0) for n, q, k, s, p, d in axes)
        if all(end < k for end, k in zip(ends, layer.kernel_size, strict=True)):
            window["pads"] = layer.padding + ends
        else:
            window["ceil_mode"] = 1
    return to.add("MaxPool", [x], node.name, **window, dilations=layer.dilation)


def _avg_pool2d(to: _Writer, node: Node, x: str) -> str:
    layer = node.layer
    if layer.ceil_mode:
        raise checks.bad_value(node.name, "ceil_mode", "off: before opset 19 runtimes divide its last means", True)
    return to.add("AveragePool", [x], node.name, **_window(layer), count_include_pad=int(layer.count_include_pad))


def _adaptive_avg_pool2d(to: _Writer, node: Node, x: str) -> str:
    sizes, out = to.shape_before(node)[:2], node.layer.output_size
    if out == (1, 1):
        return to.add("GlobalAveragePool", [x], node.name)
    if any(size % bins for size, bins in zip(sizes, out, strict=True)):
        down, across = (_means(size, bins) for size, bins in zip(sizes, out, strict=True))
        rows = to.add("MatMul", [to.constant(f"{node.name}.down", down), x], f"{node.name}.rows")
        return to.add("MatMul", [rows, to.constant(f"{node.name}.across", across.T)], node.name)
    bins = tuple(size // count for size, count in zip(sizes, out, strict=True))
    return to.add("AveragePool", [x], node.name, kernel_shape=bins, strides=bins)


def _means(size: int, bins: int) -> np.ndarray:
    """The matrix (bins, size) that takes means over bins of uneven length, for which ONNX has no pool."""
    matrix = np.zeros((bins, size), np.float32)
    for i in range(bins):
        begin, end = i * size // bins, ceil_div((i + 1) * size, bins)
        matrix[i, begin:end] = 1 / (end - begin)
    return matrix


def _flatten(to: _Writer, node: Node, x: str) -> str:
    shape = to.shape_before(node)
    if len(shape) == 3 and shape[:2] != (1, 1):  # minidl flattens with channels innermost
        x = to.add("Transpose", [x], f"{node.name}.turned", perm=_TO_NHWC)
    return to.add("Flatten", [x], node.name, axis=1)


def _linear(to: _Writer, node: Node, x: str) -> str:
    inputs = [x, to.parameter(node.layer, "weight"), *_bias(to, node.layer)]
    return to.add("Gemm", inputs, node.name, transB=1)


def _pad(to: _Writer, node: Node, x: str) -> str:
    left, right, top, bottom = node.layer.padding
    sides = to.constant(f"{node.name}.sides", np.array([0, 0, top, left, 0, 0, bottom, right], np.int64))
    value = to.constant(f"{node.name}.value", np.float32(node.layer.value))
    return to.add("Pad", [x, sides, value], node.name, mode="constant")


_FORMS: dict[type[Layer], Callable[..., str]] = {
    layers.AdaptiveAvgPool2d: _adaptive_avg_pool2d,
    layers.Add: _elementwise("Add"),
    layers.AvgPool2d: _avg_pool2d,
    layers.BatchNorm2d: _batch_norm2d,
    layers.Concat: _elementwise("Concat", axis=1),
    layers.Conv2d: _convolution,
    layers.ConvTranspose2d: _convolution,
    layers.Dropout: lambda to, node, x: x,
    layers.Flatten: _flatten,
    layers.GELU: _gelu,
    layers.GroupNorm: _group_norm,
    layers.Hardswish: _elementwise("HardSwish"),
    layers.LayerNorm: _layer_norm,
    layers.LeakyReLU: lambda to, node, x: to.add("LeakyRelu", [x], node.name, alpha=node.layer.slope),
    layers.Linear: _linear,
    layers.MaxPool2d: _max_pool2d,
    layers.Mul: _elementwise("Mul"),
    layers.Pad: _pad,
    layers.ReLU: _elementwise("Relu"),
    layers.ReLU6: _relu6,
    layers.SiLU: lambda to, node, x: to.add("Mul", [x, to.add("Sigmoid", [x], f"{node.name}.gate")], node.name),
    layers.Sigmoid: _elementwise("Sigmoid"),
    layers.Softmax: _elementwise("Softmax", axis=1),
    layers.StochasticDepth: lambda to, node, x: x,
    layers.Tanh: _elementwise("Tanh"),
    layers.Upsample: _upsample,
}
