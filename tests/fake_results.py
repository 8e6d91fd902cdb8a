"""Result files of networks that were never run, and what was drawn of them, read back from the artists.

The files are made from the networks' own graphs: FLOP and bytes by `Layer.cost`, times by a roofline with scatter.
"""

from __future__ import annotations

import copy
from functools import cache

import numpy as np

from minidl import models
from minidl.profile import plots, result
from minidl.profile.plots import style

CEILINGS = {
    "machine": "NVIDIA H200", "device": "cuda", "date": "2026-11-21T00:00:00+00:00", "copy_gb_per_s": 4230.0,
    "matrix_tflops": {"bf16": 774.0, "fp16": 760.0, "tf32": 402.0, "fp32": 51.0},
    "matrix_by": {"bf16": "cublas", "fp16": "cublas", "tf32": "cublas", "fp32": "cublas"},
    "vector_tflops": {"fp32": 60.0}, "host_to_device_gb_per_s": 55.5, "device_to_host_gb_per_s": 55.4,
    "both_ways_gb_per_s": 101.0, "all_reduce": None,
}  # fmt: skip
NETWORK = {"ranks": 2, "engine": "nccl", "latency_us": 14.0, "bus_gb_per_s": 310.0, "points": []}
MACHINE = {"host": "x86_64", "cpu": "some processor", "cores": 16, "gpu": "NVIDIA H200", "count": 1}
BYTES = {"bf16": 2, "fp16": 2, "tf32": 4, "fp32": 4}
BACKWARD = ("backward_weight", "backward_data")


class Fake:
    """A result file of ``minidl bench layers`` for a network that was never run."""

    def __init__(self, model="resnet50", size=224, batch=256, dtype="bf16", ranks=1, seed=0, arm="minidl"):
        self.graph = models.build(model, (size, size, 3), 1000 if size >= 224 else 10)
        self.case, self.batch, self.dtype, self.ranks = f"{model}/{size}x{size}/b{batch * ranks}", batch, dtype, ranks
        self.model, self.arm = model, arm
        self.random = np.random.default_rng(seed)
        self.ceilings = CEILINGS | {"all_reduce": NETWORK | {"ranks": ranks} if ranks > 1 else None}
        self.rows, self.spans, self.memory = [], [], []
        self.now, self.network_free, self.held = 0.0, 0.0, 2e9
        self._steps()

    def _steps(self):
        shapes = self.graph.shapes((self.batch, *self.graph.nodes[0].shape))
        nodes = [node for node in self.graph.nodes if node.layer is not None]
        self._sample()
        for node in nodes:
            self._layer(node, shapes, ("forward",))
        logits = np.prod(shapes[-1])
        for name in ("forward", "backward_data"):
            self._row("loss", "SoftmaxCrossEntropy", len(nodes), name, 6 * logits, 8 * logits, shapes[-1:], [], 0)
        for node in reversed(nodes):
            self._layer(node, shapes, BACKWARD)
        parameters = sum(int(np.prod(s.shape)) for node in nodes for s in node.layer.specs)
        self.now = max(self.now, self.network_free)
        self._row("optimizer", "SGD", None, "update", 5 * parameters, 22 * parameters, [], [], parameters)
        measured = self.now
        self.step_ms = 1.04 * measured
        self._row("step", None, None, "unaccounted", None, None, [], [], 0, ms=self.step_ms - measured)
        self._row("step", None, None, "step", None, None, [], [], parameters, ms=self.step_ms)

    def _layer(self, node, shapes, passes):
        layer, inputs, output = node.layer, [shapes[i] for i in node.inputs], shapes[node.index]
        cost = layer.cost(*inputs, itemsize=BYTES[self.dtype])
        parameters = sum(int(np.prod(spec.shape)) for spec in layer.specs)
        left_out = {"backward_data"} if node.inputs == (0,) else set()
        left_out |= set() if parameters else {"backward_weight"}
        for name in passes:
            work = getattr(cost, name)
            if name in left_out:
                continue
            kind = type(layer).__name__
            kept = int(np.prod(inputs[0])) * BYTES[self.dtype] * (kind in ("Conv2d", "BatchNorm2d", "Linear"))
            self._row(layer.name, kind, node.index, name, work.flop, work.bytes, inputs, output, parameters)
            self.held += kept if name == "forward" else -kept if name == passes[-1] else 0
            self._sample()
            if name == "backward_weight" and self.ranks > 1:
                flop = sum(getattr(cost, p).flop for p in {"forward", *BACKWARD} - left_out)
                self._all_reduce(layer.name, kind, node.index, parameters, flop)

    def _rate(self, kind):
        matrix = kind in ("Conv2d", "ConvTranspose2d", "Linear")
        return self.ceilings["matrix_tflops"][self.dtype] if matrix else self.ceilings["vector_tflops"]["fp32"]

    def _row(self, layer, kind, index, name, flop, size, inputs, output, parameters, ms=None, **more):
        floor = bound = None
        if flop is not None and size:
            by = {"compute": 1e-9 * flop / self._rate(kind), "memory": 1e-6 * size / self.ceilings["copy_gb_per_s"]}
            bound = max(by, key=by.get)
            floor = by[bound]
            if ms is None:
                share = {"Conv2d": 0.62, "BatchNorm2d": 0.8, "Linear": 0.5}.get(kind, 0.85)
                bad = 0.3 if self.random.random() < 0.08 else 1.0
                ms = floor / np.clip(share * bad * self.random.lognormal(0, 0.15), 0.05, 0.99) + 0.003
        ms = float(ms or 0.0)
        if name not in ("all_reduce", "step", "unaccounted"):
            self.spans.append(
                {"rank": 0, "lane": "compute", "layer": layer, "pass": name, "start_ms": self.now, "ms": ms}
            )
            self.now += ms
        record = {"ms": ms, "min_ms": ms, "p95_ms": None, "spread": 0.02, "n": 5, "samples_ms": [ms] * 5}
        self.rows.append({
            "case": self.case, "layer": layer, "type": kind, "index": index, "pass": name, "dtype": self.dtype,
            "arm": self.arm, "device": "cuda", "ranks": self.ranks, "input_shapes": [list(map(int, s)) for s in inputs],
            "output_shape": list(map(int, output)), "parameters": parameters, "ms": ms, "spread": 0.02,
            "timing": "replayed",
            "timings": {"replayed": record, "hot": None, "cold": None, "step": None, "graph_step": None},
            "flop": None if flop is None else int(flop), "bytes": None if size is None else int(size),
            "intensity": flop / size if flop is not None and size else None,
            "floor_ms": floor, "bound": bound, "roof_share": floor / ms if floor and ms else None,
            "tflops": 1e-9 * flop / ms if flop and ms else None,
            "gb_per_s": 1e-6 * size / ms if size and ms else None,
            "saved_bytes": None, "wire_bytes": None, "communication_intensity": None, "transfer_ms": None,
            "wait_ms": None, "exposed_ms": None, "bus_gb_per_s": None, "rank_ms": [ms] * self.ranks,
            "slowest_rank": 0, "kernels": None, "plan": None, "in": None, "energy_mj": None, "peers": {},
        } | more)  # fmt: skip

    def _all_reduce(self, layer, kind, index, parameters, flop):
        wire = 2 * (self.ranks - 1) / self.ranks * 4 * parameters
        transfer = (1e-3 * NETWORK["latency_us"] + 1e-6 * wire / NETWORK["bus_gb_per_s"]) * self.random.uniform(1, 1.2)
        self.network_free = max(self.now, self.network_free) + transfer
        exposed = 0.0
        if index < 3:  # the last messages of a step have nothing left to hide behind
            exposed, self.now = self.network_free - self.now, self.network_free
        self._row(layer, kind, index, "all_reduce", None, None, [], [], parameters, ms=transfer, transfer_ms=transfer,
                  wire_bytes=wire, communication_intensity=flop / wire, wait_ms=0.0, exposed_ms=exposed,
                  bus_gb_per_s=1e-6 * wire / transfer)  # fmt: skip

    def _sample(self):
        self.memory.append({"rank": 0, "t_ms": self.now, "bytes": int(self.held)})

    def content(self, **more):
        setup = {
            "model": self.model,
            "batch": self.batch,
            "precision": self.dtype,
            "device": "cuda",
            "ranks": self.ranks,
        }
        step = {
            "eager": None,
            "graph": None,
            "compute_only": None,
            "images_per_s": 1e3 * self.batch * self.ranks / self.step_ms,
        }
        return result("layers", self.rows, MACHINE, setup=setup, ceilings=self.ceilings, conventions="", step=step,
                      spans=self.spans, memory=self.memory, per_rank=[], warnings=[]) | more  # fmt: skip


