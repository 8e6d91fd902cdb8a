"""Where a network's time goes along its length: single layers, or blocks of neighbours where there are too many."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from minidl.profile.results import Row
from minidl.profile.roofline import communication_intensity
from minidl.profile.runs import Run

COMMUNICATION = "communication"
MOST = 60  # lines that one page holds with readable names
_JOINED = 40  # and how many there are at most once layers are joined
_OUTSIDE = ("loss", "optimizer", "unaccounted")


@dataclass
class Block:
    """One layer or several neighbours.

    Attributes:
        parts: milliseconds of each pass within the step, exposed communication, and what is unaccounted for.
        flop, bytes: of all passes, for the batch of one rank.
        wire_bytes: what one rank sends of its gradients.
        energy_mj: of its passes alone; 0 where it was not measured.
        floor_ms: the least that its passes can take at the machine's ceilings; 0 where those are not known.
        type, shape: of a single layer and its output.
    """

    name: str
    parts: dict[str, float] = field(default_factory=dict)
    flop: int = 0
    bytes: int = 0
    wire_bytes: float = 0.0
    energy_mj: float = 0.0
    floor_ms: float = 0.0
    type: str | None = None
    shape: tuple[int, ...] | None = None

    @property
    def ms(self) -> float:
        return sum(self.parts.values())

    @property
    def intensity(self) -> float | None:
        """FLOP per byte of all passes; None for what moves nothing."""
        return self.flop / self.bytes if self.bytes else None

    @property
    def roof(self) -> float | None:
        """The least time over the time within the step; None where either is not known."""
        return self.floor_ms / self.ms if self.floor_ms and self.ms > 0 else None

    @property
    def communication_intensity(self) -> float | None:
        """FLOP per byte that one rank sends; None for what sends nothing."""
        return communication_intensity(self.flop, self.wire_bytes)

    @property
    def is_layer(self) -> bool:
        return self.name not in _OUTSIDE

    def add(self, other: Block) -> None:
        """Count the work of another block as this one's, too."""
        for name, ms in other.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + ms
        self.flop += other.flop
        self.bytes += other.bytes
        self.wire_bytes += other.wire_bytes
        self.energy_mj += other.energy_mj
        self.floor_ms += other.floor_ms


def singles(run: Run) -> list[Block]:
    """Every layer by itself in network order, then loss, optimizer and what is unaccounted for."""
    found = []
    for key, rows in run.layers():
        block = Block("unaccounted" if set(rows) == {"unaccounted"} else run.layer_name(key))
        first = next(iter(rows.values()))
        block.type, block.shape = first.get("type"), tuple(first.get("output_shape") or ()) or None
        for row in rows.values():
            block.add(_work(row, run.ms(row)))
        found.append(block)
    return found


def _work(row: Row, ms: float) -> Block:
    if row["pass"] == "all_reduce":
        return Block("", {COMMUNICATION: ms}, wire_bytes=row.get("wire_bytes") or 0.0)
    part = COMMUNICATION if row["pass"] == "wait" else row["pass"]
    energy, least = row.get("energy_mj") or 0.0, row.get("floor_ms") or 0.0
    return Block("", {part: ms}, row.get("flop") or 0, row.get("bytes") or 0, energy_mj=energy, floor_ms=least)


def blocks(run: Run, most: int = MOST) -> list[Block]:
    """`singles`, or, of more than ``most``, neighbours joined that share the beginning of their names: as much of it as
    leaves few enough.
    """
    layers = singles(run)
    if len(layers) <= most:
        return layers
    for depth in range(max(1, *(block.name.count(".") for block in layers)), 0, -1):
        joined = _joined(layers, depth)
        if len(joined) <= _JOINED:
            break
    return joined


def _joined(layers: Iterable[Block], depth: int) -> list[Block]:
    joined: list[Block] = []
    for layer in layers:
        name = ".".join(layer.name.split(".")[:depth])
        if joined and joined[-1].name == name:
            joined[-1].type = joined[-1].shape = None
        else:
            joined.append(Block(name, type=layer.type, shape=layer.shape))
        joined[-1].add(layer)
    return joined


def order(columns: Sequence[Sequence[Block]]) -> list[str]:
    """The names of all blocks, in the order of the first run that has them; the others' own ones after those."""
    return list(dict.fromkeys(block.name for column in columns for block in column))
