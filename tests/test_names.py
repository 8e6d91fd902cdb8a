"""What newcomers from PyTorch and Keras call things: a name that minidl does not have tells the one it has."""

from __future__ import annotations

import re

import pytest

import minidl as m
from minidl.checks import _CALLED_HERE


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
