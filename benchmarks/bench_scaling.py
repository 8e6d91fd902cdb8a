"""Training steps on several ranks: images per second, efficiency, and what communication adds, beside PyTorch's DDP.

    mpirun -n 2 python benchmarks/bench_scaling.py --cases resnet50/256 vgg16/64 unet/32 --json out.json
    python benchmarks/bench_scaling.py --ranks 2 --device cpu --cases resnet20/32 --arms shm mpi

A case is MODEL/BATCH of each rank, or MODEL/BATCH/sync: with batch norms that take the statistics of all ranks.
A step is forward, loss, backward, sums of gradients and update of a resident batch per rank, fused as in training; on
GPUs it is replayed as a CUDA graph. An arm is a way of the messages: ENGINE, then what differs from the default, in any
order. GROUP: so many MiB (default: as `Model` takes it). ``soon``, ``hold``: messages start when they are complete, or
wait for the next long pass that only moves bytes, however short it is; default: as `Model` lets them, which is ``soon``
but for links, whose messages wait for passes that bear them (`minidl.messages.neighbourhood.departures`). fp32 or bf16:
how gradients are sent. ``sums``: those of large fully connected layers are added up as well, in whose place factors
travel else. Engines on GPUs: links (sums by our own kernels where they have a route), nccl; on CPUs: shm, mpi.

All arms and PyTorch's steps take turns on the same batch, in another order from block to block. A GPU at its power
limit slows down for some tenths of a second, and is faster after a lighter moment: so each turn begins with steps that
do not count, and then takes steps without messages, with, with, and without, on all ranks at once. What communication
adds is the median of the differences within a turn; a second figure, for the first arm, is what events say the update
waited in a step that is watched. Efficiency is the step less what is added, over the step. Sums of batch norms and of
the loss stay in the step without messages, and go by links there.

PyTorch runs DDP on the same ranks, weights and batches, eager or compiled, each also as a CUDA graph, with and without
messages.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from pages.files import print_tables
from pages.ranks import scaling, ways

from benchmarks.device import clean, row_ms
from minidl import checks, dist, launch, models
from minidl.bench.setup import Setup, device_of
from minidl.bench.step import Replay, TrainingStep
from minidl.bench.warm import compile_for_ranks
from minidl.dist import Communicator, ipc
from minidl.dist.shm import ShmCommunicator
from minidl.fusion import fuse
from minidl.layers import BatchNorm2d
from minidl.precision import precision
from minidl.profile.results import machine_record, result, write
from minidl.profile.steps import StepProfiler
from minidl.profile.timing import Timing

CASES = {"cuda": ["resnet50/256", "vgg16/64", "unet/32"], "cpu": ["resnet20/32"]}
ARMS = {
    "cuda": ["links", "links/soon", "links/hold", "links/bf16", "nccl"],
    "cpu": ["shm", "shm/0", "mpi", "mpi/0"],
}
SUMS = "sums"
STARTS = ("soon", "hold")
SYNTAX = "ENGINE[/GROUP][/fp32|bf16][/soon|hold][/sums]"
PEERS = {  # by torch.compile; as a CUDA graph
    "torch-ddp": (False, False),
    "torch-ddp-graph": (False, True),
    "torch-ddp-compile": (True, False),
    "torch-ddp-compile-graph": (True, True),
}
WATCHED = 5  # steps
TOLERANCE = {"fp32": 1e-3}  # of the first loss, relative; else 3e-2

Step = Callable[[], Any]
Ready = tuple[Step, Callable[[], None]]  # a step, started by the call; what to do before a run of them


class Pair(NamedTuple):
    """How long a step took with messages, and without, turn by turn."""

    messages: Timing
    alone: Timing

    @property
    def added(self) -> tuple[float, float, float]:
        """Milliseconds by which messages lengthen it: the quartiles of the turns."""
        pairs = zip(self.messages.samples_ms, self.alone.samples_ms, strict=True)
        low, median, high = statistics.quantiles((a - b for a, b in pairs), n=4, method="inclusive")
        return low, median, high

    @property
    def efficiency(self) -> float:
        """The step without messages over that with them."""
        return 1 - self.added[1] / self.messages.ms


class Arm(NamedTuple):
    """How messages go; ``group`` in MiB; None: as `Model` takes it."""

    engine: str
    group: str | None
    dtype: str
    factors: bool
    start: str

    @classmethod
    def parse(cls, text: str, device: str) -> Arm:
        engine, *rest = text.split("/")
        known = ipc.ROUTES if device == "cuda" else ("shm", "mpi")
        if engine not in known:
            raise checks.unknown("engine of an arm", engine, known)
        groups = [part for part in rest if part.isdecimal()]
        words = ("fp32", "bf16"), STARTS, (SUMS,)
        choices = groups, *([part for part in rest if part in some] for some in words)
        if sum(map(len, choices)) < len(rest) or max(map(len, choices)) > 1:
            raise checks.bad_value("bench_scaling", "--arms", SYNTAX, text)
        group, dtype, start, sums = (found[0] if found else "" for found in choices)
        start = start or ("" if engine.startswith("links") else "soon")
        return cls(engine, group or None, dtype or "fp32", not sums, start)


def arguments() -> argparse.Namespace:
    """The options."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--ranks", type=int, default=2, help="where no launcher started it")
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--cases", nargs="+", metavar="CASE", help="MODEL/BATCH or MODEL/BATCH/sync")
    p.add_argument("--precision", help="default: bf16 on GPUs, fp32 on CPUs")
    p.add_argument("--fusion", metavar="PLAN", help="of batch norms, see minidl fuse; default: as minidl train")
    p.add_argument("--arms", nargs="+", metavar="ARM", help=SYNTAX)
    p.add_argument("--peers", nargs="*", choices=PEERS, default=["torch-ddp"])
    p.add_argument("--blocks", type=int, default=9, help="timed blocks of each arm")
    p.add_argument("--steps", type=int, default=3, help="steps in a row; a block has four rows, two with messages")
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    a = p.parse_args()
    checks.at_least("bench_scaling", "--blocks", a.blocks, 2)
    return a


