"""PyTorch's DistributedDataParallel on the same ranks, weights and batches: the peer of bench_scaling.py."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from benchmarks import torch_steps
from minidl.bench.setup import Setup
from minidl.bench.step import TrainingStep
from minidl.bench.torch_calls import captured
from minidl.dist import Communicator

_FIRST_STEPS = 11  # in which DDP finds out the order of gradients, and asks events for times: no graph may hold that


def join(comm: Communicator, device: str) -> None:
    """Make PyTorch's process group of all ranks; a collective."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # it asks for events, also of what is captured
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = comm.share(_address(comm))[0]
    if device == "cuda":
        import cupy

        torch.cuda.set_device(cupy.cuda.runtime.getDevice())
        torch.backends.cudnn.benchmark = True
    engine = "nccl" if device == "cuda" else "gloo"
    distributed.init_process_group(engine, rank=comm.rank, world_size=comm.size)


def _address(comm: Communicator) -> tuple[str, str]:
    """(host, port) at which rank 0 can be found."""
    host = "127.0.0.1" if comm.local_size == comm.size else socket.gethostname()
    with socket.socket() as found:
        found.bind(("", 0))
        return host, str(found.getsockname()[1])


def leave() -> None:
    """End the process group; a collective."""
    if distributed.is_initialized():
        distributed.destroy_process_group()


def _synchronised(network: torch.nn.Module) -> torch.nn.Module:
    """``network`` with `torch.nn.SyncBatchNorm`, which does not run without a count of batches."""
    network = torch.nn.SyncBatchNorm.convert_sync_batchnorm(network)
    for module in network.modules():
        if isinstance(module, torch.nn.SyncBatchNorm):
            module.num_batches_tracked = torch.zeros_like(module.running_mean[0], dtype=torch.long)
    return network


class Peer:
    """The training step of `torch_steps` on all ranks.

    Args:
        ours: whose weights and batch it takes, as they are.
        compiled: by ``torch.compile``.
        synchronised: batch norms take the statistics of all ranks.
    """

    def __init__(self, setup: Setup, ours: TrainingStep, *, compiled: bool, synchronised: bool = False):
        self._stream = torch.cuda.Stream() if setup.device == "cuda" else None
        self._graphs = ExitStack()
        options = {"device_ids": [torch.cuda.current_device()]} if setup.device == "cuda" else {}

        def on_all_ranks(network: torch.nn.Module) -> Any:
            network = _synchronised(network) if synchronised else network
            with self._aside():  # where its backward pass is to run, in a graph as well
                self._parallel = DistributedDataParallel(
                    network, gradient_as_bucket_view=True, broadcast_buffers=False, **options
                )
            return torch.compile(self._parallel, dynamic=False) if compiled else self._parallel

        images, labels = (ours.ops.to_host(array) for array in (ours.x, ours.labels))
        state, batch = ours.model.state_dict(), (images.astype(np.float32), labels)
        self._step = torch_steps.step_of(setup, "torch-eager", state, batch, run=on_all_ranks)
        if setup.device == "cuda":
            torch.cuda.synchronize()

    def _aside(self) -> Any:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def __call__(self) -> Any:
        """One step, started; the loss."""
        with self._aside():
            return self._step()

    def silent(self) -> Any:
        """The step without messages; the ranks' weights differ afterwards."""
        with self._parallel.no_sync():
            return self()

    def steps(self, *, graphed: bool) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """The step with messages and without, each taken already; ``graphed``: as CUDA graphs. A collective."""
        found = tuple(map(self._captured, (self, self.silent))) if graphed else (self, self.silent)
        for step in found:
            step()
        return found

    def close(self) -> None:
        """Let go of the graphs: NCCL waits for those that hold its messages before a process group ends."""
        self._graphs.close()

    def _captured(self, step: Callable[[], Any]) -> Callable[[], Any]:
        for _ in range(_FIRST_STEPS):
            step()
        torch.cuda.synchronize()
        return self._graphs.enter_context(captured([step], self._stream))
