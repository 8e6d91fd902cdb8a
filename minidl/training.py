"""``minidl train``: its options, and the model, the loaders and the trainer that they make."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from minidl import checks, data, dist, models, schedule
from minidl.adaptive import LAMB, LARS, AdamW
from minidl.average import WeightAverage
from minidl.backend import get_ops
from minidl.bench import warm
from minidl.bench.setup import device_of, join
from minidl.bench.training import TrainingProfile
from minidl.callbacks import Callback, EarlyStop, KeepBest, TensorBoard
from minidl.fusion import CHOICES, fuse
from minidl.graph import Graph
from minidl.interchange import import_weights
from minidl.loss import SoftmaxCrossEntropy
from minidl.memory import LimitedMemory, limit_memory
from minidl.memory.limited import FUSIONS
from minidl.metrics import Confusion, TopK
from minidl.model import Model
from minidl.optim import SGD
from minidl.precision import Precision, precision
from minidl.sharded import ShardedSGD
from minidl.train import Trainer

_OPTIMIZERS = {"sgd": SGD, "adamw": AdamW, "lars": LARS, "lamb": LAMB}
_RATES = {"sgd": 0.1, "adamw": 0.001, "lars": 1.0, "lamb": 0.01}
_WITH_MOMENTUM = ("sgd", "lars")
_TEST_SHARE = 10  # synthetic test images: one for so many training images
_MANY_CLASSES = 100  # from here on the first five guesses are usually told
_EXAMPLES = """examples:
  minidl train                                       ResNet-20 on handwritten digits, a minute on a laptop
  minidl train --epochs 60 --resume                  continue it for another 30 epochs
  minidl train --config scripts/unet_coins.toml      a recipe; the command line wins over the file
  mpirun -n 4 minidl train --model resnet50 --data folder --data-path DIR --precision bf16 --batch 1024 --lr 0.4
