"""A layer or a whole model as a module of PyTorch, for those who want one fast piece in a program of theirs.

    block = as_torch(m.Conv2d(64, 64, 3, padding=1), device="cuda", precision="tf32")
    y = block(x)         # x a torch tensor, NHWC
    y.sum().backward()   # into x.grad and block.weight.grad

Arrays are shared, not copied: inputs through DLPack, parameters and buffers for good, so that PyTorch's optimizers
train them. On a GPU the work runs on PyTorch's current stream. Each forward pass keeps what its own backward pass
needs, so there may be several under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import numpy as np

from minidl import checks
from minidl.layer import Layer
from minidl.model import Model
from minidl.params import Arena
from minidl.precision import bfloat16
from minidl.store import TensorStore


def as_torch(piece: Layer | Model, *, device: str = "cpu", precision: str = "fp32") -> Any:
    """A ``torch.nn.Module`` that runs ``piece`` on tensors of its device and storage dtype, NHWC.

    Args:
        piece: a layer that stands alone, or a model made with ``input_grad=True``.
        device, precision: where a layer is to live; a model has settled both.

    Parameters are float32 and named as in ``state_dict``, with ``_`` for ``.``.

    Raises:
        ImportError: PyTorch is not installed.
        ValueError: a model whose backward pass gives no gradient of the input.
        RuntimeError: a layer that belongs to a model.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError(f"as_torch needs PyTorch, which minidl does not bring along: {error}") from error
    if isinstance(piece, Model):
        if not piece.input_grad:
            remedy = "make it with Model(..., input_grad=True)"
            raise checks.bad_value("as_torch", "input_grad of the model", "True", False, remedy)
        return _module(torch)(_Piece(piece, piece.layers, piece.arena))
    if piece.bound:
        raise checks.order(piece.name, "it belongs to a model", "pass the model, or a layer of its own")
    piece.to(device, precision)
    return _module(torch)(_Piece(piece, [piece], piece._arena))


class _Piece:
    """What the module needs to know of a layer or a model.

    Attributes:
        inner: the layer or the model.
        layers: its layers; of a layer, itself.
    """

    def __init__(self, inner: Layer | Model, layers: Sequence[Layer], arena: Arena | None):
        self.inner, self.layers, self.arena, self.ops = inner, layers, arena, inner.ops

    def full_name(self, layer: Layer, name: str) -> str:
        return name if layer is self.inner else f"{layer.name}.{name}"

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """(name, float32 array) of those that are trained."""
        for layer in self.layers:
            for spec in layer.specs:
                if layer.params.trainable(spec.name):
                    yield self.full_name(layer, spec.name), layer.params.master(spec.name)

    def buffers(self) -> Iterator[tuple[str, Any]]:
        for layer in self.layers:
            yield from ((self.full_name(layer, name), array) for name, array in layer.buffers.items())

    def gradients(self) -> Iterator[Any]:
        """In the order of `parameters`."""
        for layer in self.layers:
            if layer.specs:
                yield from layer.params.gradients().values()

    def train(self, mode: bool) -> None:
        if isinstance(self.inner, Model):
            self.inner.train(mode)
        else:
            self.inner.training = mode

    def refresh(self) -> None:
        """After somebody else wrote the float32 values."""
        if self.arena is not None:
            self.arena.refresh_working()

    def forward(self, arrays: Sequence[Any], keep: bool) -> tuple[Any, Any]:
        """The output, and what `backward` needs: a store of this pass's own."""
        self._use(TensorStore(), [None] * len(self.layers))
        y = self.inner.forward(*arrays, grad=keep)
        return y, (self.inner.store, [layer._kept for layer in self.layers])

    def backward(self, dy: Any, kept: Any) -> Sequence[Any]:
        """The gradients of the inputs."""
        store, facts = kept
        self._use(store.fork(), facts)  # PyTorch may come back
        dx = self.inner.backward(dy)
        if isinstance(self.inner, Model):
            for _ in self.arena.finished():
                pass  # the optimizer is PyTorch's: wait for all messages
        return dx if isinstance(dx, tuple) else (dx,)

    def _use(self, store: TensorStore, kept: Sequence[Any]) -> None:
        self.inner.store = store
        for layer, facts in zip(self.layers, kept, strict=True):
            layer.store, layer._kept = store, facts


