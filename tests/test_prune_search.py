"""Blocks and N of M, what a part's pruning does to the network, the search among random masks, fixed masks."""

from __future__ import annotations

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.compile import CompiledStep
from minidl.fusion import fuse
from minidl.sparse import (
    CubicSchedule,
    Granularity,
    PrunedSGD,
    Pruning,
    magnitude_mask,
    masked,
    pruned,
    random_mask_search,
    sensitivity,
    shrink,
    sparse_state,
    to_sparse,
    without_masks,
)
from minidl.step import EagerStep
from tests.test_shrink import NETWORKS, batches, mobile, model_of, residual, take_steps
from tests.tolerance import assert_same_arrays, draw

f32 = np.float32


# -- granularities ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8, 16), (5, 3, 3, 11), (3, 1, 1, 4), (2, 3)])
@pytest.mark.parametrize("text", ["2:4", "1:4", "3:8", "4:5"])
def test_of_every_m_neighbours_n_are_kept(rng, shape, text):
    n, m_ = map(int, text.split(":"))
    weight = draw(rng, shape, f32)
    mask = magnitude_mask({"w": weight}, 1 - n / m_, granularity=text)["w"]
    size = np.abs(weight)
    for begin in range(0, shape[-1], m_):
        group, values = mask[..., begin : begin + m_], size[..., begin : begin + m_]
        np.testing.assert_array_equal(group.sum(axis=-1), min(n, group.shape[-1]))
        if group.shape[-1] > n:
            most = np.where(group, -1, values).max(axis=-1)
            assert (most <= np.where(group, values, np.inf).min(axis=-1)).all()
    again = magnitude_mask({"w": -weight[..., ::1]}, 1 - n / m_, granularity=text, masks={"w": mask})["w"]
    np.testing.assert_array_equal(again, mask)
    first = magnitude_mask({"w": weight}, 0.5 / m_, granularity=text)["w"]
    assert not (mask & ~first).any(), "on the way there, fewer of the same"


@pytest.mark.parametrize(
    "shape,block", [((8, 16), (4, 4)), ((10, 3, 3, 7), (4, 2)), ((5, 6), (8, 8)), ((6, 6), (1, 3))]
)
def test_blocks_go_whole(rng, shape, block):
    weight = draw(rng, shape, f32)
    mask = magnitude_mask({"w": weight}, 0.5, granularity=f"block:{block[0]}x{block[1]}")["w"]
    folded, square = (
        mask.reshape(shape[0], -1, shape[-1]),
        np.square(weight.astype(float)).reshape(shape[0], -1, shape[-1]),
    )
    kept, gone, sizes = [], [], []
    for i in range(0, shape[0], block[0]):
        for j in range(0, shape[-1], block[1]):
            for tap in range(folded.shape[1]):
                part = folded[i : i + block[0], tap, j : j + block[1]]
                assert part.all() or not part.any()
                (kept if part.all() else gone).append(square[i : i + block[0], tap, j : j + block[1]].mean())
                sizes.append(part.size)
    assert max(gone, default=0) <= min(kept, default=np.inf)
    assert abs((~mask).sum() - 0.5 * mask.size) <= max(sizes) / 2


