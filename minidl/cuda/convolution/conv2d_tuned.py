"""Kernels of convolutions as `minidl tune conv` measured them: a table kept on disk, read when it is first needed.

What runs follows from the table's content alone, never from a time taken while a program runs. A table is for one GPU
model, driver and text of the kernels; where it says nothing, or there is none, the families' models of time choose.

    MINIDL_TUNED unset    the table that `minidl tune conv` kept in the cache folder, if it did
    MINIDL_TUNED=PATH     that table; an error where it is another GPU's or another version's
    MINIDL_TUNED=0        none
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minidl import cache, checks
from minidl.cuda import nvrtc, prepared
from minidl.cuda.convolution.conv2d_family import Choice, Question, forced_kernel
from minidl.cuda.convolution.conv2d_plan import convolution
from minidl.cuda.device import active_dry_run, current_device, import_cupy, unprepared

SCHEMA = 1
STEMS = (
    "conv2d", "conv2d_grouped", "conv2d_grouped_weight", "conv2d_halo", "conv2d_hopper", "conv2d_small", "conv2d_stem",
    "conv2d_stem_weight", "conv2d_thin", "conv2d_thin_weight", "conv2d_turn", "conv2d_weight", "conv2d_weight_halo",
    "conv2d_weight_hopper", "conv2d_weight_sum",
)  # fmt: skip
DTYPES = {"fp32": (0, 0), "tf32": (0, 1), "tf32x3": (0, 3), "bf16": (1, 0), "fp16": (2, 0)}

Record = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """Choices for questions, on one model of GPU.

    Attributes:
        gpu: its name, as the driver spells it; empty: no GPU's, a table without choices.
        record: what the table was read from, JSON-able: the identity, and the rows.
    """

    gpu: str
    choices: Mapping[Question, Choice]
    record: Record = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, record: Record) -> Table:
        """The table of a record; KeyError, TypeError or ValueError when it is none."""
        choices = {question_of(row): _choice_of(row["choice"]) for row in record["rows"]}
        return cls(str(record["gpu"]), choices, record)

    @functools.cached_property
    def digest(self) -> str:
        """Equal for tables that choose alike."""
        lines = sorted(f"{question} {choice}" for question, choice in self.choices.items())
        return hashlib.sha256("\n".join([self.gpu, *lines]).encode()).hexdigest()[:16] if lines else "none"


NOTHING = Table("", {})
_installed: Table | None = None
_listener: ContextVar[list[Question] | None] = ContextVar("minidl_conv2d_listener", default=None)


def chosen(question: Question) -> Choice | None:
    """The kernel that a caller forces, else the one of the table in use; None: whatever the models of time say."""
    heard = _listener.get()
    if heard is not None:
        heard.append(question)
    forced = forced_kernel()
    if forced is not None:
        return forced
    table = current()
    if not table.choices or table.gpu != current_device().name:
        return None
    return table.choices.get(question)


@contextmanager
def asked() -> Iterator[list[Question]]:
    """Inside, every question is noted, in order: in a dry run of a network, all that it will ask."""
    heard: list[Question] = []
    token = _listener.set(heard)
    try:
        with unprepared():
            yield heard
    finally:
        _listener.reset(token)


def current() -> Table:
    """The table in use; the first call of a process reads it. A dry run reads nothing: it may imagine another GPU."""
    global _installed
    if _installed is None:
        if active_dry_run() is not None:
            return NOTHING
        _installed = load()
    return _installed


def install(table: Table | None) -> None:
    """Use this table from now on; None: read one anew when it is next needed."""
    global _installed
    _installed = table
    prepared.forget()


def load() -> Table:
    """The table that this process should use, by MINIDL_TUNED and the cache folder.

    Raises:
        ValueError: when MINIDL_TUNED names a file that is no table for this GPU, driver and version of minidl.
    """
    setting = os.environ.get("MINIDL_TUNED", "")
    if setting == "0":
        return NOTHING
    try:
        path = Path(setting) if setting else table_path()
        if not setting and not path.exists():
            return NOTHING
        record = json.loads(path.read_text())
        wrong = [key for key, value in identity().items() if record.get(key) != value]
        if not wrong:
            return Table.of(record)
        problem = f"its {wrong[0]} is {record.get(wrong[0])!r}, this machine's {identity()[wrong[0]]!r}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{type(error).__name__}: {error}"
    if setting:
        raise checks.bad_value(
            "MINIDL_TUNED", "file", "0, or a table of minidl tune conv for this machine", setting, problem
        )
    return NOTHING  # a damaged file of the cache is as good as none: the next tuning replaces it


def identity() -> Record:
    """What the choices of a table hold for: GPU, driver, compiler and kernels."""
    device = current_device()
    return {
        "schema": SCHEMA, "gpu": device.name, "driver": import_cupy().cuda.runtime.driverGetVersion(),
        "nvrtc": list(nvrtc.version()), "kernels": _kernels(),
    }  # fmt: skip


@functools.cache
def _kernels() -> str:
    text = "\0".join(nvrtc.source_of(stem) for stem in STEMS)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def table_path() -> Path:
    """Where `minidl tune conv` keeps the table of this GPU, driver and version."""
    who = identity()
    words = f"conv2d {who['gpu']} cuda {who['driver']} {who['kernels']}"
    return nvrtc.cache_directory() / "tuned" / cache.file_name(words)


# -- rows -------------------------------------------------------------------------------------------------------------


def question_record(question: Question) -> Record:
    """A question as it stands in a file."""
    conv = question.conv
    kinds = {kind: name for name, kind in DTYPES.items()}
    w = conv.out_channels, *conv.kernel, conv.channels // conv.groups
    return {
        "pass": question.which, "dtype": kinds[question.code, question.tf32], "x": list(conv.x_shape), "w": list(w),
        "stride": list(conv.stride), "padding": list(conv.padding), "dilation": list(conv.dilation),
        "groups": conv.groups,
    }  # fmt: skip


def question_of(row: Mapping[str, Any]) -> Question:
    """The question of a row; KeyError, TypeError or ValueError when it has none."""
    if row["pass"] not in ("forward", "backward_data", "backward_weight"):
        raise ValueError(f"no pass of a convolution: {row['pass']!r}")
    pairs = (_pair(row[name]) for name in ("stride", "padding", "dilation"))
    conv = convolution("tuned table", row["x"], row["w"], *pairs, row["groups"])
    return Question(row["pass"], conv, *DTYPES[row["dtype"]])


def choice_record(choice: Choice) -> list[Any]:
    """A choice as it stands in a file."""
    return [choice.family, choice.tile, list(choice.split)]


def _choice_of(values: Sequence[Any]) -> Choice:
    family, tile, split = values
    if not all(type(part) is int and part > 0 for part in split):
        raise ValueError(f"the split of a tuned kernel must be positive whole numbers, got {split!r}")
    return Choice(str(family), str(tile), tuple(split))


def _pair(values: Sequence[int]) -> tuple[int, int]:
    height, width = values
    return int(height), int(width)
