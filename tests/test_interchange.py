"""Weights of PyTorch without PyTorch: names, layouts, files, and what does not fit."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import minidl as m
from minidl import checkpoint, models
from minidl.interchange import ImportReport, export_weights, import_weights, torch_state
from minidl.memory.record import blank
from minidl.sparse import magnitude_mask, save_compressed, sparse_state, to_sparse
from tests.tolerance import assert_same_arrays

f32 = np.float32


def network():
    """A convolution, a transposed one, a Flatten of an image and a Linear on it."""
    graph = m.Graph()
    x = m.Conv2d(3, 4, (3, 2), name="features.0")(graph.input((5, 4, 3)))
    x = m.ConvTranspose2d(4, 2, (2, 3), stride=2, bias=False, name="features.1")(x)
    x = m.BatchNorm2d(2, name="features.2")(x)
    return graph.output(m.Linear(6 * 7 * 2, 5, name="classifier")(m.Flatten()(x)))


def drawn(rng):
    """A state dict as PyTorch would have it."""
    shapes = {
        "features.0.weight": (4, 3, 3, 2), "features.0.bias": (4,), "features.1.weight": (4, 2, 2, 3),
        "features.2.weight": (2,), "features.2.bias": (2,), "features.2.running_mean": (2,),
        "features.2.running_var": (2,), "classifier.weight": (5, 2 * 6 * 7), "classifier.bias": (5,),
    }  # fmt: skip
    state = {name: rng.standard_normal(shape).astype(f32) for name, shape in shapes.items()}
    state["features.2.running_var"] = np.abs(state["features.2.running_var"]) + 0.5
    return state | {"features.2.num_batches_tracked": np.array(7)}


def torch_logits(state, x):
    """What PyTorch computes in evaluation, on NCHW images, in float64."""
    s = {name: values.astype(np.float64) for name, values in state.items()}
    w = s["features.0.weight"]
    y = np.zeros((len(x), 4, 3, 3))
    for p, q in np.ndindex(3, 3):
        y[:, :, p, q] = np.einsum("nchw,kchw->nk", x[:, :, p : p + 3, q : q + 2], w) + s["features.0.bias"]
    z = np.zeros((len(x), 2, 6, 7))
    for p, q in np.ndindex(3, 3):
        z[:, :, 2 * p : 2 * p + 2, 2 * q : 2 * q + 3] += np.einsum(
            "nc,ckhw->nkhw", y[:, :, p, q], s["features.1.weight"]
        )
    mean, var, gamma, beta = (
        s[f"features.2.{name}"][:, None, None] for name in ("running_mean", "running_var", "weight", "bias")
    )
    z = (z - mean) / np.sqrt(var + 1e-5) * gamma + beta
    return z.reshape(len(x), -1) @ s["classifier.weight"].T + s["classifier.bias"]


def test_logits_are_those_of_the_state_dict(ops, rng, tmp_path):
    state, x = drawn(rng), rng.standard_normal((2, 3, 5, 4)).astype(f32)
    save_file(state, tmp_path / "torch.safetensors")
    model = m.Model(network(), device=ops.name).eval()
    report = import_weights(model, tmp_path / "torch.safetensors")
    assert report.complete and report.ignored == ["features.2.num_batches_tracked"] and len(report.loaded) == 9
    y = ops.to_host(model.forward(ops.from_host(np.ascontiguousarray(x.transpose(0, 2, 3, 1)))))
    np.testing.assert_allclose(y, torch_logits(state, x.astype(np.float64)), rtol=1e-4, atol=1e-4)


def test_a_report_names_some_of_many():
    report = ImportReport(loaded=["a"], missing=[f"conv{i}.weight" for i in range(10)])
    assert str(report) == f"1 loaded; 10 missing: {', '.join(report.missing[:8])} and 2 more"


def test_a_round_trip_gives_the_same_bits(rng, tmp_path):
    state = drawn(rng)
    model = m.Model(network())
    import_weights(model, state)
    back = torch_state(model)
    assert list(back) == list(model.state_dict())
    for name, values in back.items():
        np.testing.assert_array_equal(values, state[name])
    path = export_weights(model, tmp_path / "folder" / "weights.safetensors")
    again = m.Model(network(), seed=5)
    assert import_weights(again, path).complete
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(values, again.state_dict()[name])
    assert [p.name for p in path.parent.iterdir()] == ["weights.safetensors"]


@pytest.mark.parametrize("name", ["resnet18", "densenet121", "mobilenet_v2", "efficientnet_b0", "unet"])
def test_models_export_the_names_and_shapes_of_pytorch(name):
    options = {"width": 16} if name == "unet" else {}
    model = m.Model(models.build(name, (64, 64, 3), 10, **options))
    state = torch_state(model)
    spatial = {"resnet18": ("conv1.weight", (64, 3, 7, 7)), "densenet121": ("features.conv0.weight", (64, 3, 7, 7)),
               "unet": ("up1.up.weight", (256, 128, 2, 2)),
               "mobilenet_v2": ("features.1.conv.0.0.weight", (32, 1, 3, 3)),
               "efficientnet_b0": ("features.1.0.block.1.fc1.weight", (8, 32, 1, 1))}[name]  # fmt: skip
    assert state[spatial[0]].shape == spatial[1]
    again = m.Model(blank(models.build(name, (64, 64, 3), 10, **options)))
    assert import_weights(again, {f"module.{key}": values for key, values in state.items()}).complete
    for key, values in model.state_dict().items():
        np.testing.assert_array_equal(values, again.state_dict()[key])


def test_other_spellings_of_densenets_and_vggs():
    model = m.Model(models.densenet121(10, (32, 32, 3)))
    old = {
        key.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): v for key, v in torch_state(model).items()
    }
    assert import_weights(m.Model(models.densenet121(10, (32, 32, 3)), seed=1), old).complete
    graph = m.Graph()
    x = m.Flatten()(graph.input((2, 3, 4)))
    with m.scope("classifier"):
        graph.output(m.Linear(5, 2, name="6")(m.Linear(24, 5, name="0")(x)))
    model = m.Model(graph)
    filters = np.arange(5 * 24, dtype=f32).reshape(5, 4, 2, 3)
    state = {"pre_logits.fc1.weight": filters, "pre_logits.fc1.bias": np.ones(5, f32),
             "head.fc.weight": np.ones((2, 5), f32), "head.fc.bias": np.zeros(2, f32)}  # fmt: skip
    assert import_weights(model, state).complete
    expected = filters.transpose(0, 2, 3, 1).reshape(5, 24)
    np.testing.assert_array_equal(model.state_dict()["classifier.0.weight"], expected)


def timms_names(depths, gated):
    """Layers of timm's networks of inverted residuals, in order, convolutions and normalisations."""
    yield from ("conv_stem", "bn1")
    for stage, depth in enumerate(depths):
        for block in range(depth):
            gate = ["se.conv_reduce", "se.conv_expand"] if gated else []
            wide = ["conv_pw", "bn1", "conv_dw", "bn2", *gate, "conv_pwl", "bn3"]
            for layer in ["conv_dw", "bn1", *gate, "conv_pw", "bn2"] if stage == 0 else wide:
                yield f"blocks.{stage}.{block}.{layer}"
    yield from ("conv_head", "bn2", "classifier")


