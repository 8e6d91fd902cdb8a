"""The optional PyTorch adapter: minidl's layers beside torch's, and the table of layers for any torch module.

Nothing here is imported unless PyTorch is asked for; where it is missing the import says how to install it.
"""

from __future__ import annotations

import argparse
from typing import Any

from minidl import backend, checks
from minidl.bench.layers import budget_on
from minidl.bench.setup import device_of
from minidl.bench.torch_calls import JOINT, layer_calls, peer_ms, time_calls
from minidl.bench.torch_table import bench_module
from minidl.bench.torch_twin import TorchGraph, from_nhwc, nn, torch, twin
from minidl.config import named
from minidl.dist.communicator import SOLO
from minidl.profile import ceilings
from minidl.profile.results import result

__all__ = [
    "JOINT", "TorchGraph", "bench_command", "bench_module", "from_nhwc", "layer_calls", "load", "peer_ms", "time_calls",
    "twin",
]  # fmt: skip

CONVENTIONS = (
    "Modules of PyTorch that call no other, each pass alone. FLOP: 2 per multiply-add, whole batch; bytes: the fewest "
    "a pass must move; both as of minidl's layer of the kind, unknown where there is none. Where PyTorch computes all "
    "gradients in one call, its time and work stand at backward_data. A step is a forward pass and all gradients of "
    "parameters, without loss and update."
)
_IMAGE_SIZE, _CHANNELS = 224, 3


def bench_command(a: argparse.Namespace) -> dict[str, Any]:
    """The content of a result file for ``minidl bench layers --torch``, from that command's options.

    The module is given ``a.batch`` images of three channels; without ``a.image_size``, of 224 x 224 pixels.

    Raises:
        ValueError, TypeError: as `load`; for a size, batch or number of samples that cannot be.
    """
    size = checks.at_least("", "--image-size", a.image_size or _IMAGE_SIZE, 1)
    batch = checks.at_least("", "--batch", a.batch, 1)
    samples = checks.at_least("", "--samples", a.samples, 2)
    module, device = load(a.torch), device_of(a.device, SOLO)
    known = ceilings.find(backend.get_ops(device), remeasure=a.remeasure)
    name = a.torch.partition(":")[2]
    images = torch.randn((batch, _CHANNELS, size, size), generator=torch.Generator().manual_seed(0))
    rows = bench_module(
        module, images, precision=a.precision, device=device, case=f"torch {name}/{size}x{size}/b{batch}", ways=a.ways,
        budget=budget_on(device, samples), ceilings=known,
    )  # fmt: skip
    setup = {
        "model": a.torch, "batch": batch, "precision": a.precision, "device": device, "ranks": 1, "image_size": size,
        "classes": None, "torch": torch.__version__,
    }  # fmt: skip
    whole = rows[-1]["timings"]
    step = {"eager": whole["step"], "graph": whole["graph_step"], "compute_only": None, "exposed_ms": 0.0}
    step["images_per_s"] = batch / rows[-1]["ms"] * 1e3
    nothing: dict[str, list] = {"warnings": [], "spans": [], "memory": []}
    return result("layers", rows, setup=setup, ceilings=known, conventions=CONVENTIONS, step=step, **nothing)


def load(spec: str) -> nn.Module:
    """The module that ``spec`` names (`minidl.config.named`), or that the function of this name returns.

    Raises:
        ValueError: from `named`.
        TypeError: when no torch.nn.Module is found there.
    """
    found = named("--torch", spec)
    if callable(found) and not isinstance(found, nn.Module):
        try:
            found = found()
        except TypeError as error:
            remedy = "name a function that takes no arguments"
            raise TypeError(f"--torch {spec}: calling it failed ({error}); {remedy}") from error
    if not isinstance(found, nn.Module):
        raise checks.bad_dtype(
            "--torch", spec, "a torch.nn.Module, or a function that returns one", checks.describe(found)
        )
    return found
