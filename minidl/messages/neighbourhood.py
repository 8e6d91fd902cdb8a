"""Which layers' gradients share a message, and when it starts: one rule where messages are sent and simulated."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

TAIL_BYTES = 1 << 20  # of the last message at most, where there are several: it is one trip between GPUs
ABSORBED = ("ReLU",)  # types of layers whose work plans of fusion leave to their neighbours
FEW = 32  # samples by which work is told: enough of them that weights are not the most that a layer moves
_RIDGE = 600.0  # FLOP per byte of an element: beyond it products bound a kernel, on an H200 with any type
_BARELY = 16  # times as long for its bytes as for its products: a pass that hardly computes
_SUM_BYTES = 32  # bytes at the memory's rate in which one byte is added up: 12 to 20 between H200s, and some to spare
_BEARS = 8  # bytes that a pass moves for each byte of a message that it bears: about half of the sum is then over

Departures = Callable[[Sequence[Sequence[str]]], Mapping[str, str]]  # see `departures`


@dataclass(frozen=True)
class Neighbour:
    """A layer in the backward pass: bytes of gradients that it sends, FLOP and bytes of its least work on `FEW`.

    ``alone``: it runs by itself, in plans of fusion too.
    """

    name: str
    nbytes: int
    flop: int
    bytes: int
    alone: bool = True

    def work(self, itemsize: int) -> tuple[float, bool]:
        """(how long it takes, in bytes at the memory's rate; whether products bound it)."""
        products = self.flop * itemsize / _RIDGE
        return max(products, self.bytes), products > self.bytes

    def moves(self, itemsize: int) -> int:
        """Its bytes, if it runs by itself and hardly computes; else 0."""
        return self.bytes if self.alone and _BARELY * self.flop * itemsize < _RIDGE * self.bytes else 0


def departures(
    layers: Sequence[Neighbour], messages: Iterable[Sequence[str]], itemsize: int, samples: float = FEW
) -> dict[str, str]:
    """Before whose backward pass a message starts that has to wait, by the last layer of the message.

    Between GPUs a sum takes multiprocessors: a product of as many blocks as there are takes longer by a whole block,
    where a pass that only moves bytes hardly notices. So a message waits for the next long pass of that kind, one that
    moves at least half as much as the longest. Each lets one message go, the last of them all. A message starts at
    once, or with the one before it, where that pass would be over before half of the sum is, which then meets the
    products behind it all the same, and where what is computed from then on would not hide all that is left to be sent.

    Args:
        layers: in the order of the backward pass, their work that on `FEW` samples.
        messages: the layers of each, in that order (`cut`).
        itemsize: bytes of a stored element.
        samples: of a step, the same on all ranks: by so many passes are long. More would leave more time to hide what
            is sent than the rule counts on.
    """
    messages = list(messages)
    places = {layer.name: i for i, layer in enumerate(layers)}
    moved = [layer.moves(itemsize) for layer in layers[: places[messages[-1][-1]] + 1]] if messages else []
    long = [i for i, nbytes in enumerate(moved) if 2 * nbytes >= max(moved) > 0]
    found: dict[str, str] = {}
    start = -1  # the place of the pass before which the last message starts
    for i, names in enumerate(messages):
        ready = places[names[-1]]
        coming = [place for place in long if place > ready]
        chosen = next((place for place in coming if place > start), coming[-1] if coming else ready)
        sent = sum(layers[places[name]].nbytes for name in names)
        left = sum(layers[places[name]].nbytes for names in messages[i:] for name in names)
        borne = moved[chosen] * samples / FEW >= _BEARS * sent
        hidden = sum(layer.work(itemsize)[0] for layer in layers[chosen : len(moved)]) >= _SUM_BYTES * left
        start = max(start, chosen if hidden and borne else ready)
        if start > ready:
            found[names[-1]] = layers[start].name
    return found


def cut(
    layers: Iterable[tuple[str, int]], group_bytes: int, begin: Container[str] = (), apart: Container[str] = ()
) -> list[tuple[str, ...]]:
    """The layers of each message: neighbours share one until it holds ``group_bytes``.

    Nothing is computed beside the last message, so it is kept small: where there are several, one also ends where no
    more than `TAIL_BYTES` are left to be sent.

    Args:
        layers: (name, bytes) of those that send something, in the order of the backward pass.
        begin, apart: layers that begin a message, and that have one to themselves.
    """
    layers = list(layers)
    left = sum(nbytes for _, nbytes in layers)
    several = TAIL_BYTES < group_bytes < left
    messages: list[list[str]] = []
    held, full = 0, True
    for name, nbytes in layers:
        if full or name in begin or name in apart or messages[-1][-1] in apart:
            messages.append([])
            held = 0
        messages[-1].append(name)
        held, left = held + nbytes, left - nbytes
        full = held >= group_bytes or (several and left <= TAIL_BYTES < left + nbytes)
    return [tuple(names) for names in messages]