"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """The options of ``minidl train``."""
    p.usage, p.epilog = "minidl train [options]", _EXAMPLES
    p.add_argument("--config", metavar="FILE", help="read options from a TOML file; the command line wins")
    _add_network(p.add_argument_group("network and data"))
    _add_learning(p.add_argument_group("learning"))
    _add_speed(p.add_argument_group("speed and memory"))
    _add_output(p.add_argument_group("output"))


def _add_network(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--model", default="resnet20", help=models.CHOICES)
    p.add_argument(
        "--model-options", metavar="TEXT", help="arguments of the network, such as 'width=16 depth=3' for unet"
    )
    start = "a checkpoint, an output folder or a PyTorch safetensors file; layers of another size start anew"
    p.add_argument("--start", metavar="PATH", help=f"start from the weights of {start}")
    p.add_argument(
        "--freeze", nargs="+", default=[], metavar="PATTERN", help="do not train these weights: 'conv1.*' 'layer1.*'"
    )
    sets = f"one of {', '.join(data.datasets())}, or MODULE:FUNCTION of your own"
    p.add_argument("--data", default="digits", help=sets)
    p.add_argument("--data-path", metavar="DIR", help="folder with the files of the data set")
    p.add_argument(
        "--loader", default="threads", choices=["threads", "dali"], help="dali: decode image folders with NVIDIA DALI"
    )
    p.add_argument(
        "--image-size", type=int, metavar="PIXELS", help="side of the images, for synthetic, coins and folder"
    )
    p.add_argument("--classes", type=int, help="number of classes, for synthetic")
    p.add_argument("--samples", type=int, help="number of training samples, for synthetic")
    p.add_argument(
        "--augment",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="augment training images as is usual for the data set",
    )
    p.add_argument(
        "--color-jitter",
        type=float,
        metavar="STRENGTH",
        help="vary brightness, contrast and saturation of training images",
    )
    p.add_argument(
        "--mixup", type=float, metavar="ALPHA", help="mix pairs of images and their labels (MixUp); 0.2 is usual"
    )
    p.add_argument("--workers", type=int, default=1, help="threads that load and prepare batches")


def _add_learning(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--epochs", type=int, default=30, help="number of epochs, including those before --resume")
    p.add_argument("--batch", type=int, default=64, help="samples in a step, over all ranks")
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in _RATES.items())
    p.add_argument(
        "--lr", type=float, help=f"learning rate after warm-up; default: {rates}; minidl prune: half of that"
    )
    p.add_argument(
        "--schedule",
        default="cosine",
        help="learning rate over time: constant, cosine, poly:POWER, onecycle, or step:30,60,80 (epochs)",
    )
    p.add_argument(
        "--warmup",
        type=float,
        metavar="EPOCHS",
        help="linear warm-up of the learning rate; default: 1, or 0.1 if there is only one epoch",
    )
    p.add_argument("--optimizer", default="sgd", choices=list(_OPTIMIZERS), help="how weights are updated")
    p.add_argument("--momentum", type=float, help="for sgd and lars; default: 0.9")
    p.add_argument(
        "--weight-decay", type=float, default=5e-4, help="weight decay; biases and normalisation layers have none"
    )
    p.add_argument(
        "--label-smoothing", type=float, default=0.0, help="fraction of each label that is spread over all classes"
    )
    p.add_argument(
        "--average",
        type=float,
        metavar="DECAY",
        help="evaluate an exponential moving average of the weights; 0.9999 is usual",
    )
    p.add_argument("--clip-norm", type=float, help="clip the norm of all gradients together to this value")
    p.add_argument(
        "--sync-batch-norm", action="store_true", help="batch norms use the statistics of all ranks together"
    )
    p.add_argument(
        "--seed", type=int, default=0, help="seed of starting weights, sample order, augmentation and dropout"
    )
    p.add_argument(
        "--patience", type=int, metavar="EPOCHS", help="stop when the test loss has not improved for this many epochs"
    )


def _add_speed(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: a GPU if there is one")
    p.add_argument("--precision", default="fp32", help="fp32, bf16 or fp16; on GPUs also tf32 and tf32x3")
    p.add_argument(
        "--watch-gradients", action="store_true", help="report which rank and layer makes the first NaN; slow"
    )
    p.add_argument("--eager", action="store_true", help="run steps kernel by kernel instead of as a CUDA graph")
    plans = f"{', '.join(CHOICES)}, or a file from minidl fuse; default: auto on a GPU, the fastest with --memory-limit"
    p.add_argument("--fusion", metavar="PLAN", help=f"how batch norms are fused: {plans}")
    p.add_argument(
        "--accumulate", type=int, default=1, help="cut each step into this many micro-batches, to save memory"
    )
    p.add_argument(
        "--memory-limit",
        metavar="LIMIT",
        help="train within this GPU memory: 8GB, 7.5GiB, or 25%% of what a step needs",
    )
    p.add_argument(
        "--gradients", default="keep", choices=["keep", "ring", "momentum"],
        help="ring: update within the backward pass and hold the gradients of a few layers at a time; momentum: add "
        "gradients to sgd's momentum right away, so that they need no memory",
    )  # fmt: skip
    p.add_argument(
        "--host-momentum", action="store_true",
        help="with --memory-limit and --gradients ring: keep the momentum of large layers in host memory",
    )  # fmt: skip
    p.add_argument(
        "--message-dtype",
        default="fp32",
        choices=["fp32", "bf16"],
        help="type of gradients on their way between ranks; bf16 halves their size",
    )
    p.add_argument("--shard-momentum", action="store_true", help="each rank keeps only its part of the momentum")
    p.add_argument(
        "--elastic", action="store_true",
        help="if a rank is lost, the others continue from the newest checkpoint (experimental; CPU ranks, Open MPI)",
    )  # fmt: skip


def _add_output(p: argparse._ArgumentGroup) -> None:
    p.add_argument("--output", default="runs/train", metavar="DIR", help="folder for metrics and checkpoints")
    p.add_argument(
        "--resume",
        nargs="?",
        const="",
        metavar="PATH",
        help="continue from a checkpoint; without PATH from the newest in the output folder",
    )
    p.add_argument("--keep", type=int, default=2, help="number of newest checkpoints to keep")
    p.add_argument(
        "--keep-best", nargs="?", const="test_accuracy", metavar="METRIC",
        help="also keep the best epoch as best.safetensors, by test_accuracy or another column of metrics.csv",
    )  # fmt: skip
    p.add_argument("--tensorboard", action="store_true", help="write TensorBoard event files to OUTPUT/tensorboard")
    p.add_argument(
        "--profile", action="store_true", help="measure each layer during the run and write OUTPUT/profile.json"
    )
    p.add_argument(
        "--profile-every", type=int, metavar="STEPS", help="steps from one profiled step to the next; default: 50"
    )


def _optimizer(model: Model, a: argparse.Namespace, verb: Training, samples: int) -> SGD:
    """The optimizer that the options name; one that they cannot apply to is refused."""
    options = {"weight_decay": a.weight_decay, "decay_norm_and_bias": False, "clip_norm": a.clip_norm}
    if a.optimizer in _WITH_MOMENTUM:
        options["momentum"] = _momentum(a)
    elif a.momentum is not None:
        raise ValueError(f"--momentum is for {' and '.join(_WITH_MOMENTUM)}, not for {a.optimizer}")
    if a.shard_momentum and a.optimizer != "sgd":
        raise ValueError(f"--shard-momentum is for sgd, not for {a.optimizer}")
    kind = ShardedSGD if a.shard_momentum else _OPTIMIZERS[a.optimizer]
    return verb.optimizer(kind, model, a, samples, **options)


def _momentum(a: argparse.Namespace) -> float:
    return 0.9 if a.momentum is None else a.momentum


def _profile(a: argparse.Namespace) -> TrainingProfile | None:
    if a.profile_every is not None and not a.profile:
        raise ValueError("--profile-every is for --profile")
    every = {} if a.profile_every is None else {"every": a.profile_every}
    return TrainingProfile(Path(a.output) / "profile.json", **every) if a.profile else None


class Training:
    """What ``minidl train`` does where another verb that trains may do something else."""

    rate_share = 1.0  # of the usual learning rate, where none is given

    def optimizer(self, kind: type[SGD], model: Model, a: argparse.Namespace, samples: int, **options: Any) -> SGD:
        """One of this kind, for a training set of so many samples."""
        return kind(model, a.lr, **options)

    def settings(self, optimizer: SGD) -> dict[str, Any]:
        """What a run must share with the checkpoint that it goes on from, beside the options."""
        return {"pruning": None}

    def kept(self, a: argparse.Namespace) -> str:
        """Options to add, whose defaults follow --epochs, where more epochs are to go on with this run."""
        return ""

    def fit(self, trainer: Trainer, a: argparse.Namespace) -> dict[str, float] | None:
        """The last epoch's figures; None where nothing was trained, and nothing is to be told."""
        return trainer.fit()


