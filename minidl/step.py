"""One training step: forward, loss, backward, messages and update, as a program that says so line by line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from minidl import checks, legality
from minidl.data.loader import shard
from minidl.loss import Loss, Totals
from minidl.model import Model
from minidl.optim import SGD
from minidl.profile import Profiler

_ALIGNED = 16  # bytes: the widest load of a kernel


def require_parts(who: str, model: Model, optimizer: SGD, loss: Loss, accumulate: int) -> None:
    """Refuse, in the name of ``who``, what is no part of a step, or of another model's, or not to be cut.

    Raises:
        TypeError: for another kind of object.
        ValueError: for parts that do not belong together, or an ``accumulate`` below 1.
    """
    checks.instance(who, "model", model, Model, "a Model", "Model(graph, ...) makes one of a Graph")
    checks.instance(who, "optimizer", optimizer, SGD, "an optimizer", "SGD(model, lr) and others make one")
    checks.instance(who, "loss", loss, Loss, "a Loss", "SoftmaxCrossEntropy(comm=comm) and others make one")
    if optimizer.model is not model:
        raise checks.bad_value(who, "optimizer", "that of the model", "another model's")
    if loss.comm is not model.comm:
        remedy = f"make it with {type(loss).__name__}(comm=comm)"
        raise checks.bad_value(who, "loss", "on the model's communicator", loss.comm.name, remedy)
    if checks.at_least(who, "accumulate", accumulate, 1) > 1 and not loss.divisible:
        raise checks.bad_value(who, "accumulate", f"1 with {loss.plan()}", accumulate, "take whole batches")


class EagerStep:
    """Runs training steps operation by operation.

    Args:
        model, optimizer, loss: of one model, on one communicator.
        accumulate: cut each batch into so many micro-batches of equal size (one more sample in the first ones), whose
            gradients add up to those of the whole: it needs the memory of one. All but batch normalisation, whose
            statistics are those of a micro-batch, computes what the whole batch would; a batch of fewer samples than
            that has one micro-batch for each.

    Raises:
        TypeError, ValueError: as `require_parts`; ValueError for what does not go together (`minidl.legality`).
    """

    def __init__(self, model: Model, optimizer: SGD, loss: Loss, *, accumulate: int = 1):
        require_parts("EagerStep", model, optimizer, loss, accumulate)
        self.model, self.optimizer, self.loss, self.accumulate = model, optimizer, loss, int(accumulate)
        legality.refuse("EagerStep", **optimizer.parts(), accumulated=self.accumulate > 1)
        self.num_classes = model.graph.output_node.shape[-1]

    def __call__(self, images: Any, labels: Any, first_sample: int = 0, *, eager: bool = False) -> Totals:
        """Take one step.

        Args:
            images, labels: this rank's part of the batch, on the model's device.
            first_sample: global index of ``images[0]``, for dropout.
            eager: as `minidl.compile.CompiledStep` has it; of no consequence here.

        Returns:
            The totals of the loss over all ranks; reading them waits for the device.
        """
        parts = self.parts(len(images))
        totals = self._parts(images, labels, first_sample, parts)
        self.optimizer.after_step()
        return totals

    def _parts(self, images: Any, labels: Any, first_sample: int, parts: list[tuple[int, int]]) -> Totals:
        if len(parts) == 1:
            return self.part(images, labels, first_sample)
        ops, count, rows = self.model.ops, self.loss.count(labels, self.num_classes), None
        for i, (begin, end) in enumerate(parts):
            ends = {"first": i == 0, "last": i == len(parts) - 1}
            cut = (self._cut(array, begin, end) for array in (images, labels))
            totals = self.part(*cut, first_sample + begin, count, **ends)
            if rows is None:
                rows = ops.empty((len(parts), *totals.array.shape), np.float64)
            ops.copy_into(rows[i], totals.array)
        return replace(totals, array=rows)

    def _cut(self, array: Any, begin: int, end: int) -> Any:
        """Samples ``begin`` to ``end``, on a GPU at an address as good as that of a whole batch.

        By it kernels choose the width of their loads, and some copy what lies badly: a step in planned memory asks for
        what it was planned with.
        """
        part = array[begin:end]
        if self.model.ops.name == "cpu" or begin * array.strides[0] % _ALIGNED == 0:
            return part
        copy = self.model.ops.empty(part.shape, part.dtype)
        self.model.ops.copy_into(copy, part)
        return copy

    def parts(self, samples: int) -> list[tuple[int, int]]:
        """Where the micro-batches of so many samples begin and end; as many on all ranks."""
        number = self.accumulate if self.model.comm.size > 1 else max(min(self.accumulate, samples), 1)
        return [shard(samples, i, number) for i in range(number)]

    def part(
        self, images: Any, labels: Any, first_sample: int, count: Any = None, *, first: bool = True, last: bool = True
    ) -> Totals:
        """One micro-batch: the first overwrites the gradients, the last sends them and updates; no `after_step`."""
        with self.model.store.step(len(images)):
            logits = self.model.forward(images, grad=True, first_sample=first_sample, new_step=first)
            totals = self.loss.forward(logits, labels, count=count)
            self.model.backward(self.loss.backward(self.optimizer.loss_scale), accumulate=not first, send=last)
        if last:
            self.optimizer.update()
        return totals

    def observe(self, profiler: Profiler) -> None:
        """Let ``profiler`` see every pass of the model and of the loss from now on."""
        self.model.observe(profiler)
        self.loss.profiler = profiler

    def evaluate(self, images: Any, labels: Any) -> tuple[Totals, Any]:
        """The loss and the logits of a batch without a step; in what mode, the model decides."""
        logits = self.model.forward(images, grad=False)
        return self.loss.forward(logits, labels, grad=False), logits
