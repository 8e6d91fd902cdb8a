"""What newcomers from PyTorch and Keras call things: a name that minidl does not have tells the one it has."""

from __future__ import annotations

import re

import numpy as np
import pytest

import minidl as m
from minidl import models
from minidl.checks import _CALLED_HERE, _INSTEAD


@pytest.mark.parametrize("name", _CALLED_HERE)
def test_a_foreign_name_tells_one_that_exists(name):
    assert name not in m.__all__
    with pytest.raises(AttributeError, match=f"minidl has no {name}; here it is ") as caught:
        getattr(m, name)
    here = re.match(r"[\w.]+", _CALLED_HERE[name])[0]
    if here.startswith("data."):
        from minidl import data

        assert hasattr(data, here.removeprefix("data."))
    else:
        assert here in m.__all__
    assert caught.value.name == name


@pytest.mark.parametrize(
    ("name", "words"),
    [("Conv2dd", "did you mean Conv2d?"), ("models", "import minidl.models"), ("Xyzzy", "has no Xyzzy$")],
)
def test_other_names_tell_what_is_near(name, words):
    with pytest.raises(AttributeError, match=words.replace("?", r"\?")):
        m.__getattr__(name)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: m.ReLU(inplace=True), "ReLU: takes no argument 'inplace'"),
        (lambda: m.Softmax(dim=1), "Softmax: takes no argument 'dim'"),
        (lambda: m.Flatten(start_dim=1, end_dim=2), "Flatten: takes no argument 'start_dim', 'end_dim'"),
    ],
)
def test_an_argument_that_a_layer_lacks_is_named_with_it(make, words):
    with pytest.raises(TypeError, match=f"^{words}$"):
        make()


def test_layer_norm_takes_its_channels_as_torch_does():
    assert m.LayerNorm((5,)).normalized_shape == m.LayerNorm([5]).normalized_shape == 5
    with pytest.raises(ValueError, match="normalized_shape must be .*GroupNorm"):
        m.LayerNorm((8, 8, 5))


@pytest.mark.parametrize("name", _INSTEAD)
def test_a_member_that_models_of_others_have_tells_what_stands_for_it(name):
    model = m.Model(models.lenet())
    with pytest.raises(AttributeError, match=f"^Model has no {name}; here it is ") as caught:
        getattr(model, name)
    assert caught.value.name == name and not hasattr(model, name)


def test_models_and_losses_may_be_called():
    model, loss = m.Model(models.lenet()), m.SoftmaxCrossEntropy()
    x, labels = np.ones((2, *model.graph.nodes[0].shape), np.float32), np.array([1, 2])
    logits = model(x)
    assert (logits == model.forward(x)).all()
    assert loss(logits, labels).read() == loss.forward(logits, labels).read()


def test_a_mistake_is_told_with_what_to_do():
    model = m.Model(models.resnet20())
    for wrong, words in (
        (lambda: m.Model(models.lenet(), device="gpu"), "unknown device 'gpu'; did you mean 'cuda'"),
        (lambda: m.Model(models.lenet(), precision="half"), "unknown precision 'half'; did you mean 'fp16'"),
        (lambda: model.forward(np.zeros((2, 3, 32, 32), np.float32)), "NCHW.*transpose"),
        (lambda: model.forward(np.zeros((2, 32, 32, 3))), "got float64; convert it with x.astype"),
        (lambda: models.resnet81, "unknown model 'resnet81'; did you mean 'resnet18'"),
        (lambda: m.SGD(model, 0.1).step(), r"message of fc, layer3\.2\.bn2 and \d+ more: update before backward"),
        (lambda: m.BatchNorm2d(3).forward(np.zeros((1, 1, 1, 3), np.float32)), "training needs more than one value"),
    ):
        with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError), match=words):
            wrong()
