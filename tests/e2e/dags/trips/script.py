"""A step does what the run's configuration tells it: `{"trip": {"id": …}, "do": {"a": ["flights", "raise"]}}`.

A word is the name of an action, or one of: `raise` (fail), `raise<n` (fail in the tries before the n-th), `skip`,
`swallow` (from here on go on after any exception), `hang` (never return, whatever is raised).
"""

from __future__ import annotations

import time
from typing import Any

from airflow.sdk.exceptions import AirflowSkipException

from trips.actions import ACTIONS


def act(task_id: str, context: Any, saga: Any = None) -> list[Any]:
    """Do what this step was told; gives back what its calls gave."""
    conf = context["dag_run"].conf
    words = list(conf["do"].get(task_id, ()))
    swallows, results = "swallow" in words, []
    for word in words:
        try:
            results += _do(word, conf["trip"], context["ti"].try_number)
        except Exception as problem:
            if not swallows:
                raise
            print(f"swallowed {problem!r}")
    return results


def _do(word: str, trip: dict, try_number: int) -> list[Any]:
    match word.split("<"):
        case ["swallow"]:
            return []
        case ["raise"]:
            raise RuntimeError("told to fail")
        case ["raise", number]:
            if try_number < int(number):
                raise RuntimeError(f"told to fail before try {number}")
            return []
        case ["skip"]:
            raise AirflowSkipException("told to skip")
        case ["hang"]:
            _hang()
    return [ACTIONS[word](trip)]


def _hang() -> None:
    while True:
        try:
            time.sleep(1)
        except BaseException as problem:  # noqa: BLE001 - a body as bad as they come
            print(f"goes on after {problem!r}")
