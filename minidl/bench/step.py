"""One training step of a network on resident synthetic data: called eagerly, or captured in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from minidl import checks
from minidl.cuda.capture import Room, capture
from minidl.dist.communicator import SOLO, Communicator
from minidl.graph import Graph
from minidl.loss import SoftmaxCrossEntropy, Totals
from minidl.model import Model
from minidl.optim import SGD
from minidl.profile.inputs import labels, noise
from minidl.profile.spans import NULL_PROFILER, Profiler
from minidl.profile.steps import Marked, StepProfiler
from minidl.step import EagerStep
from minidl.store import TensorStore

LR, MOMENTUM, DECAY = 1e-3, 0.9, 1e-4  # at ten times that VGG-16 diverges after some hundred steps on the same noise


@dataclass(frozen=True)
class Replay:
    """A captured step. Each call launches it once more in its room; ``totals`` are those of the last replay."""

    graph: Any
    totals: Totals
    room: Room
    tell: Callable[[], None] = lambda: None

    @property
    def stream(self) -> Any:
        """Where it is launched."""
        return self.room.stream

    def __call__(self) -> Totals:
        self.tell()
        self.graph.launch(self.stream)
        return self.totals


class TrainingStep:
    """Forward, loss, backward, messages and update of SGD with momentum.

    Args:
        graph: becomes part of the step's model.
        batch: samples of this rank.
        comm: ranks that train together, each with a batch of its own.

    Raises:
        ValueError: for a batch below 1, or what `Model` refuses.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        batch: int,
        device: str,
        precision: Any = "fp32",
        comm: Communicator = SOLO,
        store: TensorStore | None = None,
        **options: Any,
    ):
        self.comm = comm
        self.model = Model(graph, device=device, precision=precision, comm=comm, store=store, **options)
        self.ops: ModuleType = self.model.ops
        self.optimizer = SGD(self.model, LR, MOMENTUM, DECAY)
        self.loss = SoftmaxCrossEntropy(comm=comm)
        self.eager = EagerStep(self.model, self.optimizer, self.loss)
        self.x = self.labels = None
        self.resize(batch)

    def resize(self, batch: int) -> None:
        """Take steps of so many samples of this rank from now on."""
        self.batch = checks.at_least("step", "batch", batch, 1)
        graph, seed = self.model.graph, self.comm.rank
        *image, classes = graph.output_node.shape
        self.x = None  # before there is another
        self.model.expect(batch)
        self.x = noise(self.ops, (batch, *graph.nodes[0].shape), self.model.precision.storage, seed=seed)
        self.labels = labels(self.ops, (batch, *image), classes, seed=seed)

    def __call__(self) -> Totals:
        """Run, or start, one step."""
        return self.eager(self.x, self.labels, self.comm.rank * self.batch)

    def observe(self, profiler: Profiler = NULL_PROFILER) -> None:
        """Let ``profiler`` see the steps from now on."""
        self.eager.observe(profiler)

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Within, gradients stay on their rank: the step's computation alone. Afterwards the ranks' weights differ."""
        arena = self.model.arena
        comm = arena.comm
        arena.connect(SOLO, arena.group_bytes)
        try:
            yield
        finally:
            arena.connect(comm, arena.group_bytes)

    def capture(self, profiler: StepProfiler | None = None, beside: Replay | None = None) -> Replay:
        """The step as one CUDA graph, captured now; a collective where ranks are joined.

        Dropout draws the same masks in each replay.

        Args:
            profiler: gets its marks into the graph, and sees the replays that lie in a step of its.
            beside: an earlier replay, whose room this one then shares; default: one of its own.

        Raises:
            RuntimeError: on a device without graphs.
        """
        if self.ops.name != "cuda":
            raise checks.order("step", "it cannot be captured on the CPU", "use device='cuda'")
        import cupy

        room = beside.room if beside else Room()
        cupy.cuda.Device().synchronize()
        with room.entered():
            self()  # loads kernels, fills the room
            room.stream.synchronize()
            if profiler is None:
                with self.model.random.hold():
                    return Replay(*capture(self, room.stream), room)
            self.observe(profiler)
            try:
                with self.model.random.hold():
                    graph, (piece, totals) = capture(lambda: self._watched(profiler), room.stream)
            finally:
                self.observe()
        return Replay(graph, totals, room, lambda: profiler.launching(piece))

    def _watched(self, profiler: StepProfiler) -> tuple[Marked, Totals]:
        with profiler.capturing() as piece:
            return piece, self()
