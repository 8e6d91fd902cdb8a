"""What of a result file belongs together: the rows of one network (or of layers alone), where its time goes, and what
it lacks said in one line. Tables, pictures and reports are made from runs, never from a file's rows at large.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minidl.profile.cost import PASSES
from minidl.profile.results import Row, machine_name

COMPUTE = (*PASSES, "update")
WAYS = {
    "graph_step": "within the captured step",
    "step": "within the eager step",
    "replayed": "each pass alone, replayed",
    "cold": "each pass alone, cold",
    "hot": "each pass alone, hot",
}
FAMILIES = {
    "convolution": ("Conv2d", "ConvTranspose2d", "RowParallelConv2d", "ChannelParallelConv2d", "CSBConv2d"),
    "linear": ("Linear", "CSBLinear"),
    "batch norm": ("BatchNorm2d",),
    "other norms": ("GroupNorm", "LayerNorm"),
    "ReLU": ("ReLU",),
    "other activations": ("GELU", "Hardswish", "LeakyReLU", "ReLU6", "SiLU", "Sigmoid", "Softmax", "Tanh"),
    "pooling": ("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d"),
    "joins": ("Add", "Mul", "Concat"),
}

_NETWORK = re.compile(r"(?P<model>.+?)/(?P<size>\d+x\d+)/b(?P<batch>\d+)(?P<options>, .+)?")
_WHOLE = ("step", "train")

LayerKey = tuple[str, int | None, str]  # case, index, layer


class NotInFile(ValueError):
    """The file does not have what this table or picture shows."""


@dataclass(frozen=True)
class Run:
    """Rows measured together: one network, or several layers alone, in one dtype, by one arm, on so many ranks.

    Attributes:
        file: where they come from, for errors.
        case: the network's case; None for layers measured alone.
        content: the whole file.
    """

    file: str
    case: str | None
    dtype: str
    arm: str
    ranks: int
    rows: tuple[Row, ...]
    content: Mapping[str, Any]

    @property
    def key(self) -> tuple[str | None, str, str, int]:
        """What tells it from the other runs of its file."""
        return self.case, self.dtype, self.arm, self.ranks

    def lacks(self, what: str, why: str) -> NotInFile:
        """The error that this run does not allow a table or picture."""
        where = f"{self.file} ({self.name})" if len(runs(self.content, self.file)) > 1 else self.file
        return NotInFile(f"{where}: no {what}: {why}")

    # -- where its time goes ------------------------------------------------------------------------------------------

    @cached_property
    def step(self) -> Row | None:
        """The row of the whole step."""
        return next((row for row in self.rows if row["pass"] in _WHOLE and row["ms"]), None)

    @cached_property
    def way(self) -> str | None:
        """How its layers were timed within the step: graph_step before step; None where each was timed only alone."""
        timings = [row.get("timings") or {} for row in self.rows if row["pass"] in COMPUTE]
        return next((way for way in ("graph_step", "step") if any(t.get(way) for t in timings)), None)

    @property
    def how(self) -> str:
        """In words how `ms` was timed."""
        return self.how_alone if self.way is None else WAYS[self.way]

    @property
    def how_alone(self) -> str:
        """In words how the rows' own figures were timed."""
        main = next((row.get("timing") for row in self.rows if row["pass"] in COMPUTE and row.get("timing")), None)
        return WAYS.get(main or "", "each pass alone")

    def ms(self, row: Row) -> float:
        """Milliseconds that a row adds to the step: of a pass its time there (alone, where that is all there is), of an
        all-reduce what it exposes. 0 for what was not measured.
        """
        if row["pass"] == "all_reduce":
            return row.get("exposed_ms") or 0.0
        if self.way is None:
            return row["ms"] or 0.0
        record = (row.get("timings") or {}).get(self.way)
        return record["ms"] if record else 0.0

    @cached_property
    def total_ms(self) -> float:
        """Milliseconds of all its parts together: what shares are of. Within a step that is launched eagerly it is the
        step with the marks between its layers, which may lengthen it.
        """
        return float(sum(self.ms(row) for row in self.rows if row["pass"] not in _WHOLE))

    def shares(self) -> dict[str, float]:
        """The fraction of each kind of work, see `family`; together 1."""
        found: dict[str, float] = {}
        for row in self.rows:
            if row["pass"] not in _WHOLE and (ms := self.ms(row)):
                found[family(row)] = found.get(family(row), 0.0) + ms / self.total_ms
        return found

    def layers(self) -> Iterator[tuple[LayerKey, dict[str, Row]]]:
        """Per layer in network order: its key and its rows by pass; loss, optimizer and the rest last."""
        found: dict[LayerKey, dict[str, Row]] = {}
        for row in self.rows:
            if row["pass"] not in _WHOLE and row.get("layer"):
                found.setdefault((row["case"], row.get("index"), row["layer"]), {})[row["pass"]] = row
        last = {"loss": 1, "optimizer": 2, "step": 3}
        place = {key: i for i, key in enumerate(found)}
        order = sorted(found, key=lambda k: (last.get(k[2], 0), k[1] if k[1] is not None else 1 << 30, place[k]))
        return ((key, found[key]) for key in order)

    def layer_name(self, key: LayerKey) -> str:
        """What to call a layer: its name in the network; of layers measured alone, the case."""
        return key[0] if self.case is None else key[2]

    # -- what it is ---------------------------------------------------------------------------------------------------

    @cached_property
    def point(self) -> Mapping[str, Any]:
        """Its setup, step and warnings: the file's own, or its point's in a file of several."""
        points = self.content.get("points")
        if points is None:
            return self.content

        def mine(point: Mapping[str, Any]) -> bool:
            setup = point.get("setup") or {}
            return (point.get("case"), setup.get("precision"), setup.get("ranks")) == (
                self.case,
                self.dtype,
                self.ranks,
            )

        return next(filter(mine, points), {})

    @property
    def record(self) -> Mapping[str, Any]:
        """The file's record of the step: eager, graph, how much of it the layers account for."""
        return self.point.get("step") or {}

    @cached_property
    def rank_batch(self) -> int | None:
        """Samples of a step on one rank."""
        for row in self.rows:
            if row.get("input_shapes") and row["pass"] == "forward" and self.case is not None:
                return int(row["input_shapes"][0][0])
        return None

    @cached_property
    def batch(self) -> int | None:
        """Samples of a step over all ranks."""
        if self.rank_batch is not None:
            return self.rank_batch * self.ranks
        match = _NETWORK.fullmatch(self.case or "")
        return int(match["batch"]) if match else None

    @property
    def images_per_s(self) -> float | None:
        """Samples per second over all ranks."""
        if self.step is None:
            return None
        if self.step.get("images_per_s"):
            return float(self.step["images_per_s"])
        return 1e3 * self.batch / self.step["ms"] if self.batch else None

    @property
    def added(self) -> float | None:
        """How much longer messages make the step, a fraction of the step without them: what they expose, and by how
        much they slow down the passes beside them. None on one rank.
        """
        kind = "graph" if self.way == "graph_step" else "eager"
        whole, silent = self.record.get(kind), self.record.get(f"{kind}_compute_only")
        return whole["ms"] / silent["ms"] - 1 if whole and silent else None

    @property
    def fusion(self) -> str:
        """The choice of fusion plan that was asked for (`minidl.fusion.fuse`)."""
        return (self.point.get("setup") or {}).get("fusion") or "none"

    @property
    def model(self) -> str:
        """``resnet50 224×224``, with the fusion and the options of a sweep that no other word tells; or how many
        layers.
        """
        match = _NETWORK.fullmatch(self.case or "")
        if match:
            options = match["options"] or ""
            if self.fusion != "none" and "fusion" not in options:
                options = f", fusion {self.fusion}{options}"
            return f"{match['model']} {match['size'].replace('x', '×')}{options}"
        if self.case is not None:
            return self.case
        cases = list(dict.fromkeys(row["case"] for row in self.rows))
        return cases[0] if len(cases) == 1 else f"{len(cases)} layers"

    @property
    def network(self) -> str:
        """The model's bare name, or `model` where it has none."""
        match = _NETWORK.fullmatch(self.case or "")
        return match["model"] if match else self.model

    @property
    def machine(self) -> str:
        return machine_name(self.content["machine"])

    @property
    def name(self) -> str:
        """Model, batch, dtype, and the arm where it is not ours."""
        batch = "" if self.batch is None else f", batch {self.batch}"
        if self.ranks > 1:
            batch += f" on {self.ranks} ranks"
        return f"{self.model}{batch}, {self.dtype}{'' if self.arm == 'minidl' else f', {self.arm}'}"

    @property
    def heading(self) -> str:
        """What stands under a title."""
        return f"{self.name}  ·  {self.machine}"

    def ceilings(self, picture: str) -> Mapping[str, Any]:
        """The measured ceilings of the machine.

        Raises:
            NotInFile: when the file has none.
        """
        found = self.point.get("ceilings") or self.content.get("ceilings")
        if not found:
            raise self.lacks(picture, "it has no measured ceilings; run minidl bench ceilings, then measure again")
        return found


def runs(content: Mapping[str, Any], file: str) -> list[Run]:
    """What a result file holds, in its order: a run per network, dtype, arm and number of ranks; layers that were
    measured alone (no row of a step) stand together.
    """

    def what(row: Row) -> tuple[str, str, int]:
        return row["dtype"], row["arm"], row.get("ranks") or 1

    networks = {(row["case"], *what(row)) for row in content["rows"] if row["pass"] in _WHOLE}
    found: dict[tuple[str | None, str, str, int], list[Row]] = {}
    for row in content["rows"]:
        case = row["case"] if (row["case"], *what(row)) in networks else None
        found.setdefault((case, *what(row)), []).append(row)
    return [Run(str(file), *key, tuple(rows), content) for key, rows in found.items()]


def family(row: Row) -> str:
    """The kind of work of a row: of its layer's type (`FAMILIES`, or other), loss, optimizer, exposed communication,
    unaccounted.
    """
    if row["pass"] in ("all_reduce", "wait"):
        return "exposed communication"
    if row["pass"] == "unaccounted":
        return "unaccounted"
    if row.get("layer") in ("loss", "optimizer"):
        return str(row["layer"])
    return next((name for name, types in FAMILIES.items() if row.get("type") in types), "other")
