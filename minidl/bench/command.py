"""``minidl bench``: layers, model, ceilings, compare, sweep."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from minidl import backend, checks, models
from minidl.bench import layers, sweep
from minidl.bench.run import bench_layer, bench_network, merged, new_step
from minidl.bench.setup import Setup, add_images, device_of, join, layer_case
from minidl.config import Help
from minidl.dist.communicator import Communicator
from minidl.fusion import CHOICES
from minidl.precision import PRECISIONS
from minidl.profile import ceilings, compare
from minidl.profile.energy import Energy, Meter
from minidl.profile.results import load, result, write, write_csv
from minidl.profile.runs import runs
from minidl.profile.tables import show
from minidl.profile.trace import write_trace
from minidl.profile.views import VIEWS, default_view, footer, tables

_NORMS = ("BatchNorm2d", "GroupNorm", "LayerNorm")
_UNACCOUNTED = 3  # exit status of --strict
_OF_STEPS = ("fusion", "seconds", "no_capture", "trace", "strict", "model", "classes")  # and of networks
_OF_NETWORKS = (*_OF_STEPS, "image_size", "batch")
_ONE_LAYER = (
    "measure one layer instead, such as 'Conv2d(64, 64, 3, padding=1)'; --input tells the batch, --samples how often, "
    f"and {', '.join('--' + name.replace('_', '-') for name in _OF_NETWORKS)} are left out"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verbs below ``minidl bench``."""
    verbs = parser.add_subparsers(dest="bench", required=True, metavar="WHAT")
    for name, (text, add, _) in VERBS.items():
        add(verbs.add_parser(name, help=text, formatter_class=Help))


def parser_of(verb: str) -> argparse.ArgumentParser:
    """The parser of one verb by itself.

    Raises:
        ValueError: for an unknown verb.
    """
    if verb not in VERBS:
        raise checks.unknown("verb", verb, VERBS)
    parser = argparse.ArgumentParser(prog=f"minidl bench {verb}")
    VERBS[verb][1](parser)
    return parser


def run(a: argparse.Namespace) -> int:
    """One verb; the exit status."""
    return VERBS[a.bench][2](a)


# -- options ----------------------------------------------------------------------------------------------------------


def _add_layers(p: argparse.ArgumentParser) -> None:
    _add_network(p)
    p.add_argument("--model", default="resnet20", help=f"measure every layer of {models.CHOICES}")
    p.add_argument("--layer", metavar="TEXT", help=_ONE_LAYER)
    p.add_argument(
        "--input", action="append", metavar="NxHxWxC", help="shape of the layer's input; repeat for several inputs"
    )
    p.add_argument("--batch", type=int, default=32, help="samples per rank")
    p.add_argument("--precision", default="fp32", choices=PRECISIONS)
    p.add_argument(
        "--ways", nargs="+", default=list(layers.ISOLATED), choices=layers.ISOLATED, help="how each pass is timed alone"
    )
    p.add_argument(
        "--samples", type=int, default=layers.SAMPLES, help="samples of each pass alone, within a quarter of a second"
    )
    p.add_argument("--kernels", action="store_true", help="also time each kernel of each pass")
    p.add_argument(
        "--peer", action="append", default=[], choices=["torch"], help="also measure the same layers in PyTorch"
    )
    p.add_argument("--torch", metavar="MODULE:NAME", help="measure a torch.nn.Module instead; or what NAME() returns")
    p.add_argument("--view", nargs="+", default=["time"], choices=[*VIEWS, "all"], help="tables to print")


def _add_model(p: argparse.ArgumentParser) -> None:
    _add_network(p)
    p.add_argument("--model", nargs="+", default=["resnet20"], help=models.CHOICES)
    p.add_argument("--batch", nargs="+", type=int, default=[32], help="samples per rank")
    p.add_argument("--precision", nargs="+", default=["fp32"], choices=PRECISIONS)


def _add_network(p: argparse.ArgumentParser) -> None:
    add_images(p)
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument(
        "--fusion",
        default="none",
        metavar="PLAN",
        help=f"how batch norms are fused: {', '.join(CHOICES)}, or a file from minidl fuse",
    )
    p.add_argument(
        "--seconds", type=float, default=3.0, help="seconds to measure whole steps for, in each way of running them"
    )
    p.add_argument(
        "--group-mb",
        type=float,
        help="largest message that layers share, in MiB; 0: one message per layer; default: as in training",
    )
    p.add_argument("--no-capture", action="store_true", help="do not measure the step as a CUDA graph")
    p.add_argument("--remeasure", action="store_true", help="measure the machine's ceilings again")
    p.add_argument(
        "--energy", action="store_true", help="measure the energy of a step and of each pass alone, with NVML"
    )
    p.add_argument(
        "--strict", action="store_true", help=f"exit with {_UNACCOUNTED} if the layers do not add up to the step"
    )
    p.add_argument("--json", metavar="PATH", help="write the result file here")
    p.add_argument("--csv", metavar="PATH", help="write the rows here, for spreadsheets")
    p.add_argument(
        "--trace", metavar="PATH", help="write a trace of the last eager step here, for Perfetto and chrome://tracing"
    )


