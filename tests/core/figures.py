"""The README's state figures and its table of metrics: ``python -m tests.core.figures`` writes them anew from the code.

A figure stands between ``<!-- figure:saga -->`` and ``<!-- /figure -->``, the table between ``<!-- metrics -->`` and
``<!-- /metrics -->``; all that stands there is replaced.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

from airflow_saga.core.measures import table
from airflow_saga.core.states import Machine, figure

README = Path(__file__).parents[2] / "README.md"
_BLOCK = re.compile(r"(<!-- figure:(\w+) -->\n).*?(<!-- /figure -->)", re.DOTALL)
_TABLE = re.compile(r"(<!-- metrics -->\n).*?(<!-- /metrics -->)", re.DOTALL)


def figures_in(text: str) -> list[str]:
    """The machines that have a place in this text, in its order."""
    return [block.group(2) for block in _BLOCK.finditer(text)]


def with_figures(text: str) -> str:
    """The text with the figures as the tables are now."""
    return _BLOCK.sub(
        lambda block: f"{block.group(1)}```mermaid\n{_figure_of(block.group(2))}\n```\n{block.group(3)}", text
    )


def with_table(text: str) -> str:
    """The text with the table of metrics as it is now."""
    return _TABLE.sub(lambda block: f"{block.group(1)}{table()}\n{block.group(2)}", text)


def _figure_of(name: str) -> str:
    for machine in get_args(Machine):
        if machine == name:
            return figure(machine)
    raise ValueError(f"there is no machine {name!r} to draw, only {', '.join(get_args(Machine))}")


if __name__ == "__main__":
    README.write_text(with_table(with_figures(README.read_text(encoding="utf-8"))), encoding="utf-8")
