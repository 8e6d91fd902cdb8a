"""The folder where minidl keeps what one run has found out for the next: kernels, ceilings, choices that were measured.

$MINIDL_CACHE, else $XDG_CACHE_HOME/minidl, else ~/.cache/minidl. Records are JSON files in a folder of their kind, and
hold for what they say of themselves: machine, device, number of ranks.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def folder() -> Path:
    """As the environment has it; it need not exist, nor be writeable: that of a user without a home never is."""
    if chosen := os.environ.get("MINIDL_CACHE"):
        return Path(chosen)
    home = os.path.expanduser("~")  # which stays "~", and would be a folder of that name, where nobody knows it
    above = os.environ.get("XDG_CACHE_HOME") or os.path.join(home if os.path.isabs(home) else os.devnull, ".cache")
    return Path(above) / "minidl"


def file_name(words: str) -> str:
    """Of a record that these words tell from others of its kind."""
    return f"{re.sub(r'[^a-z0-9]+', '-', words.lower()).strip('-')}.json"


def load(path: Path, identity: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record at ``path``; None when there is none, it is damaged, or it is another's."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or any(record.get(key) != value for key, value in identity.items()):
        return None
    return record
