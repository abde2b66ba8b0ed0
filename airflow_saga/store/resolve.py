"""The verb of a person who says what became of an action. It closes the saga with the last one that stood open."""

from __future__ import annotations

import psycopg

from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import ActionState, Effect, RequestState, StepState
from airflow_saga.store.connect import retried
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.queries import Q
from airflow_saga.store.rows import PROBE_ASKED, first, note, one
from airflow_saga.store.saga import close_if_nothing_stands

_SAID_BY_PEOPLE = (ActionState.COMPENSATED, ActionState.ACCEPTED, ActionState.DONE, ActionState.FAILED)
_HINTS = (RequestState.HINTED, RequestState.HELD)


class ResolveVerbs:
    """One verb, one transaction."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    @retried
    def resolve(
        self,
        dag_id: str,
        run_id: str,
        action_id: int,
        *,
        to: str,
        actor: str,
        note_text: str,
        result: str | None = None,
    ) -> Decision:
        """A person says what became of an action: undone by hand, accepted, it happened, it did not.

        :param to: COMPENSATED or ACCEPTED (after an undo), DONE or FAILED (an action in doubt of a stopped step).
        :raises VerbRefusedError: saying since when by whom, or until when, it is not the moment.
        """
        if to not in _SAID_BY_PEOPLE or not note_text.strip():
            raise VerbRefusedError(
                f"action {action_id}: a person settles it as {', '.join(_SAID_BY_PEOPLE[:-1])} or "
                f"{_SAID_BY_PEOPLE[-1]}, with a note that says how it is known; not as {to}, note {note_text!r}"
            )
        with self.connection.transaction():
            saga, step, action = self._action_of(dag_id, run_id, action_id)
            answers = to in (ActionState.DONE, ActionState.FAILED)
            self._check_resolvable(saga, step, action, to, answers)
            values = {"action_id": action_id, "state": to, "note": f"{actor}: {note_text}", "result": result}
            self.connection.execute(Q.resolve_action, values)
            note(
                self.connection,
                f"action {action.state} → {to}",
                actor,
                f"{action.name}: {note_text}",
                saga_id=saga.saga_id,
                step_id=step.step_id,
                action_id=action_id,
            )
            closed = close_if_nothing_stands(
                self.connection, saga, step, actor=actor, reason="the rest is resolved"
            )
            if closed is not None:
                message = f"{dag_id} / {run_id} is {closed} now: nothing is left to settle"
                return Decision(Verdict.CANCELLED, message, saga)
            return Decision(Verdict.ALREADY, f"{action.name} is {to} now", saga)

    @retried
    def note_probe(self, action: ActionRow, said: str, actor: str) -> None:
        """What a verify probe said when a person asked; it decides nothing."""
        note(
            self.connection,
            PROBE_ASKED,
            actor,
            said,
            saga_id=action.saga_id,
            step_id=action.step_id,
            action_id=action.action_id,
        )

    def _action_of(self, dag_id: str, run_id: str, action_id: int) -> tuple[SagaRow, StepRow, ActionRow]:
        saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
        if saga is None:
            raise UnknownSagaError(f"there is no saga {dag_id} / {run_id}")
        found = one(self.connection, ActionRow, Q.read_action_row, {"action_id": action_id})
        if found is None or found.saga_id != saga.saga_id:
            raise UnknownSagaError(f"{dag_id} / {run_id} has no action {action_id}; see: airflow saga show")
        step = one(self.connection, StepRow, Q.lock_step_by_id, {"step_id": found.step_id})
        action = one(self.connection, ActionRow, Q.lock_action, {"action_id": action_id})
        assert step is not None
        assert action is not None
        return saga, step, action

    def _check_resolvable(
        self, saga: SagaRow, step: StepRow, action: ActionRow, to: str, answers: bool
    ) -> None:
        what = f"action {action.action_id} ({action.name} of {step.label})"
        if action.effect == Effect.READ_ONLY or not action.residual:
            raise VerbRefusedError(
                f"{what} is {action.state}: there is nothing to settle"
                + (f" ({action.note})" if action.note else "")
            )
        request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
        if request is not None and request.state not in _HINTS:
            raise VerbRefusedError(
                f"{what}: an undo asked for by {request.actor} is under way; wait for its end"
            )
        if answers:
            if action.state != ActionState.IN_DOUBT or step.state != StepState.STOPPED:
                raise VerbRefusedError(
                    f"{what} is {action.state} in a step that is {step.state}: only an action in doubt of a stopped "
                    f"step can be answered; after an undo use --undone or --accepted"
                )
        elif step.state != StepState.PARTLY_UNDONE:
            raise VerbRefusedError(
                f"{what}: its step is {step.state}, not PARTLY_UNDONE; undo the saga first"
            )
        now = (first(self.connection, Q.now_row, {}) or {})["now"]
        if action.lands_by is not None and action.lands_by > now:
            raise VerbRefusedError(
                f"{what}: a call that did not report may still take effect until {action.lands_by:%H:%M:%S} UTC; "
                f"settle it then",
                until=action.lands_by,
            )
