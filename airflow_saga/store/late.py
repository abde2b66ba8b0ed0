"""The answer that comes too late: a process that lost its step still knows how its call ended, and that is kept.

One transaction writes the event, moves the action, the step and the saga, and asks for the undo that follows from it
(PROTOCOL 5). Only a late answer can reopen what was settled.
"""

from __future__ import annotations

from typing import Any

import psycopg

from airflow_saga.core.identity import action_key
from airflow_saga.core.records import ActionRow, Outcome, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import ActionState, Cause, RequestState, SagaState, StepState
from airflow_saga.store.connect import retried
from airflow_saga.store.queries import Q
from airflow_saga.store.requests import insert_request, widen_request
from airflow_saga.store.rows import note, one, wake
from airflow_saga.store.saga import close_if_nothing_stands, undo_again
from airflow_saga.store.scope import scope_of, scope_that_goes_on

_KEEPS_ITS_STATE = (
    ActionState.COMPENSATING,
    ActionState.COMPENSATION_FAILED,
    ActionState.NON_COMPENSABLE,
    ActionState.ACCEPTED,
)

_CLOSED_BY_UNDO = (SagaState.CANCELLED, SagaState.PARTIALLY_CANCELLED, SagaState.SUSPENDED)


class LateVerbs:
    """What a fenced attempt may still say."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    @retried
    def record_late(self, step: StepRow, outcome: Outcome, *, idempotent: bool) -> str:
        """Keep the outcome of a call whose attempt no longer owns its step; says what it changed.

        :param step: the step as that attempt had it (its fence and generation then).
        """
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": step.saga_id})
            now_step = one(self.connection, StepRow, Q.lock_step_by_id, {"step_id": step.step_id})
            key = {"step_id": step.step_id, "generation": step.generation, "seq": outcome.seq}
            action = one(self.connection, ActionRow, Q.action_by_seq, key) or self._carried_over(
                saga, step, outcome
            )
            assert saga is not None
            assert now_step is not None
            assert action is not None
            change = self._apply(saga, now_step, action, outcome, idempotent)
            note(
                self.connection,
                "late answer",
                "the attempt that was fenced",
                f"{action.name}: {outcome.state}; {change}",
                saga_id=saga.saga_id,
                step_id=step.step_id,
                action_id=action.action_id,
            )
            return change

    def _carried_over(self, saga: SagaRow | None, step: StepRow, outcome: Outcome) -> ActionRow | None:
        """A part of the step was undone since, and this action went over into a newer generation: its key did too."""
        assert saga is not None
        place = (step.task_id, step.map_index, step.generation, outcome.seq)
        key = action_key(saga.saga_uuid, *place)
        return one(self.connection, ActionRow, Q.action_by_key, {"step_id": step.step_id, "key": key})

    def _apply(
        self, saga: SagaRow, step: StepRow, action: ActionRow, outcome: Outcome, idempotent: bool
    ) -> str:
        newer = action.tries > outcome.tries
        if action.state == ActionState.PENDING and not newer:
            # A no speaks for its own try only: while an earlier one is in doubt, the action stays in doubt.
            denied = outcome.state == ActionState.FAILED and action.in_doubt
            state = ActionState.IN_DOUBT if denied else outcome.state
            self._change(action, state, outcome, in_doubt=state == ActionState.IN_DOUBT)
            return "completed after its step was taken over"
        if outcome.state == ActionState.FAILED:
            return self._late_no(saga, step, action, outcome, newer)
        if outcome.state != ActionState.DONE:
            return "nothing new"
        if action.state in _KEEPS_ITS_STATE:
            return f"it stays {action.state}"
        if newer and action.state in (ActionState.PENDING, ActionState.DONE):
            if idempotent:
                return "the same effect as the newer attempt's, by its key"
            return self._twin(saga, step, action, outcome)
        if action.state == ActionState.DONE:
            return "it was known to be DONE"
        if action.state == ActionState.COMPENSATED:
            self._change(action, ActionState.IN_DOUBT, outcome, in_doubt=True, reopened=1)
        else:
            self._change(action, ActionState.DONE, outcome, in_doubt=False)
        return "it took effect after all" + ("" if action.kept else self._reopen(saga, step))

    def _late_no(self, saga: SagaRow, step: StepRow, action: ActionRow, outcome: Outcome, newer: bool) -> str:
        if (
            action.state != ActionState.IN_DOUBT or newer or action.tries > 1
        ):  # it speaks for its own try only
            return f"it stays {action.state}"
        self._change(action, ActionState.FAILED, outcome, in_doubt=False)
        closed = close_if_nothing_stands(
            self.connection, saga, step, actor=saga.actor, reason="the rest proved not to have taken effect"
        )
        return "it proved that it did not take effect" + (f"; the saga is {closed} now" if closed else "")

    def _twin(self, saga: SagaRow, step: StepRow, action: ActionRow, outcome: Outcome) -> str:
        """Two attempts, two effects: the second one needs a row of its own to be undone."""
        values = {
            "action_id": action.action_id,
            "tries": outcome.tries,
            "result": outcome.result,
            "result_lost": outcome.result_lost,
        }
        twin = one(self.connection, ActionRow, Q.insert_twin, values)
        assert twin is not None
        return f"a second effect beside the newer attempt's, kept as action {twin.action_id}" + self._reopen(
            saga, step
        )

    def _change(
        self, action: ActionRow, state: str, outcome: Outcome, *, in_doubt: bool, reopened: int = 0
    ) -> None:
        self.connection.execute(
            Q.reopen_action,
            {
                "action_id": action.action_id,
                "state": state,
                "in_doubt": in_doubt,
                "result": outcome.result,
                "result_lost": outcome.result_lost,
                "reopened": reopened,
                "error": outcome.error,
                "landed": outcome.own and outcome.tries >= action.tries,
            },
        )

    def _reopen(self, saga: SagaRow, step: StepRow) -> str:
        """An effect stands that an undo had settled: ask for the undo that it needs, in this transaction."""
        if step.state not in (StepState.UNDONE, StepState.PARTLY_UNDONE):
            return ""
        if step.state == StepState.UNDONE:
            self.connection.execute(Q.step_partly_undone, {"step_id": step.step_id})
        why = "a late answer showed an effect that stands"
        closed = saga.state in _CLOSED_BY_UNDO
        if closed:
            undo_again(self.connection, saga, why)
        request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
        if request is not None and request.state in (RequestState.HINTED, RequestState.HELD):
            return "; the undo that is due covers it"  # and asks for its own, should it be withdrawn
        ask: dict[str, Any] = {
            "scope": scope_that_goes_on(self.connection, saga) if closed else {step.step_id: 0},
            "cause": Cause.LATE,
            "actor": "airflow",
            "reason": why,
            "clear_number": saga.clear_number,
        }
        wake(self.connection, saga.saga_id, "undo")
        if request is None:
            insert_request(self.connection, saga, **ask)
            return "; its undo is asked for"
        if request.state == RequestState.REQUESTED:
            if step.step_id not in scope_of(
                self.connection, request
            ):  # else it may keep what came before a place
                widen_request(self.connection, request, **ask)
            return "; the undo that was asked for takes it along"
        queued = one(self.connection, RequestRow, Q.queued_request, {"saga_id": saga.saga_id})
        if queued is None:
            insert_request(self.connection, saga, state=RequestState.QUEUED, **ask)
        else:
            widen_request(self.connection, queued, **ask)
        return "; its undo is queued behind the one under way"
