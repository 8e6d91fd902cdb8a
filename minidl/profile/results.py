"""Result files: what was measured, where, by which command; one JSON format for every benchmark (schema 1).

    {"schema": 1, "benchmark": "layers", "command": "...", "commit": "...", "date": "...", "machine": {...},
     "rows": [{"case": "resnet50/b32", "layer": "conv1", "pass": "forward", "dtype": "bf16", "arm": "minidl",
               "ms": 0.098, "spread": 0.02, "floor_ms": 0.075, "peers": {"cudnn": 0.1}, ...}], ...}

Units are in the names of keys; what is not known is null and not left out. FLOP count 2 per multiply-add, the whole
batch included; bytes are the fewest that a pass must move through device memory.
"""

from __future__ import annotations

import csv
import gzip
import json
import platform
import shlex
import subprocess
import sys
import zlib
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minidl.checkpoint import write_whole
from minidl.dist.threads import available_cores

SCHEMA = 1
_GZIP = b"\x1f\x8b"
REQUIRED = ("case", "pass", "dtype", "arm", "ms", "spread", "floor_ms", "peers")

Row = dict[str, Any]


def result(
    benchmark: str, rows: Iterable[Row], machine: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """The content of a result file.

    Args:
        benchmark: which program made it: layers, model, ceilings, bench_conv, ...
        rows: each with at least the keys of `REQUIRED`.
        machine: default: this one.
        more: further top-level keys, JSON-able.

    Raises:
        ValueError: for a row that lacks a key.
    """
    rows = list(rows)
    for row in rows:
        missing = set(REQUIRED) - row.keys()
        if missing:
            raise ValueError(f"{benchmark}: row {row.get('case')!r} lacks {', '.join(sorted(missing))}")
    head = {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "command": _command(),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": dict(machine or machine_record()),
    }
    return head | more | {"rows": rows}


def write(path: str | Path, content: Mapping[str, Any] | bytes) -> None:
    """Write a result file, or any other, as `minidl.checkpoint.write_whole` does; ``.gz`` in its name: compressed."""
    data = content if isinstance(content, bytes) else _text(content).encode()
    write_whole(path, gzip.compress(data, mtime=0) if Path(path).suffix == ".gz" else data)


def _text(content: Mapping[str, Any]) -> str:
    """JSON with a line for each row: half the size of indented JSON, and a change of one row is one line."""
    parts = []
    for key, value in rounded(content).items():
        text = json.dumps(value, allow_nan=False)
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            text = "[\n  " + ",\n  ".join(json.dumps(item, allow_nan=False) for item in value) + "\n ]"
        parts.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def rounded(value: Any) -> Any:
    """Numbers with seven significant digits: more than any clock has, and half of what a float prints."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return value


def load(path: str | Path) -> dict[str, Any]:
    """Read a result file, compressed or not.

    Raises:
        OSError: when it cannot be read.
        ValueError: when it is no result file, or one of another schema, naming the file and what is wrong.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if data[:2] == _GZIP else data)
    except (UnicodeDecodeError, json.JSONDecodeError, EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: not a result file, for it is not JSON ({error})") from error
    if not isinstance(content, dict) or not isinstance(content.get("rows"), list) or "schema" not in content:
        raise ValueError(f"{path}: JSON, but not a result file of minidl: it has no schema and rows")
    if content["schema"] != SCHEMA:
        raise ValueError(f"{path}: schema {content['schema']!r}; this minidl reads schema {SCHEMA}")
    for key in ("benchmark", "machine"):
        if key not in content:
            raise ValueError(f"{path}: a result file without {key!r}; it is damaged")
    for i, row in enumerate(content["rows"]):
        missing = set(REQUIRED) - row.keys() if isinstance(row, dict) else REQUIRED
        if missing:
            raise ValueError(f"{path}: row {i} lacks {', '.join(sorted(missing))}; the file is damaged")
    return content


def write_csv(path: str | Path, content: Mapping[str, Any]) -> None:
    """The rows as a table: one line a row, simple values only (samples and nested records stay in the JSON file)."""
    rows = [{k: v for k, v in row.items() if not isinstance(v, (list, dict))} for row in content["rows"]]
    rows = [flat | _nested(row) for flat, row in zip(rows, content["rows"], strict=True)]
    columns = list(dict.fromkeys(key for row in rows for key in row))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)


def _nested(row: Row) -> dict[str, Any]:
    """Peers and the figures of each way of timing, as columns of their own."""
    flat = {f"peer_{name}_ms": ms for name, ms in row["peers"].items()}
    for way, record in (row.get("timings") or {}).items():
        if record:
            flat |= {f"{way}_{key}": value for key, value in record.items() if key != "samples_ms"}
    return flat


# -- the machine ------------------------------------------------------------------------------------------------------


def machine_record() -> dict[str, Any]:
    """The machine as it stands in result files: processor, GPU, driver and versions."""
    record: dict[str, Any] = {
        "host": platform.machine(),
        "cpu": _processor(),
        "cores": len(available_cores()),
        "python": platform.python_version(),
    }
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
    except Exception as error:  # no package, no driver or no device: then this is a run on the processor
        return record | {"gpu": None, "count": 0, "why": type(error).__name__}
    return record | {
        "gpu": properties["name"].decode(),
        "count": count,
        "l2_bytes": properties["l2CacheSize"],
        "multiprocessors": properties["multiProcessorCount"],
        "driver": cupy.cuda.runtime.driverGetVersion(),
        "cuda": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
    }


def machine_name(machine: Mapping[str, Any]) -> str:
    """What the machine of a record computes with, in words: results of two machines of one name may be compared."""
    if machine.get("gpu"):
        return str(machine["gpu"])
    cores = machine.get("cores")
    return f"{machine.get('cpu') or machine.get('host', 'unknown processor')}{f', {cores} cores' if cores else ''}"


def _processor() -> str:
    """The processor's name as the system spells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the tree this file stands in, with ``+`` when files differ from it; None outside a repository."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if not git("ls-files", Path(__file__).name):
            return None  # installed into somebody else's repository
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _command() -> str:
    """The command line, without where its results went."""
    words = [word for word in sys.argv if word]
    for option in ("--json", "--csv", "--trace"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    name = Path(words[0]).name if words else ""
    if name in ("minidl", "__main__.py", "cli.py"):
        return shlex.join(["minidl", *words[1:]])
    return shlex.join(["python", *words])