def _add_show(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "file", metavar="FILE.json", help="a result file from bench layers, model or sweep, or from train --profile"
    )
    p.add_argument(
        "--view", nargs="+", choices=[*VIEWS, "all"],
        help="tables to print; default: time, or networks for a file with several",
    )  # fmt: skip


def _add_ceilings(p: argparse.ArgumentParser) -> None:
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    p.add_argument("--cached", action="store_true", help="show the last measurement, if there is one")
    p.add_argument("--json", metavar="PATH", help="write the record here")


# -- verbs ------------------------------------------------------------------------------------------------------------


def _layers(a: argparse.Namespace) -> int:
    _refuse(a)
    if a.torch:
        return _torch_module(a)
    comm, device, progress = _start(a)
    known = ceilings.find(backend.get_ops(device), comm, remeasure=a.remeasure, progress=progress)
    options = _options(a, device)
    common = {"options": options, "progress": progress}
    if a.layer:
        setup = {"precision": a.precision, "device": device, "ranks": comm.size}
        content = bench_layer(layer_case(a.layer, a.input), a.layer, setup, comm, known, **common)
    else:
        setup = Setup(a.model, a.batch, a.precision, device, comm.size, a.image_size, a.classes, a.fusion)
        content = bench_network(setup, comm, known, **common, **_network_options(a))
    if any(row["peers"] and row["type"] in _NORMS for row in content["rows"]):
        from minidl.bench.torch_calls import JOINT

        content["warnings"].append(JOINT)
    progress("")
    if comm.rank == 0:
        _print(a.view, content)
        _write(a, content)
    return _status(a, [content])


def _refuse(a: argparse.Namespace) -> None:
    """Options that cannot apply together are errors."""
    if a.layer and not a.input:
        raise checks.bad_value("", "--input", "the shape of the layer's input, such as 32x56x56x64", a.input)
    if a.input and not a.layer:
        raise checks.bad_value("", "--input", "left out without --layer: networks take --image-size", a.input)
    if a.torch and (a.layer or a.peer):
        raise checks.bad_value("", "--torch", "without --layer and --peer", a.torch)
    if a.precision == "tf32x3" and (a.torch or a.peer):
        name, given = ("--torch", a.torch) if a.torch else ("--peer", a.peer)
        remedy = "PyTorch has no such products; --precision fp32 measures its own"
        raise checks.bad_value("", name, "left out with --precision tf32x3", given, remedy)
    usual = parser_of("layers").get_default
    for one, others in (("layer", _OF_NETWORKS), ("torch", (*_OF_STEPS, "kernels", "energy"))):
        for other in others if getattr(a, one) else ():
            if getattr(a, other) != usual(other):
                name = other.replace("_", "-")
                raise checks.bad_value("", f"--{name}", f"left out with --{one}", getattr(a, other))


def _energy(a: argparse.Namespace) -> Energy | None:
    if not a.energy:
        return None
    meter = Meter(backend.get_ops("cuda"))
    if meter.reason is not None:
        raise ValueError(f"--energy: {meter.reason}")
    return meter.energy_per_call


def _options(a: argparse.Namespace, device: str) -> layers.Options:
    budget, peers = layers.budget_on(device, checks.at_least("", "--samples", a.samples, 2)), {}
    if a.peer:
        from minidl.bench.torch_calls import peer_ms

        peers["torch"] = partial(peer_ms, budget=budget)
    return layers.Options(a.ways, budget, a.kernels, _energy(a), peers)


def _network_options(a: argparse.Namespace) -> dict[str, Any]:
    megabytes = a.group_mb and checks.number("", "--group-mb", a.group_mb, "of at least 0", lambda v: v >= 0)
    seconds = checks.number("", "--seconds", a.seconds, "above 0", lambda v: v > 0)
    return {
        "seconds": seconds, "capture": not a.no_capture, "energy": _energy(a),
        "group_bytes": None if megabytes is None else int(megabytes * (1 << 20)),
    }  # fmt: skip


def _torch_module(a: argparse.Namespace) -> int:
    from minidl.bench.torch_table import bench_command

    content = bench_command(a)
    _print(a.view, content)
    _write(a, content)
    return 0


