"""What is told of a saga while it runs and while it is undone: which measure, when, under which tags.

Where times lie in two processes they are the database's own; within one process they are monotonic.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Any

from airflow_saga.core import measures
from airflow_saga.core.actions import Action
from airflow_saga.core.measures import Measure
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import ActionState
from airflow_saga.runtime import observe
from airflow_saga.runtime.stops import Stop, StopOrder
from airflow_saga.store.overview import OpenWork
from airflow_saga.store.settle import Settled
from airflow_saga.store.undo import EndedTry

STATE = "saga.action.state"
_ENDINGS = {
    ActionState.DONE: measures.ACTION_DONE,
    ActionState.FAILED: measures.ACTION_FAILED,
    ActionState.IN_DOUBT: measures.ACTION_IN_DOUBT,
}


class ActionAccount:
    """Of the calls of one step. Each call that began is told to have ended in one way."""

    def __init__(self, saga: SagaRow, step: StepRow) -> None:
        self._saga = saga
        self._step = step

    def span(self, action: Action[Any, Any], seq: int) -> AbstractContextManager[object]:
        """Around the whole story of one action: its intent, its tries, its doubts."""
        return observe.span(
            f"saga.action {action.name}",
            lambda: {
                **_ids(self._saga, self._step),
                "saga.action.seq": seq,
                "saga.action.effect": action.effect.value,
            },
        )

    def began(self, action: Action[Any, Any]) -> None:
        self._tell(measures.ACTION_BEGUN, action)

    def ended(self, action: Action[Any, Any], state: ActionState) -> None:
        """:param state: one that is no ending (a call that was not made after all) is not told."""
        if (measure := _ENDINGS.get(state)) is not None:
            self._tell(measure, action)
            observe.mark(STATE, state.value)

    def found_done(self) -> None:
        """A call in doubt, which is counted as such: a probe or a person has told that it took effect."""
        observe.mark(STATE, ActionState.DONE.value)

    def deferred(self, action: Action[Any, Any]) -> None:
        self._tell(measures.ACTION_DEFERRED, action)
        observe.mark(STATE, "deferred")

    def _tell(self, measure: Measure, action: Action[Any, Any]) -> None:
        if observe.is_measured():  # an action is the one thing here that there are many of
            observe.count(measure, dag_id=self._saga.dag_id, effect=action.effect.value)


class CancelClock:
    """Times a cancel in the process that it stops."""

    def __init__(self, dag_id: str) -> None:
        self._dag_id = dag_id
        self._seen_at: float | None = None

    def see(self, order: StopOrder | None) -> None:
        """An order to stop was given, or given again. One that no cancel has given says no age, and is not timed."""
        if order is None or order.kind is not Stop.CANCELLED or order.age_seconds is None:
            return
        if self._seen_at is None:
            self._seen_at = time.monotonic()
            observe.timing(measures.CANCEL_SEEN, order.age_seconds, dag_id=self._dag_id)

    def stopped(self) -> None:
        """The log has it that the step ended."""
        if self._seen_at is not None:
            observe.timing(measures.CANCEL_STOPPED, time.monotonic() - self._seen_at, dag_id=self._dag_id)


class UndoAccount:
    """Of one attempt to undo a step."""

    def __init__(self, saga: SagaRow, step: StepRow, request: RequestRow) -> None:
        self._saga = saga
        self._step = step
        self._request = request

    def span(self, row: ActionRow, tries: int) -> AbstractContextManager[object]:
        """Around one call of a compensation."""
        return observe.span(
            f"saga.undo {row.name}",
            lambda: {
                **_ids(self._saga, self._step),
                "saga.action.seq": row.seq,
                "saga.action.id": row.action_id,
                "saga.undo.request": str(self._request.request_uuid),
                "saga.undo.try": tries,
            },
        )

    def began(self) -> None:
        observe.count(measures.COMPENSATION_BEGUN, dag_id=self._saga.dag_id)

    def ended(self, ended: EndedTry) -> None:
        if ended.state == ActionState.COMPENSATED:
            measure = measures.COMPENSATION_DONE
        elif ended.reconcile_seconds is not None:
            measure = measures.COMPENSATION_LATER
        else:
            measure = measures.COMPENSATION_FAILED
        observe.count(measure, dag_id=self._saga.dag_id)
        observe.mark(STATE, ended.state)
        if ended.state == ActionState.COMPENSATION_FAILED:
            self.stands()

    def stands(self) -> None:
        observe.count(measures.UNDO_STANDING, dag_id=self._saga.dag_id)


def tell_settled(settled: Settled) -> None:
    """The end of an undo, by whoever brought it about."""
    request = settled.request
    if not settled.just_now or request.ended_at is None:
        return
    tags = {"dag_id": settled.saga.dag_id, "cause": request.cause}
    observe.timing(measures.CANCEL_SETTLED, (request.ended_at - request.asked_at).total_seconds(), **tags)
    if request.frozen_at is not None:
        observe.timing(measures.UNDO_DURATION, (request.ended_at - request.frozen_at).total_seconds(), **tags)


def tell_expired(saga: SagaRow) -> None:
    observe.count(measures.UNDO_EXPIRED, dag_id=saga.dag_id)


def tell_open(work: OpenWork) -> None:
    """What is open in the whole store; zeros too, since a gauge stays where it was left."""
    observe.gauge(measures.OPEN_RESIDUALS, work.residuals)
    observe.gauge(measures.OPEN_NEEDS_PERSON, work.needs_person)
    observe.gauge(measures.OPEN_NEEDS_PERSON_AGE, work.needs_person_age_seconds)
    observe.gauge(measures.OPEN_UNDO_REQUESTS, work.undo_requests)
    observe.gauge(measures.OPEN_UNDO_REQUEST_AGE, work.undo_request_age_seconds)


def _ids(saga: SagaRow, step: StepRow) -> dict[str, str | int]:
    return {
        "saga.id": str(saga.saga_uuid),
        "saga.step.id": step.step_id,
        "saga.step.generation": step.generation,
        "airflow.dag_id": saga.dag_id,
        "airflow.task_id": step.task_id,
    }
