"""The catch-all of an undo: steps that acted in a run and that the DAG file does not have any more.

They have no ``undo.<task>`` of their own, so one task undoes them, before the others: a later step that is gone would
stand in the way of all that came before it. One that is gone and came before a step that is still there waits for that
one; ``settle`` undoes it in the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowSkipException

from airflow_saga.core import errors
from airflow_saga.operators.compensation import open_store, planned_request, undo_step
from airflow_saga.runtime.undo import StepUndo
from airflow_saga.store.reader import Reader


class GoneOperator(BaseOperator):
    """Undo the steps of the plan that no other task of this DAG undoes.

    :param steps: the task_ids that have an undo of their own, and whether each is mapped.
    """

    ui_color = "#f6dfd6"

    def __init__(self, *, steps: Mapping[str, bool], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = dict(steps)
        self._undo: StepUndo | None = None

    def execute(self, context: Any) -> dict[str, Any]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            raise AirflowSkipException("this run carries out no undo")
        with open_store() as connection:
            request = Reader(connection).request(request_uuid)
        assert request is not None
        planned = (request.plan or {"steps": []})["steps"]
        gone = [(step["task_id"], step["map_index"]) for step in planned if self._is_gone(step)]
        if not gone:
            raise AirflowSkipException("each step of the plan has a task of its own that undoes it")
        done = {"compensated": 0, "standing": 0}
        for task_id, map_index in gone:
            self.log.info("%s (index %d) is not in the DAG file any more", task_id, map_index)
            try:
                report = undo_step(self, context, request_uuid, task_id, map_index)
            except errors.UndoOutOfOrderError as later:
                self.log.info("%s; it is undone after them, by settle", later)
                continue
            done["compensated"] += report.compensated
            done["standing"] += report.standing
        return done

    def on_kill(self) -> None:
        if self._undo is not None:
            self._undo.request_kill()

    def _is_gone(self, step: Mapping[str, Any]) -> bool:
        """Its task is not there, or has many instances now where it had one, or the other way round."""
        mapped = self.steps.get(step["task_id"])
        return mapped is None or mapped != (step["map_index"] >= 0)
