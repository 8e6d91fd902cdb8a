"""``minidl prune``: ``minidl train`` with masks that grow, then what is left as a smaller network or a smaller file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from minidl import checkpoint, checks, models, training
from minidl.data import Loader
from minidl.graph import Graph
from minidl.loss import SoftmaxCrossEntropy, Sums
from minidl.model import Model
from minidl.optim import SGD
from minidl.profile.tables import show
from minidl.shapes import ceil_div
from minidl.sparse import (
    CubicSchedule,
    Granularity,
    Pruning,
    SharedSGD,
    pruned,
    save_compressed,
    sensitivity,
    share_weights,
    shrink,
    sparse_state,
    to_sparse,
)
from minidl.sparse.compress import require_libraries
from minidl.train import Trainer

_SCANNED = (0.5, 0.7, 0.8, 0.9, 0.95)  # sparsities
_COMPRESSING = {"clusters": 32, "share_epochs": 2}


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl prune``: those of ``minidl train`` and its own."""
    training.add_arguments(p)
    p.usage, p.epilog = "minidl prune [options]", None
    p.add_argument("--sparsity", type=float, default=0.9, help="fraction of weights that are zero in the end")
    p.add_argument(
        "--granularity",
        default="weight",
        help="weight, kernel, filter, filter:8 (keep a multiple), layer, block:8x4, 2:4 (of 4 inputs)",
    )
    p.add_argument(
        "--scope",
        choices=["layer", "global"],
        help="reach the sparsity in each layer or over all; default: layer, for --granularity layer global",
    )
    p.add_argument("--include", nargs="+", default=["*"], metavar="PATTERN", help="prune only these weights")
    p.add_argument("--exclude", nargs="+", default=[], metavar="PATTERN", help="do not prune these weights")
    p.add_argument("--prune-begin", type=float, default=0.0, metavar="EPOCH", help="epoch in which pruning begins")
    p.add_argument(
        "--prune-end", type=float, metavar="EPOCH", help="epoch in which the sparsity is reached; default: half-way"
    )
    p.add_argument(
        "--prune-every", type=int, default=20, metavar="STEPS", help="steps from one change of the masks to the next"
    )
    p.add_argument(
        "--scan",
        action="store_true",
        help="only report how much pruning each part of the network tolerates, without training",
    )
    p.add_argument("--compress", action="store_true", help="also share weights and write OUTPUT/model.mdz")
    p.add_argument(
        "--clusters", type=int, help="with --compress: number of values that the weights of a layer share; default: 32"
    )
    p.add_argument(
        "--share-epochs", type=int, help="with --compress: further epochs that train the shared values; default: 2"
    )
    p.set_defaults(output="runs/prune")


def plan_of(a: argparse.Namespace, samples: int) -> Pruning:
    """What the options ask for, with an epoch of so many samples."""
    steps_per_epoch = ceil_div(samples, checks.at_least("", "--batch", a.batch, 1))
    end = _end(a)
    if not 0 <= a.prune_begin <= end <= a.epochs:
        expected = f"from --prune-begin ({a.prune_begin:g}) to --epochs ({a.epochs})"
        raise checks.bad_value("", "--prune-end", expected, end)
    first, last = (max(round(epoch * steps_per_epoch), 1) for epoch in (a.prune_begin, end))
    good = "in [0, 1), such as 0.9 for 90 %"
    sparsity = checks.number("", "--sparsity", a.sparsity, good, lambda value: 0 <= value < 1)
    schedule = CubicSchedule(sparsity, first, last, frequency=a.prune_every)
    scope = a.scope or ("global" if a.granularity == "layer" else "layer")
    return Pruning(schedule, a.include, a.exclude, granularity=a.granularity, scope=scope)


def _end(a: argparse.Namespace) -> float:
    """The epoch in which the sparsity is reached."""
    return a.epochs / 2 if a.prune_end is None else a.prune_end


