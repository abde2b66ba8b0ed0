"""A step does what the run's configuration tells it: `{"trip": {"id": …}, "do": {"a": ["flights", "raise"]}}`.

A word is the name of an action, or one of these:

`raise`, `raise<n`  fail; fail in the tries before the n-th
`skip`              end as skipped
`swallow`           from here on, go on after any `Exception`
`cling`             from here on, go on after anything, even what only ends processes
`nap`               sleep for two seconds
`hang`              do not return, whatever is raised
"""

from __future__ import annotations

import time
from typing import Any

from airflow.sdk.exceptions import AirflowSkipException

from trips.actions import ACTIONS


def act(task_id: str, context: Any) -> list[Any]:
    """Do what this step was told; gives back what its calls gave."""
    conf = context["dag_run"].conf
    swallowed: type[BaseException] | tuple[()] = ()
    results = []
    for word in conf["do"].get(task_id, ()):
        try:
            match word.split("<"):
                case ["swallow"]:
                    swallowed = Exception
                case ["cling"]:
                    swallowed = BaseException
                case ["raise", *before]:
                    _fail(context["ti"].try_number, *before)
                case ["skip"]:
                    raise AirflowSkipException("told to skip")
                case ["nap"]:
                    time.sleep(2)
                case ["hang"]:
                    _hang()
                case _:
                    results.append(ACTIONS[word](conf["trip"]))
        except swallowed as problem:
            print(f"{word}: goes on after {problem!r}")
    return results


def _fail(try_number: int, before: str | None = None) -> None:
    if before is None or try_number < int(before):
        raise RuntimeError(f"told to fail in try {try_number}")


def _hang() -> None:
    while True:
        try:
            time.sleep(1)
        except BaseException as problem:  # noqa: BLE001 - a body as bad as they come
            print(f"hangs on after {problem!r}")