@cache
def _fake(*args, **options):
    return Fake(*args, **options).content()


def fake(*args, **options):
    """A file of its own, which a test may change."""
    return copy.deepcopy(_fake(*args, **options))


def only(content, name="file.json"):
    (run,) = plots.runs(content, name)
    return run


def resnet20(**options):
    return fake("resnet20", 32, 64, "bf16", **options)


def edited(content, change):
    for row in content["rows"]:
        change(row)
    return content


def scatter(axes):
    """Position, area, face and shape of each point, from the artists."""
    from matplotlib.colors import to_hex

    found = []
    for collection in axes.collections:
        if collection.get_label() in style.SHAPES:
            spread = np.broadcast_to(collection.get_sizes(), len(collection.get_offsets()))
            found += [
                (*map(float, place), float(size), to_hex(face), collection.get_label())
                for place, size, face in zip(collection.get_offsets(), spread, collection.get_facecolors(), strict=True)
            ]
    return found


def names(axes):
    """The texts with a leader."""
    return [text for text in axes.texts if getattr(text, "arrow_patch", None) is not None]


def widths(axes):
    """Per segment the bars' (start, width) in order from the top."""
    return {
        container.get_label(): [(bar.get_x(), bar.get_width()) for bar in container] for container in axes.containers
    }


def timed_within(content, way="graph_step", by=2.0):
    """Passes of this file also timed within the step, where they take ``by`` times as long, every second four times."""
    for i, row in enumerate(content["rows"]):
        ms = row["ms"] * by * (1 + i % 2)
        row["timings"][way] = row["timings"]["replayed"] | {"ms": ms, "samples_ms": [ms] * 5}
    return content
