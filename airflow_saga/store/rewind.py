"""Going back to a place inside of a saga: a save-point, an action that a person chose, where a step took another way.

What came after the place is undone, in this step and in those after it; what came before stays and is gone on from
(PROTOCOL 4). These verbs only ask for it: the undo is carried out like any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psycopg

from airflow_saga.core.decide import pruned
from airflow_saga.core.errors import UnknownSagaError, VerbRefusedError
from airflow_saga.core.plan import comes_after
from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import ActionState, Cause, Mode, RequestState, SagaState, StepState
from airflow_saga.store.connect import retried
from airflow_saga.store.decision import Decision, Verdict
from airflow_saga.store.queries import Q
from airflow_saga.store.requests import insert_request, widen_request
from airflow_saga.store.rows import dicts, first, many, note, one, wake
from airflow_saga.store.saga import move_saga, steps_with_lease
from airflow_saga.store.scope import check_signed_plan, plan_of_scope, scope_of, withdraw

_REWINDABLE = (SagaState.RUNNING, SagaState.COMPLETED, SagaState.FAILED, SagaState.SUSPENDED)
_CUTTABLE = (StepState.RUNNING, StepState.STOPPED, StepState.SUCCEEDED)
_AT_REST = (SagaState.COMPLETED, SagaState.FAILED, SagaState.SUSPENDED)
_INSTEAD = {
    SagaState.RUNNING: "it is still running: stop it first (airflow saga cancel --keep), or go back to a save-point",
    SagaState.PARTIALLY_CANCELLED: "an undo of it has left something: try that again, or undo all that is left",
}


@dataclass(frozen=True)
class Rewind:
    """:ivar step: where the place is; the run goes on from here, so it and all that comes after it must be cleared.

    :ivar undone: labels of the steps whose effects are undone, in whole or from the place on.
    """

    saga: SagaRow
    request: RequestRow
    step: StepRow
    undone: tuple[str, ...]


@dataclass(frozen=True)
class _Place:
    """An action from which on a saga is to be undone, and the steps that came after its step."""

    action: ActionRow
    step: StepRow
    later: tuple[StepRow, ...]

    @property
    def is_in_newest_pass(self) -> bool:
        """False: that part of the step is undone, or being undone, and what is left of it goes on anew."""
        return self.action.generation == self.step.generation

    def scope(self) -> dict[int, int]:
        """The step from the action on, if that is not undone already, and the later ones as a whole.

        :raises VerbRefusedError: an undo of an earlier pass of the step has left the action.
        """
        if not self.is_in_newest_pass and self.action.residual:
            raise VerbRefusedError(
                f"{self.action.name} of {self.step.label} (action {self.action.action_id}) belongs to an earlier pass "
                f"of its step; choose one of the newest pass"
            )
        here = {self.step.step_id: self.action.seq} if self.is_in_newest_pass else {}
        return {**here, **{step.step_id: 0 for step in self.later}}


class RewindVerbs:
    """One verb, one transaction. The connection is in autocommit and belongs to one thread."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    @retried
    def savepoint_if_held(self, step: StepRow, seq: int, name: str, checkpoint: str | None) -> bool:
        """Remember this place under a name; False if a newer attempt or the undo owns the step.

        :param seq: of the first action that comes after it.
        """
        values = {"step_id": step.step_id, "fence": step.fence, "seq": seq, "name": name}
        with self.connection.transaction():
            found = first(self.connection, Q.savepoint_if_held, {**values, "checkpoint": checkpoint})
            if found is not None and found["is_new"]:
                detail = f"{name}, before action {seq} of {step.label}"
                ids = {"saga_id": step.saga_id, "step_id": step.step_id}
                note(self.connection, "save-point", "airflow", detail, **ids)
            return found is not None

    @retried
    def rewind(
        self,
        dag_id: str,
        run_id: str,
        to: str,
        *,
        actor: str,
        reason: str | None = None,
        clear_number: int = 0,
    ) -> Rewind:
        """Ask for the undo of everything after a save-point; asking twice joins the first request.

        :param to: the name of the save-point, ``task_id:name`` where several steps have one of that name.
        :raises UnknownSagaError: there is no such saga.
        :raises VerbRefusedError: there is no such place, or the saga cannot go back now; says why and what to do.
        """
        where = f"{dag_id} / {run_id}"
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
            if saga is None:
                raise UnknownSagaError(f"there is no saga {where}")
            if saga.pruned_at is not None:
                raise VerbRefusedError(f"{where}: {pruned(saga)}")
            if saga.state not in _REWINDABLE:
                raise VerbRefusedError(f"{where} is {saga.state}: it cannot go back to a save-point")
            steps = many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga.saga_id})
            step, place = self._place(where, saga, steps, to)
            later = [other for other in steps if comes_after(other, step)]
            request = self._ask(
                saga,
                {step.step_id: place["seq"], **{other.step_id: 0 for other in later}},
                cause=Cause.REWIND,
                actor=actor,
                reason=reason or f"back to save-point {place['name']} of {step.label}",
                clear_number=max(clear_number, saga.clear_number),
            )
            keep = {"request_id": request.request_id, "step_id": step.step_id, "from_seq": place["seq"]}
            self.connection.execute(Q.keep_checkpoint_of_scope, {**keep, "checkpoint": place["checkpoint"]})
            labels = (*(other.label for other in later), f"{step.label} from its action {place['seq']} on")
            return Rewind(saga, request, step, labels)

    def _place(
        self, where: str, saga: SagaRow, steps: list[StepRow], to: str
    ) -> tuple[StepRow, dict[str, Any]]:
        by_id = {step.step_id: step for step in steps}
        places = dicts(self.connection, Q.savepoints_of_saga, {"saga_id": saga.saga_id})
        now = [place for place in places if place["generation"] == by_id[place["step_id"]].generation]
        found = [
            place
            for place in now
            if to in (place["name"], f"{by_id[place['step_id']].label}:{place['name']}")
        ]
        if not found:
            named = ", ".join(f"{by_id[place['step_id']].label}:{place['name']}" for place in now)
            gone = " (there was one, in a part that has been undone)" if len(now) < len(places) else ""
            there = named or "none; a step makes one with saga.savepoint(name)"
            raise VerbRefusedError(f"{where} has no save-point {to!r}{gone}; it has {there}")
        if len(found) > 1:
            named = ", ".join(f"{by_id[place['step_id']].label}:{place['name']}" for place in found)
            raise VerbRefusedError(f"{where} has several save-points {to!r}; name one of: {named}")
        step = by_id[found[0]["step_id"]]
        if step.state not in _CUTTABLE:
            raise VerbRefusedError(
                f"{where}: {step.label} is {step.state}, so there is nothing to go back from. "
                f"Clear it to run it again: airflow saga show says what stands."
            )
        return step, found[0]

    def _ask(self, saga: SagaRow, scope: dict[int, int], *, actor: str, **ask: Any) -> RequestRow:
        """Ask for this undo, or join the one that is asked for; the policy's hint gives way to it.

        :raises VerbRefusedError: another undo is under way.
        """
        request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
        if request is not None and request.state == RequestState.FROZEN:
            raise VerbRefusedError(
                f"{saga.dag_id} / {saga.run_id}: undo {request.number} ({request.cause}, asked for by {request.actor}) "
                f"is under way; wait for its end"
            )
        if request is not None and request.state in (RequestState.HINTED, RequestState.HELD):
            withdraw(self.connection, request, f"{actor} goes back a part of the way instead")
            request = None
        if request is not None:
            request = widen_request(self.connection, request, scope=scope, actor=actor, **ask)
        else:
            request = insert_request(self.connection, saga, scope=scope, actor=actor, **ask)
        wake(self.connection, saga.saga_id, "undo")
        return request

    @retried
    def undo_from(
        self,
        dag_id: str,
        run_id: str,
        action_id: int,
        *,
        actor: str,
        reason: str | None = None,
        clear_number: int = 0,
        plan_hash: str | None = None,
    ) -> Decision:
        """Undo an action and all that came after it; what came before stays, and the saga is SUSPENDED then.

        :raises UnknownSagaError: there is no such saga, or it has no such action.
        :raises VerbRefusedError: it is not at rest, something before is in doubt, or the plan signed is another one.
        """
        where = f"{dag_id} / {run_id}"
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga, {"dag_id": dag_id, "run_id": run_id})
            if saga is None:
                raise UnknownSagaError(f"there is no saga {where}")
            place = self._place_in(saga, action_id)
            what = f"{place.action.name} of {place.step.label}"
            request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
            if request is not None and saga.state == SagaState.CANCELLING and self._covers(request, place):
                message = f"{where} is being undone already, asked for by {request.actor}"
                return Decision(Verdict.ALREADY, message, saga, request)
            self._check_at_rest(saga)
            self._check_sure_before(place)
            scope = place.scope()
            if plan_hash is not None:
                check_signed_plan(self.connection, saga, plan_hash, scope)
            if not plan_of_scope(self.connection, saga, scope)[0]["steps"]:
                return Decision(Verdict.ALREADY, f"{where}: nothing stands from {what} on", saga)
            told: dict[str, Any] = {
                "actor": actor,
                "reason": reason or f"from {what} on",
                "cause": Cause.USER,
            }
            asked = self._ask(saga, scope, clear_number=max(clear_number, saga.clear_number), **told)
            stop_clear_number = max(clear_number, saga.clear_number)
            move_saga(
                self.connection,
                saga,
                SagaState.CANCELLING,
                mode=Mode.UNDO,
                stop_clear_number=stop_clear_number,
                **told,
            )
            message = (
                f"{where}: from {what} on it is being undone, asked for by {actor}; what came before stays"
            )
            return Decision(Verdict.CANCELLING, message, saga, asked)

    def plan_from(self, saga: SagaRow, action_id: int) -> tuple[dict[str, Any], str]:
        """What :meth:`undo_from` would do now, and the hash by which a person signs it. Calls nothing.

        :raises UnknownSagaError: the saga has no such action.
        """
        return plan_of_scope(self.connection, saga, self._place_in(saga, action_id).scope())

    def _place_in(self, saga: SagaRow, action_id: int) -> _Place:
        """:raises UnknownSagaError: the saga has no such action."""
        action = one(self.connection, ActionRow, Q.read_action_row, {"action_id": action_id})
        if action is None or action.saga_id != saga.saga_id:
            raise UnknownSagaError(
                f"{saga.dag_id} / {saga.run_id} has no action {action_id}; see: airflow saga show"
            )
        steps = many(self.connection, StepRow, Q.steps_of_saga, {"saga_id": saga.saga_id})
        step = next(each for each in steps if each.step_id == action.step_id)
        return _Place(action, step, tuple(each for each in steps if comes_after(each, step)))

    def _covers(self, request: RequestRow, place: _Place) -> bool:
        cut = scope_of(self.connection, request).get(place.step.step_id)
        return request.whole_run or (
            cut is not None and (not place.is_in_newest_pass or cut.from_seq <= place.action.seq)
        )

    def _check_at_rest(self, saga: SagaRow) -> None:
        """:raises VerbRefusedError: it runs, is being undone, or an undo has left something."""
        where = f"{saga.dag_id} / {saga.run_id}"
        if saga.pruned_at is not None:
            raise VerbRefusedError(f"{where}: {pruned(saga)}")
        if saga.state not in _AT_REST:
            instead = _INSTEAD.get(SagaState(saga.state), "look: airflow saga show")
            raise VerbRefusedError(
                f"{where} is {saga.state}, so it cannot be undone from a place on: {instead}"
            )
        running = steps_with_lease(self.connection, saga.saga_id)
        if running:
            raise VerbRefusedError(f"{where}: {running[0].label} is still running; stop the saga first")

    def _check_sure_before(self, place: _Place) -> None:
        """What stays has to be known: nobody would ask about it any more.

        :raises VerbRefusedError: an action of the step that came before is in doubt; names it.
        """
        action = place.action
        rows = many(self.connection, ActionRow, Q.actions_of_steps, {"step_ids": [action.step_id]})
        unsure = [
            row
            for row in rows
            if row.generation == action.generation and row.seq < action.seq and row.state != ActionState.DONE
        ]
        if unsure:
            named = ", ".join(f"{row.name} (action {row.action_id}, {row.state})" for row in unsure[:5])
            raise VerbRefusedError(
                f"before {action.name} of {place.step.label}, {named} is not settled, and would be kept as it is. Undo "
                f"from there, or say first what became of it: airflow saga resolve"
            )

    @retried
    def undo_from_if_stopped(self, step: StepRow, from_seq: int, reason: str) -> RequestRow:
        """The step asks for another action than the recorded one: what it did from there on is undone.

        :param step: as the attempt had it that has just stopped it.
        :raises VerbRefusedError: later steps acted on what it did, or it is not this attempt's any more.
        """
        with self.connection.transaction():
            saga = one(self.connection, SagaRow, Q.lock_saga_by_id, {"saga_id": step.saga_id})
            assert saga is not None
            steps = many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": step.saga_id})
            now = next(other for other in steps if other.step_id == step.step_id)
            if saga.state != SagaState.RUNNING or now.fence != step.fence or now.state != StepState.STOPPED:
                raise VerbRefusedError(f"{step.label} is {now.state} in a saga that is {saga.state}")
            stands = [other.label for other in steps if comes_after(other, step) and self._acted(other)]
            if stands:
                raise VerbRefusedError(
                    f"later steps used what it did: {', '.join(stands)}. Clear them and this task together"
                )
            note(
                self.connection,
                "step diverged",
                "airflow",
                reason,
                saga_id=saga.saga_id,
                step_id=step.step_id,
            )
            ask: dict[str, Any] = {
                "cause": Cause.DIVERGED,
                "actor": "airflow",
                "reason": f"{step.label} asked for another action than the recorded one",
                "clear_number": saga.clear_number,
            }
            return self._ask(saga, {step.step_id: from_seq}, **ask)

    def _acted(self, step: StepRow) -> bool:
        found = first(self.connection, Q.step_has_residual, {"step_id": step.step_id})
        return step.state == StepState.RUNNING or bool(found and found["stands"])