def _flat(name: str) -> str:
    return name.replace(".", "_")  # PyTorch's own dots lead into submodules


def lend(torch: ModuleType, array: Any) -> Any:
    """A minidl array as a tensor of the same memory. DLPack has no bfloat16 of NumPy's: its bits are lent."""
    if array.dtype == bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def borrow(torch: ModuleType, ops: ModuleType, tensor: Any) -> Any:
    """A tensor as a minidl array of the same memory."""
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        return ops.from_dlpack(tensor.view(torch.int16)).view(bfloat16)
    return ops.from_dlpack(tensor)


def _on_torchs_stream(torch: ModuleType, ops: ModuleType) -> AbstractContextManager[Any]:
    if ops.name == "cpu":
        return nullcontext()
    import cupy

    return cupy.cuda.Stream.from_external(_Stream(torch.cuda.current_stream().cuda_stream))


class _Stream:
    """A stream's handle as the CUDA stream protocol hands it over."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


def _require_device(torch: ModuleType, ops: ModuleType, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise checks.bad_dtype("as_torch", "x", "a torch tensor", type(tensor).__name__)
    if tensor.device.type != ops.name:
        raise checks.bad_dtype("as_torch", "x", f"a tensor on {ops.name}", f"one on {tensor.device}")


def _module(torch: ModuleType) -> type:
    """The class of modules, made once PyTorch is known."""

    class Pass(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, piece: _Piece, keep: bool, inputs: int, *tensors: Any) -> Any:
            with _on_torchs_stream(torch, piece.ops):
                arrays = [borrow(torch, piece.ops, tensor) for tensor in tensors[:inputs]]
                y, ctx.kept = piece.forward(arrays, keep)
            ctx.piece = piece
            return lend(torch, y)

        @staticmethod
        @torch.autograd.function.once_differentiable
        def backward(ctx: Any, dy: Any) -> Any:
            piece = ctx.piece
            with _on_torchs_stream(torch, piece.ops):
                dx = piece.backward(borrow(torch, piece.ops, dy.contiguous()), ctx.kept)
                given = [lend(torch, array) for array in dx]
                # The gradients' memory is written again in the next backward pass; PyTorch may keep what it gets.
                found = [lend(torch, array).clone() for array in piece.gradients()]
            return None, None, None, *given, *found

    class MinidlModule(torch.nn.Module):
        """Runs a layer or model of minidl; see `minidl.torch_bridge.as_torch`."""

        def __init__(self, piece: _Piece):
            super().__init__()
            self.piece = piece
            self.names: list[str] = []
            for name, array in piece.parameters():
                self.names.append(_flat(name))
                self.register_parameter(self.names[-1], torch.nn.Parameter(lend(torch, array)))
            for name, array in piece.buffers():
                self.register_buffer(_flat(name), lend(torch, array))
            self._versions: list[int] = []

        def train(self, mode: bool = True) -> Any:
            self.piece.train(mode)
            return super().train(mode)

        def _apply(self, *arguments: Any, **options: Any) -> Any:
            raise checks.order("as_torch", "its memory belongs to minidl", "choose device and precision in as_torch")

        def forward(self, *inputs: Any) -> Any:
            for tensor in inputs:
                _require_device(torch, self.piece.ops, tensor)
            parameters = [getattr(self, name) for name in self.names]
            versions = [parameter._version for parameter in parameters]
            if versions != self._versions:  # an optimizer wrote the float32 values: round the copies anew
                self.piece.refresh()
                self._versions = versions
            keep = torch.is_grad_enabled() and any(t.requires_grad for t in (*inputs, *parameters))
            return Pass.apply(self.piece, keep, len(inputs), *(t.contiguous() for t in inputs), *parameters)

    return MinidlModule