def _model(a: argparse.Namespace) -> int:
    if a.trace and len(a.model) * len(a.batch) * len(a.precision) > 1:
        raise checks.bad_value("", "--trace", "with one model, batch and precision", a.trace)
    for name in ("model", "batch", "precision"):
        values = getattr(a, name)
        if len(set(values)) < len(values):
            raise checks.bad_value("", f"--{name}", "a list without repetitions", " ".join(map(str, values)))
    comm, device, progress = _start(a)
    known = ceilings.find(backend.get_ops(device), comm, remeasure=a.remeasure, progress=progress)
    contents, options = [], _network_options(a)
    for model in a.model:
        for precision in a.precision:
            step = None
            for batch in a.batch:
                setup = Setup(model, batch, precision, device, comm.size, a.image_size, a.classes, a.fusion)
                step = step or new_step(setup, comm, options["group_bytes"])
                told = lambda what, setup=setup: progress(f"{setup.title} {setup.precision}: {what}" if what else "")  # noqa: E731
                contents.append(bench_network(setup, comm, known, isolated=False, progress=told, step=step, **options))
    progress("")
    if comm.rank == 0:
        content = contents[0] if len(contents) == 1 else merged(contents)
        _print(["networks"], content)
        _write(a, content)
    return _status(a, contents)


def _show(a: argparse.Namespace) -> int:
    content = load(a.file)
    if not content["rows"] or any("timings" not in row for row in content["rows"]):
        raise ValueError(f"{a.file}: a result file of {content['benchmark']}, which has no table of layers")
    _print(a.view, content, a.file)
    return 0


def _print(names: Sequence[str] | None, content: dict[str, Any], file: str = "this run") -> None:
    """The tables asked for, what could not be shown, and what one must know beside them.

    Raises:
        ValueError: when a file has none of them.
    """
    found = runs(content, file)
    names = names or [default_view(found)]
    shown, reasons = tables(found, VIEWS if "all" in names else names)
    if not shown and file != "this run":
        raise ValueError(reasons[0] + (f" (and {len(reasons) - 1} more like it)" if len(reasons) > 1 else ""))
    for table in shown:
        show(*table)
    for line in [*reasons, *footer(content)]:
        print(line)


def _ceilings(a: argparse.Namespace) -> int:
    comm, device, progress = _start(a)
    record = ceilings.find(backend.get_ops(device), comm, remeasure=not a.cached, progress=progress)
    progress("")
    if comm.rank == 0:
        show(
            f"ceilings of {record['machine']}, {record['device']}",
            ["what", "at most", "how"],
            ceilings.describe(record),
        )
        if a.json:
            write(a.json, result("ceilings", [], ceilings=record))
            print(f"wrote {a.json}")
    return 0


def _sweep(a: argparse.Namespace) -> int:
    return sweep.run(a, parser_of)


VERBS: Mapping[str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]] = {
    "layers": ("each pass of each layer: time, intensity, share of the roofline, all-reduce", _add_layers, _layers),
    "model": ("whole networks: steps, and the share of each kind of layer", _add_model, _model),
    "show": ("the tables of a result file", _add_show, _show),
    "ceilings": ("what this machine can do at most", _add_ceilings, _ceilings),
    "compare": ("two result files, row by row: SAME, FASTER, SLOWER or UNCLEAR", compare.add_arguments, compare.run),
    "sweep": ("a grid of shapes, precisions, batches and ranks", sweep.add_arguments, _sweep),
}


# -- starting and ending ----------------------------------------------------------------------------------------------


def _start(a: argparse.Namespace) -> tuple[Communicator, str, Callable[[str], None]]:
    """The ranks, their device, and a display of what is being done."""
    comm = join(a.device)
    device = device_of(a.device, comm)
    given = next((name for name in ("energy", "kernels") if getattr(a, name, False)), None)
    if device == "cpu" and given:
        raise checks.bad_value("", f"--{given}", "with a GPU", "--device cpu")
    return comm, device, _display() if comm.rank == 0 else lambda what: None


def _display() -> Callable[[str], None]:
    """What is being done, on stderr: in place on a terminal, every ten seconds elsewhere; "" ends it."""
    terminal, last = sys.stderr.isatty(), [time.monotonic()]

    def tell(what: str) -> None:
        if terminal:
            print(f"\r\033[K{what}", end="", file=sys.stderr, flush=True)
        elif what and time.monotonic() - last[0] >= 10:
            last[0] = time.monotonic()
            print(f"measuring {what}", file=sys.stderr, flush=True)

    return tell


def _write(a: argparse.Namespace, content: dict[str, Any]) -> None:
    """The files asked for."""
    if a.json:
        write(a.json, content)
        print(f"wrote {a.json}")
    if a.csv:
        write_csv(a.csv, content)
        print(f"wrote {a.csv}")
    if a.trace:
        write_trace(a.trace, content)
        print(f"wrote {a.trace}")


def _status(a: argparse.Namespace, contents: list[dict[str, Any]]) -> int:
    unclosed = any("account for only" in text for content in contents for text in content["warnings"])
    return _UNACCOUNTED if a.strict and unclosed else 0
