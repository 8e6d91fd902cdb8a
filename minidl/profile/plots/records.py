"""What a picture is made from: the rows of a result file that belong together, and what they lack said in one line."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minidl.profile.plots.style import FAMILY
from minidl.profile.results import Row, machine_name

__all__ = ["COMPUTE", "NotInFile", "Run", "family", "milliseconds", "runs"]

COMPUTE = ("forward", "backward_data", "backward_weight", "update")

_NETWORK = re.compile(r"(?P<model>.+?)/(?P<size>\d+x\d+)/b(?P<batch>\d+)")


class NotInFile(ValueError):
    """The file does not have what this picture shows."""


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

    def lacks(self, picture: str, why: str) -> NotInFile:
        """The error that this run does not allow a picture."""
        where = f"{self.file} ({self.name})" if len(runs(self.content, self.file)) > 1 else self.file
        return NotInFile(f"{where}: no {picture}: {why}")

    @cached_property
    def step(self) -> Row | None:
        """The row of the whole step."""
        return next((row for row in self.rows if row["pass"] in ("step", "train") and row["ms"]), None)

    @cached_property
    def total_ms(self) -> float:
        """Milliseconds of the step; for layers alone, the sum of their passes."""
        if self.step is not None:
            return float(self.step["ms"])
        return float(sum(row["ms"] or 0.0 for row in self.rows if row["pass"] in COMPUTE))

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
    def model(self) -> str:
        """``resnet50 224×224``, or how many layers."""
        match = _NETWORK.fullmatch(self.case or "")
        if match:
            return f"{match['model']} {match['size'].replace('x', '×')}"
        if self.case is not None:
            return self.case
        cases = list(dict.fromkeys(row["case"] for row in self.rows))
        return cases[0] if len(cases) == 1 else f"{len(cases)} layers"

    @property
    def machine(self) -> str:
        return machine_name(self.content["machine"])

    @property
    def name(self) -> str:
        """Model, batch, dtype, and the arm where it is not ours."""
        batch = "" if self.batch is None else f", batch {self.batch}"
        if self.ranks > 1 and self.batch is not None:
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
        found = self.content.get("ceilings")
        if not found:
            raise self.lacks(picture, "it has no measured ceilings; run minidl bench ceilings, then measure again")
        return found

    def layers(self) -> Iterator[tuple[tuple[str, int | None, str], dict[str, Row]]]:
        """Per layer in network order: (case, index, layer) and its rows by pass; loss, optimizer and the rest last."""
        found: dict[tuple[str, int | None, str], dict[str, Row]] = {}
        for row in self.rows:
            if row["pass"] in (*COMPUTE, "all_reduce", "unaccounted") and row.get("layer"):
                found.setdefault((row["case"], row.get("index"), row["layer"]), {})[row["pass"]] = row
        last = {"loss": 1, "optimizer": 2, "step": 3}
        place = {key: i for i, key in enumerate(found)}
        order = sorted(found, key=lambda k: (last.get(k[2], 0), k[1] if k[1] is not None else 1 << 30, place[k]))
        return ((key, found[key]) for key in order)


def runs(content: Mapping[str, Any], file: str) -> list[Run]:
    """What a result file holds, in its order: a run per network, dtype, arm and number of ranks; layers that were
    measured alone (no row of a step) stand together.
    """

    def what(row: Row) -> tuple[str, str, int]:
        return row["dtype"], row["arm"], row.get("ranks") or 1

    networks = {(row["case"], *what(row)) for row in content["rows"] if row["pass"] in ("step", "train")}
    found: dict[tuple[str | None, str, str, int], list[Row]] = {}
    for row in content["rows"]:
        case = row["case"] if (row["case"], *what(row)) in networks else None
        found.setdefault((case, *what(row)), []).append(row)
    return [Run(str(file), *key, tuple(rows), content) for key, rows in found.items()]


def family(row: Row) -> str:
    """The kind of layer as pictures tell them apart."""
    if row.get("layer") in ("loss", "optimizer"):
        return str(row["layer"])
    return FAMILY.get(row.get("type") or "", "other")


def milliseconds(ms: float) -> str:
    """``12.3 ms`` or ``45 µs``: three figures and the unit."""
    if abs(ms) >= 999.5:
        return f"{ms:,.0f} ms"
    value, unit = (1e3 * ms, "µs") if abs(ms) < 0.09995 else (ms, "ms")
    return f"{value:#.3g}".rstrip(".") + f" {unit}"
