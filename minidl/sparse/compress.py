"""Trained networks in small files: nonzeros as codes, codes and the gaps between nonzeros in Huffman's code.

S. Han, H. Mao, W. Dally, "Deep compression", ICLR 2016. What `minidl.sparse.share` left is kept to the bit:

    shared = share_weights({name: state[name] for name in pruned}, clusters=32)
    report = save_compressed("model.mdz", state | {name: one.dense() for name, one in shared.items()})
    model.load_state_dict(load_compressed("model.mdz"))

The file is one of `minidl.checkpoint`, so what is truncated, damaged or foreign is refused. It holds three arrays of
bytes: ``header``, zlib over JSON, one entry for each array; ``codes``, the Huffman streams; ``plain``, arrays that are
not coded, as they lie in memory, and codebooks. A coded array lists its nonzeros in memory order: an index into its
codebook of distinct values, and the number of zeros since the one before, where 255 stands for 255 zeros and no
nonzero yet. Huffman's tables are canonical: how many words there are of each length, and the symbols in their order.
"""

from __future__ import annotations

import importlib.util
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from minidl import checkpoint, checks
from minidl.precision import float32

_KIND = "minidl compressed 1"
_SKIP = 255  # zeros that one symbol stands for, without a nonzero
_MOST_VALUES = 255


@dataclass(frozen=True)
class Compressed:
    """What a compressed file holds, in bytes.

    Attributes:
        before: of all arrays as they were.
        file: of the file.
        header, values, gaps, plain: of its parts; ``plain`` with the codebooks.
        coded: arrays that are coded.
    """

    before: int
    file: int
    header: int
    values: int
    gaps: int
    plain: int
    coded: int

    @property
    def ratio(self) -> float:
        """How many times smaller the file is."""
        return self.before / self.file


def save_compressed(path: str | os.PathLike, state: Mapping[str, np.ndarray]) -> Compressed:
    """Write a model's `state_dict` to ``path``, coding what has few distinct values; the file gives it back to the bit.

    Args:
        state: host arrays by name. Float32 arrays of two and more axes with at most 255 distinct nonzeros are coded;
            all others are stored as they are.

    Raises:
        TypeError: a state that is no mapping, what is no NumPy array of a type that checkpoints hold.
        ImportError: the library of Huffman codes is not installed.
        OSError: the file cannot be written.
    """
    checkpoint.require_mapping(state, "state")
    entries, streams, plain = [], [], []
    sizes = {"values": 0, "gaps": 0}
    for name, given in state.items():
        array = checkpoint.storable("save_compressed", name, given)
        entry: dict[str, Any] = {"name": name, "shape": list(array.shape), "dtype": array.dtype.name}
        coded = _coded(array)
        if coded is None:
            plain.append(array.tobytes())
        else:
            codebook, parts = coded
            plain.append(codebook.tobytes())
            entry["distinct"] = codebook.size
            for part, symbols in parts.items():
                entry[part], stream = _encode(symbols)
                streams.append(stream)
                sizes[part] += len(stream)
        entries.append(entry)
    header = zlib.compress(json.dumps(entries, separators=(",", ":")).encode(), 9)
    parts = {"header": header, "codes": b"".join(streams), "plain": b"".join(plain)}
    tensors = {name: np.frombuffer(part, np.uint8) for name, part in parts.items()}
    checkpoint.save(path, tensors, {"kind": _KIND})
    return Compressed(
        sum(a.nbytes for a in state.values()), Path(path).stat().st_size, len(header), **sizes,
        plain=len(parts["plain"]), coded=sum("distinct" in entry for entry in entries),
    )  # fmt: skip


