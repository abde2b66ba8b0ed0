"""A compensation that gave back an operator: the undo executes it, as a part of its own task."""

from __future__ import annotations

import contextvars
import logging
from datetime import datetime
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.bases.operator import ExecutorSafeguard
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    DagRunTriggerException,
    TaskAwaitingInput,
    TaskDeferred,
)

from airflow_saga.core.errors import ActionTimedOut, CompensationRejected
from airflow_saga.core.records import ActionRecord
from airflow_saga.graph import is_step
from airflow_saga.platform import SupervisorPlatform

log = logging.getLogger(__name__)

_NEEDS_A_TASK = (TaskDeferred, TaskAwaitingInput, AirflowRescheduleException, DagRunTriggerException)
"""How operators ask for what only a task of their own can have."""


class OperatorExecutor:
    """Executes the operators that the compensations of one task give back; anything else it gives back as it is.

    Their templates see the run that is undone (``run_id``, ``dag_run``, ``logical_date``, ``ds``, ``ts``,
    ``data_interval_start``, … as the forward task saw them) and ``record``. What belongs to a task (``ti``, ``task``,
    ``params``, ``dag``) is the undo's.

    :param context: Airflow's, of the task that undoes.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._running: BaseOperator | None = None

    def __call__(self, answer: Any, record: ActionRecord) -> Any:
        """What the operator came to; an exception of it is one failed try.

        :raises CompensationRejected: it asked for a task of its own, or failed for good; a person decides.
        """
        if not isinstance(answer, BaseOperator):
            return answer
        if is_step(answer):
            raise CompensationRejected(
                f"the compensation of {record.name} gave back a saga step ({answer.task_type}): nothing would undo it, "
                f"so it was not executed. Give back the plain operator."
            )
        log.info("the compensation of %s is %s: what follows is its log", record.name, answer.task_type)
        if getattr(answer, "deferrable", False):
            answer.deferrable = False  # type: ignore[attr-defined]
        self._running = answer
        try:
            return self._execute(answer, record)
        except _NEEDS_A_TASK as wish:
            raise CompensationRejected(
                f"the compensation of {record.name}, {answer.task_type}, asked for what only a task of its own can "
                f"have ({type(wish).__name__}); what it had begun may stand. Give back one that ends by itself "
                f"(deferrable=False, mode='poke'), or do its work in a function."
            ) from wish
        except AirflowFailException as no:
            raise CompensationRejected(str(no)) from no
        except ActionTimedOut:
            answer.on_kill()
            raise
        finally:
            self._running = None

    def on_kill(self) -> None:
        """From a signal handler, as for any operator: the one that is executed ends its own work."""
        if self._running is not None:
            self._running.on_kill()

    def _execute(self, operator: BaseOperator, record: ActionRecord) -> Any:
        context = {**self._context, **_of_forward_run(record), "record": record}
        operator.render_template_fields(context)  # type: ignore[arg-type]
        own = contextvars.copy_context()
        own.run(ExecutorSafeguard.tracker.set, operator)
        return own.run(operator.execute, context)  # type: ignore[arg-type]


def _of_forward_run(record: ActionRecord) -> dict[str, Any]:
    """What templates are told of the run that is undone, as its own tasks were told."""
    told: dict[str, Any] = {"run_id": record.run_id}
    run = SupervisorPlatform().run(record.dag_id, record.run_id)
    if run is None:
        return told
    told["dag_run"] = run
    date: datetime | None = run.logical_date
    if date is None:
        return told
    day, moment = date.strftime("%Y-%m-%d"), date.isoformat()
    return told | {
        "logical_date": date,
        "ds": day,
        "ds_nodash": day.replace("-", ""),
        "ts": moment,
        "ts_nodash": date.strftime("%Y%m%dT%H%M%S"),
        "ts_nodash_with_tz": moment.replace("-", "").replace(":", ""),
        "data_interval_start": run.data_interval_start,
        "data_interval_end": run.data_interval_end,
    }
