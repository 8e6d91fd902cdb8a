"""What goes together: each pair of the table is refused in its words, and every other pair trains a step."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

import minidl as m
from minidl import data, legality
from minidl.layers import ChannelParallelConv2d, RowParallelConv2d
from minidl.legality import PARTS, TABLE
from minidl.sharded import ShardedSGD
from minidl.step import EagerStep
from minidl.train import Trainer
from tests.parts import Twins

ELSEWHERE = {"compiled"}  # needs a GPU: tests/test_compile.py
ALONE = [
    {"ring", "norms"},
    {"in_momentum", "norms"},
    {"sharded", "adaptive"},
    {"sharded", "norms"},
    {"rows", "filters"},
]


def network(parts: set[str], comm) -> m.Graph:
    graph = m.Graph()
    x = graph.input((4 if "rows" in parts else 8, 8, 3))
    if "rows" in parts:
        x = RowParallelConv2d(3, 4, 3, padding=1, height=8, group=comm, name="conv")(x)
    elif "filters" in parts:
        x = ChannelParallelConv2d(3, 4, 3, padding=1, group=comm, name="conv")(x)
    else:
        x = m.Conv2d(3, 4, 3, padding=1, name="conv")(x)
    return graph.output(m.Linear(x.shape[0] * x.shape[1] * 4, 4, name="fc")(m.Flatten()(m.ReLU(name="relu")(x))))


def trained(parts: set[str], folder: Path) -> None:
    """One step of a network with these parts, on two ranks as far as this one can tell."""
    comm = Twins()
    model = m.Model(
        network(parts, comm), comm=comm, group_bytes=0, precision="fp16" if "scaled" in parts else "fp32",
        message_dtype="bf16" if "rounded" in parts else "fp32",
    )  # fmt: skip
    options = {"clip_norm": 1.0} if "clipped" in parts else {}
    if "norms" in parts:
        optimizer = m.LARS(model, 0.1, **options)
    elif "adaptive" in parts:
        optimizer = m.AdamW(model, 0.1, **options)
    else:
        optimizer = (ShardedSGD if "sharded" in parts else m.SGD)(model, 0.1, 0.9, **options)
    if "in_momentum" in parts:
        optimizer.gradients_in_momentum()
    if "ring" in parts:
        optimizer.update_in_backward()
    loss, accumulate = m.SoftmaxCrossEntropy(comm=comm), 2 if "accumulated" in parts else 1
    if parts & {"checkpoints", "watched"}:
        images = data.dataset("synthetic", None, "train", n=8, shape=model.graph.nodes[0].shape, num_classes=4)
        loader = data.Loader(images, 8, rank=0, size=2, dtype=model.precision.storage)
        run = Trainer(
            model, optimizer, loss, loader, schedule=lambda step: 0.1, epochs=1, accumulate=accumulate,
            output=folder if "checkpoints" in parts else None, watch_gradients="watched" in parts,
        )  # fmt: skip
        if "checkpoints" in parts:
            run.save()
    step = EagerStep(model, optimizer, loss, accumulate=accumulate)
    x = np.ones((4, *model.graph.nodes[0].shape), model.precision.storage)
    step(x, np.arange(4, dtype=np.int32))


PAIRS = [pair for pair in combinations([n for n in PARTS if n not in ELSEWHERE], 2) if set(pair) not in ALONE]


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_a_pair_is_refused_exactly_where_the_table_says_so(pair, tmp_path):
    reason = TABLE.get(pair)
    if reason is None:
        trained(set(pair), tmp_path)
        return
    first, second = (PARTS[name] for name in pair)
    with pytest.raises(ValueError, match="together with") as error:
        trained(set(pair), tmp_path)
    assert f"{first} together with {second}: {reason}; leave one of the two out" in str(error.value)


@pytest.mark.parametrize("part", ["rows", "filters"])
def test_layers_that_ranks_share_are_parts(part):
    told = m.SGD(m.Model(network({part}, Twins()), comm=Twins()), 0.1).parts()
    assert {name for name in ("rows", "filters") if told[name]} == {part}


def test_the_table_knows_its_parts_in_their_order():
    order = list(PARTS)
    for first, second in TABLE:
        assert order.index(first) < order.index(second)


def test_what_is_not_there_refuses_nothing():
    legality.refuse("step", ring=0, sharded=True, clipped=None)
    with pytest.raises(AssertionError):
        legality.refuse("step", rung=True)


def test_the_documentation_shows_the_table():
    text = Path(__file__).parents[1].joinpath("docs", "distributed.md").read_text()
    for (first, second), reason in TABLE.items():
        assert f"| {PARTS[first]} | {PARTS[second]} | {reason} |" in text
