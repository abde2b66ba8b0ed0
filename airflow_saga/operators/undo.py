"""The tasks that undo steps: one per step of the DAG file, and a catch-all for steps that the file has no more.

A step that is gone has no ``undo.<task>`` of its own. Those that nothing comes after are undone before all others; one
in the middle is undone by whichever task undoes what came before it, when its turn has come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from airflow_saga.core import errors
from airflow_saga.core.records import StepRow
from airflow_saga.core.secret import set_secret_resolver
from airflow_saga.core.states import StepState
from airflow_saga.operators.carry_out import OperatorExecutor
from airflow_saga.operators.compensation import MOST_MAPPED, open_store, planned_request
from airflow_saga.runtime.undo import StepUndo
from airflow_saga.settings import Settings, resolve_secret, secrets_of_this_process, store_address
from airflow_saga.store.reader import Reader
from airflow_saga.store.settle import SettleVerbs
from airflow_saga.telemetry import listen_in


class _Undoing(BaseOperator):
    """A task that undoes steps. A kill is a flag for the undo, and handed on to an operator that it executes."""

    _undo: StepUndo | None = None
    _carried_out: OperatorExecutor | None = None

    def on_kill(self) -> None:
        if self._undo is not None:
            self._undo.request_kill()
        if self._carried_out is not None:
            self._carried_out.on_kill()


class UndoOperator(_Undoing):
    """Undo one step (or some indexes of a mapped one) action by action, newest first.

    :param step_task_id: the task of the saga DAG that is undone.
    :param steps: the steps that the DAG file has: task_id → whether it is mapped.
    :param indexes: map indexes; None for a task that is not mapped.
    """

    ui_color = "#f6dfd6"

    def __init__(
        self,
        *,
        step_task_id: str,
        steps: Mapping[str, bool],
        indexes: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.step_task_id = step_task_id
        self.steps = dict(steps)
        self.indexes = indexes

    template_fields: Sequence[str] = ("indexes",)

    def execute(self, context: Any) -> dict[str, Any]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            raise AirflowSkipException("this run carries out no undo")
        undo_gone(self, context, request_uuid, self.steps, before=self.step_task_id)
        done = {"compensated": 0, "standing": 0}
        for index in [-1] if self.indexes is None else self.indexes:
            report = undo_step(self, context, request_uuid, self.step_task_id, int(index))
            done["compensated"] += report.compensated
            done["standing"] += report.standing
        return done


class GoneOperator(_Undoing):
    """Undo the steps that no other task of this DAG undoes, as far as it is their turn.

    :param steps: the steps that the DAG file has: task_id → whether it is mapped.
    """

    ui_color = "#f6dfd6"

    def __init__(self, *, steps: Mapping[str, bool], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.steps = dict(steps)

    def execute(self, context: Any) -> list[str]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            raise AirflowSkipException("this run carries out no undo")
        undone = undo_gone(self, context, request_uuid, self.steps)
        if not undone:
            raise AirflowSkipException("each step of the plan has a task of its own that undoes it")
        return undone


def undo_gone(
    operator: Any, context: Any, request_uuid: UUID, steps: Mapping[str, bool], before: str | None = None
) -> list[str]:
    """Undo steps of the plan that the DAG file has no more, and whose turn it is; their labels.

    :param before: only those that came after this task, which it has to wait for.
    """
    undone = []
    for step in _gone(request_uuid, steps):
        if before is not None and before not in step.ancestors:
            continue
        operator.log.info("%s is not in the DAG file any more; it is undone here", step.label)
        try:
            undo_step(operator, context, request_uuid, step.task_id, step.map_index)
        except errors.UndoOutOfOrderError as later:
            operator.log.info("%s; it is undone after them", later)
        except AirflowFailException as fenced:
            raise AirflowException(
                f"{fenced}; the next try goes on"
            ) from fenced  # two tasks wait for the same step
        else:
            undone.append(step.label)
    return undone


def _gone(request_uuid: UUID, steps: Mapping[str, bool]) -> list[StepRow]:
    """In the order of the undo. Its task is not there, or has many instances now where it had one, or the reverse."""
    with open_store() as connection:
        reader = Reader(connection)
        request = reader.request(request_uuid)
        assert request is not None
        order = [step["step_id"] for step in (request.plan or {"steps": []})["steps"]]
        found = {
            step.step_id: step for step in reader.steps(request.saga_id) if step.state == StepState.UNDOING
        }
        unsettled = {row.step_id for row in SettleVerbs(connection).unsettled(request)}
    return [
        step
        for step in (found[step_id] for step_id in order if step_id in found and step_id in unsettled)
        if steps.get(step.task_id) != (step.map_index >= 0)
    ]


def undo_step(operator: Any, context: Any, request_uuid: UUID, task_id: str, map_index: int) -> Any:
    """One attempt to undo one step, its errors said in Airflow's terms."""
    set_secret_resolver(resolve_secret)
    listen_in()
    carry_out = OperatorExecutor(context)
    undo = StepUndo(
        store_address(),
        request_uuid,
        context["dag_run"].run_id,
        task_id,
        map_index,
        Settings.load().limits(),
        secrets_of_this_process(),
        execute=carry_out,
    )
    operator._undo, operator._carried_out = undo, carry_out
    try:
        return undo.run()
    except errors.UndoFencedError as fenced:
        raise AirflowFailException(str(fenced)) from fenced
    except errors.StepInterrupted as stop:
        raise AirflowException(f"{stop}; the next try goes on where this one stopped") from stop
    finally:
        operator._undo = operator._carried_out = None


class IndexesOperator(BaseOperator):
    """Which indexes of a mapped step have something to undo, in as many groups as there will be instances."""

    ui_color = "#f3ead9"

    def __init__(self, *, step_task_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step_task_id = step_task_id

    def execute(self, context: Any) -> list[list[int]]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            return []
        with open_store() as connection:
            request = Reader(connection).request(request_uuid)
            assert request is not None
            indexes = Reader(connection).indexes_to_undo(request, self.step_task_id)
        size = -(-len(indexes) // MOST_MAPPED) or 1
        return [indexes[start : start + size] for start in range(0, len(indexes), size)]
