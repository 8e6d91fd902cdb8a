"""What goes together in training and what does not: one table, asked wherever parts are put together.

Each pair that is refused stands in `TABLE` with the reason; every other pair of parts works together, and
`tests/test_legality.py` tries all of them. `docs/distributed.md` shows the table.
"""

from __future__ import annotations

from itertools import combinations

from minidl import checks

PARTS = {
    "ring": "updates within the backward pass",
    "in_momentum": "gradients added to the momentum",
    "sharded": "sharded momentum",
    "rounded": "bf16 messages",
    "scaled": "loss scaling (fp16)",
    "clipped": "clipping",
    "adaptive": "AdamW, LARS or LAMB",
    "norms": "norms of layers (LARS, LAMB)",
    "accumulated": "micro-batches",
    "compiled": "compiled steps",
    "rows": "rows shared by ranks",
    "filters": "filters shared by ranks",
    "checkpoints": "checkpoints",
    "watched": "gradients looked at for NaN",
}
"""Names of parts, and what they are in words."""

TABLE = {
    ("ring", "in_momentum"): "gradients then take no memory that a ring could save",
    ("ring", "sharded"): "a ring keeps whole messages for a moment, and no momentum by parts",
    ("ring", "scaled"): "a gradient that overflows must keep the whole step from updating",
    ("ring", "clipped"): "gradients are limited when all of them are there",
    ("ring", "adaptive"): "they begin a step when all gradients are there",
    ("ring", "accumulated"): "gradients of micro-batches add up, and a ring keeps none of them",
    ("in_momentum", "sharded"): "a rank has no momentum for the gradients of others",
    ("in_momentum", "rounded"): "the momentum would be rounded with the messages",
    ("in_momentum", "scaled"): "a gradient that overflows must leave the momentum alone",
    ("in_momentum", "clipped"): "gradients are limited by themselves, without the momentum",
    ("in_momentum", "adaptive"): "they need the gradients by themselves",
    ("sharded", "scaled"): "the test for overflow needs all gradients",
    ("sharded", "clipped"): "parts are updated as they arrive",
    ("sharded", "compiled"): "the weights of other ranks come in an update of its own",
    ("scaled", "filters"): "each rank would test the gradients of its own filters, and skip steps by itself",
    ("scaled", "watched"): "overflows are expected, and only skip their step",
    ("clipped", "filters"): "each rank would limit by the norm of its own filters",
    ("norms", "filters"): "each rank would scale by the norm of its own filters",
    ("filters", "checkpoints"): "a checkpoint would hold the filters of one rank",
}
"""Pairs of parts that are refused, and why."""


def refuse(who: str, **present: object) -> None:
    """Raise ValueError where two of the parts that are ``present`` do not go together.

    Args:
        who: for the message.
        present: by the names of `PARTS`, whether each is there.
    """
    unknown = [name for name in present if name not in PARTS]
    assert not unknown, unknown
    for pair in combinations([name for name in PARTS if present.get(name)], 2):
        reason = TABLE.get(pair) or TABLE.get(pair[::-1])
        if reason:
            first, second = (PARTS[name] for name in pair)
            raise checks.impossible(who, f"{first} together with {second}: {reason}", "leave one of the two out")


def described(**present: object) -> str:
    """The parts that are there, as `refuse` takes them: in the table's words, or in those of a text in their place."""
    there = {name: present.get(name) for name in PARTS}
    return ", ".join(found if isinstance(found, str) else PARTS[name] for name, found in there.items() if found)
