"""The per-layer table of a real training run: some of its steps watched, all ranks', while it goes on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from minidl import checks
from minidl.bench.isolated import cases
from minidl.bench.launches import Launches, absorbed
from minidl.bench.network import NetworkTimes, joined
from minidl.bench.rows import Table, network_rows
from minidl.bench.run import CONVENTIONS, step_record
from minidl.callbacks import StepWatch
from minidl.profile import ceilings
from minidl.profile.results import result, write
from minidl.profile.spans import NULL_PROFILER
from minidl.profile.steps import StepProfiler, StepTimes
from minidl.train import Trainer

_FEWEST = 2
_MOST = 200  # watched steps that are kept; of a longer run, every second of them goes, and half as many are watched
_UNREAD = 4  # watched steps whose events wait to be read; when the next one comes, they have long passed


class TrainingProfile(StepWatch):
    """Watches one step in ``every`` of a `Trainer` and writes what it saw as a result file.

    Where steps are replays of a CUDA graph, a watched one replays a second graph of the same step, in the same memory,
    whose nodes mark each pass of each layer; else marks are set while the step is launched. Halfway between two watched
    steps one is timed as a whole, without marks. The others cost nothing. A smaller last batch is not watched.

    Args:
        path: the result file; written by rank 0 when training ends.
        every: steps from one watched step to the next; the second comes sooner, for short runs. It doubles whenever 200
            were watched.
        first: the first step that is watched; those before it compile kernels and fill the memory pool.
    """

    def __init__(self, path: str | Path, *, every: int = 50, first: int = 5):
        self.path = Path(path)
        self.every = checks.at_least("profile", "every", every, 1)
        self.first = checks.at_least("profile", "first", first, 0)
        self.written = False
        self.steps: list[StepTimes] = []
        self.plain: list[StepTimes] = []
        self._batch: int | None = None
        self._seen = self._pending = 0
        self._kernels: dict[tuple[str, str], list[str]] | None = None
        self._profiler: StepProfiler | None = None
        self._around: StepProfiler | None = None

    @contextmanager
    def step(self, trainer: Trainer, samples: int | None) -> Iterator[None]:
        """Around each training step, see `minidl.callbacks.StepWatch`."""
        if self._profiler is None:
            self._profiler, self._around = StepProfiler(trainer.model.ops), StepProfiler(trainer.model.ops)
        self._batch = self._batch or samples
        turn = self._seen - self.first if samples is not None else -1
        self._seen += 1
        if turn >= 0 and (turn % self.every == 0 or turn == self.every // 5):
            with self._watched(trainer, self._profiler):
                yield
        elif turn >= 0 and (turn % self.every == (self.every + 1) // 2 or turn == self.every // 10):
            with self._around.step():
                yield
        else:
            yield

    @contextmanager
    def _watched(self, trainer: Trainer, profiler: StepProfiler) -> Iterator[None]:
        if self._pending >= _UNREAD:
            self._read()
        first = self._kernels is None
        noted = Launches(profiler) if first and trainer.model.ops.name == "cuda" else None
        trainer.observe(noted or profiler)
        try:
            with noted.noting() if noted else nullcontext(), profiler.step(memory=first):
                yield
        finally:
            trainer.observe(NULL_PROFILER)
        self._kernels = noted.found if noted else self._kernels or {}
        self._pending += 1

    def _read(self) -> None:
        if self._profiler is not None:
            self.steps += self._profiler.read()
            self.plain += self._around.read()
        self._pending = 0
        if len(self.steps) > _MOST:
            self.steps, self.plain, self.every = self.steps[::2], self.plain[::2], 2 * self.every

    def finish(self, trainer: Trainer) -> Path | None:
        """Join the ranks' records and write the file; a collective. None where too few steps were watched."""
        self._read()
        captured = [step for step in self.steps if step.captured]
        # A run of replays may have watched some eager steps as well: before its graph was there, or in another mode.
        wanted = all(trainer.comm.share(len(captured) >= _FEWEST))
        steps = [step for step in self.steps if step.captured == wanted]
        watched, plain = map(min, zip(*trainer.comm.share((len(steps), len(self.plain))), strict=True))
        if watched < _FEWEST:
            return None
        steps = steps[:watched]
        kind = joined(trainer.comm, self.plain if plain >= _FEWEST else steps, steps, None)
        times = NetworkTimes(None, kind) if wanted else NetworkTimes(kind, None)
        times.show(trainer.comm, steps[0])
        known = ceilings.kept(trainer.model.ops, trainer.comm)
        if trainer.comm.rank == 0:
            write(self.path, self._content(trainer, times, known, told=plain >= _FEWEST))
        self.written = True
        return self.path

    @property
    def too_short(self) -> str:
        """Why nothing was written."""
        return f"no profile: of {self._seen} steps {len(self.steps)} were watched, and it takes {_FEWEST}"

    def _content(self, trainer: Trainer, times: NetworkTimes, known: Any, *, told: bool) -> dict[str, Any]:
        """``told``: what steps take without marks is known."""
        model = trainer.model
        title = f"{trainer.settings.get('model', 'training')}/{_size(model)}/b{self._batch}"
        found = cases(model.graph, self._batch)
        kernels, fusion, others = self._kernels or {}, model.fusion, {}
        if fusion is not None:
            others = {"plan": fusion.sites, "absorbed": absorbed(model.graph, fusion, kernels)}
        table = Table(title, trainer, self._batch, found, (), times, {}, known, None, kernels=kernels, **others)
        setup = {
            "model": trainer.settings.get("model"), "batch": self._batch, "precision": model.precision.name,
            "device": model.ops.name, "ranks": trainer.comm.size, "steps": len(self.steps), "every": self.every,
            "parameters": model.num_parameters,
        }  # fmt: skip
        content = result("training", network_rows(table), setup=setup, ceilings=known, conventions=CONVENTIONS)
        step = step_record(times, self._batch, trainer.comm.size)
        for name in ("eager", "graph"):
            cost = f"{name}_profiling_overhead"
            step[cost] = step[cost] / self.every if told and step[cost] is not None else None
        return content | {"step": step, "warnings": [], "spans": times.spans, "memory": times.memory}


def _size(model: Any) -> str:
    shape = model.graph.nodes[0].shape
    return "x".join(map(str, shape[:2])) if len(shape) == 3 else str(shape[0])
