"""Convolutions that several ranks compute together: each some rows of the images, or each some output channels.

The ranks of a ``group`` (`Communicator.split`) share the work of one batch; Yadan et al. (arXiv 1312.5853) compare such
model parallelism with data parallelism, and combine both. With one rank in the group they are plain convolutions.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

from minidl import checks
from minidl.dist.communicator import SOLO, Communicator, Work
from minidl.initializers import Initializer, kaiming_uniform, uniform_fan_in
from minidl.layers.conv2d import Conv2d
from minidl.layers.row_plan import Axis, Halo, RowPlan, Rows, Strip, plan, share
from minidl.params import Arena
from minidl.profile import Cost
from minidl.shapes import Pair, conv_output_size

_PARTS = 2  # of a batch: while one travels, the next is computed


class RowParallelConv2d(Conv2d):
    """`Conv2d` of images whose rows lie on the ranks of ``group``.

    Rank i of n holds rows ``height * i // n`` to ``height * (i + 1) // n``, and so of the result. What a rank needs of
    its neighbours' rows travels while it computes its own: the edge rows of the input in the forward pass, those of the
    output's gradient in the backward pass. Weights are on all ranks, and their gradients are partial sums: the
    communicator of the model must cover the group, so that its messages add them up.

    Args:
        height: rows of the whole image; the group has no more ranks than the image and the result have rows.
        group: the ranks that share the images, SOLO for one alone.

    Others: as `Conv2d`.

    Shapes:
        x (N, own rows of the image, W, C) → (N, own rows of the result, Q, K); see `minidl.layers.row_plan.share`.

    Raises:
        ValueError: also for an input that does not hold this rank's rows.
    """

    accepts_add = accepts_masked = accepts_unfinished = False

    def __init__(self, *args: Any, height: int, group: Communicator = SOLO, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.group = group
        self.height = checks.at_least(self.name, "height", height, 1)
        axis = Axis(*(pair[0] for pair in (self.kernel_size, self.stride, self.padding, self.dilation)))
        least = min(self.height, conv_output_size(self.height, *axis))
        if least < group.size:
            expected = f"enough for a row of image and result on each of {group.size} ranks"
            raise checks.bad_value(self.name, "height", expected, height, "split over fewer ranks")
        self._plan: RowPlan = plan(self.height, axis, group.size, group.rank)
        self._fetched: tuple[dict[int, Any], Work] | None = None

    def describe(self) -> str:
        return f"{super().describe()}, height={self.height} over {self.group.size} ranks"

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, h, w, c = self.require_image(shape, self.in_channels)
        if h != self._plan.rows.count:
            expected = f"(N, {self._plan.rows.count}, W, C)"
            remedy = f"rank {self.group.rank} of {self.group.size} holds rows {self._plan.rows.begin} to "
            raise checks.bad_shape(self.name, "x", expected, shape, f"{remedy}{self._plan.rows.end - 1}")
        whole = super().output_shape((n, self.height, w, c))
        return n, self._plan.out.count, *whole[2:]

    def bind(self, arena: Arena, ops: ModuleType, **services: Any) -> None:
        super().bind(arena, ops, **services)
        if self.comm.size < self.group.size:
            remedy = "give Model a communicator that covers the group"
            raise checks.order(self.name, "its weight gradients are sums over the group, which nobody adds up", remedy)

    # -- the passes ---------------------------------------------------------------------------------------------------

    def compute(self, x: Any) -> Any:
        x = self.ops.contiguous(x)
        weight, bias, _ = self.folded or (self.params["weight"], self.params.get("bias"), False)
        edges = self._plan.forward
        received, work = self._exchange(x, edges, self._plan.rows, "halo")
        y = self._local(x, weight, bias)
        work.wait()
        sources = [self._assemble(x, strip, self._plan.rows, edges, received) for strip in edges.strips]
        for strip, source in zip(edges.strips, sources, strict=True):
            part = self.ops.conv2d(source, weight, bias, **self._unpadded, tf32=self.tf32)
            y = self._put(y, strip.target.within(self._plan.out), part)
        self.save(x=x, **{f"strip{i}": source for i, source in enumerate(sources)})
        return y

    def _local(self, x: Any, weight: Any, bias: Any) -> Any:
        """The result as if the image had no other rows; None where that is no result of this rank."""
        if not self._plan.aligned:
            return None
        return self.ops.conv2d(x, weight, bias, **self.geometry, tf32=self.tf32)

    def backward_weight(self, dy: Any) -> None:
        dy = self.ops.contiguous(dy)
        if self.needs_input_grad:
            self._fetched = self._exchange(dy, self._plan.backward, self._plan.out, "halo of the gradient")
        if (weight := self.grad("weight")) is not None:
            self._weight_gradient(dy, weight.view, not weight.first)
        if (bias := self.grad("bias")) is not None:
            self.ops.channel_sum(dy, out=bias.view, accumulate=not bias.first)

    def _weight_gradient(self, dy: Any, out: Any, accumulate: bool) -> None:
        """Own rows with themselves, then the strips, in which the own rows count as zeros: they have been counted."""
        kept = self.saved()
        if self._plan.aligned:
            self.ops.conv2d_backward_weight(dy, kept.x, **self.geometry, out=out, accumulate=accumulate, tf32=self.tf32)
            accumulate = True
        for i, strip in enumerate(self._plan.forward.strips):
            source = getattr(kept, f"strip{i}")
            if self._plan.aligned:
                source = self._without(source, strip.source, self._plan.rows)
            part = self._cut(dy, strip.target.within(self._plan.out))
            self.ops.conv2d_backward_weight(
                part, source, **self._unpadded, out=out, accumulate=accumulate, tf32=self.tf32
            )
            accumulate = True

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        assert add is None, "not declared in accepts_add"
        assert self._fetched is not None
        (received, work), self._fetched = self._fetched, None
        dy, shape, weight = self.ops.contiguous(dy), self.saved().x.shape, self.params["weight"]
        dx = None
        if self._plan.aligned:
            dx = self.ops.conv2d_backward_data(dy, weight, shape, **self.geometry, tf32=self.tf32)
        work.wait()
        edges = self._plan.backward
        for strip in edges.strips:
            part = self._data_gradient_of(strip, self._assemble(dy, strip, self._plan.out, edges, received), shape)
            dx = self._put(dx, strip.target.within(self._plan.rows), part)
        return dx

    def _data_gradient_of(self, strip: Strip, dy: Any, shape: tuple[int, ...]) -> Any:
        """The input gradient in the rows of a strip."""
        windows = self._axis.windows(strip.source)
        above = strip.target.begin - windows.begin
        # With so much padding the rows of the strip alone have these windows, unless a stride skips some.
        exact = conv_output_size(strip.target.count, *self._axis._replace(padding=above)) == strip.source.count
        rows, padding = (strip.target, above) if exact else (windows, 0)
        geometry = {**self.geometry, "padding": (padding, self.padding[1])}
        dx = self.ops.conv2d_backward_data(
            dy, self.params["weight"], (shape[0], rows.count, *shape[2:]), **geometry, tf32=self.tf32
        )
        return dx if exact else self._cut(dx, strip.target.within(rows))

    def _cut(self, x: Any, rows: Rows) -> Any:
        """A dense copy of some rows."""
        return self.ops.contiguous(_rows(x, rows)).reshape(x.shape[0], rows.count, *x.shape[2:])

    # -- rows ---------------------------------------------------------------------------------------------------------

    @property
    def _axis(self) -> Axis:
        return Axis(*(pair[0] for pair in (self.kernel_size, self.stride, self.padding, self.dilation)))

    @property
    def _unpadded(self) -> dict[str, Any]:
        """The geometry on strips, which hold their padding."""
        return {**self.geometry, "padding": (0, self.padding[1])}

    def _exchange(self, x: Any, halo: Halo, own: Rows, what: str) -> tuple[dict[int, Any], Work]:
        """Start to send the rows that others need; what will be received, (N, rows, W, C) by rank."""
        n, _, *rest = x.shape
        sends = {rank: self._cut(x, rows.within(own)) for rank, rows in halo.sends.items()}
        received = {rank: self.ops.empty((n, rows.count, *rest), x.dtype) for rank, rows in halo.receives.items()}
        return received, self.group.start_exchange(sends, received, f"{what} of {self.name}")

    def _assemble(self, x: Any, strip: Strip, own: Rows, halo: Halo, received: Mapping[int, Any]) -> Any:
        """The source rows of a strip, dense; zeros outside of the image."""
        n, _, *rest = x.shape
        out = self.ops.zeros((n, strip.source.count, *rest), x.dtype)
        for rows, part in [(own, x), *((halo.receives[rank], part) for rank, part in received.items())]:
            wanted = strip.source & rows
            if wanted.count:
                self.ops.copy_into(_rows(out, wanted.within(strip.source)), _rows(part, wanted.within(rows)))
        return out

    def _without(self, source: Any, rows: Rows, own: Rows) -> Any:
        """A copy in which the own rows are zeros."""
        out = self.ops.zeros(source.shape, source.dtype)
        for kept in (Rows(rows.begin, min(own.begin, rows.end)), Rows(max(own.end, rows.begin), rows.end)):
            if kept.count:
                self.ops.copy_into(_rows(out, kept.within(rows)), _rows(source, kept.within(rows)))
        return out

    def _put(self, whole: Any, rows: Rows, part: Any) -> Any:
        """``whole`` with ``part`` in its rows; the part itself where there is no whole."""
        if whole is None:
            return part
        self.ops.copy_into(_rows(whole, rows), part.reshape(part.shape[0], -1))
        return whole


def _rows(x: Any, rows: Rows) -> Any:
    """Rows of a dense (N, H, W, C) as (N, rows·W·C): a pitched view, as such legal everywhere."""
    pixels = prod(x.shape[2:])
    return x.reshape(x.shape[0], x.shape[1] * pixels)[:, rows.begin * pixels : rows.end * pixels]


class ChannelParallelConv2d(Conv2d):
    """`Conv2d` whose filters lie on the ranks of ``group``: on rank i of n ``K * i // n`` to ``K * (i + 1) // n``.

    All ranks of the group take the whole input and give the whole output: each computes its channels, which travel to
    the others, half a batch while the other half is computed; backward, the input gradients of all are added up while
    the weight gradient is computed. Layers between such convolutions do the same on every rank of the group, so a model
    sends its gradients among ranks of *different* groups only: its communicator joins those of the same place.

    Args:
        group: the ranks that share the filters, SOLO for one alone; no more than ``out_channels``.

    Others: as `Conv2d`, but without channel groups. Weight and bias are this rank's part of what `Conv2d` starts with.
    In 16-bit types each part of the input gradient is rounded before the parts are added.

    Shapes:
        x (N, H, W, C) → (N, P, Q, K) on each rank; weight (own channels, R, S, C), bias (own channels,).
    """

    accepts_add = accepts_masked = accepts_unfinished = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | Pair,
        stride: int | Pair = 1,
        padding: int | Pair = 0,
        dilation: int | Pair = 1,
        bias: bool = True,
        *,
        group: Communicator = SOLO,
        weight_init: Initializer | None = None,
        name: str | None = None,
    ):
        super().__init__(in_channels, out_channels, kernel_size, stride, padding, dilation, bias=False, name=name)
        if self.out_channels < group.size:
            expected = f"at least one for each of {group.size} ranks"
            raise checks.bad_value(self.name, "out_channels", expected, out_channels, "split over fewer ranks")
        self.group = group
        self._parts = [share(self.out_channels, group.size, rank) for rank in range(group.size)]
        self._own = self._parts[group.rank]
        self._sum: tuple[Any, Work] | None = None
        shape = self.specs.pop().shape
        self._declare_part("weight", shape, kaiming_uniform() if weight_init is None else weight_init, product=True)
        if bias:
            self._declare_part("bias", shape[:1], uniform_fan_in(prod(shape[1:])), product=False)

    def _declare_part(self, name: str, shape: tuple[int, ...], init: Initializer, *, product: bool) -> None:
        own = self._own

        def part(rng: np.random.Generator, _: tuple[int, ...]) -> np.ndarray:
            return np.asarray(init(rng, shape))[own.begin : own.end]

        self.declare(name, (own.count, *shape[1:]), part, product=product)

    @property
    def parted(self) -> bool:
        return self.group.size > 1

    def describe(self) -> str:
        return f"{super().describe()}, channels {self._own.begin} to {self._own.end - 1}"

    def cost(self, shape: tuple[int, ...], itemsize: int = 4) -> Cost:
        return self._cost(shape, (*self.output_shape(shape)[:3], self._own.count), itemsize)

    def compute(self, x: Any) -> Any:
        self.save(x=x)
        n, *rest = self.output_shape(x.shape)
        y, parts = self.ops.empty((n, *rest), x.dtype), []
        for begin, end in self._batches(n):
            own = self.ops.conv2d(
                x[begin:end], self.params["weight"], self.params.get("bias"), **self.geometry, tf32=self.tf32
            )
            received = {
                rank: self.ops.empty((*own.shape[:3], part.count), x.dtype)
                for rank, part in enumerate(self._parts)
                if rank != self.group.rank
            }
            work = self.group.start_exchange(dict.fromkeys(received, own), received, f"output of {self.name}")
            parts.append((y[begin:end], work, {self.group.rank: own, **received}))
        for out, work, pieces in parts:
            work.wait()
            for rank, piece in pieces.items():
                self.ops.copy_into(out[..., self._parts[rank].begin : self._parts[rank].end], piece)
        return y

    def _batches(self, n: int) -> list[Rows]:
        """Parts of a batch, empty ones too: all ranks make the same calls. One rank alone needs no parts."""
        parts = _PARTS if self.group.size > 1 else 1
        return [share(n, parts, part) for part in range(parts)]

    def backward_weight(self, dy: Any) -> None:
        own = dy[..., self._own.begin : self._own.end]
        x = self.saved().x
        if self.needs_input_grad:
            # Before the weight gradient, which hides the sum.
            dx = self.ops.conv2d_backward_data(own, self.params["weight"], x.shape, **self.geometry, tf32=self.tf32)
            self._sum = dx, self.group.start_all_reduce(dx, name=f"input gradient of {self.name}")
        super().backward_weight(own)

    def backward_data(self, dy: Any, add: Any = None) -> Any:
        assert add is None and self._sum is not None
        (dx, work), self._sum = self._sum, None
        work.wait()
        return dx
