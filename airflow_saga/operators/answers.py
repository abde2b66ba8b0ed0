"""A person's answers: asked for in Airflow's Required Actions, written into the log, and then the truth is told.

The log decides. What was settled there by another way (the command line, another undo) ends its question here, and a
question that an earlier undo has put and that is still open is not put a second time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import psycopg
from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
    TaskAwaitingInput,
)

from airflow_saga.core import errors
from airflow_saga.core.records import ActionRow, RequestRow
from airflow_saga.core.states import ActionState, Effect, RequestState, SagaState
from airflow_saga.operators.compensation import open_store, planned_request
from airflow_saga.operators.review import OPTIONS, REVIEW_TASK, REVIEWED_KEY, SETTLE_TASK, questions_put
from airflow_saga.platform import SupervisorPlatform, reschedule_date
from airflow_saga.store.reader import Reader
from airflow_saga.store.resolve import ResolveVerbs

log = logging.getLogger(__name__)

LOOK_AGAIN_SECONDS = 600.0
"""How often an open question looks whether the log still needs its answer."""
SECONDS_PER_QUESTION = 6.0
"""Many questions of one undo look less often: each look is a task that Airflow starts."""
_UNDER_WAY = (RequestState.REQUESTED, RequestState.QUEUED, RequestState.FROZEN)
_OVER = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
_RUN_IS_OPEN = frozenset({"queued", "running"})


def look_again_seconds(questions: int) -> float:
    return max(LOOK_AGAIN_SECONDS, SECONDS_PER_QUESTION * questions)


def asked_already(context: Any, requests: Iterable[RequestRow]) -> dict[int, str]:
    """The actions about which earlier undos of a saga have a question open, and the run in which it is."""
    here = context["dag_run"]
    platform = SupervisorPlatform()

    def reviewed_in(run_id: str) -> list[int]:
        if run_id == here.run_id or platform.run_state(here.dag_id, run_id) not in _RUN_IS_OPEN:
            return []
        return context["ti"].xcom_pull(task_ids=SETTLE_TASK, key=REVIEWED_KEY, run_id=run_id) or []

    states: dict[str, dict[int, str | None]] = {}
    found: dict[int, str] = {}
    for asked in questions_put(requests, reviewed_in):
        if asked.run_id not in states:
            states[asked.run_id] = platform.mapped_states(here.dag_id, asked.run_id, REVIEW_TASK)
        if states[asked.run_id].get(asked.map_index) not in _OVER:
            found[asked.action_id] = asked.run_id
    return found


class ReviewOperator(HITLOperator):
    """Puts one action that still stands before a person, until it is answered here or settled elsewhere.

    :param saga_dag_id: of the saga, as ``saga_run_id`` and ``action_id``: what the answer is about.
    :param look_again_seconds: how often to look whether the answer is still needed.
    """

    def __init__(
        self,
        *,
        saga_dag_id: str,
        saga_run_id: str,
        action_id: int,
        look_again_seconds: float = LOOK_AGAIN_SECONDS,
        **kwargs: Any,
    ) -> None:
        super().__init__(response_timeout=timedelta(seconds=look_again_seconds), **kwargs)
        self.saga_dag_id = saga_dag_id
        self.saga_run_id = saga_run_id
        self.action_id = action_id

    def execute(self, context: Any) -> Any:
        """Put the question, if it is one still: it may have been settled since ``settle`` has found it."""
        if not self._still_asked():
            return self._settled_elsewhere()
        return super().execute(context)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """A person has answered, or it is time to look again. Airflow's clock is not the log's: nothing times out."""
        if event.get("error_type") == "timeout":
            if self._still_asked():
                raise TaskAwaitingInput(method_name="execute_complete", timeout=self.response_timeout)
            return self._settled_elsewhere()
        answer = super().execute_complete(context, event)
        with open_store() as connection:
            problem = write_answer(connection, self.saga_dag_id, self.saga_run_id, self.action_id, answer)
        return {**answer, "written": problem is None}

    def _settled_elsewhere(self) -> dict[str, Any]:
        self.log.info("action %d was settled by another way, so nobody is asked any more", self.action_id)
        return {"chosen_options": [], "written": True}

    def _still_asked(self) -> bool:
        with open_store() as connection:
            saga = Reader(connection).saga(self.saga_dag_id, self.saga_run_id)
            return any(
                row.action_id == self.action_id and needs_person(row)
                for row in Reader(connection).residual(saga.saga_id)
            )


def write_answer(
    connection: psycopg.Connection, dag_id: str, run_id: str, action_id: int, answer: dict[str, Any]
) -> errors.VerbRefusedError | None:
    """Put an answer into the log; why it was refused, if it was. What is settled there already needs no answer."""
    chosen = answer.get("chosen_options") or []
    to = OPTIONS.get(chosen[0]) if chosen else None
    if to is None:
        return None
    who = (answer.get("responded_by_user") or {}).get("name") or "somebody in Airflow"
    note = (answer.get("params_input") or {}).get("note") or chosen[0]
    try:
        decision = ResolveVerbs(connection).resolve(
            dag_id, run_id, action_id, to=to, actor=who, note_text=note
        )
    except errors.VerbRefusedError as refused:
        there = Reader(connection).action(action_id)
        if there is not None and not there.residual:
            _tell_who_was_first(there, to, who)
            return None
        log.warning("the answer of %s is not applied: %s", who, refused)
        return refused
    log.info("%s", decision.message)
    return None


def _tell_who_was_first(there: ActionRow, to: str, who: str) -> None:
    """Who settles an action elsewhere has its question answered too, so most answers say what the log says."""
    if there.state == to:
        log.info("action %d is %s in the log already (%s)", there.action_id, there.state, there.note)
    else:
        log.warning(
            "the answer of %s came second and changes nothing: action %d is %s (%s)",
            who,
            there.action_id,
            there.state,
            there.note,
        )


class ApplyOperator(BaseOperator):
    """Write what could not be written at once, and fail while anything stands: the run's colour tells the truth."""

    ui_color = "#f3ead9"

    def __init__(self, *, saga_dag_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.saga_dag_id = saga_dag_id

    def execute(self, context: Any) -> dict[str, Any]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            raise AirflowSkipException("this run carries out no undo")
        with open_store() as connection:
            reader = Reader(connection)
            request = reader.request(request_uuid)
            assert request is not None
            if request.state != RequestState.SETTLED:
                raise AirflowFailException(
                    f"the undo is {request.state}, not settled: see the log of {SETTLE_TASK}"
                )
            self._apply(context, connection, request.saga_id)
            saga = reader.by_id(request.saga_id)
            standing = reader.left_by_undo(request.saga_id)
        if standing and saga.state in (SagaState.PARTIALLY_CANCELLED, SagaState.CANCELLING):
            named = "; ".join(f"{row.name} (action {row.action_id}): {_why(row)}" for row in standing[:20])
            raise AirflowFailException(
                f"{saga.dag_id} / {saga.run_id} is {saga.state}: {len(standing)} effects still stand, or may: {named}. "
                f"Next: airflow saga show {saga.dag_id} {saga.run_id}"
            )
        return {"saga": f"{saga.dag_id} / {saga.run_id}", "state": saga.state}

    def _apply(self, context: Any, connection: psycopg.Connection, saga_id: int) -> None:
        """Each answer once: what somebody else settled meanwhile is left alone.

        :raises AirflowRescheduleException: one may be written later: another undo is under way, or a call may land.
        """
        ti = context["ti"]
        reader = Reader(connection)
        run_id = reader.by_id(saga_id).run_id
        reviewed = ti.xcom_pull(task_ids=SETTLE_TASK, key=REVIEWED_KEY) or []
        later = False
        for index, action_id in enumerate(reviewed):
            answer = ti.xcom_pull(task_ids=REVIEW_TASK, map_indexes=index) or {}
            if answer.get("written"):
                continue
            refused = write_answer(connection, self.saga_dag_id, run_id, action_id, answer)
            if refused is not None:
                stands = any(row.action_id == action_id for row in reader.residual(saga_id))
                undone = any(request.state in _UNDER_WAY for request in reader.requests(saga_id))
                later = later or (stands and (undone or refused.until is not None))
        if later:
            raise AirflowRescheduleException(reschedule_date())


def needs_person(row: ActionRow) -> bool:
    """Whether an action that stands waits for a person; one with a date settles by itself, or asks later."""
    return row.effect != Effect.READ_ONLY and not (row.state == ActionState.COMPENSATING and row.reconcile_at)


def _why(row: ActionRow) -> str:
    if row.state == ActionState.COMPENSATING and row.reconcile_at is not None:
        return f"waiting for {row.waiting_for}, asked for again at {row.reconcile_at:%Y-%m-%d %H:%M:%S} UTC"
    return f"{row.state}, {row.error or 'nobody knows more'}"
