"""Indexes of a mapped step that acted and are no more, since the mapping has become shorter before a clear.

A sibling that runs again asks for their undo as it attaches. Where none is left (the list is empty now), the end of the
run tells: nobody will run them again, so nobody else would ever undo what they did.
"""

from __future__ import annotations

from collections.abc import Callable

from airflow_saga.core.records import SagaRow
from airflow_saga.core.states import StepState
from airflow_saga.store.decision import Decision
from airflow_saga.store.reader import Reader
from airflow_saga.store.runs import RunVerbs

TaskState = Callable[[str, str, str, int], str | None]


def undo_removed(
    reader: Reader, runs: RunVerbs, saga: SagaRow, clear_number: int, task_state: TaskState
) -> Decision | None:
    """Ask for their undo; None if there are none.

    :param clear_number: of the run now: only a clear makes a mapping shorter.
    :param task_state: asks Airflow for the state of a task instance, by dag_id, run_id, task_id and map_index.
    """
    gone = [
        step.step_id
        for step in (reader.steps(saga.saga_id) if clear_number else ())
        if step.map_index >= 0
        and step.state == StepState.SUCCEEDED
        and step.clear_number < clear_number
        and task_state(saga.dag_id, saga.run_id, step.task_id, step.map_index) == "removed"
    ]
    return runs.undo_removed(saga.dag_id, saga.run_id, gone) if gone else None
