"""Options from a TOML file, what a run was started with, and what options name in the user's own modules.

model = "resnet50"        # run.toml; the same words as on the command line, without the dashes
batch = 256
weight-decay = 5e-5
sync-batch-norm = true
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any

from minidl import checks


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help of options with the defaults that say something, and with descriptions as they are written."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        plain = action.default is None or action.default is False or action.default == []
        if isinstance(action.default, list) and not plain:  # as it is typed, not as Python writes it
            words = " ".join(map(str, action.default)).replace("%", "%%")
            return f"{action.help} (default: {words})"
        return action.help if plain else super()._get_help_string(action)


def use_config(parser: argparse.ArgumentParser, path: str | Path) -> None:
    """Make the values of a file the defaults of a parser's options; the command line still wins.

    Raises:
        OSError: a file that cannot be read.
        ValueError: a file that is not TOML, a word that is no option, or a value that the option cannot take.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    actions = (action for action in parser._actions if action.option_strings)
    options = {action.dest: action for action in actions if action.dest not in ("help", "config")}
    defaults = {}
    for word, value in values.items():
        name = word.replace("-", "_")
        if name not in options:
            raise ValueError(f"{path}: {checks.unknown('option', word, [o.replace('_', '-') for o in options])}")
        defaults[name] = _value(path, word, options[name], value)
    parser.set_defaults(**defaults)


def _value(path: str | Path, word: str, action: argparse.Action, value: Any) -> Any:
    """The value as the option would have it."""
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise checks.bad_value(str(path), word, "true or false", value)
        return value
    if action.nargs == "+":
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise checks.bad_value(str(path), word, "a text or a list of texts", value)
        return texts
    if action.nargs == "?" and isinstance(value, bool):  # the option without a value, or left out
        return action.const if value else action.default
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise checks.bad_value(str(path), word, "a text or a number", value)
    try:
        taken = action.type(value if isinstance(value, str) else repr(value)) if action.type else str(value)
    except (ValueError, TypeError) as error:
        raise checks.bad_value(str(path), word, f"of the kind {action.type.__name__}", value) from error
    if action.choices is not None and taken not in action.choices:
        raise checks.bad_value(str(path), word, f"one of {', '.join(map(str, action.choices))}", value)
    return taken


_own: set[Path] = set()  # folders of modules that were imported for an option


def where(error: BaseException) -> str:
    """`` (mynet.py, line 7: x = block(x))``: where an error came up in what `named` imported, or a file beside it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).parent in _own]
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""


def named(option: str, spec: str) -> Any:
    """What ``"package.module:name"`` names; also of a file of the working directory, ``"mynet:build"`` of mynet.py.

    Raises:
        ValueError: for text of another form, a module that cannot be imported, a name that it has not.
    """
    path, _, name = spec.partition(":")
    if not (path and name):
        raise checks.bad_value("", option, "MODULE:NAME, as in mynet:build for a function of mynet.py", spec)
    if path.endswith(".py") or os.sep in path:
        module, folder = Path(path).stem, Path(path).parent
        remedy = f"write {module}:{name}{f' in the folder {folder}' if str(folder) != '.' else ''}"
        raise checks.bad_value("", option, "MODULE:NAME, the name of a module and not of its file", spec, remedy)
    if os.getcwd() not in sys.path:  # it stays: functions of the module may import others later
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.import_module(path)
        _own.add(Path(getattr(found, "__file__", None) or path).parent)
    except ImportError as error:
        raise ValueError(f"{option} {spec}: {path} cannot be imported ({error})") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise checks.unknown(f"name in {path}", name, [n for n in vars(found) if not n.startswith("_")])
        found = getattr(found, part)
    return found