def run(a: argparse.Namespace) -> int:
    """Train as the options say; the exit status."""
    return status(trained(a)[1])


def status(trainer: Trainer) -> int:
    """The exit status, as shells report a signal."""
    return 0 if trainer.stopped is None else 128 + trainer.stopped


def _data_sets(a: argparse.Namespace) -> tuple[Any, Any]:
    """Training and test set; options only where they apply."""
    if data.needs_path(a.data) and a.data_path is None:
        raise ValueError(f"--data {a.data} needs --data-path DIR, the folder of its files")
    given = lambda value, default: default if value is None else value  # noqa: E731  (0 is refused, not replaced)
    options: dict[str, Any] = {}
    sizes: tuple[dict[str, int], dict[str, int]] = ({}, {})
    if a.data == "synthetic":
        size, samples = given(a.image_size, 32), given(a.samples, 2048)
        sizes = {"n": samples}, {"n": max(samples // _TEST_SHARE, 1)}
        shape, classes = (size, size, 3), given(a.classes, 10)
        output = models.build(a.model, shape, classes, **model_options(a)).output_node.shape
        options = {"shape": shape, "num_classes": classes, "seed": a.seed}
        options["task"] = "segmentation" if len(output) == 3 else "classification"
    elif a.data == "folder":
        options = {"size": given(a.image_size, 224)}
    elif a.data == "coins" and a.image_size is not None:
        options = {"size": a.image_size}
    taken = {"synthetic": ("image_size", "classes", "samples"), "folder": ("image_size",), "coins": ("image_size",)}
    for name in ("image_size", "classes", "samples"):
        if getattr(a, name) is not None and name not in taken.get(a.data, ()):
            fits = " or ".join(data_set for data_set, names in taken.items() if name in names)
            raise ValueError(f"--{name.replace('_', '-')} is for --data {fits}, not for {a.data}")
    return tuple(
        data.dataset(a.data, a.data_path, split, **options, **n)
        for split, n in zip(("train", "test"), sizes, strict=True)
    )


def train(a: argparse.Namespace) -> dict[str, float]:
    """``minidl train`` with parsed options, on every rank; the last epoch's figures, named as in metrics.csv."""
    return trained(a)[0]


_PLAIN = Training()


def trained(a: argparse.Namespace, verb: Training = _PLAIN) -> tuple[dict[str, float], Trainer]:
    """Train, and with ``--elastic`` again with the ranks that are left: from the newest checkpoint of this run, or from
    where it began.
    """
    begun, others = a.resume, set() if a.resume == "" else _checkpoints(a)
    while True:
        try:
            return _trained_once(a, verb)
        except dist.RankLost as lost:
            told = str(lost)
        comm = dist.shrink()
        there = comm.share(bool(_checkpoints(a) - others), "whether there is a checkpoint")[0]
        a.resume = "" if there else begun
        if comm.rank == 0:
            where = "anew" if a.resume is None else f"from {a.resume or 'the newest checkpoint'}"
            print(f"minidl {a.verb}: {told.partition(';')[0]}; {where}", file=sys.stderr)


def _checkpoints(a: argparse.Namespace) -> set[tuple[Path, int]]:
    """Those in the output folder, and when they were written: what another run has left there is none of this one."""
    return {(path, path.stat().st_mtime_ns) for path in Path(a.output).glob("checkpoint-*")}


def _trained_once(a: argparse.Namespace, verb: Training) -> tuple[dict[str, float], Trainer]:
    checks.at_least("", "--epochs", a.epochs, 1)
    if not a.output:
        raise checks.bad_value("", "--output", "a folder", a.output, "'.' is this one")
    a.lr = verb.rate_share * _RATES[a.optimizer] if a.lr is None else a.lr
    comm = join(a.device, elastic=a.elastic)
    device = device_of(a.device, comm)
    train_set, test_set = _data_sets(a)
    model, optimizer, memory = _prepared(a, verb, comm, device, train_set)
    loaders = _loaders(a, train_set, test_set, comm, get_ops(device), model.precision.storage)
    trainer = _trainer(a, verb, model, optimizer, loaders, _metrics(train_set, comm), _profile(a))
    if a.resume is not None:
        trainer.resume(a.resume or a.output)
    if comm.rank == 0:
        _tell_start(a, trainer, len(train_set), memory)
    row = verb.fit(trainer, a)
    if row is not None and comm.rank == 0:
        _finish(a, row, trainer, verb.kept(a))
    return row or {}, trainer


def _prepared(
    a: argparse.Namespace, verb: Training, comm: Any, device: str, train_set: Any
) -> tuple[Model, SGD, LimitedMemory | None]:
    """The model, fused and with its kernels compiled, what updates it, and within which memory."""
    choosing = a.fusion is None and a.memory_limit is not None and device == "cuda"
    a.fusion = a.fusion or ("auto" if device == "cuda" else "none")
    mode = precision(a.precision)
    shape, options = tuple(train_set[0][0].shape), model_options(a)
    network = partial(models.build, a.model, shape, train_set.num_classes, **options)
    if device == "cuda" and not choosing:
        _compile_ahead(a, network(), comm)
    model = Model(
        network(), device=device, precision=mode, comm=comm, seed=a.seed, message_dtype=a.message_dtype, frozen=a.freeze
    )
    if a.start is not None:
        _begin(model, a.start)
    part = -(-a.batch // (comm.size * max(a.accumulate, 1)))
    fuse(model, a.fusion, batch=part, progress=partial(print, file=sys.stderr, flush=True))
    optimizer = _optimizer(model, a, verb, len(train_set))
    if a.gradients == "ring":
        optimizer.update_in_backward()
    elif a.gradients == "momentum":
        optimizer.gradients_in_momentum()
    memory = _limited(a, model, optimizer, part, FUSIONS if choosing else ())
    if choosing:
        a.fusion = model.fusion
        _compile_ahead(a, network(), comm)
    return model, optimizer, memory


def _begin(model: Model, path: str) -> None:
    """Start from the weights of a file; a network of other layers is refused."""
    report = import_weights(model, path, strict=False)
    if report.missing or report.unexpected:
        raise ValueError(f"--start {path}: weights do not fit the model: {report}")
    if report.mismatched and model.comm.rank == 0:
        print(f"--start {path}: {report}; what is mismatched begins anew", flush=True)


def _trainer(
    a: argparse.Namespace, verb: Training, model: Model, optimizer: SGD, loaders: tuple[data.Loader, data.Loader],
    metrics: dict[str, Any], profile: TrainingProfile | None,
) -> Trainer:  # fmt: skip
    steps = len(loaders[0])
    rate = schedule.parse(a.schedule, lr=a.lr, epochs=a.epochs, steps_per_epoch=steps, warmup=a.warmup)
    settings = _settings(a, model.precision) | verb.settings(optimizer)
    return Trainer(
        model, optimizer, SoftmaxCrossEntropy(comm=model.comm, label_smoothing=a.label_smoothing), *loaders,
        schedule=rate, epochs=a.epochs, output=a.output, keep=a.keep, profile=profile,
        compile=False if a.eager else None, accumulate=a.accumulate, metrics=metrics, callbacks=_callbacks(a),
        watch_gradients=a.watch_gradients, settings=settings,
        average=None if a.average is None else WeightAverage(model, a.average),
    )  # fmt: skip


def _tell_start(a: argparse.Namespace, trainer: Trainer, images: int, memory: LimitedMemory | None) -> None:
    """The first line: what is trained, on what, by whom."""
    model, comm = trainer.model, trainer.comm
    ranks = f"{comm.size} rank{'s' * (comm.size > 1)} ({comm.name}, {model.ops.name})"
    network = f"{a.model}: {model.num_parameters:,} parameters, {model.precision.name}"
    parts = f"; with {trainer.parts}" if trainer.parts else ""
    print(f"{network}; {a.data}: {images:,} images; {ranks}{parts}", flush=True)
    if memory is not None:
        print(f"memory: {memory.describe()}", flush=True)


def _limited(
    a: argparse.Namespace, model: Model, optimizer: SGD, part: int, fusions: Sequence[str]
) -> LimitedMemory | None:
    """The memory that the options ask for, for steps of ``part`` samples."""
    if a.host_momentum and (a.memory_limit is None or a.gradients != "ring"):
        raise ValueError("--host-momentum is for steps with --memory-limit and --gradients ring")
    if a.memory_limit is None:
        return None
    if model.ops.name == "cpu":
        raise ValueError("--memory-limit is for GPUs; this run is on the CPU")
    other = a.optimizer if a.optimizer != "sgd" else "mixed images" if a.mixup is not None else None
    if other or a.average is not None:
        raise ValueError(f"--memory-limit plans steps of sgd, not of {other or 'averaged weights'}")
    options = {"momentum": _momentum(a), "optimizer": optimizer if a.host_momentum else None, "fusions": fusions}
    return limit_memory(model, part, a.memory_limit, **options)


def model_options(a: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the network from ``width=16 depth=3``."""
    return models.parse_options(a.model_options) | ({"sync_batch_norm": True} if a.sync_batch_norm else {})


def _loaders(
    a: argparse.Namespace, train_set: Any, test_set: Any, comm: Any, ops: ModuleType, dtype: Any
) -> tuple[data.Loader, data.Loader]:
    augment = getattr(train_set, "augment", None) if a.augment else None
    if a.color_jitter is not None:
        jitter = data.ColorJitter(a.color_jitter, a.color_jitter, a.color_jitter)
        augment = data.Compose(*([augment] if augment else []), jitter)
    mix = data.MixUp(train_set.num_classes, a.mixup) if a.mixup is not None else None

    def loader(dataset: Any, **options: Any) -> data.Loader:
        options |= {"rank": comm.rank, "size": comm.size, "seed": a.seed, "workers": a.workers, "dtype": dtype}
        if a.loader == "dali":
            return data.DaliLoader(dataset, a.batch, device=ops.name, **options)
        # Bytes travel to a GPU, which normalises in no time; on the CPU the loader's threads do.
        normalise = ops.normalise if ops.name == "cuda" else None
        return data.Loader(dataset, a.batch, transfer=ops.uploader(), normalise=normalise, **options)

    return loader(train_set, shuffle=True, augment=augment, mix=mix), loader(test_set, shuffle=False)


def _metrics(train_set: Any, comm: Any) -> dict[str, Any]:
    """What is usual beside loss and accuracy: IoU where pixels have labels, the first five where classes are many."""
    if np.ndim(train_set[0][1]):
        return {"iou": Confusion(comm=comm)}
    return {"top5": TopK(5, comm=comm)} if train_set.num_classes >= _MANY_CLASSES else {}


def _callbacks(a: argparse.Namespace) -> list[Callback]:
    found: list[Callback] = [KeepBest(a.keep_best)] if a.keep_best is not None else []
    if a.patience is not None:
        found.append(EarlyStop(patience=a.patience))
    return [*found, TensorBoard()] if a.tensorboard else found


def _settings(a: argparse.Namespace, mode: Precision) -> dict[str, Any]:
    """What a run must share with the checkpoint that it goes on from; None of an option that is left out, too."""
    names = ("model", "data", "batch", "augment", "model_options", "color_jitter", "mixup", "optimizer", "average")
    settings = {name: getattr(a, name) for name in names} | {"precision": mode.name}
    return settings | {"accumulate": a.accumulate if a.accumulate > 1 else None}


def _compile_ahead(a: argparse.Namespace, graph: Graph, comm: Any) -> None:
    batch = -(-a.batch // (comm.size * max(a.accumulate, 1)))
    built = warm.compile_for_ranks(graph, batch, a.precision, a.fusion, comm)
    if built and built.missing and comm.rank == 0:
        print(f"compiled {built.missing} of {built.kernels} kernels in {built.compile_s:.1f} s", flush=True)


def _finish(a: argparse.Namespace, row: dict[str, float], trainer: Trainer, kept: str) -> None:
    """The last lines: the figure, what was written, what to try next."""
    if trainer.stopped is not None:
        print(f"stopped by {trainer.stopped.name} after step {trainer.step}; the same with --resume goes on")
        return
    if not row and trainer.ended is not None:
        print(f"nothing left to do: {trainer.ended}; raise --patience to go on")
        return
    if not row:
        at = f"{a.output} is at epoch {trainer.train_loader.epoch}"
        print(f"nothing left to do: {at}; raise --epochs to go on{kept and f', with{kept}'}")
        return
    if trainer.ended is not None:
        print(f"ended after epoch {row['epoch'] + 1}: {trainer.ended}")
    for name in ("test_accuracy", *trainer.metrics):
        print(f"{name.replace('_', ' ')} {row[name]:.4f}")
    print(f"wrote {Path(a.output) / 'metrics.csv'}, metrics.jsonl and checkpoints beside them")
    profile = trainer.profile
    if isinstance(profile, TrainingProfile):
        print(f"wrote {profile.path}: minidl bench show, minidl plot" if profile.written else profile.too_short)
    predict = f"minidl predict {a.output} IMAGES applies the network"
    print(f"next: the same with --epochs {2 * a.epochs}{kept} --resume trains on; {predict}")
