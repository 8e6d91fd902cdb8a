"""What newcomers from PyTorch and Keras call things: a name that minidl does not have tells the one it has."""

from __future__ import annotations

import copy
import importlib
import pickle
import re
from functools import partial
from itertools import product

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.checks import _CALLED_HERE, _DONE_HERE
from minidl.data.loader import Batch


@pytest.mark.parametrize("name", _CALLED_HERE)
def test_a_foreign_name_tells_one_that_exists(name):
    assert name not in m.__all__
    with pytest.raises(AttributeError, match=f"minidl has no {name}; here it is ") as caught:
        getattr(m, name)
    here = re.match(r"[\w.]+", _CALLED_HERE[name])[0]
    module, _, short = here.rpartition(".")
    if module:
        assert hasattr(importlib.import_module(f"minidl.{module}"), short)
    else:
        assert here in m.__all__
    assert caught.value.name == name


MODULES = "callbacks data fusion memory schedule sharded sparse".split()


@pytest.mark.parametrize("module", MODULES)
def test_a_name_of_a_module_tells_the_module(module):
    there = importlib.import_module(f"minidl.{module}")
    own = [name for name, value in vars(there).items() if getattr(value, "__module__", "") == there.__name__]
    names = [name for name in getattr(there, "__all__", own) if not name.startswith("_") and name not in _CALLED_HERE]
    assert names
    for name in names:
        with pytest.raises(AttributeError, match=rf"^minidl has no {name}; here it is .*\b{module}\.{name}\b"):
            m.__getattr__(name)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("Step", "memory.Step or schedule.Step"),
        ("Trainer", "train.Trainer"),
        ("as_torch", "torch_bridge.as_torch"),
        ("export_onnx", "onnx.export_onnx"),
        ("resnet50", "models.resnet50"),
    ],
)
def test_names_of_further_modules(name, home):
    with pytest.raises(AttributeError, match=f"^minidl has no {name}; here it is {home}$"):
        m.__getattr__(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Conv2dd", "did you mean Conv2d?"),
        ("Xyzzy", "has no Xyzzy$"),
        ("optim.Adam", "^minidl.optim has no Adam; here it is AdamW with weight_decay=0$"),
        ("optim.AdamW", "^minidl.optim has no AdamW; here it is minidl.AdamW$"),
        ("optim.SDG", "did you mean SGD?"),
        ("schedule.CosineAnnealingLR", "^minidl.schedule has no CosineAnnealingLR; here it is schedule.Cosine$"),
        ("schedule._xyzzy", "has no _xyzzy$"),
    ],
)
def test_other_names_tell_what_is_near(name, words):
    module, _, short = f"minidl.{name}".rpartition(".")
    with pytest.raises(AttributeError, match=words.replace("?", r"\?")):
        getattr(importlib.import_module(module), short)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: m.ReLU(inplace=True), "ReLU: takes no argument 'inplace'"),
        (lambda: m.Softmax(dim=1), "Softmax: takes no argument 'dim'"),
        (lambda: m.Flatten(start_dim=1, end_dim=2), "Flatten: takes no argument 'start_dim', 'end_dim'"),
        (lambda: models.mlp(hiden=(3,)), "mlp: takes no argument 'hiden'"),
        *(
            (
                partial(build, **{word: True}),
                rf"{name}: takes no argument '{word}'; interchange.import_weights\(model, .*",
            )
            for (name, build), word in product(models.MODELS.items(), ("pretrained", "weights"))
        ),
    ],
)
def test_an_argument_that_a_layer_or_a_network_lacks_is_named_with_it(make, words):
    with pytest.raises(TypeError, match=f"^{words}$"):
        make()


def test_a_learning_rate_that_is_assigned_names_the_call():
    optimizer = trained()["SGD"]
    with pytest.raises(AttributeError, match=r"^AdamW: lr cannot be set so; call set_lr\(0\.05\)$"):
        optimizer.lr = 0.05
    optimizer.set_lr(0.05)
    assert optimizer.lr == 0.05


