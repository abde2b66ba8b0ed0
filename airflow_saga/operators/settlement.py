"""The end of an undo: settle what is left, put what stands before a person, write the answers, tell the truth."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import psycopg
from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException, AirflowSkipException

from airflow_saga.core import errors
from airflow_saga.core.plan import undo_order
from airflow_saga.core.records import ActionRow
from airflow_saga.core.states import ActionState, Effect, RequestState
from airflow_saga.operators.compensation import (
    MOST_MAPPED,
    REVIEW_TASK,
    REVIEWED_KEY,
    SETTLE_ROUNDS,
    SETTLE_TASK,
    SUMMARY_KEY,
    open_store,
    planned_request,
    tell_once,
    tell_stuck,
    undo_step,
)
from airflow_saga.operators.review import OPTIONS, question_of
from airflow_saga.runtime.undo import StepUndo
from airflow_saga.store.reader import Reader
from airflow_saga.store.resolve import ResolveVerbs
from airflow_saga.store.settle import Settled, SettleVerbs

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

    def execute(self, context: Any) -> list[dict[str, str]]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            return []
        settled = self._settle(context, request_uuid)
        standing = [row for row in settled.residual if needs_person(row)][:MOST_MAPPED]
        ti = context["ti"]
        ti.xcom_push(key=REVIEWED_KEY, value=[row.action_id for row in standing])
        ti.xcom_push(key=SUMMARY_KEY, value=_summary(settled))
        self.log.info("%s / %s is %s", settled.saga.dag_id, settled.saga.run_id, settled.saga.state)
        for row in settled.residual:
            self.log.warning(
                "still stands: %s (action %d) is %s: %s", row.name, row.action_id, row.state, row.error
            )
        if standing:
            tell_once(self.notifiers, context, settled.request.request_id, "standing")
        labels = self._labels(settled)
        return [question_of(settled.saga, row, labels[row.step_id]) for row in standing]

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

    def _labels(self, settled: Settled) -> dict[int, str]:
        with open_store() as connection:
            return {step.step_id: step.label for step in Reader(connection).steps(settled.saga.saga_id)}


def needs_person(row: ActionRow) -> bool:
    """Whether an action that stands waits for a person; one with a date settles by itself, or asks later."""
    return row.effect != Effect.READ_ONLY and not (row.state == ActionState.COMPENSATING and row.reconcile_at)


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


class ReviewOperator(HITLOperator):
    """Puts one action that still stands before a person, in Airflow's Required Actions. The store is the truth."""


class ApplyOperator(BaseOperator):
    """Write people's answers into the log, and fail while anything still stands: the run's colour tells the truth."""

    ui_color = "#f3ead9"

    def __init__(self, *, saga_dag_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.saga_dag_id = saga_dag_id

    def execute(self, context: Any) -> dict[str, Any]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            raise AirflowSkipException("this run carries out no undo")
        with open_store() as connection:
            request = Reader(connection).request(request_uuid)
            assert request is not None
            if request.state != RequestState.SETTLED:
                raise AirflowFailException(
                    f"the undo is {request.state}, not settled: see the log of {SETTLE_TASK}"
                )
            saga = Reader(connection).by_id(request.saga_id)
            self._apply(context, connection, saga.run_id)
            saga = Reader(connection).by_id(request.saga_id)
            standing = Reader(connection).residual(request.saga_id)
        if standing and request.whole_run:
            named = "; ".join(f"{row.name} (action {row.action_id}): {_why(row)}" for row in standing[:20])
            raise AirflowFailException(
                f"{saga.dag_id} / {saga.run_id} is {saga.state}: {len(standing)} effects still stand, or may: {named}. "
                f"Next: airflow saga show {saga.dag_id} {saga.run_id}"
            )
        return {"saga": f"{saga.dag_id} / {saga.run_id}", "state": saga.state}

    def _apply(self, context: Any, connection: psycopg.Connection, run_id: str) -> None:
        """Each answer once: what the tab, the command line or somebody else settled meanwhile is left alone."""
        ti = context["ti"]
        reviewed = ti.xcom_pull(task_ids=SETTLE_TASK, key=REVIEWED_KEY) or []
        for index, action_id in enumerate(reviewed):
            answer = ti.xcom_pull(task_ids=REVIEW_TASK, map_indexes=index)
            chosen = (answer or {}).get("chosen_options") or []
            to = OPTIONS.get(chosen[0]) if chosen else None
            if to is None:
                continue
            who = (answer.get("responded_by_user") or {}).get("name") or "somebody in Airflow"
            note = (answer.get("params_input") or {}).get("note") or chosen[0]
            try:
                decision = ResolveVerbs(connection).resolve(
                    self.saga_dag_id, run_id, action_id, to=to, actor=who, note_text=note
                )
                self.log.info("%s", decision.message)
            except errors.VerbRefusedError as refused:
                self.log.warning("the answer of %s is not applied: %s", who, refused)


def _why(row: ActionRow) -> str:
    if row.state == ActionState.COMPENSATING and row.reconcile_at is not None:
        return f"waiting for {row.waiting_for}, asked for again at {row.reconcile_at:%Y-%m-%d %H:%M:%S} UTC"
    return f"{row.state}, {row.error or 'nobody knows more'}"
