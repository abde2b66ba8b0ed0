"""What shows that a run which failed was marked failed by a person, where no hook has told.

Airflow keeps no word of it with the run. Its audit log has one, which a task cannot read; what a task can read is what
became of the tasks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

_NOT_FAILED = frozenset({"success", "skipped", "removed"})


@dataclass(frozen=True)
class TaskEnd:
    """How a task instance ended: its state, and the duration that Airflow keeps of it."""

    state: str | None
    seconds: float | None


@dataclass(frozen=True)
class FailedRun:
    """What is known of a failed run.

    :ivar marked: whether a person marked it failed; None: that cannot be told from here.
    :ivar actor: who did, where that is known.
    :ivar evidence: what shows it, for the history.
    :ivar over_seconds: for how long it is over; None if that is not known.
    """

    marked: bool | None
    actor: str | None = None
    evidence: str = ""
    over_seconds: float | None = None


NO_TASK_FAILED = "none of its tasks failed, and those that had not begun were skipped at once"


def tasks_show_mark(tasks: Collection[TaskEnd]) -> bool:
    """Whether the tasks of a failed run could be left like this by nothing but a mark.

    By itself a run fails with a task that failed, or with tasks that never got a state. Its ``dagrun_timeout`` skips
    what is open, as a mark does, and a branch skips what is not taken: both leave the duration empty. A mark sets begin
    and end of a task that had not begun to the same moment. A task under way is failed by a mark, which looks like a
    failure of its own: that says nothing.
    """
    skipped = [task for task in tasks if task.state == "skipped"]
    return (
        bool(skipped)
        and all(task.state in _NOT_FAILED for task in tasks)
        and all(task.seconds == 0.0 for task in skipped)
    )


def runs_set_failed(extra: Mapping[str, Any], dag_id: str, run_id: str) -> list[tuple[str, str]]:
    """The runs that a request set to failed, as Airflow's audit log keeps it: one, or many at once.

    :param dag_id: the DAG of its path; ``~`` where each of many runs names its own.
    :param run_id: the run of its path, if it has one.
    """
    if "actions" not in extra:
        return [(dag_id, run_id)] if extra.get("state") == "failed" else []
    return [
        (str(entity.get("dag_id") or dag_id), str(entity.get("dag_run_id")))
        for action in _dicts(extra["actions"])
        for entity in _dicts(action.get("entities"))
        if entity.get("state") == "failed"
    ]


def _dicts(found: Any) -> list[Mapping[str, Any]]:
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