def trained() -> dict[str, object]:
    """One object of each class that tells."""
    graph = m.Graph()
    graph.output(m.Linear(4, 3, name="head")(graph.input((4,))))
    model, loss = m.Model(graph), m.SoftmaxCrossEntropy()
    images = np.zeros((2, 4), np.float32)
    totals = loss(model(images), np.array([0, 2]))
    batch = Batch(images, np.array([0, 2]), 0, 2)
    return {"Layer": m.ReLU(), "Model": model, "SGD": m.AdamW(model, 0.1), "Totals": totals, "Batch": batch}


@pytest.mark.parametrize("name", _DONE_HERE)
def test_what_other_libraries_can_do_is_told_in_the_words_of_this_one(name):
    thing = trained()[name]
    for foreign, remedy in _DONE_HERE[name].items():
        assert not hasattr(thing, foreign)
        with pytest.raises(AttributeError, match=re.escape(f"{type(thing).__name__} has no {foreign}; {remedy}")):
            getattr(thing, foreign)
    with pytest.raises(AttributeError, match=f"^{type(thing).__name__} has no xyzzy$"):
        thing.xyzzy  # noqa: B018
    assert copy.copy(thing) is not thing


@pytest.mark.parametrize("taken", [copy.deepcopy, pickle.dumps])
def test_what_holds_arrays_is_made_again_as_the_error_says(taken):
    layer, x = m.Conv2d(3, 4, 3), np.ones((2, 5, 5, 3), np.float32)
    assert copy.deepcopy(layer).forward(x).shape == (2, 3, 3, 4)  # it has no arrays yet
    y, made = layer.forward(x), trained()
    for thing, remedy in ((layer, "layer.unbound"), (made["SGD"], "make another"), (made["Totals"], "read")):
        with pytest.raises(TypeError, match=f"^a {type(thing).__name__} cannot be copied or pickled; {remedy}"):
            taken(thing)
    again = layer.unbound()
    again.load_state_dict(layer.state_dict())
    np.testing.assert_array_equal(again.forward(x), y)


def test_models_and_losses_are_called_and_batches_unpacked_as_elsewhere():
    made = trained()
    images, labels = made["Batch"]
    model = made["Model"]
    np.testing.assert_array_equal(model(images), model.forward(images))
    assert m.SoftmaxCrossEntropy()(model(images), labels).loss == made["Totals"].loss


def test_totals_are_printed_in_a_line_without_a_wait_for_the_device(monkeypatch):
    totals = trained()["Totals"]
    x = np.zeros((2, 3), np.float32)
    monkeypatch.setattr(type(totals), "read", None)
    assert str(totals) == "Totals of SoftmaxCrossEntropy, still on the device; read .loss and .accuracy"
    assert f"{m.MSELoss()(x, x)}".endswith("read .loss")


@pytest.mark.parametrize("options", [{}, {"strict": False}])
@pytest.mark.parametrize("state", ["x.pt", None])
def test_a_state_is_no_path(options, state):
    model, layer = trained()["Model"], m.Linear(4, 3)
    told = r"must be a mapping of names to arrays, got .*; interchange.import_weights reads files$"
    with pytest.raises(TypeError, match=f"^state {told}"):
        model.load_state_dict(state, **options)
    with pytest.raises(TypeError, match=f"^state of linear {told}"):
        layer.load_state_dict(state)


def test_nodes_say_which_layers_join_them():
    graph = m.Graph()
    x = graph.input((8, 8, 3))
    for join in (lambda: x + x, lambda: x * x, lambda: 2 * x, lambda: np.ones(3, np.float32) + x):
        with pytest.raises(TypeError, match=r"joined by layers: Add\(name=...\)\(a, b\)"):
            join()


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda model: model(np.zeros((3, 8, 8), np.float32)), r"got \(3, 8, 8\); one sample is x\[None\]"),
        (lambda model: model(np.zeros((2, 3, 8, 8), np.float32)), "NCHW"),
        (lambda model: m.Conv2d(3, 4, 3, padding="same"), "kernel // 2 keeps the size"),
        (lambda model: model.load_state_dict({}), "strict=False loads what fits; interchange.import_weights"),
        (lambda model: m.AdamW(model, 0.1).load_state_dict({}), "not that of AdamW with these options"),
        (lambda model: loss_of(np.eye(3)[[0, 1]].astype(int)), r"labels.argmax\(-1\)"),
        (lambda model: loss_of(np.zeros((2, 8, 8), int)), "such as unet"),
    ],
)
def test_the_remedy_is_told(call, words):
    graph = m.Graph()
    graph.output(m.Conv2d(3, 3, 3, name="conv")(graph.input((8, 8, 3))))
    with pytest.raises(ValueError, match=words):
        call(m.Model(graph))


