"""Weight sharing and compressed files: what is shared moves together, what is written comes back to the bit."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest

import minidl as m
from minidl import checkpoint, models
from minidl.compile import obstacle
from minidl.precision import bfloat16
from minidl.sparse import SharedSGD, load_compressed, magnitude_mask, save_compressed, share_weights
from tests.test_shrink import batches, model_of, residual, take_steps
from tests.tolerance import assert_same_arrays, draw

f32 = np.float32

needs_scipy = pytest.mark.skipif(find_spec("scipy") is None, reason="needs SciPy")
needs_bitarray = pytest.mark.skipif(find_spec("bitarray") is None, reason="needs bitarray")


def sparse(rng, shape, sparsity):
    weight = draw(rng, shape, f32)
    return weight * magnitude_mask({"w": weight}, sparsity)["w"]


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


# -- sharing ----------------------------------------------------------------------------------------------------------


@needs_scipy
@pytest.mark.parametrize("shape,sparsity", [((40, 3, 3, 20), 0.9), ((30, 70), 0.0), ((11, 13), 0.5)])
@pytest.mark.parametrize("clusters", [1, 2, 16, 255])
def test_each_weight_takes_the_nearest_centroid_and_zeros_stay(rng, shape, sparsity, clusters):
    weight = sparse(rng, shape, sparsity)
    one = share_weights({"w": weight}, clusters)["w"]
    assert one.codes.shape == shape and one.codebook.dtype == f32 and 2 <= one.codebook.size <= clusters + 1
    np.testing.assert_array_equal(one.codes == 0, weight == 0)
    assert one.codebook[0] == 0 and (np.diff(one.codebook[1:]) > 0).all()
    distance = np.abs(weight[..., None].astype(np.float64) - one.codebook[1:])
    chosen = np.abs(one.dense().astype(np.float64) - weight)
    live = weight != 0
    np.testing.assert_array_equal(chosen[live], distance.min(axis=-1)[live])
    # k-means may not be worse than where it started: values evenly between the least and the largest.
    start = np.linspace(weight[live].min(), weight[live].max(), clusters)
    even = np.abs(weight[live][:, None] - start).min(axis=-1)
    assert np.square(chosen[live]).sum() <= np.square(even).sum() * (1 + 1e-6)


@needs_scipy
def test_centroids_are_the_means_of_their_members(rng):
    weight = np.concatenate([draw(rng, (50, 40), f32, scale=0.1) + c for c in (-3, -1, 2)]).astype(f32)
    one = share_weights({"w": weight}, 3)["w"]
    for code in (1, 2, 3):
        assert abs(weight[one.codes == code].astype(float).mean() - one.codebook[code]) < 1e-6


def test_few_values_are_kept_exactly(rng):
    weight = rng.choice(np.array([0, -2.5, 1 / 3, 7], f32), (20, 30))
    one = share_weights({"w": weight}, 3)["w"]
    np.testing.assert_array_equal(one.dense(), weight)
    np.testing.assert_array_equal(share_weights({"w": np.zeros((3, 4), f32)}, 3)["w"].dense(), np.zeros((3, 4), f32))


@needs_scipy
def test_members_move_together_by_the_sum_of_their_gradients(ops, rng):
    """One step against float64: a centroid loses lr times the sum; later every cluster still has one value."""
    model = model_of(residual(), ops)
    weights = {k: v for k, v in model.state_dict().items() if k.endswith("weight") and v.ndim > 1}
    masks = magnitude_mask(weights, 0.8)
    shared = share_weights({name: weights[name] * masks[name] for name in masks}, 8)
    optimizer = SharedSGD(model, 1e-3, 0.9, weight_decay=1e-2, shared=shared)
    assert "SharedSGD" in obstacle(model, optimizer) or ops.name == "cpu"
    before = model.state_dict()
    for name, one in shared.items():
        np.testing.assert_array_equal(before[name], one.dense())
    twin = model_of(residual(), ops)
    twin.load_state_dict(before)
    data = batches(rng, model, 4)
    take_steps(twin, m.SGD(twin, 0.0), data[:1])
    take_steps(model, optimizer, data[:1])
    after = model.state_dict()
    for name, one in shared.items():
        layer, _, parameter = name.rpartition(".")
        gradient = ops.to_host(twin.graph[layer].layer.params.gradients()[parameter]).astype(np.float64)
        sums = np.bincount(one.codes.reshape(-1), weights=gradient.reshape(-1))
        expected = before[name] - 1e-3 * (sums[one.codes] + 1e-2 * before[name])
        expected[one.codes == 0] = 0
        np.testing.assert_allclose(after[name], expected, rtol=1e-5, atol=1e-7, err_msg=name)
    take_steps(model, optimizer, data[1:])
    now = optimizer.shared()
    for name, one in shared.items():
        value = model.state_dict()[name]
        assert not value[one.codes == 0].any()
        for code in range(1, one.codebook.size):
            assert np.unique(value[one.codes == code]).size <= 1, "one cluster, one value, to the bit"
        np.testing.assert_array_equal(now[name].codes, one.codes)
        np.testing.assert_array_equal(now[name].dense(), value)
        assert (now[name].dense() != one.dense()).any()


@needs_scipy
def test_shared_training_resumes_bit_for_bit(ops, rng):
    data = batches(rng, m.Model(residual()), 5)

    def start():
        model = model_of(residual(), ops)
        weights = {k: v for k, v in model.state_dict().items() if k.startswith(("a1.w", "b2.w"))}
        return model, SharedSGD(model, 1e-2, 0.9, shared=share_weights(weights, 6))

    model, optimizer = start()
    take_steps(model, optimizer, data)
    expected = model.state_dict() | optimizer.state_dict()
    model, optimizer = start()
    take_steps(model, optimizer, data[:2])
    kept = model.state_dict(), optimizer.state_dict()
    model, optimizer = start()
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    take_steps(model, optimizer, data[2:])
    assert_same_arrays(model.state_dict() | optimizer.state_dict(), expected)


def test_what_cannot_be_shared_is_refused(cpu_ops, rng):
    w = {"a1.weight": rng.integers(0, 3, (6, 3, 3, 8)).astype(f32)}
    for arguments, kind, words in (
        ((w, 0), ValueError, "clusters must be an integer of at least 1"),
        ((w, 256), ValueError, "clusters must be at most 255"),
        (({"w": np.full((2, 2), np.nan, f32)},), ValueError, "w must be finite"),
        (({"w": np.ones((2, 2))},), TypeError, "w must be float32, got float64"),
    ):
        with pytest.raises(kind, match=words):
            share_weights(*arguments)
    shared = share_weights(w)
    with pytest.raises(ValueError, match="unknown trained parameter 'a3.weight'"):
        SharedSGD(m.Model(residual()), 0.1, shared={"a3.weight": shared["a1.weight"]})
    with pytest.raises(TypeError, match="a1.weight must be a SharedWeight, got float32 array .*; share_weights makes"):
        SharedSGD(m.Model(residual()), 0.1, shared={"a1.weight": w["a1.weight"]})
    with pytest.raises(ValueError, match="a2.weight must have shape"):
        SharedSGD(m.Model(residual()), 0.1, shared={"a2.weight": shared["a1.weight"]})


@needs_scipy
def test_a_shared_weight_that_is_updated_in_tiles_is_refused(cpu_ops, monkeypatch):
    monkeypatch.setattr("minidl.layers.linear.TILE_BYTES", 1 << 12)
    graph = m.Graph()
    graph.output(m.Linear(300, 4, name="b")(m.Linear(20, 300, name="a")(graph.input((20,)))))
    model = m.Model(graph)
    weights = {name: model.state_dict()[name] for name in ("a.weight", "b.weight")}
    optimizer = SharedSGD(model, 0.1, 0.9, shared=share_weights({"b.weight": weights["b.weight"]}, 4))
    optimizer.update_in_backward()
    optimizer = SharedSGD(m.Model(graph.unbound()), 0.1, 0.9, shared=share_weights(weights, 4))
    with pytest.raises(ValueError, match="a.weight is updated in tiles, .*; leave one of the two out"):
        optimizer.update_in_backward()


# -- files ------------------------------------------------------------------------------------------------------------


@needs_bitarray
@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 511, 5000])
@pytest.mark.parametrize("distinct", [1, 2, 255, 256])
@pytest.mark.parametrize("density", [0.0, 0.001, 0.1, 1.0])
def test_what_is_written_comes_back_to_the_bit(rng, tmp_path, size, distinct, density):
    values = np.concatenate([[-0.0, np.nan, np.inf, 1e-42], draw(rng, (distinct,), f32)]).astype(f32)[:distinct]
    array = np.where(rng.random((size, 3)) < density, rng.choice(values, (size, 3)), 0).astype(f32)
    save_compressed(tmp_path / "a", {"w": array})
    found = load_compressed(tmp_path / "a")["w"]
    assert found.dtype == f32 and found.shape == array.shape and found.flags.writeable
    np.testing.assert_array_equal(bits(found), bits(array))


@needs_bitarray
def test_arrays_of_every_kind_come_back(rng, tmp_path):
    state = {
        "vector": draw(rng, (7,), f32), "scalar": np.array(3, np.int64), "none": np.zeros((0, 4), f32),
        "half": draw(rng, (3, 5), bfloat16), "wide": draw(rng, (300, 2), f32), "flags": rng.random((2, 2)) < 0.5,
        "turned": rng.integers(0, 3, (4, 9)).astype(f32).T, "coded": sparse(rng, (9, 9), 0.9),
    }  # fmt: skip
    report = save_compressed(tmp_path / "a", state)
    found = load_compressed(tmp_path / "a")
    assert list(found) == list(state) and report.coded == 2, (
        "600 distinct values are not coded, nor what is not float32"
    )
    for name, value in state.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        np.testing.assert_array_equal(bits(found[name]), bits(value), err_msg=name)


@needs_bitarray
@needs_scipy
def test_the_file_is_as_small_as_huffman_promises(rng, tmp_path):
    """A tenth of ResNet-20's weights in 32 values: each stream within a bit a symbol of its entropy, all in a tenth."""
    state = m.Model(models.resnet20()).state_dict()
    names = [name for name, value in state.items() if name.endswith("weight") and value.ndim > 1 and value.size > 432]
    masks = magnitude_mask({name: state[name] for name in names}, 0.9)
    shared = share_weights({name: state[name] * masks[name] for name in names}, 32)
    state |= {name: one.dense() for name, one in shared.items()}
    report = save_compressed(tmp_path / "a", state)
    assert report.file == (tmp_path / "a").stat().st_size and report.coded == len(names)
    assert report.before == sum(v.nbytes for v in state.values()) and report.ratio > 15
    bound = 0
    for one in shared.values():
        counts = np.bincount(one.codes[one.codes > 0])
        share = counts[counts > 0] / counts.sum()
        bound += counts.sum() * (1 - (share * np.log2(share)).sum()) + 8
    assert report.values <= bound / 8
    assert report.values + report.gaps + report.plain + report.header + 1024 > report.file
    found = load_compressed(tmp_path / "a")
    model = m.Model(models.resnet20())
    model.load_state_dict(found)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(bits(value), bits(state[name]), err_msg=name)