class Ours:
    """Our step in all its arms, on one model."""

    def __init__(self, setup: Setup, comm: Communicator, synchronised: bool):
        self.comm, self.setup, self.synchronised, graph = comm, setup, synchronised, setup.graph()
        for layer in graph.layers:
            if isinstance(layer, BatchNorm2d):
                layer.sync = synchronised
        self.step = TrainingStep(graph, batch=setup.batch, device=setup.device, precision=setup.precision, comm=comm)
        by = {"hold": math.inf, "soon": 0.0, "": setup.batch}
        self.departures = {start: self.step.model.departures(samples) for start, samples in by.items()}
        fuse(self.step.model, setup.fusion, batch=setup.batch)
        self.tuned_bytes, self.factored = self.step.model.arena.group_bytes, self.step.model.arena.factored
        self.messages: dict[str, tuple[int, int]] = {}  # of an arm, and how many of them wait
        self._captured: Replay | None = None

    def connect(self, arm: Arm) -> None:
        """Cut and send messages as the arm does; a collective."""
        arena, comm = self.step.model.arena, self.comm
        if self.setup.device == "cuda":
            if comm.links is None and arm.engine != "nccl":
                raise checks.impossible("bench_scaling", f"arm {arm.engine} without links between the GPUs")
            if comm.links is not None:
                comm.links.routes = ipc.ROUTES[arm.engine]
        elif arm.engine == "mpi":
            comm = comm.control
        arena.factored = self.factored if arm.factors else {}
        arena.departures = self.departures[arm.start]
        group_bytes = self.tuned_bytes if arm.group is None else int(arm.group) << 20
        arena.connect(comm, group_bytes, precision(arm.dtype).storage)
        arena.settle()

    def ready(self, arm: Arm | None) -> Ready:
        """A step as the arm takes it; None: without messages. A collective."""
        arena, comm = self.step.model.arena, self.comm

        def prepare() -> None:
            if arm is None:
                arena.connect(dist.SOLO, self.tuned_bytes)
            else:
                self.connect(arm)

        prepare()
        self.messages[str(arm)] = len(arena.messages), sum(bool(message.before) for message in arena.messages)
        if self.setup.device == "cpu":
            return self.step, prepare
        replay, wire = self.step.capture(beside=self._captured), arena.wire
        self._captured = replay

        def step() -> Any:
            assert wire is not None  # the graph writes to it
            return replay()

        arena.connect(comm, self.tuned_bytes)
        return step, lambda: None

    def waited(self, arm: Arm) -> float:
        """Milliseconds that the update of a watched step waits for messages, on the slowest rank; a collective."""
        self.connect(arm)
        profiler = StepProfiler(self.step.ops)
        if self.setup.device == "cuda":
            step = self.step.capture(profiler, self._captured)
            around: Any = step.stream
        else:
            self.step.observe(profiler)
            step, around = self.step, nullcontext()
        with around:
            for _ in range(WATCHED + 1):
                self.comm.barrier()
                with profiler.step():
                    step()
            found = profiler.read()
        self.step.observe()
        names = {message.name for message in self.step.model.arena.messages}
        waits = [sum(s.ms for s in one.spans if s.pass_name == "wait" and s.layer in names) for one in found[1:]]
        return max(self.comm.share(statistics.median(waits)))


