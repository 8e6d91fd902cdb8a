"""What one training step does with memory, as plain records: the only thing that planners of memory read.

A step of the trace is one pass of one layer. Sizes are bytes. Tensors that share memory (views, a ReLU's output that
the next convolution saves again) are one tensor here. Step numbers run over the whole training step: forward passes,
loss, backward passes in reverse, updates.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from minidl import checks

SCHEMA = 1  # of the files of traces and plans
# Tensors that outlive the step: on the device at every moment of it, touched or not.
RESIDENT_KINDS = ("weight", "working", "gradient", "momentum", "buffer")


@dataclass(frozen=True)
class Step:
    """One pass of one layer.

    Attributes:
        name: of the layer; "loss" and "optimizer" for those.
        pass_name: forward, backward_weight, backward_data or update.
        workspace: most bytes of arrays that come and go within the step.
        flop, bytes: model work, see `minidl.profile.cost`.
        traffic: bytes of the arrays that its kernels are given, each as often as it is given.
        matrix: the FLOP are those of products.
        layer: class of the layer, "" for loss and update.
    """

    name: str
    pass_name: str
    workspace: int = 0
    flop: int = 0
    bytes: int = 0
    traffic: int = 0
    matrix: bool = False
    layer: str = ""

    @property
    def title(self) -> str:
        """``layer1.0.conv1 forward``."""
        return f"{self.name} {self.pass_name}"


@dataclass(frozen=True)
class Tensor:
    """One piece of memory.

    Attributes:
        name: ``<layer that made it>:<what>``.
        kind: activation, input, gradient_of_activation, or one of `RESIDENT_KINDS`.
        bytes: size.
        touches: steps whose kernels read or write it, ascending; the first one makes it, unless ``given``.
        saved: kept for the backward pass by a layer, so that a store may move it.
        given: there before the first step (the batch, parameters).
        savers: who keeps it, as ``<layer>.<name given to save>``.
        again: running the forward pass that makes it once more gives it again.
        reread: that pass reads it instead, when it runs again (the moments of a batch norm).
        visit: steps from the first to the last of which it has memory; before and behind its content is on the host
            (`minidl.memory.visits`).
    """

    name: str
    kind: str
    bytes: int
    touches: tuple[int, ...]
    saved: bool = False
    given: bool = False
    savers: tuple[str, ...] = ()
    again: bool = True
    visit: tuple[int, int] | None = None
    reread: bool = False

    @property
    def resident(self) -> bool:
        """Whether it is on the device at every moment."""
        return self.kind in RESIDENT_KINDS and self.visit is None

    @property
    def first(self) -> int:
        """First step at which it takes memory."""
        if self.visit is not None:
            return self.visit[0]
        return 0 if self.given else self.touches[0]

    @property
    def last(self) -> int:
        """Last step at which it takes memory."""
        return self.touches[-1] if self.visit is None else self.visit[1]


@dataclass(frozen=True)
class Trace:
    """One training step.

    Attributes:
        steps: in order.
        tensors: everything that lives longer than one step.
        loss: the step that makes the first gradient: what is saved before it and needed behind it straddles it.
        facts: what was traced (model, batch, precision, device, ...), JSON-able.
    """

    steps: tuple[Step, ...]
    tensors: tuple[Tensor, ...]
    loss: int
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.steps or not 0 <= self.loss < len(self.steps):
            raise checks.bad_value("trace", "loss", f"a step in 0..{len(self.steps) - 1}", self.loss)
        for tensor in self.tensors:
            ordered = all(a < b for a, b in zip(tensor.touches, tensor.touches[1:], strict=False))
            inside = all(0 <= t < len(self.steps) for t in tensor.touches)
            if not (ordered and inside) or not (tensor.touches or tensor.resident):
                raise checks.bad_value("trace", f"touches of {tensor.name}", "ascending step numbers", tensor.touches)
            first, last = tensor.visit or (1, len(self.steps) - 1)
            if tensor.visit and not 0 < first <= tensor.touches[0] <= tensor.touches[-1] <= last < len(self.steps):
                raise checks.bad_value("trace", f"visit of {tensor.name}", "around its touches", tensor.visit)
            if tensor.bytes < 0:
                raise checks.bad_value("trace", f"bytes of {tensor.name}", "at least 0", tensor.bytes)

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def resident_bytes(self) -> dict[str, int]:
        """Bytes of parameters and their company by kind."""
        total = dict.fromkeys(RESIDENT_KINDS, 0)
        for tensor in self.tensors:
            if tensor.resident:
                total[tensor.kind] += tensor.bytes
        return total

    @cached_property
    def visitors(self) -> list[int]:
        """Tensors that are on the host but for a part of the step, those that come first first."""
        numbers = [i for i, tensor in enumerate(self.tensors) if tensor.visit is not None]
        return sorted(numbers, key=lambda i: (self.tensors[i].touches[0], i))

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits that change with anything a plan depends on: a plan is good for this trace only."""
        steps, tensors = ([list(vars(one).values()) for one in many] for many in (self.steps, self.tensors))
        text = json.dumps([steps, tensors, self.loss])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """One JSON object; `from_json` gives an equal trace back."""
        return dumps("trace", self)

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """The trace that `to_json` wrote.

        Raises:
            ValueError: when ``text`` is no trace, or one of another schema.
        """
        content = loads("trace", text)
        tensors = (
            Tensor(**{name: tuple(value) if isinstance(value, list) else value for name, value in record.items()})
            for record in content["tensors"]
        )
        steps = (Step(**record) for record in content["steps"])
        return cls(tuple(steps), tuple(tensors), content["loss"], content["facts"])


def dumps(kind: str, record: Any) -> str:
    """One JSON object of a dataclass."""
    return json.dumps({"schema": SCHEMA, "kind": f"memory_{kind}", **dataclasses.asdict(record)})


def loads(kind: str, text: str) -> dict[str, Any]:
    """The fields that `dumps` wrote.

    Raises:
        ValueError: when ``text`` is something else, or of another schema.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop("kind", None) != f"memory_{kind}":
        raise ValueError(f"not a memory {kind}: minidl plan --{'json' if kind == 'plan' else kind} PATH writes one")
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise ValueError(f"memory {kind} of schema {schema!r}; this minidl reads schema {SCHEMA}")
    return content
