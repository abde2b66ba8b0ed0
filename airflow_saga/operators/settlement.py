"""The end of an undo: settle what is left, say what still stands, and make the questions about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from airflow_saga.core import errors
from airflow_saga.core.plan import undo_order
from airflow_saga.core.records import ActionRow
from airflow_saga.operators.answers import asked_already, look_again_seconds, needs_person
from airflow_saga.operators.compensation import (
    MOST_MAPPED,
    SETTLE_ROUNDS,
    SUMMARY_KEY,
    open_store,
    planned_request,
    tell_stuck,
)
from airflow_saga.operators.notices import STANDING, tell_once
from airflow_saga.operators.review import REVIEWED_KEY, question_of
from airflow_saga.operators.undo import undo_step
from airflow_saga.runtime.accounts import tell_settled
from airflow_saga.runtime.undo import StepUndo
from airflow_saga.store.reader import Reader
from airflow_saga.store.settle import Settled, SettleVerbs
from airflow_saga.telemetry import listen_in

log = logging.getLogger(__name__)


class SettleOperator(BaseOperator):
    """Close the request: what no task undid (late answers, tasks that are gone) is undone here, then the end is said.

    :param notifiers: told once per request that leaves something standing.
    """

    ui_color = "#f3ead9"

    def __init__(self, *, saga_dag_id: str, notifiers: Sequence[Any] = (), **kwargs: Any) -> None:
        super().__init__(on_failure_callback=tell_stuck, **kwargs)
        self.saga_dag_id = saga_dag_id
        self.notifiers = list(notifiers)
        self._undo: StepUndo | None = None

    def execute(self, context: Any) -> list[dict[str, Any]]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            return []
        listen_in()
        settled = self._settle(context, request_uuid)
        tell_settled(settled)
        standing = [row for row in settled.residual if needs_person(row)]
        new = self._not_asked_yet(context, settled, standing)[:MOST_MAPPED]
        ti = context["ti"]
        ti.xcom_push(key=REVIEWED_KEY, value=[row.action_id for row in new])
        ti.xcom_push(key=SUMMARY_KEY, value=_summary(settled))
        self.log.info("%s / %s is %s", settled.saga.dag_id, settled.saga.run_id, settled.saga.state)
        for row in settled.residual:
            self.log.warning(
                "still stands: %s (action %d) is %s: %s", row.name, row.action_id, row.state, row.error
            )
        if standing:
            self._tell(context, settled)
        return self._questions(settled, new)

    def on_kill(self) -> None:
        if self._undo is not None:
            self._undo.request_kill()

    def _settle(self, context: Any, request_uuid: UUID) -> Settled:
        for _ in range(SETTLE_ROUNDS):
            with open_store() as connection:
                try:
                    settled = SettleVerbs(connection).settle_if_all_settled(
                        request_uuid, context["dag_run"].run_id
                    )
                except errors.UndoFencedError as fenced:
                    raise AirflowFailException(str(fenced)) from fenced
                if settled is not None:
                    return settled
                left = self._left(connection, request_uuid)
            for task_id, map_index in left:
                undo_step(self, context, request_uuid, task_id, map_index)
        raise AirflowException(
            "actions of the plan are still open after several rounds; the next try goes on"
        )

    def _left(self, connection: psycopg.Connection, request_uuid: UUID) -> list[tuple[str, int]]:
        """Steps that still have an unsettled action, in the order of the undo."""
        request = Reader(connection).request(request_uuid)
        assert request is not None
        open_steps = {row.step_id for row in SettleVerbs(connection).unsettled(request)}
        steps = [step for step in Reader(connection).steps(request.saga_id) if step.step_id in open_steps]
        return [(step.task_id, step.map_index) for step in undo_order(steps)]

    def _not_asked_yet(self, context: Any, settled: Settled, standing: list[ActionRow]) -> list[ActionRow]:
        """What an earlier undo of this saga has asked about and still asks, a person need not be asked again."""
        if not standing:
            return []
        with open_store() as connection:
            asked = asked_already(context, Reader(connection).requests(settled.saga.saga_id))
        for row in standing:
            if row.action_id in asked:
                self.log.info("a person is asked about %s already, in %s", row.name, asked[row.action_id])
        return [row for row in standing if row.action_id not in asked]

    def _tell(self, context: Any, settled: Settled) -> None:
        if not self.notifiers:
            return
        ids = {"saga_id": settled.saga.saga_id, "request_id": settled.request.request_id}
        with open_store() as connection:
            tell_once(connection, self.notifiers, context, kind=STANDING, **ids)

    def _questions(self, settled: Settled, rows: list[ActionRow]) -> list[dict[str, Any]]:
        """The arguments of each ``review``."""
        with open_store() as connection:
            steps = Reader(connection).steps(settled.saga.saga_id)
        labels = {step.step_id: step.label for step in steps}
        often = look_again_seconds(len(rows))
        about = {"saga_run_id": settled.saga.run_id, "look_again_seconds": often}
        return [
            {**question_of(settled.saga, row, labels[row.step_id]), **about, "action_id": row.action_id}
            for row in rows
        ]


def _summary(settled: Settled) -> dict[str, Any]:
    return {
        "saga": f"{settled.saga.dag_id} / {settled.saga.run_id}",
        "state": settled.saga.state,
        "asked_by": settled.request.actor,
        "cause": settled.request.cause,
        "still_stands": [
            {
                "action": row.action_id,
                "name": row.name,
                "state": row.state,
                "why": row.error or row.waiting_for or "",
            }
            for row in settled.residual
        ],
    }