@pytest.mark.parametrize(
    ("name", "depths"), [("mobilenet_v2", (1, 2, 3, 4, 3, 3, 1)), ("efficientnet_b0", (1, 2, 2, 3, 3, 4, 1))]
)
def test_timms_names_of_inverted_residuals(name, depths):
    """They stand in the order of torchvision's, so the n-th layer of one is the n-th of the other."""
    model = m.Model(models.build(name, (32, 32, 3), 7), seed=1)
    state = torch_state(model)
    layers = [layer.name for layer in model.layers if layer.specs]
    renamed = dict(zip(layers, timms_names(depths, gated=name == "efficientnet_b0"), strict=True))
    other = {f"{renamed[key.rpartition('.')[0]]}.{key.rpartition('.')[2]}": values for key, values in state.items()}
    again = m.Model(blank(models.build(name, (32, 32, 3), 7)))
    assert import_weights(again, other).complete
    for key, values in model.state_dict().items():
        np.testing.assert_array_equal(values, again.state_dict()[key])


def test_sparse_layers_travel_dense(rng, tmp_path):
    """The file is that of the masked network, zeros and all; back at the pattern nothing is lost, or it is refused."""

    def build():
        graph = m.Graph()
        x = m.Conv2d(3, 6, 3, padding=1, name="conv")(graph.input((4, 5, 3)))
        return graph.output(m.Linear(120, 7, name="head")(m.Flatten(name="flat")(m.ReLU(name="relu")(x))))

    masked = m.Model(build(), seed=3)
    weights = {name: value for name, value in masked.state_dict().items() if value.ndim > 1}
    masks = magnitude_mask(weights, 0.9)
    masked.load_state_dict(masked.state_dict() | {name: weights[name] * mask for name, mask in masks.items()})
    graph = build()
    assert sorted(to_sparse(graph, masked.state_dict(), masks)) == ["conv", "head"]
    sparse = m.Model(graph)
    sparse.load_state_dict(sparse_state(graph, masked.state_dict()))
    assert_same_arrays(torch_state(sparse), torch_state(masked))
    assert torch_state(sparse)["conv.weight"].shape == (6, 3, 3, 3)
    before = {name: value.copy() for name, value in sparse.state_dict().items()}
    for model in (masked, sparse):
        path = export_weights(model, tmp_path / "weights.safetensors")
        sparse.load_state_dict({name: np.zeros_like(value) for name, value in before.items()})
        assert import_weights(sparse, path).complete
        assert_same_arrays(sparse.state_dict(), before)
        sparse.load_state_dict(before)
    masked.load_state_dict(masked.state_dict() | weights)
    with pytest.raises(ValueError, match=r"2 mismatched: (head|conv)\.weight \(expected"):
        import_weights(sparse, torch_state(masked))


