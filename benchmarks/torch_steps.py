"""PyTorch's training step of one of our networks: the peer of bench_train and others, on several ranks as in ddp.py.

The same layers, weights and batch; images in channels_last; bf16 and fp16 by autocast, fp16 with its `GradScaler`; SGD
in one kernel (``fused=True``), which reads that scaler's flag on the device, so that no step waits for the host.
Gradients are written anew in each step, not added up. Arms:

    torch-eager           as it is written
    torch-graph           as a CUDA graph
    torch-compile         forward, loss and backward by `torch.compile`
    torch-compile-graph   that step, update included, as a CUDA graph
    torch-autotune-graph  the same, compiled in the mode max-autotune-no-cudagraphs, which tries out kernels of products
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from minidl.bench.setup import Setup
from minidl.bench.step import DECAY, LR, MOMENTUM
from minidl.bench.torch_twin import TorchGraph, from_nhwc

# Arms and their modes of torch.compile.
ARMS = {
    "torch-eager": None,
    "torch-graph": None,
    "torch-compile": "default",
    "torch-compile-graph": "default",
    "torch-autotune-graph": "max-autotune-no-cudagraphs",
}
WARM_UP = 4  # steps before a capture
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Of the loss: so small that no step overflows, as with PyTorch's own 65536 a ResNet-50's first three do. They are left
# out, but the fused SGD then goes on with momentum that nobody has written.
_SCALE = 2.0**10

Step = Callable[[], Any]
Batch = tuple[np.ndarray, np.ndarray]


def step_of(
    setup: Setup,
    arm: str,
    state: dict[str, np.ndarray] | None,
    batch: Batch,
    *,
    search: bool = True,
    run: Callable[[TorchGraph], Callable[[torch.Tensor], torch.Tensor]] = lambda network: network,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Step:
    """A training step that returns its loss as a tensor; not yet as a CUDA graph.

    Args:
        state: weights, of `minidl.Model.state_dict`; None: PyTorch's own first ones.
        batch: images (N, H, W, 3) and labels, per image or per pixel.
        search: let cuDNN try out which of its kernels is fastest.
        run: makes of the network what takes images; default: itself.
        within: a context for forward pass and loss.
    """
    mode, device = setup.precision, setup.device
    torch.backends.cudnn.benchmark = search
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = mode == "tf32"
    network = TorchGraph(setup.graph())
    network = (network if state is None else network.load(state)).to(device)
    logits = run(network)
    x, labels = from_nhwc(batch[0], device), torch.from_numpy(batch[1]).long().to(device)

    def forward(x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with within(), torch.autocast(device, dtype=_HALF.get(mode, torch.bfloat16), enabled=mode in _HALF):
            return torch.nn.functional.cross_entropy(logits(x), labels)

    loss_of = torch.compile(forward, mode=ARMS[arm], dynamic=False) if ARMS[arm] else forward
    optimizer = torch.optim.SGD(network.parameters(), LR, MOMENTUM, weight_decay=DECAY, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=_SCALE, enabled=mode == "fp16")

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(x, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return step


def first_steps(step: Step, arm: str) -> tuple[Step, list[float]]:
    """(``step`` as its arm runs it, the losses of the steps taken)."""
    if not arm.endswith("graph"):
        return step, [float(step()) for _ in range(WARM_UP)]
    losses: list[torch.Tensor] = []
    replay = captured(lambda: losses.append(step()) or losses[-1])
    return replay, [float(loss) for loss in losses[:WARM_UP]]


def captured(step: Step) -> Step:
    """``step``, taken `WARM_UP` times, as a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    whole = torch.cuda.CUDAGraph()
    with torch.cuda.graph(whole):
        loss = step()

    def replay(inputs: Step = step) -> Any:  # the graph reads its inputs' memory: who replays it keeps them alive
        whole.replay()
        return loss

    return replay


def compile_ahead(setup: Setup, mode: str, batch: Batch, share: float) -> None:
    """Leave in the compiler's cache on disk what the arms of a mode of torch.compile need.

    Args:
        share: of the GPU's memory, that this process may take.
    """
    if setup.device == "cuda":
        torch.cuda.set_per_process_memory_fraction(share)  # untried, cuDNN takes work space by the 100 GB where it can
    arm = next(arm for arm, its in ARMS.items() if its == mode)
    step_of(setup, arm, None, batch, search=False)()
    if setup.device == "cuda":
        torch.cuda.synchronize()
