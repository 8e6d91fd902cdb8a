"""Ranks agree on the tuned kernels of convolutions before they train: rank 0's table, or none, is everybody's."""

from __future__ import annotations

from types import ModuleType

from minidl.dist import Communicator
from minidl.dist.agree import on_rank_0


def settle(ops: ModuleType, comm: Communicator) -> str:
    """Let all ranks use rank 0's table of kernels (`minidl.cuda.convolution.conv2d_tuned`); a collective on GPUs.

    Returns:
        The table's digest, "none" without one.

    Raises:
        ValueError: on every rank, when MINIDL_TUNED names a file that rank 0 cannot use.
    """
    if ops.name != "cuda":
        return "none"
    from minidl.cuda.convolution import conv2d_tuned as tuned

    record = on_rank_0(comm, lambda: tuned.current().record)
    if comm.rank > 0:
        tuned.install(tuned.Table.of(record) if record else tuned.NOTHING)
    return tuned.current().digest