def test_what_does_not_fit_is_told_and_left_alone(rng):
    state = drawn(rng)
    state["classifier.weight"], state["classifier.bias"] = np.zeros((7, 84), f32), np.zeros(7, f32)
    state["extra.weight"] = np.zeros(3, f32)
    del state["features.0.bias"]
    model = m.Model(network())
    before = model.state_dict()
    words = (
        r"6 loaded; 1 missing: features.0.bias; 1 unexpected: extra.weight; 2 mismatched: classifier.weight \(expected"
    )
    with pytest.raises(ValueError, match=words + r".*strict=False"):
        import_weights(model, state)
    for name, values in model.state_dict().items():
        np.testing.assert_array_equal(values, before[name])
    report = import_weights(model, state, strict=False)
    assert not report.complete and len(report.loaded) == 6
    after = model.state_dict()
    for name in ("classifier.weight", "classifier.bias", "features.0.bias"):
        np.testing.assert_array_equal(after[name], before[name])
    np.testing.assert_array_equal(after["features.2.bias"], state["features.2.bias"])


def test_sixteen_bit_files_become_float32(rng, tmp_path):
    state = {name: values.astype(np.float16) for name, values in drawn(rng).items()}
    save_file(state, tmp_path / "half.safetensors")
    model = m.Model(network())
    import_weights(model, tmp_path / "half.safetensors")
    np.testing.assert_array_equal(model.state_dict()["features.0.bias"], state["features.0.bias"].astype(f32))


def test_files_that_are_none(tmp_path):
    model = m.Model(network())
    with pytest.raises(FileNotFoundError, match="there is no file"):
        import_weights(model, tmp_path / "absent.safetensors")
    (tmp_path / "weights.pth").write_bytes(b"PK\3\4 pickle")
    with pytest.raises(ValueError, match="path must be a safetensors file.*save_file"):
        import_weights(model, tmp_path / "weights.pth")


def branched():
    """Flattened images meet their weights behind other layers, as in AlexNet, and beside those of another size."""
    graph = m.Graph()
    x = graph.input((4, 3, 2))
    y = m.Flatten()(m.Conv2d(2, 5, 1, name="conv")(x))
    y = m.ReLU()(m.BatchNorm2d(60, name="norm")(m.Dropout(0.5)(y)))
    z = m.LayerNorm(8, name="shift")(m.Flatten()(m.MaxPool2d(2, ceil_mode=True)(x)))
    z = m.Mul()(z, m.Flatten()(z))
    return graph.output(m.Linear(68, 4, name="head")(m.Tanh()(m.Concat()(y, z))))


