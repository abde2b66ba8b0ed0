"""What a benchmark says: one JSON line, with its limits beside the figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from typing import Any


def p50_ms(seconds: Sequence[float]) -> float:
    return statistics.median(seconds) * 1000


def p99_ms(seconds: Sequence[float]) -> float:
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))] * 1000


class Report:
    """Prints lines as they come and remembers which limits were exceeded."""

    def __init__(self) -> None:
        self.exceeded: list[str] = []

    def line(self, bench: str, *, limits: dict[str, tuple[str, float]] | None = None, **figures: Any) -> None:
        """:param limits: figure → ("<=" or ">=", bound)."""
        said: dict[str, Any] = {"bench": bench}
        for name in ("p50_ms", "p99_ms", "ratio", "count"):
            said[name] = _rounded(figures.pop(name, None))
        said |= {name: _rounded(value) for name, value in figures.items()}
        kept = {}
        for name, (relation, bound) in (limits or {}).items():
            value = said[name]
            holds = value is not None and (value <= bound if relation == "<=" else value >= bound)
            kept[f"{name} {relation} {bound:g}"] = holds
            if not holds:
                self.exceeded.append(f"{bench}: {name} is {value}, limit {relation} {bound:g}")
        said["limits"] = kept
        print(json.dumps(said), flush=True)


def _rounded(value: Any) -> Any:
    return round(value, 4) if isinstance(value, float) else value
