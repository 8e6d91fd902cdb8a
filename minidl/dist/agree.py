"""Ranks compare what must be equal before they rely on it, and fail together rather than one by one.

MPI does not notice that two ranks disagree: messages of different length or type give wrong numbers, a hang or a
crash, depending on the library. So plans and starting weights are compared when a model is built.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from os.path import commonprefix
from typing import Any

import numpy as np

from minidl import backend
from minidl.dist.communicator import Communicator

_LONG = 100  # letters
_TOLD = FileNotFoundError, OSError, ValueError, MemoryError, RuntimeError  # others may not be made of words alone


def require_same(comm: Communicator, what: str, entries: Sequence[str], remedy: str = "") -> None:
    """Check that all ranks hold the same ``entries``; a collective that costs one small exchange when they do.

    Raises:
        ValueError: on every rank, naming the first entry that differs and who has which, of long ones the part that
            differs, and what to do about it.
    """
    digest = hashlib.sha256(repr(list(entries)).encode()).digest()
    if len(set(comm.share(digest, what))) == 1:
        return
    rows = zip_longest(*comm.share(list(entries), what))
    index, row = next((index, row) for index, row in enumerate(rows) if len(set(row)) > 1)
    held = by_value(_apart(["no such entry" if entry is None else entry for entry in row]))
    raise ValueError(f"ranks differ in {what}, first in entry {index}: {held}{remedy and f'; {remedy}'}")


def require_same_arrays(
    comm: Communicator, what: str, named_arrays: Mapping[str, Any] | Iterable[tuple[str, Any]], remedy: str = ""
) -> None:
    """Check that all ranks hold the same bytes under the same names; a collective.

    Args:
        named_arrays: NumPy or CuPy arrays by name, in the same order on all ranks.

    Raises:
        ValueError: on every rank, naming the first array that differs and who has which (by SHA-256).
    """
    pairs = named_arrays.items() if isinstance(named_arrays, Mapping) else named_arrays
    require_same(comm, what, [_fingerprint(name, array) for name, array in pairs], remedy)


def together(comm: Communicator, what: str, attempt: Callable[[], Any], name: str = "") -> list[Any]:
    """Run ``attempt`` on every rank and return all results in rank order; a collective.

    Args:
        what: the attempt, in words.
        name: of the collective, where the words of one group differ from those of another.

    Raises:
        RuntimeError: on every rank, when it raised on some, naming these and their errors.
    """
    value, problem, cause = None, None, None
    try:
        value = attempt()
    except Exception as error:
        problem, cause = f"{type(error).__name__}: {error}", error
    outcomes = comm.share((value, problem), name or what)
    failed = {rank: text for rank, (_, text) in enumerate(outcomes) if text is not None}
    if failed:
        raise RuntimeError(f"{what} failed: {by_value(failed.values(), failed)}") from cause
    return [value for value, _ in outcomes]


def on_rank_0(comm: Communicator, action: Callable[[], Any]) -> Any:
    """What ``action`` gives on rank 0, for every rank: files, caches and clocks are asked once; a collective.

    Raises:
        FileNotFoundError, OSError, ValueError, MemoryError, RuntimeError: on every rank, with rank 0's words, when
            ``action`` raised one there, for the others are waiting.
    """
    if comm.size == 1:
        return action()
    value, problem, cause = None, None, None
    if comm.rank == 0:
        try:
            value = action()
        except _TOLD as error:
            problem, cause = (next(kind for kind in _TOLD if isinstance(error, kind)), str(error)), error
    value, problem = comm.share((value, problem), "of rank 0")[0]
    if problem is not None:
        kind, words = problem
        raise kind(words) from cause
    return value


def rank_list(ranks: Iterable[int]) -> str:
    """Ranks in short: ``0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def by_value(values: Iterable[str], ranks: Iterable[int] | None = None) -> str:
    """``on rank 0: a; on ranks 1-3: b``: who has what, for a value of each rank (default: of ranks 0, 1, ...)."""
    values = list(values)
    holders: dict[str, list[int]] = {}
    for rank, value in zip(range(len(values)) if ranks is None else ranks, values, strict=True):
        holders.setdefault(value, []).append(rank)
    return "; ".join(
        f"on rank{'s' if len(where) > 1 else ''} {rank_list(where)}: {value}" for value, where in holders.items()
    )


def _apart(texts: Sequence[str]) -> Sequence[str]:
    """Long ones cut to their first word and what differs, between commas."""
    if max(map(len, texts)) <= _LONG:
        return texts
    parts = [text.split(", ") for text in texts]
    begin = len(commonprefix(parts))
    end = len(commonprefix([part[begin:][::-1] for part in parts]))
    begin -= begin > 0 and any(len(part) == begin + end for part in parts)  # one lacks what others have
    before, behind = f"{texts[0].split()[0]} ... " if begin else "", " ..." if end else ""
    return [before + ", ".join(part[begin : len(part) - end]) + behind for part in parts]


def _fingerprint(name: str, array: Any) -> str:
    ops = backend.ops_of(array)
    host = np.ascontiguousarray(array if ops is None else ops.to_host(array))
    digest = hashlib.sha256(host.reshape(-1).view(np.uint8)).hexdigest()
    return f"{name} {host.dtype} {host.shape} sha256 {digest[:16]}"