def test_words_for_what_is_dropped_together():
    assert Granularity.parse("block:8x4") == Granularity("block", (8, 4))
    assert Granularity.parse("2:4") == Granularity("n:m", (2, 4)) and Granularity.parse("2:4").most == 0.5
    for text, words in (("4:4", "N below M"), ("0:4", "sizes of at least 1"), ("block:0x4", "sizes of at least 1"),
                        ("blok", "unknown granularity 'blok'"), (3, "unknown granularity 3")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            Granularity.parse(text)
    w = {"w": np.ones((4, 4), f32)}
    with pytest.raises(ValueError, match="sparsity must be at most 0.5 with 2:4"):
        magnitude_mask(w, 0.6, granularity="2:4")
    with pytest.raises(ValueError, match="scope must be 'layer' for N:M"):
        magnitude_mask(w, 0.5, granularity="2:4", scope="global")
    with pytest.raises(ValueError, match="schedule must be one that ends at 0.5, as 2:4 does, got 0.9"):
        Pruning(CubicSchedule(0.9, 1, 1), granularity="2:4")


@pytest.mark.parametrize("granularity,final", [("2:4", 0.5), ("block:2x2", 0.75), ("kernel", 0.8), ("filter", 0.6)])
def test_sparsity_rises_and_dropped_weights_stay_zero(ops, rng, granularity, final):
    model = model_of(residual(), ops)
    pruning = Pruning(CubicSchedule(final, 2, 8, frequency=2), granularity=granularity)
    optimizer = PrunedSGD(model, 0.05, 0.9, weight_decay=1e-2, nesterov=True, pruning=pruning)
    before: dict[str, np.ndarray] = {}
    for batch in batches(rng, model, 10):
        take_steps(model, optimizer, [batch])
        state, momentum = model.state_dict(), optimizer.state_dict()
        for name, mask in optimizer.masks().items():
            assert not state[name][~mask].any() and not momentum[f"momentum.{name}"][~mask].any()
            assert not (mask & ~before.get(name, mask)).any()
        before = optimizer.masks()
    for name, share in optimizer.sparsity().items():
        assert abs(share - final) < 0.2, name
    assert not any(name.startswith("stem.") for name in before)


# -- compiled ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("granularity", ["weight", "filter"])
@pytest.mark.parametrize("kind", [m.SGD, m.AdamW])
def test_compiled_steps_prune_as_eager_ones(cuda_ops, rng, granularity, kind):
    """Masks change between replays of one graph, with the bits of steps that are run as they are written."""
    data = batches(np.random.default_rng(3), m.Model(residual()), 12)
    states = []
    for step_kind in (EagerStep, CompiledStep):
        model = model_of(residual(), cuda_ops)
        fuse(model, "auto")  # as compiled steps do by themselves
        pruning = Pruning(CubicSchedule(0.7, 3, 9, frequency=2), granularity=granularity)
        options = {"momentum": 0.9} if kind is m.SGD else {}
        optimizer = pruned(kind)(model, 0.01, weight_decay=1e-3, pruning=pruning, **options)
        step = step_kind(model, optimizer, m.SoftmaxCrossEntropy())
        for x, labels in data:
            step(*map(cuda_ops.from_host, (x, labels)))
        states.append(model.state_dict() | optimizer.state_dict())
    assert optimizer.count == 12 and max(optimizer.sparsity().values()) > 0.6
    assert_same_arrays(states[1], states[0])


@pytest.mark.parametrize("way", ["shrink", "to_sparse"])
def test_what_is_left_is_captured_again(cuda_ops, rng, way):
    """The re-plan point: another graph, other arenas, the state taken along by name, and the bits of eager steps."""
    data = batches(np.random.default_rng(3), m.Model(residual()), 10)
    masked_model = model_of(residual(), cuda_ops)
    pruning = Pruning(CubicSchedule(0.8, 1, 1), granularity="filter" if way == "shrink" else "weight")
    optimizer = PrunedSGD(masked_model, 0.01, 0.9, weight_decay=1e-3, pruning=pruning)
    step = CompiledStep(masked_model, optimizer, m.SoftmaxCrossEntropy())
    for x, labels in data[:4]:
        step(*map(cuda_ops.from_host, (x, labels)))
    state, moments = masked_model.state_dict(), optimizer.state_dict()
    states = []
    for step_kind in (EagerStep, CompiledStep):
        if way == "shrink":
            graph, cut = shrink(residual(), state)
            model = model_of(graph, cuda_ops)
            model.load_state_dict(cut.state(state))
            tuned = m.SGD(model, 0.01, 0.9, weight_decay=1e-3)
            tuned.load_state_dict(without_masks(cut.state(moments)))
        else:
            graph = residual()
            assert to_sparse(graph, state, optimizer.masks())
            model = model_of(graph, cuda_ops)
            model.load_state_dict(sparse_state(graph, state))
            tuned = PrunedSGD(model, 0.01, 0.9, weight_decay=1e-3, pruning=pruning)
            tuned.load_state_dict(sparse_state(graph, moments, "momentum."))
        fuse(model, "auto")
        step = step_kind(model, tuned, m.SoftmaxCrossEntropy())
        for x, labels in data[4:]:
            step(*map(cuda_ops.from_host, (x, labels)))
        states.append(model.state_dict() | tuned.state_dict())
    assert_same_arrays(states[1], states[0])


# -- looking for masks ------------------------------------------------------------------------------------------------


def errors_of(model, x, labels):
    def evaluate():
        training = model.training
        logits = model.ops.to_host(model.eval().forward(model.ops.from_host(x)))
        model.train(training)
        return float((logits.argmax(axis=-1) != labels).mean())

    return evaluate


def taught(ops, rng, build=residual):
    """A network that has learnt 32 samples by heart."""
    model = model_of(build(), ops)
    x = draw(rng, (32, *model.graph.nodes[0].shape), f32)
    labels = rng.integers(0, 5, 32).astype(np.int32)
    take_steps(model, m.SGD(model, 0.05, 0.9), [(x, labels)] * 40)
    return model, errors_of(model, x, labels)


@pytest.mark.parametrize("granularity", ["weight", "kernel", "filter", "layer", "2:4"])
def test_sensitivity_prunes_one_part_at_a_time_and_leaves_no_trace(ops, rng, granularity):
    model, evaluate = taught(ops, rng)
    before = model.state_dict()
    scope = "global" if granularity == "layer" else "layer"
    sparsities = (0.0, 0.5) if granularity == "2:4" else (0.0, 0.5, 0.95)
    rows = sensitivity(model, Pruning(None, granularity=granularity, scope=scope), evaluate, sparsities)
    assert_same_arrays(model.state_dict(), before)
    start = evaluate()
    assert start < 0.1 and all(row.before == start for row in rows)
    expected = {"filter": ["a1", "b1", "b2+proj"], "layer": ["a1+a2", "b1+b2"]}
    weights = [f"{name}.weight" for name in ("a1", "a2", "b1", "b2", "proj", "head")]
    parts = expected.get(granularity, weights)
    assert list(dict.fromkeys(row.part for row in rows)) == parts
    assert [row.sparsity for row in rows] == ([1.0] if granularity == "layer" else list(sparsities)) * len(parts)
    for row in rows:
        assert row.sparsity > 0 or row.score == start
    assert granularity == "2:4" or max(row.score for row in rows) > start + 0.2


@pytest.mark.parametrize("granularity", ["kernel", "filter"])
@pytest.mark.parametrize("network", ["residual", "dense"])
def test_the_search_keeps_the_least_harmful_candidate(ops, rng, granularity, network):
    model, evaluate = taught(ops, rng, NETWORKS[network])
    before = model.state_dict()
    pruning = Pruning(None, exclude=["head.*"], granularity=granularity)
    found = random_mask_search(model, pruning, evaluate, sparsity=0.4, candidates=6, seed=1)
    assert_same_arrays(model.state_dict(), before)
    assert found.before == evaluate()
    assert all(len(scores) == 6 for scores in found.scores.values())
    with masked(model, found.masks):
        assert evaluate() == min(list(found.scores.values())[-1]), "the last part's best has all parts chosen"
    assert any(len(set(scores)) > 1 for scores in found.scores.values())
    again = random_mask_search(model, pruning, evaluate, sparsity=0.4, candidates=6, seed=1)
    other = random_mask_search(model, pruning, evaluate, sparsity=0.4, candidates=6, seed=2)
    assert again.scores == found.scores != other.scores
    for name, mask in found.masks.items():
        np.testing.assert_array_equal(again.masks[name], mask)
        if name.endswith("weight") and mask.ndim > 1:
            assert abs((~mask).mean() - 0.4) < 0.13, name


def test_a_candidate_without_a_figure_is_never_the_least_harmful(cpu_ops, rng):
    model, _ = taught(cpu_ops, rng)
    pruning = Pruning(None, include=["a1.weight"], granularity="filter")

    def chosen(*scores):
        told = iter([0.0, *scores])
        return random_mask_search(model, pruning, lambda: next(told), sparsity=0.5, candidates=3, seed=1).masks

    for without, with_inf in [((np.nan, 0.3, 0.2), (np.inf, 0.3, 0.2)), ((0.3, np.nan, 0.4), (0.3, np.inf, 0.4))]:
        assert_same_arrays(chosen(*without), chosen(*with_inf))


def test_more_candidates_do_no_worse(cpu_ops, rng):
    model, evaluate = taught(cpu_ops, rng)
    pruning = Pruning(None, include=["a1.weight"], granularity="filter")
    best = [
        min(random_mask_search(model, pruning, evaluate, sparsity=0.5, candidates=n).scores["a1"]) for n in (1, 4, 16)
    ]
    assert best == sorted(best, reverse=True)


def test_found_masks_are_fixed_while_training_goes_on(ops, rng):
    """The last step of Anwar and Sung: the network is trained on under the masks that were found, then shrunk."""
    model, evaluate = taught(ops, rng)
    pruning = Pruning(None, exclude=["head.*"], granularity="filter")
    found = random_mask_search(model, pruning, evaluate, sparsity=0.4, candidates=4)
    optimizer = PrunedSGD(model, 0.02, 0.9, weight_decay=1e-2, pruning=pruning)
    optimizer.impose(found.masks)
    take_steps(model, optimizer, batches(rng, model, 5))
    state = model.state_dict()
    for name, mask in optimizer.masks().items():
        np.testing.assert_array_equal(mask, found.masks.get(name, np.ones_like(mask)))
        assert not state[name][~mask].any()
    graph, _ = shrink(residual(), state)
    assert graph["a1"].layer.out_channels == found.masks["a1.weight"].any(axis=(1, 2, 3)).sum() < 6


def test_an_average_under_the_masks_is_cut_as_the_weights_are(cpu_ops, rng):
    model = m.Model(residual())
    optimizer = PrunedSGD(model, 0.05, 0.9, pruning=Pruning(None, granularity="filter"))
    average = m.WeightAverage(model)
    take_steps(model, optimizer, batches(rng, model, 1))
    optimizer.prune(0.5)
    average.update()
    with average.applied(), masked(model, optimizer.masks()):
        averaged = model.state_dict()
    cut, expected = (shrink(residual(), state)[0] for state in (averaged, model.state_dict()))
    assert [repr(layer) for layer in cut.layers] == [repr(layer) for layer in expected.layers]
    assert [repr(layer) for layer in cut.layers] != [repr(layer) for layer in residual().layers]


def test_a_class_that_prunes_is_its_own_pruned_class():
    assert pruned(PrunedSGD) is PrunedSGD and pruned(pruned(m.AdamW)) is pruned(m.AdamW)


def test_what_cannot_be_searched_is_refused(cpu_ops, rng):
    model = m.Model(mobile())
    pruning = Pruning(None, granularity="filter")
    with pytest.raises(ValueError, match=r"sparsity must be a number in \[0, 1\)"):
        random_mask_search(model, pruning, lambda: 0.0, sparsity=1.0)
    with pytest.raises(ValueError, match="candidates must be an integer of at least 1"):
        random_mask_search(model, pruning, lambda: 0.0, sparsity=0.5, candidates=0)
    with pytest.raises(ValueError, match="granularity must be one that can be drawn"):
        random_mask_search(model, Pruning(None, granularity="layer", scope="global"), lambda: 0.0, sparsity=0.5)
    with pytest.raises(ValueError, match="sparsities must be"):
        sensitivity(model, pruning, lambda: 0.0, [1.5])
    with (
        pytest.raises(ValueError, match="unknown parameter 'stemm.weight'; did you mean 'stem.weight'"),
        masked(model, {"stemm.weight": np.ones(3, bool)}),
    ):
        pass
    for found in ((0.1, 0.9), None):
        with pytest.raises(TypeError, match="^what evaluate returns must be a number, got"):
            sensitivity(model, pruning, lambda found=found: found)
    optimizer = PrunedSGD(model, 0.1, pruning=pruning)
    search = random_mask_search(model, pruning, lambda: 0.0, sparsity=0.5, candidates=1)
    for take in (optimizer.impose, lambda masks: to_sparse(mobile(), model.state_dict(), masks),
                 lambda masks: masked(model, masks).__enter__()):  # fmt: skip
        with pytest.raises(TypeError, match="masks must be a mapping of names to masks, got MaskSearch"):
            take(search)
    some = next(iter(optimizer.masks()))
    with pytest.raises(ValueError, match="unknown pruned parameter 'nobody.weight'"):
        optimizer.impose({"nobody.weight": np.ones(3, bool)})
    with pytest.raises(TypeError, match="a mask of booleans"):
        optimizer.impose({some: np.ones(3, f32)})
    with pytest.raises(ValueError, match=f"{some} must have shape"):
        optimizer.impose({some: np.ones(3, bool)})


def test_searching_resnet20_takes_every_block(cpu_ops, rng):
    model = m.Model(models.resnet20(4, (8, 8, 1)))
    x, labels = draw(rng, (4, 8, 8, 1), f32), rng.integers(0, 4, 4)
    pruning = Pruning(None, exclude=["fc.*"], granularity="filter")
    found = random_mask_search(model, pruning, errors_of(model, x, labels), sparsity=0.5, candidates=1)
    assert len(found.scores) == 9 + 2, "a first convolution of each block, and the trunks but the stem's"


@pytest.mark.parametrize("sparsity", [0.0, 0.2, 0.5, 0.95])
def test_a_multiple_of_filters_stays(cpu_ops, rng, sparsity):
    model = m.Model(models.resnet20(10, (8, 8, 1)))
    options = {"exclude": ["fc.*"], "granularity": "filter:8"}
    optimizer = PrunedSGD(model, 0.1, pruning=Pruning(None, **options))
    weights = model.state_dict()
    for share in (sparsity / 2, sparsity):
        before = optimizer.masks()
        optimizer.prune(share)
        for name, mask in optimizer.masks().items():
            assert not (mask & ~before[name]).any()
            kept = mask.reshape(len(mask), -1).any(axis=1)
            assert kept.sum() % 8 == 0 and kept.any()
            assert abs(kept.mean() - (1 - share)) <= 4 / kept.size + 1e-9 or kept.sum() == 8
            if name in ("layer1.0.conv1.weight", "layer3.1.conv1.weight"):  # tied to no other
                norm = np.square(weights[name].astype(float)).mean(axis=(1, 2, 3))
                assert norm[~kept].max(initial=0) <= norm[kept].min()
    alone = magnitude_mask({"w": draw(rng, (10, 3), f32)}, 0.3, granularity="filter:4")["w"]
    assert alone.any(axis=1).sum() == 8
    assert magnitude_mask({"w": draw(rng, (10, 3), f32)}, 0.0, granularity="filter:4")["w"].all(), (
        "no multiple, but all"
    )


@pytest.mark.parametrize("granularity", ["weight", "filter", "layer"])
def test_weights_that_are_not_finite_are_not_pruned(cpu_ops, granularity):
    model = m.Model(residual())
    scope = "global" if granularity == "layer" else "layer"
    optimizer = PrunedSGD(model, 0.1, pruning=Pruning(None, granularity=granularity, scope=scope))
    state = model.state_dict()
    state["a1.weight"][0] = np.nan
    model.load_state_dict(state)
    with pytest.raises(ValueError, match="a1.weight must be finite when it is pruned"):
        optimizer.prune(0.5)
    with pytest.raises(ValueError, match=r"sparsity must be a number in \[0, 1\)"):
        optimizer.prune(1.0)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradients_of_dropped_weights_count_for_nothing(ops, rng, clip):
    """Updates within the backward pass mask as those after it do; clipping sees the gradients of kept weights only."""
    data, states = batches(rng, m.Model(residual()), 8), []
    for ring in (False, True):
        model = model_of(residual(), ops, group_bytes=0)
        pruning = Pruning(CubicSchedule(0.7, 2, 6, frequency=2))
        optimizer = PrunedSGD(model, 0.05, 0.9, weight_decay=1e-3, pruning=pruning, clip_norm=clip)
        if ring and clip is None:
            optimizer.update_in_backward(1)
        take_steps(model, optimizer, data)
        states.append(model.state_dict() | optimizer.state_dict())
    assert_same_arrays(states[1], states[0])
    if clip is not None:
        before = model.state_dict()
        control = PrunedSGD(model, 1.0, pruning=Pruning(None), clip_norm=clip)
        control.impose({name: np.zeros_like(mask) for name, mask in control.masks().items()})
        held = model.state_dict()
        take_steps(model, control, data[:1])
        moved = [model.state_dict()[name] - held[name] for name in before if name not in control.masks()
                 and "running" not in name]  # fmt: skip
        norm = np.sqrt(sum(np.square(part.astype(np.float64)).sum() for part in moved))
        assert norm == pytest.approx(clip, rel=1e-4), "the norm is that of what moves"
