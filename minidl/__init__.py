"""minidl: a standalone deep-learning library for convolutional networks, with explicit backward passes.

Its names are those of `minidl.public`, imported when the first of them is asked for: the command would otherwise spend
half a second on them before it could answer Ctrl-C, or list its options.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from minidl import extensions  # noqa: F401  (first: the others need what it asks for)

if TYPE_CHECKING:
    from minidl.public import *  # noqa: F403
    from minidl.public import __all__ as __all__

__version__ = "0.1.0"

# Modules that a user imports names from, beside those of `minidl.public`.
_MODULES = (
    "callbacks", "compile", "data", "dist", "fusion", "interchange", "layers", "memory", "models", "onnx", "predict",
    "schedule", "sharded", "sparse", "step", "torch_bridge", "train",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name != "__all__":  # what Python and its tools ask of every module
        raise AttributeError(f"module 'minidl' has no attribute {name!r}", name=name)
    if name.isidentifier() and find_spec(f"minidl.{name}"):
        return import_module(f"minidl.{name}")
    public = import_module("minidl.public")
    here = globals()
    here.update({each: getattr(public, each) for each in ("__all__", *public.__all__)})
    if name not in here:
        from minidl import checks

        raise checks.elsewhere(name, public.__all__, _homes(name))
    return here[name]


def _homes(name: str) -> list[str]:
    """Where else a public name is: ``["schedule.Cosine"]``."""
    found = []
    for short in _MODULES:
        module = import_module(f"minidl.{short}")
        own = getattr(vars(module).get(name), "__module__", "") == module.__name__
        if name in getattr(module, "__all__", ()) or own and not name.startswith("_"):
            found.append(f"{short}.{name}")
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *sys.modules[__name__].__all__})
