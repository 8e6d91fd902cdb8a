"""What every engine offers: collectives on arrays, a control plane for small objects, and the engine of one rank.

A collective is called by all ranks in the same program order, with arrays of the same shape and dtype. Arrays are
dense. "In stream order" means like a kernel launched on the current CUDA stream; on the CPU such a call blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from minidl import checks

Span = Callable[[Any], AbstractContextManager]

_NOTHING = nullcontext()


def unseen(stream: Any) -> AbstractContextManager:
    """The span of a message that nobody times."""
    return _NOTHING


@runtime_checkable
class Work(Protocol):
    """A started message. The memory of its array stays its own until it is sent, also where nobody waits."""

    def wait(self) -> None:
        """Order what follows after the message: the current stream waits on a GPU, the caller on a CPU."""


@runtime_checkable
class Communicator(Protocol):
    """The ranks of one job, seen from one of them.

    Attributes:
        rank, size: this rank among all ranks.
        local_rank, local_size: this rank among the ranks of its host.
        name: the engine: solo, shm, mpi, nccl, staged, cuda-mpi or simulated.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    name: str

    def all_reduce(self, array: Any) -> None:
        """Replace ``array`` by its sum over all ranks, in stream order; the same bits on every rank.

        Raises:
            TypeError: for an array of another kind, or a dtype that the engine cannot add.
            ValueError: for an array that is not dense or not writeable.
        """

    def start_all_reduce(self, array: Any, span: Span = unseen, name: str = "") -> Work:
        """Like `all_reduce`, but return at once; the message starts when all work enqueued so far is done.

        Until `Work.wait` nobody may read or write ``array``. Started messages run one after another, beside compute
        and beside the other collectives.

        Args:
            span: called with the CUDA stream that the transfer is enqueued on, or with None in the thread that makes
                it; a context around the transfer, for a profiler.
            name: of the message, told where ranks disagree or wait for ever.
        """

    def all_gather(self, array: Any) -> Any:
        """The arrays of all ranks, (size, ...) in rank order, any dtype, in stream order.

        The result is to be read only: with one rank it is a view of ``array``.
        """

    def broadcast(self, array: Any, root: int = 0) -> None:
        """Overwrite ``array`` by that of rank ``root``, any dtype, in stream order."""

    def start_exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any], name: str = "") -> Work:
        """Send ``sends[r]`` to rank r and overwrite ``receives[r]`` by what rank r sends, any dtype; return at once.

        All ranks call it, those with nothing to send as well; what one sends has the bytes that the other expects. It
        is a message like those of `start_all_reduce`: ordered behind what is enqueued, arrays untouched until `wait`.

        Raises:
            ValueError: for a rank that is not one of the others, or an array that is not dense.
        """

    def start_reduce_scatter(self, array: Any, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        """Like `start_all_reduce`, but rank r gets the sum of its part only, ``array[cuts[r] : cuts[r + 1]]``.

        Args:
            array: of one dimension; what the other parts hold afterwards is not said.
            cuts: size + 1 places, ascending from 0 to the end.
        """

    def start_all_gather(self, array: Any, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        """Give the part of each rank, ``array[cuts[r] : cuts[r + 1]]`` of rank r, to all, in place; any dtype.

        A message like those of `start_all_reduce`; the arguments are those of `start_reduce_scatter`.
        """

    def split(self, color: int) -> Communicator:
        """The ranks that tell the same ``color``, in rank order, as a communicator of their own; a collective.

        The groups are parts of one program: every rank makes the same calls in the same order, those in its group as
        well. What ranks of different groups send may differ in size.
        """

    def barrier(self) -> None:
        """Return when every rank's host has come this far; work queued on a GPU may still run."""

    def share(self, value: Any, name: str = "") -> list[Any]:
        """The values of all ranks in rank order: small picklable objects, through the host.

        Args:
            name: of what is shared: ranks that share different things are told so, and do not take one for the other.
        """

    def close(self) -> None:
        """Part from the other ranks; a collective itself. Further calls do nothing."""


def place(comm: Communicator, array: Any) -> Any:
    """``array``, or its copy in memory where ``comm`` adds up fastest; a collective.

    For arrays that are sent again and again, such as gradients. Engines may offer it as a method ``place``. Of a placed
    array of a GPU all ranks send the same part.
    """
    own = getattr(comm, "place", None)
    return array if own is None else own(array)


def by_kernels(comm: Communicator) -> bool:
    """Whether kernels of our own add up gradients, beside those of the backward pass: between the GPUs of a host."""
    return getattr(comm, "links", None) is not None


def follow(comm: Communicator, name: str) -> None:
    """Let the watchdog see what a replayed CUDA graph just launched waits for: it counts as one call of this name.

    All ranks replay it. Engines whose calls a graph may hold offer it as a method ``follow``.
    """
    own = getattr(comm, "follow", None)
    if own is not None:
        own(name)


def capturable(comm: Communicator) -> bool:
    """Whether sums of GPU arrays can be part of a CUDA graph: the host waits for those of the other engines."""
    return comm.name in ("solo", "nccl")


def check_array(who: str, array: Any, *, written: bool, of: ModuleType | None = None) -> None:
    """Refuse what an engine could not send as one run of bytes, or could not write to.

    Raises:
        TypeError: when ``array`` is neither a NumPy nor a CUDA array, or none ``of`` an engine's operation table.
        ValueError: when it is not dense in C order, or read-only although it is ``written``.
    """
    if not (isinstance(array, np.ndarray) or hasattr(type(array), "__cuda_array_interface__")):
        raise checks.bad_dtype(who, "array", "a NumPy or CuPy array", checks.describe(array))
    if not array.flags.c_contiguous:
        raise checks.bad_value(who, "array", "dense in C order", array.strides, "copy it with ops.contiguous first")
    if written and not getattr(array.flags, "writeable", True):
        raise checks.bad_value(who, "array", "writeable", "a read-only array")
    if of is not None and not isinstance(array, of.Array):
        kind, other, where = ("NumPy", "cuda", "a GPU") if of.name == "cpu" else ("CuPy", "cpu", "the host")
        remedy = f"start with init(device={other!r}) for arrays on {where}"
        raise checks.bad_dtype(who, "array", f"a {kind} array", checks.describe(array), remedy)


def check_exchange(
    rank: int, size: int, sends: Mapping[int, Any], receives: Mapping[int, Any], of: ModuleType | None = None
) -> None:
    """Refuse partners that are not among the others, and arrays that cannot be sent.

    Raises:
        ValueError, TypeError: as `Communicator.start_exchange`.
    """
    for argument, arrays in (("sends", sends), ("receives", receives)):
        for other, array in arrays.items():
            if other == rank or not 0 <= other < size:
                expected = f"by ranks from 0 to {size - 1}, without this one ({rank})"
                raise checks.bad_value("start_exchange", argument, expected, other)
            check_array("start_exchange", array, written=argument == "receives", of=of)


def check_cuts(who: str, array: Any, cuts: Sequence[int], size: int, of: ModuleType | None = None) -> None:
    """Refuse what `check_array` does, and cuts that do not give each rank its part of a one-dimensional array.

    Raises:
        ValueError: for another number of them, or other ends, or a part of negative length.
    """
    check_array(who, array, written=True, of=of)
    ends = [0, *array.shape[:1]]
    if array.ndim != 1 or len(cuts) != size + 1 or [cuts[0], cuts[-1]] != ends or sorted(cuts) != list(cuts):
        expected = f"{size + 1} ascending places of a one-dimensional array, from 0 to its end"
        raise checks.bad_value(who, "cuts", f"{expected} ({array.shape})", tuple(cuts))


class _Done:
    """The work of a message that nobody had to send."""

    def wait(self) -> None:
        pass


_DONE = _Done()


class SoloCommunicator:
    """One rank alone: sums are there already, and nobody is waited for."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1
    name = "solo"

    def all_reduce(self, array: Any) -> None:
        check_array("all_reduce", array, written=True)

    def start_all_reduce(self, array: Any, span: Span = unseen, name: str = "") -> Work:
        check_array("start_all_reduce", array, written=True)
        return _DONE

    def all_gather(self, array: Any) -> Any:
        check_array("all_gather", array, written=False)
        return array[None]

    def broadcast(self, array: Any, root: int = 0) -> None:
        check_array("broadcast", array, written=True)
        check_root(root, self.size)

    def start_exchange(self, sends: Mapping[int, Any], receives: Mapping[int, Any], name: str = "") -> Work:
        check_exchange(self.rank, self.size, sends, receives)
        return _DONE

    def start_reduce_scatter(self, array: Any, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        check_cuts("start_reduce_scatter", array, cuts, self.size)
        return _DONE

    def start_all_gather(self, array: Any, cuts: Sequence[int], span: Span = unseen, name: str = "") -> Work:
        check_cuts("start_all_gather", array, cuts, self.size)
        return _DONE

    def split(self, color: int) -> Communicator:
        return self

    def barrier(self) -> None:
        pass

    def share(self, value: Any, name: str = "") -> list[Any]:
        return [value]

    def close(self) -> None:
        pass


def check_root(root: int, size: int) -> None:
    """Raise ValueError unless ``root`` is a rank."""
    if not 0 <= root < size:
        raise checks.bad_value("broadcast", "root", f"a rank from 0 to {size - 1}", root)


SOLO = SoloCommunicator()