def nothing() -> None:
    """Before a run of steps that need none of it."""


def crossed(comm: Communicator, arm: Ready, silent: Ready, steps: int, device: str) -> tuple[float, ...]:
    """(with messages, without): milliseconds of a step on the slowest rank; a collective.

    In the order without, with, with, without: what drifts meanwhile, such as the clock of a GPU at its power limit,
    lengthens both alike. Before them steps that do not count, whatever ran last.
    """
    times = []
    for step, prepare in (silent, silent, arm, arm, silent):
        prepare()
        times.append(row_ms(comm, step, steps, device))
    return (times[2] + times[3]) / 2, (times[1] + times[4]) / 2


def attempted(comm: Communicator, name: str, work: Callable[[], Any]) -> Any:
    """What ``work`` gives, or None where it fails on any rank, which rank 0 tells; a collective."""
    found, failure = None, ""
    try:
        found = work()
    except Exception:  # the rows of ours are worth having without it
        failure = traceback.format_exc()
    failures = comm.share(failure)
    if any(failures) and comm.rank == 0:
        print(f"{name} is left out:\n{next(filter(None, failures))}", flush=True)
    return None if any(failures) else found


def started(make: Callable[[], Any]) -> tuple[Any, float]:
    """What PyTorch makes, having taken a step, and the loss of that on this rank."""
    peer = make()
    return peer, float(peer())


def peers_of(
    a: argparse.Namespace, setup: Setup, ours: Ours, loss: float, until: ExitStack
) -> dict[str, tuple[Ready, Ready]]:
    """PyTorch's steps, with and without messages, which compute what ours does, as long as ``until`` is open.

    A collective.
    """
    if not a.peers:
        return {}
    from benchmarks.ddp import Peer

    found, peers = {}, {}
    for name in a.peers:
        compiled, graphed = PEERS[name]
        if compiled not in peers:
            make = partial(Peer, setup, ours.step, compiled=compiled, synchronised=ours.synchronised)
            peers[compiled] = attempted(ours.comm, name, partial(started, make))
        if peers[compiled] is None:
            continue
        peer, own = peers[compiled]
        until.callback(peer.close)
        losses = ours.comm.share(own)
        if not math.isclose(statistics.mean(losses), loss, rel_tol=TOLERANCE.get(setup.precision, 3e-2)):
            if ours.comm.rank == 0:
                print(f"{name} is left out: its losses are {losses}, ours {loss}", flush=True)
            continue
        steps = attempted(ours.comm, name, partial(peer.steps, graphed=graphed))
        if steps is not None:
            found[name] = (steps[0], nothing), (steps[1], nothing)
    return found


def turns(
    a: argparse.Namespace, comm: Communicator, steps: Mapping[str, tuple[Ready, Ready]], device: str
) -> dict[str, list[tuple[float, ...]]]:
    """What `crossed` finds of each, block by block; a collective."""
    samples: dict[str, list[tuple[float, ...]]] = {name: [] for name in steps}
    for block in range(a.blocks + 1):
        for name in random.Random(block).sample(list(steps), len(steps)):  # nobody is always behind the same one
            ms = crossed(comm, *steps[name], a.steps if block else 1, device)
            samples[name] += [ms] * bool(block)
    return samples