@needs_bitarray
def test_truncated_damaged_and_foreign_files_are_refused(rng, tmp_path):
    save_compressed(tmp_path / "a", {"w": sparse(rng, (30, 30), 0.5), "b": np.ones(3, f32)})
    whole = (tmp_path / "a").read_bytes()
    for cut in (0, 1, 7, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / "b").write_bytes(whole[:cut])
        with pytest.raises(ValueError, match="b is not a readable checkpoint|b is damaged"):
            load_compressed(tmp_path / "b")
    for place in rng.integers(0, len(whole), 40):
        changed = bytearray(whole)
        changed[place] ^= 1 << rng.integers(8)
        (tmp_path / "b").write_bytes(changed)
        with pytest.raises(ValueError):
            load_compressed(tmp_path / "b")
    checkpoint.save(tmp_path / "c", {"w": np.ones(3, f32)}, {})
    with pytest.raises(ValueError, match="c is a checkpoint, but not a compressed one"):
        load_compressed(tmp_path / "c")
    (tmp_path / "d").write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ValueError, match="d is not a readable checkpoint"):
        load_compressed(tmp_path / "d")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        load_compressed(tmp_path / "e")


@needs_bitarray
def test_what_a_file_would_not_give_back_is_refused(tmp_path):
    for state, words in (
        ({"w": [1, 2]}, "w must be a NumPy array"),
        ({"w": np.array(["a"])}, "w must be one of bool, .* got <U1"),
        ({"w": np.array([None])}, "w must be one of bool, .* got object"),
        ([np.ones(3, f32)], "state must be a mapping of names to arrays"),
    ):
        with pytest.raises(TypeError, match=f"^(save_compressed: )?{words}"):
            save_compressed(tmp_path / "a", state)
    assert not (tmp_path / "a").exists()


@needs_bitarray
def test_values_of_another_byte_order_come_back_as_they_are(rng, tmp_path):
    state = {"coded": sparse(rng, (9, 9), 0.9), "plain": draw(rng, (7,), f32)}
    report = save_compressed(tmp_path / "a", {name: value.astype(">f4") for name, value in state.items()})
    found = load_compressed(tmp_path / "a")
    assert report.coded == 1
    for name, value in state.items():
        np.testing.assert_array_equal(found[name], value)