class _Pruning(training.Training):
    """Training with masks that grow."""

    rate_share = 0.5

    def optimizer(self, kind: type[SGD], model: Model, a: argparse.Namespace, samples: int, **options: Any) -> SGD:
        """An optimizer of this kind that prunes as the options say.

        Raises:
            ValueError: options that do not go together.
            ImportError: with ``--compress``, a library that it will need is not installed.
        """
        if a.average is not None:
            raise ValueError("--average is for minidl train: averages of pruned weights are not pruned")
        if a.shard_momentum:
            raise ValueError("--shard-momentum is for minidl train: pruning needs the whole momentum on each rank")
        if a.compress:
            share_weights({}, a.clusters)  # refuses the number at the door, and not after the training
            require_libraries()
        checks.at_least("", "--share-epochs", a.share_epochs, 0)
        return pruned(kind)(model, a.lr, pruning=plan_of(a, samples), **options)

    def settings(self, optimizer: SGD) -> dict[str, Any]:
        return {"pruning": repr(optimizer.pruning)}

    def kept(self, a: argparse.Namespace) -> str:
        return f" --prune-end {_end(a):g}" if a.prune_end is None else ""

    def fit(self, trainer: Trainer, a: argparse.Namespace) -> dict[str, float] | None:
        if not a.scan:
            return trainer.fit()
        scan(trainer, a)
        return None


def run(a: argparse.Namespace) -> int:
    """Train and prune as the options say, and make of the result what they ask for; the exit status."""
    _refuse(a)
    _, trainer = training.trained(a, _Pruning())
    if trainer.stopped is None and not a.scan:
        finish(trainer, a)
    return training.status(trainer)


def _refuse(a: argparse.Namespace) -> None:
    """Options that cannot apply are errors; those of compressed files get their usual values."""
    if a.scan and a.compress:
        raise checks.bad_value("", "--compress", "left out with --scan, which trains nothing", True)
    if a.scan and a.start is None and a.resume is None:
        raise ValueError("--scan needs --start, the network to look at")
    for name, usual in _COMPRESSING.items():
        given = getattr(a, name)
        if given is not None and not a.compress:
            raise checks.bad_value("", f"--{name.replace('_', '-')}", "left out without --compress", given)
        setattr(a, name, usual if given is None else given)


def accuracy(model: Model, loader: Loader) -> float:
    """The fraction of a loader's labels that the model, in evaluation mode, gets right; over all ranks."""
    loss, sums = SoftmaxCrossEntropy(comm=model.comm), Sums()
    model.eval()
    for batch in loader:
        sums = sums.plus(loss.forward(model.forward(batch.images, grad=False), batch.labels, grad=False).read())
    return sums.accuracy


def scan(trainer: Trainer, a: argparse.Namespace) -> None:
    """What the test accuracy becomes when one part alone is pruned, by magnitude and without training; a collective."""
    unit = Granularity.parse(a.granularity)
    levels = {"n:m": (unit.most,), "layer": (1.0,)}.get(unit.kind, _SCANNED)
    found = sensitivity(
        trainer.model, trainer.optimizer.pruning, lambda: 1 - accuracy(trainer.model, trainer.test_loader),
        levels if unit.kind != "layer" else (),
    )  # fmt: skip
    if trainer.comm.rank:
        return
    scores: dict[str, list[str]] = {}
    for one in found:
        scores.setdefault(one.part, []).append(f"{1 - one.score:.4f}")
    title = f"test accuracy with one part pruned; with none {1 - found[0].before:.4f}"
    show(title, ["part", *(f"{level:.0%}" for level in levels)], [[part, *row] for part, row in scores.items()])


def finish(trainer: Trainer, a: argparse.Namespace) -> None:
    """Tell what was pruned, and make of it what the granularity and the options allow; a collective."""
    told = print if trainer.comm.rank == 0 else lambda *_: None
    if trainer.comm.rank == 0:
        _show(trainer.optimizer)
    if Granularity.parse(a.granularity).kind in ("filter", "layer"):
        told(_shrunk(trainer, a))
    else:
        told(_sparse(trainer, a))
    if a.compress:
        told(_compressed(trainer, a))


