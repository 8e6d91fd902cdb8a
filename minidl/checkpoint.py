"""Checkpoints: one safetensors file with every tensor and the JSON state, written atomically and verified when read.

The file is an ordinary safetensors file, so other tools read its tensors. Its metadata carries minidl's schema number,
the state, and a SHA-256 over state and tensors. A file appears under its name only when it is complete and on the
disk; whatever kills the writer, the previous checkpoint stays as it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save as serialize

from minidl import checks

SCHEMA = 1

PREVIOUS = "previous"  # folder of what `set_aside` moved

_SUFFIX = ".safetensors"
_TEMPORARY = ".partial"
_STEP = re.compile(r"checkpoint-(\d+)\.safetensors")
_DTYPES = "bool bfloat16 float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()


def save(path: str | os.PathLike, tensors: Mapping[str, np.ndarray], state: Mapping[str, Any]) -> None:
    """Write ``tensors`` and ``state`` to ``path``, replacing what was there in one step. One writer per path.

    Args:
        path: the file; missing folders above it are created.
        tensors: host arrays by name, of any strides; bool, bfloat16, float16/32/64 or integers of 8 to 64 bits.
        state: what JSON holds: nested dictionaries with string keys, lists, strings, numbers, booleans and None.

    Raises:
        TypeError: a tensor that is no NumPy array or has another dtype, a state that JSON would not give back as it is.
        OSError: the file cannot be written; the previous one, if any, is untouched.
    """
    # safetensors 0.8 writes the memory of an array as it lies: of a transposed one, the wrong values without an error.
    dense = {name: storable("checkpoint", f"tensor {name!r}", tensor) for name, tensor in tensors.items()}
    require_json(state, "state")
    text = json.dumps(state)
    metadata = {"format": "minidl", "schema": str(SCHEMA), "state": text, "sha256": _digest(dense, text)}
    # Not save_file, which makes files that only their owner may read and leaves its own debris when killed.
    write_whole(path, serialize(dense, metadata))


def write_whole(path: str | os.PathLike, data: bytes) -> None:
    """Write a file, whole or not at all, and wait for the disk; folders are made. One writer per path.

    A link stays one, and its file is replaced; a device such as /dev/stdout is written to.
    """
    path = Path(path)
    # Before links are followed: a pipe has no name of its own.
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_bytes(data)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    _sync_folder(path.parent)


def require_place(who: str, argument: str, path: str | os.PathLike, kind: str = "file") -> None:
    """Refuse a path that no file, or ``"folder"``, can be written to, before the work whose result it is to hold.

    Raises:
        ValueError: naming ``argument`` and what is in the way.
    """
    path = Path(path)
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    above = kind == "folder" or there != path
    problem = f"{there} is a {'file' if above else 'folder'}" if there.is_dir() != above else None
    if problem is None and not (_takes_files(there) if above else os.access(there, os.W_OK)):
        problem = f"{there} cannot be written to"
    if problem is not None:
        raise checks.bad_value(who, argument, f"a {kind}, there already or to be made", str(path), problem)


def _takes_files(folder: Path) -> bool:
    """By a file without a name: the mode of a folder does not tell of /proc, or of what is mounted to be read."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def load(path: str | os.PathLike) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors and the state that :func:`save` wrote to ``path``, bit for bit.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is truncated or damaged, was not written by minidl, or by a newer minidl.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _require_ours(path, metadata)
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        state = json.loads(metadata["state"])
    except (SafetensorError, KeyError, json.JSONDecodeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not a readable checkpoint, it is truncated or damaged ({reason})") from error
    if _digest(tensors, metadata["state"]) != metadata.get("sha256"):
        raise ValueError(f"{path} is damaged: its contents do not have the SHA-256 that was written with them")
    return tensors, state


def part(tensors: Mapping[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    """Those of a Trainer's checkpoint that belong to its ``name``: "model", "optimizer" or "average"."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): array for key, array in tensors.items() if key.startswith(prefix)}


def evaluated(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The model of a Trainer's checkpoint as the run evaluated it: with averaged weights, where it had any."""
    return part(tensors, "model") | part(tensors, "average")


def step_path(folder: str | os.PathLike, step: int) -> Path:
    """Where the checkpoint of a training step lies in ``folder``."""
    return Path(folder) / f"checkpoint-{checks.at_least('checkpoint', 'step', step, 0):08d}{_SUFFIX}"


def latest(folder: str | os.PathLike) -> Path:
    """The checkpoint of the highest step in ``folder``, as :func:`step_path` names it.

    Raises:
        FileNotFoundError: there is no checkpoint, or no such folder.
    """
    paths = _steps(folder)
    if not paths:
        older = Path(folder) / PREVIOUS
        remedy = f"; {older} has those of a run before" if _steps(older) else ""
        raise FileNotFoundError(f"there is no checkpoint in {Path(folder)}{remedy}")
    return max(paths, key=_step_of)


def prune(folder: str | os.PathLike, keep: int) -> list[Path]:
    """Remove all but the ``keep`` newest checkpoints and what interrupted writers left; the removed checkpoints.

    Only the one process that writes into ``folder`` may call this.
    """
    checks.at_least("checkpoint", "keep", keep, 1)
    old = sorted(_steps(folder), key=_step_of)[:-keep]
    for path in [*old, *Path(folder).glob(f".checkpoint-*{_SUFFIX}{_TEMPORARY}")]:
        path.unlink(missing_ok=True)
    return old


def set_aside(folder: str | os.PathLike, step: int, records: Iterable[str] = ()) -> Path | None:
    """Move the checkpoints after ``step`` and copies of ``records`` into ``folder/previous``, replacing what was there.

    For a run that starts at ``step`` in a folder where another run went further: left in place, the other's checkpoints
    would count as the newest. Only the one process that writes into ``folder`` may call this.

    Args:
        records: names of files in ``folder``, such as metrics, that tell what the moved checkpoints are; those that
            are absent are left out.

    Returns:
        ``folder/previous``, or None where nothing had to move and nothing was done.
    """
    folder = Path(folder)
    later = [path for path in _steps(folder) if _step_of(path) > step]
    if not later:
        return None
    previous = folder / PREVIOUS
    previous.mkdir(exist_ok=True)
    for path in [*_steps(previous), *(previous / name for name in records)]:
        path.unlink(missing_ok=True)
    for path in later:
        os.replace(path, previous / path.name)
    for name in records:
        if (folder / name).is_file():
            shutil.copy2(folder / name, previous / name)
    return previous


def match(
    expected: Mapping[str, Any], found: Mapping[str, np.ndarray], who: str = "checkpoint", remedy: str = ""
) -> None:
    """Check that ``found`` has exactly the names of ``expected``, each with its shape and dtype.

    Args:
        expected: by name, an array or a pair (shape, dtype).
        found: what was loaded.
        who: what the error message starts with, for instance the file's name.
        remedy: what it ends with.

    Raises:
        ValueError: lists everything that is missing, unexpected or of another shape or dtype.
        TypeError: what was found is no mapping, or no array.
    """
    require_mapping(found, who)
    odd = next((name for name in found if not isinstance(name, str)), None)
    if odd is not None:
        raise checks.bad_dtype("", f"{who}: name {odd!r}", "a string", type(odd).__name__)
    wanted = {name: _kind(value) for name, value in expected.items()}
    given = {name: _kind_of(value, f"{who}: {name}") for name, value in found.items()}
    different = [
        f"{name} (expected {_words(wanted[name])}, got {_words(given[name])})"
        for name in wanted
        if name in given and wanted[name] != given[name]
    ]
    groups = {
        "missing": [name for name in wanted if name not in given],
        "unexpected": [name for name in given if name not in wanted],
        "different": different,
    }
    problems = [f"{len(names)} {group}: {checks.some(names)}" for group, names in groups.items() if names]
    if problems:
        raise ValueError(f"{who} does not fit: {'; '.join([*problems, remedy] if remedy else problems)}")


def require_mapping(found: Any, who: str) -> None:
    """Refuse the path of a file, and whatever else is no state.

    Raises:
        TypeError: naming ``who``.
    """
    if not isinstance(found, Mapping):
        remedy = "interchange.import_weights reads files"
        raise checks.bad_dtype("", who, "a mapping of names to arrays", checks.describe(found), remedy)


def require_json(value: Any, where: str) -> None:
    """Refuse what JSON refuses or changes: keys that are no strings, tuples, NumPy numbers.

    Raises:
        TypeError: naming ``where`` it stands.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise checks.bad_dtype("checkpoint", f"key {key!r} of {where}", "a string", type(key).__name__)
            require_json(item, f"{where}[{key!r}]")
    elif isinstance(value, list):
        for position, item in enumerate(value):
            require_json(item, f"{where}[{position}]")
    elif type(value) not in (str, int, float, bool, type(None)):
        expected = "a dictionary, list, string, number, boolean or None"
        raise checks.bad_dtype("checkpoint", where, expected, type(value).__name__)


def storable(who: str, argument: str, tensor: np.ndarray) -> np.ndarray:
    """``tensor`` as files hold it: in C's order, in the byte order of this machine.

    Raises:
        TypeError: for what is no NumPy array, or has a dtype that checkpoints do not hold.
    """
    if not isinstance(tensor, np.ndarray):
        raise checks.bad_dtype(who, argument, "a NumPy array", type(tensor).__name__)
    if tensor.dtype.name not in _DTYPES:
        raise checks.bad_dtype(who, argument, f"one of {', '.join(_DTYPES)}", tensor.dtype)
    return np.asarray(tensor, order="C", dtype=tensor.dtype.newbyteorder("="))


def _require_ours(path: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != "minidl":
        raise ValueError(f"{path} is a safetensors file, but not a checkpoint of minidl: its metadata lack 'minidl'")
    schema = metadata.get("schema", "")
    if not schema.isdecimal():
        raise ValueError(f"{path} is damaged: its schema is {schema!r}, expected a number")
    if int(schema) > SCHEMA:
        raise ValueError(f"{path} has schema {schema}, this minidl reads up to {SCHEMA}; use a newer minidl")


def _digest(tensors: Mapping[str, np.ndarray], state: str) -> str:
    """SHA-256 of the state's text and of each tensor's name, dtype, shape and bytes, in the order of names."""
    digest = hashlib.sha256(state.encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"\n{name!r} {tensor.dtype.name} {tensor.shape}\n".encode())
        digest.update(tensor.reshape(-1).view(np.uint8))
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Wait until the names in ``folder`` are on the disk, else a power cut could lose the new one."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _steps(folder: str | os.PathLike) -> list[Path]:
    return [path for path in Path(folder).glob(f"checkpoint-*{_SUFFIX}") if _STEP.fullmatch(path.name)]


def _step_of(path: Path) -> int:
    return int(_STEP.fullmatch(path.name)[1])


def _kind(value: Any) -> tuple[tuple[int, ...], np.dtype]:
    shape, dtype = value if isinstance(value, tuple) else (value.shape, value.dtype)
    return tuple(shape), np.dtype(dtype)


def _kind_of(value: Any, where: str) -> tuple[tuple[int, ...], np.dtype]:
    try:
        return _kind(value)
    except (AttributeError, TypeError):
        remedy = "interchange.import_weights reads states of PyTorch"
        raise checks.bad_dtype("", where, "a NumPy array", checks.describe(value), remedy) from None


def _words(kind: tuple[tuple[int, ...], np.dtype]) -> str:
    return f"{kind[1]} {kind[0]}"
