"""Other readings of a stored tree, without its classes: one form for all equal values, and one for people."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

from airflow_saga.runtime.kinds import READERS
from airflow_saga.runtime.kinds.compact import dumps_sorted
from airflow_saga.runtime.kinds.tree import TAG, Payload


def canonical(node: Any) -> Any:
    """The same tree for every writing of equal values."""
    if isinstance(node, float):
        return node + 0.0
    if isinstance(node, list):
        return [canonical(item) for item in node]
    if not isinstance(node, dict):
        return node
    tree = {name: canonical(item) for name, item in node.items()}
    tag, kept = tree.get(TAG), tree.get("v", ())
    if tag in ("dict", "dataclass", "pydantic", "set", "frozenset"):
        tree["v"] = sorted(kept, key=dumps_sorted)
        for private in ("x", "p"):
            if private in tree:
                tree[private] = sorted(tree[private], key=dumps_sorted)
    elif tag == "decimal":
        number = Decimal(kept)
        tree["v"] = "NaN" if number.is_nan() else str(_shortest(number)) if number.is_finite() else kept
    elif tag == "range":
        tree["v"] = _numbers(
            range(*(int(part["v"], 16) if isinstance(part, dict) else part for part in kept))
        )
    return tree


def _numbers(of: range) -> list[str]:
    """What makes two ranges equal: the numbers in them."""
    if not of:
        return []
    return [hex(of[0]), hex(of[-1]), hex(of.step)] if of[0] != of[-1] else [hex(of[0])]


def _shortest(number: Decimal) -> Decimal:
    """The number without trailing zeros, whatever the precision of the present context."""
    sign, digits, exponent = number.as_tuple()
    text = "".join(map(str, digits)).rstrip("0")
    if not text.strip("0"):
        return Decimal(0)
    return Decimal((sign, tuple(map(int, text)), int(exponent) + len(digits) - len(text)))


def for_people(node: Payload) -> Any:
    """One tagged object as plain JSON, its parts being so already."""
    tag, kept = node.get(TAG), node.get("v", ())
    if tag in ("bytes", "bytearray", "numpy"):
        return f"<{tag}, {len(kept) * 3 // 4 - kept.count('=')} bytes>"
    if tag == "secret":
        return f"Secret({node['c']!r}, field={kept!r})"
    if tag in ("dataclass", "pydantic", "namedtuple"):
        return dict(kept)
    if tag == "dict":
        return {key if isinstance(key, str) else json.dumps(key): item for key, item in kept}
    if tag == "timedelta":
        return str(READERS[tag](node))
    if tag in ("datetime", "time", "pendulum"):
        zone = node.get("z")
        return f"{kept} {zone[-1]}" if zone else kept
    if tag == "str":
        return READERS[tag](node)
    return node if tag is None else kept
