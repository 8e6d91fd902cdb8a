"""Frozen records as JSON objects that say what they are, and of which schema."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

SCHEMA = 1


def dumps(kind: str, record: Any) -> str:
    """One JSON object of a dataclass."""
    return json.dumps({"schema": SCHEMA, "kind": f"memory_{kind}", **dataclasses.asdict(record)})


def loads(kind: str, text: str) -> dict[str, Any]:
    """The fields that `dumps` wrote.

    Raises:
        ValueError: when ``text`` is something else, or of another schema.
    """
    content = json.loads(text)
    if not isinstance(content, dict) or content.pop("kind", None) != f"memory_{kind}":
        raise ValueError(f"not a memory {kind}: minidl plan --{'json' if kind == 'plan' else kind} PATH writes one")
    if (schema := content.pop("schema", None)) != SCHEMA:
        raise ValueError(f"memory {kind} of schema {schema!r}; this minidl reads schema {SCHEMA}")
    return content
