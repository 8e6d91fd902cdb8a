"""The per-layer table of a real training run: some of its steps watched, all ranks', while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from minidl import checks
from minidl.bench.isolated import cases
from minidl.bench.network import Kind, NetworkTimes, joined, portable
from minidl.bench.rows import Table, network_rows
from minidl.bench.run import CONVENTIONS, step_record
from minidl.profile import ceilings
from minidl.profile.results import result, write
from minidl.profile.spans import NULL_PROFILER, Profiler
from minidl.profile.steps import StepProfiler, StepTimes
from minidl.train import Trainer

__all__ = ["TrainingProfile"]

_FEWEST = 2
_UNREAD = 4  # watched steps whose events wait to be read; by then all but the last have long passed


class TrainingProfile:
    """Watches one step in ``every`` of a `Trainer` and writes what it saw as a result file.

    A watched step runs operation by operation, also where the others are replays of a graph, and records two events for
    each pass of each layer; the others cost nothing. Steps of a smaller last batch are not watched.

    Args:
        path: the result file; written by rank 0 when training ends.
        every: steps from one watched step to the next.
        first: the first step that is watched; those before it compile kernels and fill the memory pool.
    """

    def __init__(self, path: str | Path, *, every: int = 20, first: int = 5):
        self.path = Path(path)
        self.every = checks.at_least("profile", "every", every, 1)
        self.first = checks.at_least("profile", "first", first, 0)
        self.written = False
        self.steps: list[StepTimes] = []
        self._batch: int | None = None
        self._seen = self._pending = 0
        self._profiler: StepProfiler | None = None

    @contextmanager
    def step(self, trainer: Trainer, samples: int) -> Iterator[None]:
        """Around each training step of ``samples`` samples on this rank."""
        if self._profiler is None:
            self._profiler = StepProfiler(trainer.model.ops)
            self._batch = samples
        due = self._seen >= self.first and (self._seen - self.first) % self.every == 0
        self._seen += 1
        if not due or samples != self._batch:
            yield
            return
        self._observe(trainer, self._profiler)
        try:
            with self._profiler.step(memory=not self.steps and not self._pending):
                yield
        finally:
            self._observe(trainer, NULL_PROFILER)
        self._pending += 1
        if self._pending >= _UNREAD:
            self._read()

    def _observe(self, trainer: Trainer, profiler: Profiler) -> None:
        trainer.model.observe(profiler)
        trainer.loss.profiler = profiler

    def _read(self) -> None:
        if self._profiler is not None:
            self.steps += self._profiler.read()
        self._pending = 0

    def finish(self, trainer: Trainer) -> Path | None:
        """Join the ranks' records and write the file; a collective. None where too few steps were watched."""
        self._read()
        counts = trainer.comm.share(len(self.steps))
        if min(counts) < _FEWEST:
            return None
        steps = self.steps[: min(counts)]
        kind = joined(trainer.comm, steps, steps, None)
        shared = trainer.comm.share(portable(steps[0]))
        known = ceilings.kept(trainer.model.ops, trainer.comm)
        if trainer.comm.rank == 0:
            write(self.path, self._content(trainer, kind, shared, known))
        self.written = True
        return self.path

    @property
    def too_short(self) -> str:
        """Why nothing was written."""
        return f"no profile: of {self._seen} steps {len(self.steps)} were watched, and it takes {_FEWEST}"

    def _content(self, trainer: Trainer, kind: Kind, shared: list[Any], known: Any) -> dict[str, Any]:
        model, times = trainer.model, NetworkTimes(kind, None)
        for rank, (spans, memory) in enumerate(shared):
            times.spans += [{"rank": rank, **span} for span in spans]
            times.memory += [{"rank": rank, "t_ms": at, "bytes": used} for at, used in memory]
        title = f"{trainer.settings.get('model', 'training')}/{_size(model)}/b{self._batch}"
        found = cases(model.graph, self._batch)
        table = Table(title, trainer, self._batch, found, (), times, {}, known, None)
        setup = {
            "model": trainer.settings.get("model"), "batch": self._batch, "precision": model.precision.name,
            "device": model.ops.name, "ranks": trainer.comm.size, "steps": len(self.steps), "every": self.every,
            "parameters": model.num_parameters,
        }  # fmt: skip
        content = result("training", network_rows(table), setup=setup, ceilings=known, conventions=CONVENTIONS)
        step = step_record(times, self._batch, trainer.comm.size)
        step |= {"eager_profiling_overhead": None}  # every watched step has its spans: see bench layers for their cost
        return content | {"step": step, "warnings": [], "spans": times.spans, "memory": times.memory}


def _size(model: Any) -> str:
    shape = model.graph.nodes[0].shape
    return "x".join(map(str, shape[:2])) if len(shape) == 3 else str(shape[0])
