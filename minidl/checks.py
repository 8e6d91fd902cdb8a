"""The only place that words an error.

Every message says who complains (layer or file), which argument, what was expected, what came, and, where one is
known, the remedy. ValueError: shapes and values. TypeError: dtype or kind of array. RuntimeError: order of calls.
"""

from __future__ import annotations

import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any


def _sentence(who: str, text: str, remedy: str | None) -> str:
    message = f"{who}: {text}" if who else text
    return f"{message}; {remedy}" if remedy else message


def describe(array: Any) -> str:
    """One short phrase for whatever a user passed: ``float32 array of shape (2, 3) (numpy)``."""
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
    if shape is None or dtype is None:
        return f"{type(array).__name__} {array!r:.60}"
    module = type(array).__module__.split(".")[0]
    return f"{str(dtype).removeprefix('torch.')} array of shape {tuple(shape)} ({module})"


def wording(value: Any) -> str:
    """``repr`` without addresses in memory, so that equal things of two processes read alike."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def bad_shape(who: str, argument: str, expected: str, got: Sequence[int], remedy: str | None = None) -> ValueError:
    """``conv1: x must have shape (N, H, W, 3), got (2, 3, 8, 8); <remedy>``."""
    return ValueError(_sentence(who, f"{argument} must have shape {expected}, got {tuple(got)}", remedy))


def unlike(who: str, argument: str, array: Any, shape: Sequence[int], dtype: Any) -> ValueError | TypeError:
    """A gradient of another shape or dtype than the last forward pass gave."""
    if array.shape != shape:
        return bad_shape(who, argument, str(shape), array.shape, "as in the last forward pass")
    return bad_dtype(who, argument, dtype, array.dtype, f"convert it with {argument}.astype({str(dtype)!r})")


def bad_dtype(who: str, argument: str, expected: str, got: Any, remedy: str | None = None) -> TypeError:
    """``conv1: x must be float32, got float64; <remedy>``."""
    return TypeError(_sentence(who, f"{argument} must be {expected}, got {got}", remedy))


def options(**given: tuple[Any, Any]) -> str:
    """``, name=value`` of each option, (value, default), that is not its default."""
    return "".join(f", {name}={value!r}" for name, (value, default) in given.items() if value != default)


def bad_value(who: str, argument: str, expected: str, got: Any, remedy: str | None = None) -> ValueError:
    """``Dropout: p must be in [0, 1), got 1.5``."""
    return ValueError(_sentence(who, f"{argument} must be {expected}, got {got!r}", remedy))


def impossible(who: str, reason: str, remedy: str | None = None) -> ValueError:
    """What was asked for cannot be had here: ``CompiledStep: CUDA graphs need a GPU; use EagerStep``."""
    return ValueError(_sentence(who, reason, remedy))


def order(who: str, text: str, remedy: str | None = None) -> RuntimeError:
    """A call that came at the wrong time: ``conv1: backward called before forward``."""
    return RuntimeError(_sentence(who, text, remedy))


_MOST = 40  # names that an error lists
_MEANT = {"float": "fp32", "gpu": "cuda", "half": "fp16", "single": "fp32"}  # words of others for choices here


def unknown(kind: str, name: Any, known: Iterable[str]) -> ValueError:
    """``unknown model 'resnet81'; did you mean 'resnet18'? known: ...``."""
    names = sorted(known)
    near = [_MEANT[name]] if _MEANT.get(name) in names else difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return ValueError(f"unknown {kind} {name!r}; {hint}known: {some(names, _MOST)}")


# Names of PyTorch, Keras and timm that minidl does not have, and what stands for them.
_CALLED_HERE = {
    "Accuracy": "TopK",
    "Adam": "AdamW with weight_decay=0",
    "BCELoss": "BCEWithLogitsLoss, before the sigmoid",
    "BatchNormalization": "BatchNorm2d",
    "CategoricalCrossentropy": "SoftmaxCrossEntropy",
    "ConfusionMatrix": "Confusion",
    "Conv2D": "Conv2d",
    "Conv2DTranspose": "ConvTranspose2d",
    "CrossEntropyLoss": "SoftmaxCrossEntropy",
    "DataLoader": "data.Loader",
    "Dense": "Linear",
    "DepthwiseConv2D": "Conv2d with groups=in_channels",
    "DropPath": "StochasticDepth",
    "EMA": "WeightAverage",
    "GlobalAveragePooling2D": "AdaptiveAvgPool2d(1)",
    "InstanceNorm2d": "GroupNorm with a group for each channel",
    "JaccardIndex": "Confusion",
    "MaxPooling2D": "MaxPool2d",
    "Module": "Layer, or a function that builds a Graph",
    "Multiply": "Mul",
    "NLLLoss": "SoftmaxCrossEntropy, before the softmax",
    "Sequential": "Graph, which layers are called on",
    "Swish": "SiLU",
    "UpSampling2D": "Upsample",
    "ZeroPad2d": "Pad",
    # Modules and functions of torch, and what its modules of optimizers and schedules hold.
    "CosineAnnealingLR": "schedule.Cosine",
    "LinearLR": "schedule.Warmup",
    "MultiStepLR": "schedule.Step",
    "OneCycleLR": "schedule.OneCycle",
    "PolynomialLR": "schedule.Polynomial",
    "StepLR": "schedule.Step",
    "Tensor": "get_ops(device).from_host(array); on the CPU arrays are NumPy's",
    "functional": "get_ops(device), whose functions take arrays",
    "inference_mode": "Model's and Layer's forward(x, grad=False)",
    "load": "interchange.import_weights(model, path)",
    "nn": "Conv2d, ReLU and so on of minidl itself",
    "no_grad": "Model's and Layer's forward(x, grad=False)",
    "save": "interchange.export_weights(model, path)",
    "tensor": "get_ops(device).from_host(array); on the CPU arrays are NumPy's",
}


def elsewhere(name: str, known: Iterable[str], homes: Sequence[str] = (), module: str = "minidl") -> AttributeError:
    """``minidl has no CrossEntropyLoss; here it is SoftmaxCrossEntropy``; ``homes``: its modules that have the name."""
    near = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {near[0]}?" if near else None
    if name in _CALLED_HERE or homes:
        remedy = f"here it is {_CALLED_HERE.get(name) or ' or '.join(homes)}"
    elif not name.startswith("_") and name in sys.modules["minidl"].__all__:
        remedy = f"here it is minidl.{name}"
    return AttributeError(_sentence("", f"{module} has no {name}", remedy), name=name)


def some(names: Iterable[str], most: int = 8) -> str:
    """``a, b and 7 more``."""
    names = list(names)
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


# What objects of PyTorch and Keras can do and those here cannot, by class, and what is done instead.
_OVERWRITTEN = "it is not needed: the first gradient of a step overwrites"
_DONE_HERE = {
    "Layer": {
        "bias": 'read params["bias"]',
        "cuda": "write layer.to('cuda')",
        "eval": "write layer.training = False",
        "half": "write layer.to(precision='fp16')",
        "parameters": "read params",
        "requires_grad_": "write Model(..., frozen=['layer1.*'])",
        "train": "write layer.training = True",
        "weight": 'read params["weight"]',
        "zero_grad": _OVERWRITTEN,
    },
    "Batch": {name: "give the Loader transfer=model.ops.from_host" for name in ("cuda", "to")},
    "Model": {
        "children": "read layers",
        "compile": "a Trainer captures steps by itself; without one take compile.CompiledStep",
        "cuda": "write Model(..., device='cuda')",
        "evaluate": "give the Trainer a test_loader",
        "fit": "write Trainer(model, optimizer, loss, loader, ...).fit()",
        "half": "write Model(..., precision='fp16')",
        "modules": "read layers",
        "named_parameters": "state_dict() has all arrays by name",
        "parameters": "optimizers take the model itself; state_dict() has the arrays",
        "predict": "call forward(x, grad=False); of a checkpoint: predict.Predictor(path).predict(files)",
        "requires_grad_": "write Model(..., frozen=['layer1.*'])",
        "save": "call interchange.export_weights(model, path); a Trainer with output= writes checkpoints",
        "to": "write Model(..., device='cuda', precision='bf16')",
        "zero_grad": _OVERWRITTEN,
    },
    "SGD": {"param_groups": "write SGD(..., groups=...)", "zero_grad": _OVERWRITTEN},
    "Totals": {"backward": "call model.backward(loss.backward())", "item": "read totals.loss"},
}

_MADE_AGAIN = {
    "Layer": "layer.unbound() makes another; then load_state_dict(layer.state_dict())",
    "Model": "Model(model.graph.unbound(), ...) makes another; then load_state_dict(model.state_dict())",
    "SGD": "make another for the other model; then load_state_dict(optimizer.state_dict())",
    "Totals": "read() gives its numbers",
}


class Told:
    """Objects that tell how it is done here, when asked for what others of their kind can do."""

    def __copy__(self) -> Any:
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For pickle and deep copies, which would part arrays from the views of them that others hold."""
        if vars(self).get("ops") is None:
            return super().__reduce_ex__(protocol)
        remedy = next(_MADE_AGAIN[base.__name__] for base in type(self).__mro__ if base.__name__ in _MADE_AGAIN)
        raise TypeError(_sentence("", f"a {type(self).__name__} cannot be copied or pickled", remedy))

    def __getattr__(self, name: str) -> Any:
        tables = [_DONE_HERE.get(base.__name__, {}) for base in type(self).__mro__]
        remedy = next((table[name] for table in tables if name in table), None)
        raise AttributeError(_sentence("", f"{type(self).__name__} has no {name}", remedy), name=name, obj=self)


