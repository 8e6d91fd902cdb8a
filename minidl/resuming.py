"""What of a `minidl.train.Trainer` its checkpoints hold, and how it goes on from one, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from minidl import checkpoint
from minidl.dist.agree import require_same, require_same_arrays
from minidl.loss import Sums
from minidl.segments import by_name


def held(trainer: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """(tensors by name, JSON state) of a trainer, after the collectives that bring them together on this rank."""
    tensors = {f"model.{k}": v for k, v in trainer.model.state_dict().items()}
    tensors |= {f"optimizer.{k}": v for k, v in trainer.optimizer.state_dict().items()}
    if trainer.average is not None:
        tensors |= {f"average.{k}": v for k, v in trainer.average.state_dict().items()}
    state = _places(trainer) | {
        "settings": trainer.settings,
        "sums": list(trainer.sums),
        "task": _task(trainer),
        "callbacks": {callback.key: callback.state() for callback in trainer.callbacks},
    }
    return tensors, state


def _task(trainer: Any) -> dict[str, Any]:
    """What the network is for, which `minidl.predict` goes by."""
    model = trainer.model
    outputs = model.graph.output_node.shape[-1]
    return trainer.train_loader.recipe() | {"outputs": outputs, "precision": model.precision.name}


def _places(trainer: Any) -> dict[str, Any]:
    """Where training stands."""
    random = trainer.model.random
    return {
        "step": trainer.step,
        "random": {"seed": random.seed, "step": random.step},
        "loader": trainer.train_loader.state(),
    }


def restore(trainer: Any, path: Path) -> None:
    """Give a trainer what `held` took of one like it; a collective.

    Raises:
        FileNotFoundError, ValueError: as `minidl.train.Trainer.resume`.
    """
    tensors, state = checkpoint.load(path)
    _require_fitting(path, tensors, state, trainer)
    trainer.model.load_state_dict(checkpoint.part(tensors, "model"))
    trainer.optimizer.load_state_dict(checkpoint.part(tensors, "optimizer"))
    if trainer.average is not None:
        trainer.average.load_state_dict(checkpoint.part(tensors, "average"))
    trainer.train_loader.restore(state["loader"])
    trainer.step, random = state["step"], trainer.model.random
    trainer.sums = Sums(*state.get("sums", ()))
    random.seed, random.step = state["random"]["seed"], state["random"]["step"]
    kept = state.get("callbacks", {})
    for callback in trainer.callbacks:
        if kept.get(callback.key):
            callback.restore(kept[callback.key])
    agree(trainer)


def _require_fitting(path: Path, tensors: Mapping[str, Any], state: Mapping[str, Any], trainer: Any) -> None:
    """Refuse what is no trainer's, or a run's with other settings, before anything is changed."""
    lacking = {"step", "random", "loader", "settings"} - state.keys()
    if lacking:
        raise ValueError(f"{path} is a checkpoint, but not a Trainer's: its state lacks {', '.join(sorted(lacking))}")
    order = {key: value for key, value in trainer.train_loader.state().items() if key not in ("epoch", "next_batch")}
    compared = {**_differing(state["settings"], trainer.settings), **_differing(state["loader"], order)}
    if trainer.average is None and checkpoint.part(tensors, "average"):
        compared.setdefault("average", "averaged weights there, none here")
    if compared:
        differing = "; ".join(f"{key}: {words}" for key, words in compared.items())
        raise ValueError(f"{path}: the checkpoint is of another run: {differing}")


def _differing(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, str]:
    return {key: f"{there.get(key)!r} there, {value!r} here" for key, value in here.items() if there.get(key) != value}


def agree(trainer: Any) -> None:
    """Refuse ranks that start from different places or weights, and would drift apart in silence; a collective.

    A checkpoint may be named on some ranks only, and folders of several hosts may hold different ones.

    Raises:
        ValueError: on every rank, naming who has what.
    """
    what, remedy = "where training starts", "start all ranks from the same checkpoint, or all from none"
    require_same(trainer.comm, what, [f"{key} {value}" for key, value in _places(trainer).items()], remedy)
    if trainer.comm.size > 1:
        model = trainer.model
        weights = by_name(model.ops.to_host(model.arena.master), model.arena.segments)
        require_same_arrays(trainer.comm, what, weights, remedy)