def _show(optimizer: Any) -> None:
    masks = {name: mask for name, mask in optimizer.masks().items() if mask.ndim > 1}
    rows = [[name, "x".join(map(str, mask.shape)), f"{mask.size:,}", f"{mask.sum():,}", f"{1 - mask.mean():.3f}"]
            for name, mask in masks.items()]  # fmt: skip
    size, left = sum(mask.size for mask in masks.values()), sum(int(mask.sum()) for mask in masks.values())
    note = f"all of these: {left:,} of {size:,} weights left, {1 - left / max(size, 1):.1%} dropped"
    show("pruned weights", ["weight", "shape", "weights", "left", "sparsity"], rows, notes=[note])


def _graph(trainer: Trainer, a: argparse.Namespace) -> Graph:
    """The network once more, without a model."""
    old = trainer.model.graph
    return models.build(a.model, old.nodes[0].shape, old.output_node.shape[-1], **training.model_options(a))


def _model(trainer: Trainer, graph: Graph) -> Model:
    old = trainer.model
    return Model(graph, device=old.ops.name, precision=old.precision, comm=old.comm, seed=old.random.seed)


def _shrunk(trainer: Trainer, a: argparse.Namespace) -> str:
    """Cut out what is zero, look at it on the test set, and write it."""
    state = trainer.model.state_dict()
    graph, cut = shrink(_graph(trainer, a), state)
    small = _model(trainer, graph)
    small.load_state_dict(cut.state(state))
    reached, path = accuracy(small, trainer.test_loader), Path(a.output) / "shrunk.safetensors"
    before, after = (_flop(model.graph) for model in (trainer.model, small))
    if trainer.comm.rank == 0:
        checkpoint.save(path, small.state_dict(), {"model": a.model, "test_accuracy": reached})
    return (
        f"shrunk: {small.num_parameters:,} of {trainer.model.num_parameters:,} parameters, {after / before:.1%} of the "
        f"forward FLOP, {len(cut.dropped)} layers gone, test accuracy {reached:.4f}; wrote {path}"
    )


def _flop(graph: Graph) -> int:
    return sum(cost.forward.flop for _, cost in graph.costs(1))


def _sparse(trainer: Trainer, a: argparse.Namespace) -> str:
    """Put sparse layers where they can stand, and look at the result on the test set."""
    graph, state = _graph(trainer, a), trainer.model.state_dict()
    replaced = to_sparse(graph, state, {k: v for k, v in trainer.optimizer.masks().items() if v.ndim > 1})
    if not replaced:
        return "no layer is sparse enough, or of a kind, to become a sparse one: weights stay dense with zeros"
    sparse = _model(trainer, graph)
    sparse.load_state_dict(sparse_state(graph, state))
    reached = accuracy(sparse, trainer.test_loader)
    return f"as Compressed Sparse Blocks: {', '.join(replaced)}; test accuracy {reached:.4f}"


def _compressed(trainer: Trainer, a: argparse.Namespace) -> str:
    """Share the weights, train what they share for some epochs, and write the file."""
    model, loader = trainer.model, trainer.train_loader
    weights = {name: value for name, value in model.state_dict().items() if value.ndim > 1}
    shared = model.comm.share(share_weights(weights, a.clusters) if model.comm.rank == 0 else None)[0]
    rate = a.lr / 100
    tuned = SharedSGD(model, rate, 0.9, weight_decay=a.weight_decay, decay_norm_and_bias=False, shared=shared)
    epochs = loader.epoch + a.share_epochs
    if a.share_epochs:
        options = {"schedule": lambda step: rate, "epochs": epochs, "compile": False}
        Trainer(model, tuned, trainer.loss, loader, **options).fit()
    reached, path = accuracy(model, trainer.test_loader), Path(a.output) / "model.mdz"
    text = ""
    if model.comm.rank == 0:
        report = save_compressed(path, model.state_dict())
        text = f"{report.before:,} to {report.file:,} bytes, {report.ratio:.1f} times smaller"
    return f"wrote {path}: {text}, test accuracy {reached:.4f}"