def keeps_templates(kind: type) -> None:
    """Refuse a class of layers that defines `forward` as those of other libraries do.

    Raises:
        TypeError: naming what to define.
    """
    arguments = inspect.signature(kind.forward).parameters
    if "grad" not in arguments and not any(p.kind is p.VAR_KEYWORD for p in arguments.values()):
        raise bad_dtype(
            kind.__name__, "forward", "that of Layer", "one without grad=",
            "define compute(x) in its place, and backward_weight(dy) and backward_data(dy) for backward",
        )  # fmt: skip


def images_first(shape: Sequence[int], channels: int) -> str | None:
    """The remedy for images of ``shape`` that seem to be NCHW."""
    if len(shape) != 4 or shape[1] != channels or shape[3] == channels:
        return None
    return "NCHW? Pass x.permute(0, 2, 3, 1).contiguous() (torch) or x.transpose(0, 2, 3, 1) (numpy)"


def unexpected(who: str, arguments: Iterable[str], remedy: str | None = None) -> TypeError:
    """``ReLU: takes no argument 'inplace'``."""
    return TypeError(_sentence(who, f"takes no argument {', '.join(map(repr, arguments))}", remedy))


def missing_extra(what: str, extra: str, cause: BaseException | None = None) -> ImportError:
    """A feature whose optional packages are absent, with the command that installs them."""
    because = f" ({cause})" if cause else ""
    return ImportError(f"{what} is not available{because}; install it with: pip install 'minidl[{extra}]'")