def test_flattened_images_keep_their_places_behind_other_layers(cpu_ops, rng):
    """Against PyTorch's order, channels first, in float64."""
    shapes = {name: value.shape for name, value in m.Model(branched()).state_dict().items()}
    s = {name: rng.uniform(0.5, 1.5, shape).astype(f32) for name, shape in shapes.items()}
    s["conv.weight"] = s["conv.weight"].transpose(0, 3, 1, 2)
    model, x = m.Model(branched()).eval(), rng.standard_normal((3, 2, 4, 3)).astype(f32)
    assert import_weights(model, s).complete
    y = np.einsum("nchw,kc->nkhw", x.astype(float), s["conv.weight"][:, :, 0, 0]) + s["conv.bias"][:, None, None]
    y = (y.reshape(3, -1) - s["norm.running_mean"]) / np.sqrt(s["norm.running_var"] + 1e-5)
    y = np.maximum(y * s["norm.weight"] + s["norm.bias"], 0)
    z = np.stack([x[:, :, :, :2].max(-1), x[:, :, :, 2]], -1).reshape(3, 2, 2, 2, 2).max(3).reshape(3, -1).astype(float)
    z = (z - z.mean(-1, keepdims=True)) / np.sqrt(z.var(-1, keepdims=True) + 1e-5)
    z = np.square(z * s["shift.weight"] + s["shift.bias"])
    expected = np.tanh(np.concatenate([y, z], 1)) @ s["head.weight"].T + s["head.bias"]
    np.testing.assert_allclose(model.forward(np.ascontiguousarray(x.transpose(0, 2, 3, 1))), expected, rtol=1e-4)
    for name, values in torch_state(model).items():
        np.testing.assert_array_equal(values, s[name], err_msg=name)


def square(classes=5):
    """Filters of as many rows as columns and channels: another order of theirs has the same shape."""
    graph = m.Graph()
    x = m.ReLU()(m.Conv2d(3, 3, 3, name="conv")(graph.input((6, 6, 3))))
    return graph.output(m.Linear(4 * 4 * 3, classes, name="head")(m.Flatten()(x)))


def test_a_compressed_file_tells_who_reads_it(tmp_path):
    pytest.importorskip("bitarray")
    model = m.Model(square())
    save_compressed(tmp_path / "model.mdz", model.state_dict())
    with pytest.raises(ValueError, match="got 'a compressed one, .*model.mdz'; sparse.load_compressed reads it"):
        import_weights(model, tmp_path / "model.mdz", strict=False)


def test_checkpoints_are_taken_as_they_lie(tmp_path):
    trained = m.Model(square(), seed=1)
    state = trained.state_dict()
    whole = {f"model.{name}": values for name, values in state.items()} | {"optimizer.control": np.zeros(8, f32)}
    checkpoint.save(checkpoint.step_path(tmp_path, 7), whole, {"step": 7})
    checkpoint.save(tmp_path / "alone.safetensors", state, {})
    for path in (tmp_path, checkpoint.step_path(tmp_path, 7), tmp_path / "alone.safetensors"):
        model = m.Model(square())
        assert import_weights(model, path).complete
        for name, values in model.state_dict().items():
            np.testing.assert_array_equal(values, state[name])
    other = m.Model(square(classes=2))
    before = other.state_dict()
    report = import_weights(other, tmp_path, strict=False)
    assert report.loaded == ["conv.weight", "conv.bias"] and len(report.mismatched) == 2
    found = other.state_dict()
    for name in found:
        np.testing.assert_array_equal(found[name], (before if name.startswith("head") else state)[name])


def test_a_model_takes_what_fits_of_another(rng):
    trained, other = m.Model(square(), seed=1), m.Model(square(classes=2))
    state, before = trained.state_dict(), other.state_dict()
    with pytest.raises(ValueError, match="strict=False loads what fits"):
        other.load_state_dict(state)
    left = other.load_state_dict(state | {"more": np.zeros(2, f32)}, strict=False)
    assert sorted(left) == ["head.bias", "head.weight"]
    found = other.state_dict()
    for name in found:
        np.testing.assert_array_equal(found[name], (before if name in left else state)[name])
    assert trained.load_state_dict(state) == []


def test_a_single_number_that_a_state_lacks_is_left():
    class Shift(m.Layer):
        def __init__(self):
            super().__init__("shift")
            self.declare("by", (), lambda rng, shape: np.full(shape, 3, f32), product=False)

        def output_shape(self, shape):
            return shape

    graph = m.Graph()
    model = m.Model(graph.output(Shift()(graph.input((4,)))))
    assert model.load_state_dict({}, strict=False) == ["shift.by"]
    assert model.state_dict()["shift.by"] == 3