def measure(
    a: argparse.Namespace, comm: Communicator, setup: Setup, synchronised: bool, arms: dict[str, Arm]
) -> list[dict[str, Any]]:
    """The rows of one case; a collective."""
    if setup.device == "cuda":
        compile_for_ranks(setup.graph(), setup.batch, setup.precision, setup.fusion, comm)
    ours = Ours(setup, comm, synchronised)
    with_weights = ours.step.model.forward(ours.step.x)
    loss = ours.step.loss.forward(with_weights, ours.step.labels).loss
    with ExitStack() as peers:
        steps = peers_of(a, setup, ours, loss, peers)
        silent = ours.ready(None)
        steps |= {name: (ours.ready(arm), silent) for name, arm in arms.items()}
        samples = turns(a, comm, steps, setup.device)
    times = {name: Pair(*(Timing(side) for side in zip(*found, strict=True))) for name, found in samples.items()}
    watched = next(iter(arms))
    waited = {watched: ours.waited(arms[watched])}
    return [row(setup, name, arm, ours, times, waited.get(name)) for name, arm in arms.items()]


def row(
    setup: Setup, name: str, arm: Arm, ours: Ours, times: Mapping[str, Pair], waited: float | None
) -> dict[str, Any]:
    """A row of the result file."""
    its, images = times[name], setup.batch * setup.ranks
    messages, waiting = ours.messages[str(arm)]
    low, added, high = its.added
    peers = {peer: times[peer] for peer in PEERS if peer in times}
    return {
        "case": setup.title + ", synchronised" * ours.synchronised, "pass": "step", "dtype": setup.precision,
        "arm": name, "ms": its.messages.ms, "spread": its.messages.spread, "floor_ms": None, "ranks": setup.ranks,
        "fusion": setup.fusion, "images_per_s": images / its.messages.ms * 1e3, "efficiency": its.efficiency,
        "alone_ms": its.messages.ms - added, "alone_spread": its.alone.spread, "exposed_ms": added,
        "exposed_range_ms": high - low, "exposed_by_events_ms": waited, "messages": messages, "waiting": waiting,
        "group": arm.group or f"{ours.tuned_bytes / (1 << 20):g}", "message_dtype": arm.dtype,
        "factors": [name for name, most in ours.factored.items() if arm.factors and images <= most],
        "parameters": ours.step.model.num_parameters,
        "peers": {peer: its.messages.ms for peer, its in peers.items()},
        "peer_spreads": {peer: its.messages.spread for peer, its in peers.items()},
        "peer_images_per_s": {peer: images / its.messages.ms * 1e3 for peer, its in peers.items()},
        "peer_efficiency": {peer: its.efficiency for peer, its in peers.items()},
        "peer_exposed_ms": {peer: its.added[1] for peer, its in peers.items()},
    }  # fmt: skip


def joined(device: str) -> Communicator:
    """All ranks; on CPUs in shared memory, with the engine of MPI underneath."""
    if device == "cpu":
        return ShmCommunicator(dist.init("cpu", "mpi"))
    return dist.init(device)


def main() -> None:
    """Measure all cases and show them."""
    a = arguments()
    if dist.launched_size() == 1:
        sys.exit(launch.main(["-n", str(a.ranks), *sys.argv]))
    comm = joined(a.device)
    device = device_of(a.device, comm)
    arms = {text: Arm.parse(text, device) for text in a.arms or ARMS[device]}
    if device == "cpu" and any(PEERS[name][1] for name in a.peers):
        raise checks.bad_value("bench_scaling", "--peers", "none as a CUDA graph on a cpu", a.peers)
    mode = precision(a.precision or ("bf16" if device == "cuda" else "fp32")).name
    fusion = a.fusion or ("auto" if device == "cuda" else "none")
    if a.peers:
        from benchmarks import ddp

        ddp.join(comm, device)
    rows: list[dict[str, Any]] = []
    for case in a.cases or CASES[device]:
        (model, _, batch), synchronised = case.removesuffix("/sync").partition("/"), case.endswith("/sync")
        if model not in models.MODELS or not batch.isdecimal():
            raise checks.bad_value("bench_scaling", "--cases", "MODEL/BATCH or MODEL/BATCH/sync", case)
        clean(device)
        rows += measure(a, comm, Setup(model, int(batch), mode, device, comm.size, fusion=fusion), synchronised, arms)
        if comm.rank == 0:
            latest = [r for r in rows if r["case"] == rows[-1]["case"]]
            print(f"{case}: " + ", ".join(f"{r['arm']} {r['ms']:.2f} ms" for r in latest), flush=True)
            content = result("bench_scaling", rows, machine_record())
            if a.json:
                write(Path(a.json), content)
    if comm.rank == 0:
        print_tables(content, scaling, ways)
    if a.peers:
        ddp.leave()
    comm.close()


if __name__ == "__main__":
    main()