@contextmanager
def needs(what: str, extra: str) -> Iterator[None]:
    """Around imports of a feature's optional packages: `missing_extra` where one is absent."""
    try:
        yield
    except ImportError as error:
        raise missing_extra(what, extra, error) from error


def instance(who: str, argument: str, value: Any, kind: type, expected: str, remedy: str | None = None) -> Any:
    """``value``, or TypeError when it is no object of ``kind``, a class or what a protocol asks for."""
    if isinstance(value, type) or not isinstance(value, kind):  # a class has the methods of its objects
        raise bad_dtype(who, argument, expected, describe(value), remedy)
    return value


def at_least(who: str, argument: str, value: int, least: int) -> int:
    """``value`` as an int, or ValueError when it is not an integer of at least ``least``."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < least:
        raise bad_value(who, argument, f"an integer of at least {least}", value)
    return int(value)


def number(who: str, argument: str, value: Any, expected: str, fits: Callable[[float], bool]) -> float:
    """``value`` as a float, or ValueError when it is no number or does not fit what is ``expected``."""
    if isinstance(value, bool) or not isinstance(value, Real) or not fits(float(value)):
        raise bad_value(who, argument, f"a number {expected}", value)
    return float(value)


def function(who: str, argument: str, value: Any, expected: str, remedy: str | None = None) -> None:
    """TypeError when ``value`` cannot be called, or is a class, of which an instance was meant."""
    if not callable(value) or isinstance(value, type):
        raise bad_dtype(who, argument, expected, describe(value), remedy)


def positive_pair(who: str, argument: str, value: Any, least: int = 1) -> tuple[int, int]:
    """``value`` as a (height, width) pair of integers of at least ``least``."""
    items = (value, value) if hasattr(value, "__index__") else tuple(value) if isinstance(value, Sequence) else ()
    if len(items) != 2 or any(isinstance(v, bool) or not hasattr(v, "__index__") or v < least for v in items):
        remedy = "kernel // 2 keeps the size of an odd kernel at stride 1" if value == "same" else None
        expected = f"an integer of at least {least} or a pair of them (height, width)"
        raise bad_value(who, argument, expected, value, remedy)
    return int(items[0]), int(items[1])