def load_compressed(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The arrays that `save_compressed` wrote to ``path``, bit for bit.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is truncated, damaged, or no compressed file.
        ImportError: the library of Huffman codes is not installed.
    """
    tensors, state = checkpoint.load(path)
    if state.get("kind") != _KIND:
        raise ValueError(f"{path} is a checkpoint, but not a compressed one: read it with minidl.checkpoint.load")
    entries = json.loads(zlib.decompress(tensors["header"].tobytes()))
    codes, plain = _Reader(tensors["codes"].tobytes()), _Reader(tensors["plain"].tobytes())
    return {entry["name"]: _decoded(entry, codes, plain) for entry in entries}


class _Reader:
    def __init__(self, data: bytes):
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes."""
        self._at += count
        return self._data[self._at - count : self._at]


def _coded(array: np.ndarray) -> tuple[np.ndarray, dict[str, np.ndarray]] | None:
    """Codebook, and streams of symbols; None for an array that is not to be coded."""
    if array.dtype != float32 or array.ndim < 2 or array.size == 0:
        return None
    bits = array.reshape(-1).view(np.uint32)
    (where,) = np.nonzero(bits)  # by bits: -0.0 and NaN come back, too
    codebook, codes = np.unique(bits[where], return_inverse=True)
    if codebook.size > _MOST_VALUES:
        return None
    gaps = np.diff(where, prepend=-1) - 1
    skips = gaps // _SKIP
    stream = np.full(gaps.size + int(skips.sum()), _SKIP, np.uint8)
    stream[np.cumsum(skips + 1) - 1] = gaps % _SKIP
    return codebook, {"values": codes.reshape(-1).astype(np.uint8), "gaps": stream}


def _decoded(entry: Mapping[str, Any], codes: _Reader, plain: _Reader) -> np.ndarray:
    shape, dtype = tuple(entry["shape"]), np.dtype(entry["dtype"])
    if "distinct" not in entry:
        return np.frombuffer(plain.take(prod(shape) * dtype.itemsize), dtype).reshape(shape).copy()
    codebook = np.frombuffer(plain.take(4 * entry["distinct"]), np.uint32)
    values, stream = (_decode(entry[part], codes) for part in ("values", "gaps"))
    steps = np.where(stream == _SKIP, _SKIP, stream.astype(np.int64) + 1)
    where = np.cumsum(steps)[stream != _SKIP] - 1
    bits = np.zeros(prod(shape), np.uint32)
    bits[where] = codebook[values]
    return bits.view(float32).reshape(shape)


def require_libraries() -> None:
    """Find out early whether compression can run.

    Raises:
        ImportError: bitarray or SciPy is not installed.
    """
    _huffman()
    if importlib.util.find_spec("scipy") is None:
        raise checks.missing_extra("weight sharing", "compress")


def _huffman() -> Any:
    """bitarray, and its canonical Huffman codes."""
    try:
        import bitarray
        from bitarray import util
    except ImportError as error:
        raise checks.missing_extra("compression", "compress", error) from error
    return bitarray.bitarray, util


def _encode(symbols: np.ndarray) -> tuple[dict[str, Any], bytes]:
    """The table of a stream of bytes, and the stream in Huffman's code; one symbol alone takes no bits."""
    bits, util = _huffman()
    present, counts = np.unique(symbols, return_counts=True)
    if present.size < 2:
        return {"n": symbols.size, "counts": [], "symbols": present.tolist()}, b""
    words, lengths, order = util.canonical_huffman(dict(zip(present.tolist(), counts.tolist(), strict=True)))
    stream = bits(endian="big")
    stream.encode(words, symbols.tolist())
    return {"n": symbols.size, "counts": lengths, "symbols": order, "bits": len(stream)}, stream.tobytes()


def _decode(table: Mapping[str, Any], codes: _Reader) -> np.ndarray:
    if not table["counts"]:
        return np.full(table["n"], (table["symbols"] or [0])[0], np.uint8)
    bits, util = _huffman()
    stream = bits(endian="big")
    stream.frombytes(codes.take(-(-table["bits"] // 8)))
    found = util.canonical_decode(stream[: table["bits"]], table["counts"], table["symbols"])
    return np.fromiter(found, np.uint8, table["n"])
