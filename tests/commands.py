"""Commands of a test's own, found before those of the machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
PYTHON = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
MINIDL = f'#!/bin/sh\nexec {sys.executable} -m minidl "$@"\n'


def with_commands(folder: Path, scripts: Mapping[str, str]) -> dict[str, str]:
    """An environment in which these names are these scripts, put into ``folder``, and Python finds this minidl."""
    folder.mkdir(exist_ok=True)
    for name, text in scripts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    modules = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": modules}