def loss_of(labels: np.ndarray) -> object:
    return m.SoftmaxCrossEntropy()(np.zeros((2, 3), np.float32), labels)


def test_parameters_are_read_only_and_tell_when_they_are_there():
    conv = m.Conv2d(3, 4, 3)
    with pytest.raises(KeyError, match=r"no parameter 'weight'; one that stands alone has its .* \.to\('cpu'\)"):
        conv.params["weight"]
    assert conv.params.gradients() == {} and m.ReLU().params.get("weight") is None
    for layer in (conv, m.Conv2d(3, 4, 3).to("cpu")):
        with pytest.raises(
            ValueError, match=r"write layer.load_state_dict\({\*\*layer.state_dict\(\), 'weight': values"
        ):
            layer.params["weight"] = np.zeros((4, 3, 3, 3), np.float32)
        with pytest.raises(ValueError, match=r"write layer.load_state_dict\({\*\*layer.state_dict\(\), 'bias': values"):
            layer.bias = np.zeros(4, np.float32)
        with pytest.raises(AttributeError, match=r'Conv2d has no bias.*params\["bias"\]'):
            layer.bias  # noqa: B018
    plain = m.ReLU()
    plain.weight = 3.0  # of no meaning here
    assert plain.weight == 3.0 and not hasattr(m.ReLU(), "weight")
    assert not m.Linear(3, 4).params and "weight" in layer.params and "wieght" not in layer.params
    with pytest.raises(KeyError, match="unknown parameter of the layer 'wieght'; did you mean 'weight'"):
        layer.params["wieght"]
    layer.load_state_dict({**layer.state_dict(), "weight": np.zeros((4, 3, 3, 3), np.float32)})
    assert not layer.params["weight"].any()
    with pytest.raises(
        TypeError, match="state of conv2d: weight must be a NumPy array, got list .*; interchange.import"
    ):
        layer.load_state_dict({"weight": [0.0], "bias": np.zeros(4, np.float32)})


def test_an_array_of_no_library_is_answered_in_numpy():
    class Lent:
        def __init__(self, array):
            self.array, self.shape, self.dtype = array, array.shape, array.dtype
            self.__dlpack_device__, self.__dlpack__ = array.__dlpack_device__, array.__dlpack__

    x = np.ones((2, 3), np.float32)
    y = m.Linear(3, 4).forward(Lent(x))
    np.testing.assert_array_equal(y, m.Linear(3, 4).forward(x))


def test_layer_norm_takes_its_channels_as_torch_does():
    assert m.LayerNorm((5,)).normalized_shape == m.LayerNorm([5]).normalized_shape == 5
    with pytest.raises(ValueError, match="normalized_shape must be .*GroupNorm"):
        m.LayerNorm((8, 8, 5))


def test_a_mistake_is_told_with_what_to_do():
    model = m.Model(models.resnet20())
    for wrong, words in (
        (lambda: m.Model(models.lenet(), device="gpu"), "unknown device 'gpu'; did you mean 'cuda'"),
        (lambda: m.Model(models.lenet(), precision="half"), "unknown precision 'half'; did you mean 'fp16'"),
        (lambda: model.forward(np.zeros((2, 32, 32, 3))), "got float64; convert it with model.ops.cast"),
        (lambda: models.resnet81, "unknown model 'resnet81'; did you mean 'resnet18'"),
        (lambda: m.SGD(model, 0.1).step(), r"message of fc, layer3\.2\.bn2 and \d+ more: update before backward"),
        (lambda: m.BatchNorm2d(3).forward(np.zeros((1, 1, 1, 3), np.float32)), "training needs more than one value"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError), match=words):
            wrong()


def test_modules_need_no_import_of_their_own():
    assert m.models.resnet18 and m.interchange.import_weights and m.sparse.CSBLinear
