"""Airflow's log files, as text for people: the components' as they are, the tasks' out of their JSON lines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

TAIL_LINES = 60
LINE_CHARACTERS = 500
# What a component says all the time, whatever happens.
_ROUTINE = re.compile(
    r"\[http\.access\]|Refreshing bundle|Searching for files|Found \d+ files|Adopting or resetting orphaned tasks|"
    r"(triggers|watchers) currently running"
)
# What is in every line of a task's log, and already in the name of its file or of no use to a reader.
_SAID_BY_THE_PATH = frozenset(
    ("logger", "filename", "lineno", "dag_id", "run_id", "task_id", "ti_id", "try_number", "map_index")
)


def tail(log: Path) -> str:
    """The last lines of a component's log, without the routine; empty if there is none."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    telling = [line[:LINE_CHARACTERS] for line in lines if not _ROUTINE.search(line)]
    return "\n".join(telling[-TAIL_LINES:])


def readable(log: Path) -> list[str]:
    """The lines of a task's log, which are JSON, as `time level event`, with the stack trace of an error."""
    return [_line(text) for text in log.read_text(errors="replace").splitlines()]


def _line(text: str) -> str:
    try:
        entry: Any = json.loads(text)
    except ValueError:
        return text
    if not isinstance(entry, dict):
        return text
    head = [str(entry.pop(key, "")) for key in ("timestamp", "level", "event")]
    traces = [_trace(error) for error in entry.pop("error_detail", [])]
    rest = [f"{key}={value}" for key, value in entry.items() if key not in _SAID_BY_THE_PATH]
    return " ".join(head + rest) + "".join(traces)


def _trace(error: dict[str, Any]) -> str:
    frames = [f"\n    {each['filename']}:{each['lineno']} {each['name']}" for each in error["frames"]]
    return f"\n  {error['exc_type']}: {error['exc_value']}{''.join(frames[-8:])}"
