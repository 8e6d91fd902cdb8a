"""Sums and gathers among the GPUs of one host, each able to address the memory of the others: kernels and their sizes.

Who maps that memory, and when which way is taken, is `minidl.dist.ipc`'s business.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from minidl.cuda import nvrtc
from minidl.cuda.device import current_device
from minidl.cuda.launch import launch
from minidl.cuda.rows import address
from minidl.precision import bfloat16, float16, float32
from minidl.shapes import ceil_div

THREADS = 512
BLOCKS = 64  # of a grid at most: each has a flag of its own
WORD, VECTOR = 8, 16  # bytes that travel with one flag, and that one access moves
SLOTS = 8192
SLOT_DATA_BYTES = SLOTS * WORD  # that `flagged` and `gather` take at most
MAILBOX_BYTES = 1 << 20  # that `one_shot` takes at most
STATE_BYTES = 256  # at the end of a channel

SUMMED = {
    float32: 0, bfloat16: 1, float16: 2, np.dtype(np.float64): 3, np.dtype(np.int32): 4, np.dtype(np.int64): 5,
}  # fmt: skip
_MOVED = {WORD: 6, 1: 7}


@dataclass(frozen=True, eq=False)
class Channel:
    """Where calls meet that follow one another in stream order; see all_reduce.cu.

    Attributes:
        rank, ranks: of this host.
        peers: `addresses` of the channels of all ranks, in rank order.
        state: address of this rank's counter, in its own channel.
        stop: address of two words of the host, (stop now, somebody gave up).
        limit_ns: how long a call waits for the other ranks.
    """

    rank: int
    ranks: int
    peers: np.ndarray
    state: int
    stop: int
    limit_ns: int

    @functools.cached_property
    def last(self) -> tuple[Any, ...]:
        """The last arguments of every kernel."""
        waiting = np.uint64(self.state), np.uint64(self.stop), np.uint64(self.limit_ns)
        return self.peers, np.int32(self.rank), *waiting

    @functools.lru_cache  # noqa: B019  (channels live as long as the process, nearly)
    def defines(self, kind: int, wide: bool = True, aligned: bool = True) -> dict[str, int]:
        """The macros of a kernel's variant."""
        sizes = {"RANKS": self.ranks, "SLOTS": SLOTS, "BLOCKS": BLOCKS, "MAILBOX": MAILBOX_BYTES}
        return {"KIND": kind, "WIDE": int(wide), "ALIGNED": int(aligned), **sizes}


def channel_bytes(ranks: int) -> int:
    """Memory of a channel, zero at first, on each rank; the state is its last `STATE_BYTES`."""
    return 2 * ranks * SLOTS * 16 + 2 * 2 * BLOCKS * ranks * 4 + 2 * MAILBOX_BYTES + STATE_BYTES


def compiled(channel: Channel) -> None:
    """Compile the kernels for float32, so that no rank waits for another's compiler."""
    nvrtc.build("all_reduce", nvrtc.target(current_device().arch), channel.defines(SUMMED[float32]))


def addresses(of_ranks: Sequence[int]) -> np.ndarray:
    """The addresses of something of each rank, as a kernel's argument."""
    return np.frombuffer(np.array(of_ranks, np.uint64).tobytes(), f"V{8 * len(of_ranks)}")


def shares(nbytes: int, itemsize: int, ranks: int) -> list[int]:
    """Where the shares of the ranks begin and end, in bytes: in whole vectors where the array has such."""
    unit = VECTOR if nbytes % VECTOR == 0 else itemsize
    return [unit * (nbytes // unit * rank // ranks) for rank in range(ranks + 1)]


def flagged(array: Any, channel: Channel) -> None:
    """Replace ``array``, of at most `SLOT_DATA_BYTES`, by its sum: one trip over the link."""
    _words("flagged", channel.defines(SUMMED[array.dtype]), channel, array.nbytes, array, np.int64(array.size))


def gather(array: Any, out: Any, channel: Channel) -> None:
    """Fill ``out`` (ranks, ...) with the arrays of all ranks, of at most `SLOT_DATA_BYTES` each and any dtype."""
    item = WORD if array.nbytes % WORD == 0 and address(array) % WORD == 0 else 1
    size = np.int64(array.nbytes // item)
    _words("gather", channel.defines(_MOVED[item]), channel, array.nbytes, array, out, size)


def _words(name: str, defines: dict[str, int], channel: Channel, nbytes: int, *arrays: Any) -> None:
    words = ceil_div(nbytes, WORD)
    assert 0 < words <= SLOTS, nbytes
    block = min(THREADS, 32 * ceil_div(words, 32))
    grid = min(BLOCKS, ceil_div(words, block))
    launch("all_reduce", name, grid, block, *arrays, *channel.last, defines=defines)


def _wide(*numbers: int) -> bool:
    return all(number % VECTOR == 0 for number in numbers)


def one_shot(array: Any, channel: Channel) -> None:
    """Replace ``array``, of at most `MAILBOX_BYTES`, by its sum: every rank reads all of the others'."""
    assert 0 < array.nbytes <= MAILBOX_BYTES, array.nbytes
    wide = _wide(array.nbytes)  # and not where the array lies: blocks must be the same on all ranks
    vectors = array.nbytes // (VECTOR if wide else array.itemsize)
    grid = min(BLOCKS, ceil_div(vectors, THREADS))
    defines = channel.defines(SUMMED[array.dtype], wide, not wide or _wide(address(array)))
    launch("all_reduce", "one_shot", grid, THREADS, array, np.int64(vectors), *channel.last, defines=defines)


def two_shot(arrays: Sequence[int], nbytes: int, dtype: np.dtype, channel: Channel, blocks: int = 32) -> None:
    """Replace the ``nbytes`` at ``arrays``, the address here of each rank's array, by their sum, on all ranks.

    Args:
        blocks: of the grid at most, `BLOCKS` or fewer: multiprocessors that compute beside it keep.
    """
    grid, arguments, defines = _shared_out(tuple(arrays), nbytes, dtype, channel, blocks)
    launch("all_reduce", "two_shot", grid, THREADS, *arguments, defines=defines)


@functools.lru_cache(4096)  # gradients are sent again and again
def _shared_out(
    arrays: tuple[int, ...], nbytes: int, dtype: np.dtype, channel: Channel, blocks: int
) -> tuple[int, tuple[Any, ...], dict[str, int]]:
    """Grid, arguments and macros of `two_shot`."""
    cuts, wide = shares(nbytes, dtype.itemsize, channel.ranks), _wide(nbytes, *arrays)
    unit = VECTOR if wide else dtype.itemsize
    begin, end = (cuts[channel.rank + i] // unit for i in (0, 1))
    most = max(after - before for before, after in zip(cuts, cuts[1:], strict=False)) // unit
    grid = max(1, min(blocks, BLOCKS, ceil_div(most, THREADS)))  # the same on all ranks, whose shares may differ
    arguments = addresses(arrays), np.int64(begin), np.int64(end), *channel.last
    return grid, arguments, channel.defines(SUMMED[dtype], wide)
