"""Attach: may this attempt of a step begin, and with what? It takes the step, resumes it, or says why it waits or ends.

What the attempt before left open is swept here, a hint to undo that came to nothing is withdrawn, and the undo that a
clear of a finished step asks for is requested. Invariant: one transaction under the saga's row lock decides and acts on
what it decided, so an attach and a freeze never both win; each step that is taken has a new fence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg

from airflow_saga.core.decide import AttachDecision, Go, cleared_itself, decide_attach
from airflow_saga.core.plan import comes_after
from airflow_saga.core.records import Attempt, RecordedCall, RequestRow, SagaRow, StepRow
from airflow_saga.core.states import ActionState, Cause, RequestState, SagaState, StepState
from airflow_saga.store import signals
from airflow_saga.store.connect import retried
from airflow_saga.store.queries import Q
from airflow_saga.store.requests import insert_request, undo_removed_indexes, widen_request
from airflow_saga.store.rows import dicts, first, many, note, one, wake
from airflow_saga.store.scope import scope_of, withdraw


@dataclass(frozen=True)
class Attached:
    """:ivar recorded: the actions of this generation so far, in order.

    :ivar request: what a WAIT waits for; else an undo that this attach has asked for.
    """

    decision: AttachDecision
    saga: SagaRow | None = None
    step: StepRow | None = None
    recorded: tuple[RecordedCall, ...] = ()
    request: RequestRow | None = None


# What RecordedCall._make does, without counting the fields of each row: a test counts those of the statement.
_recorded_call = partial(tuple.__new__, RecordedCall)


class AttachVerbs:
    """One verb, one transaction. The connection is in autocommit and belongs to one thread."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    @retried
    def attach_if_allowed(self, attempt: Attempt) -> Attached:
        """Begin, resume or begin anew this attempt's step, or say why it has to wait or end. See PROTOCOL 4.

        A connection that took a step hears of every decision about its saga from then on.
        """
        with self.connection.transaction():
            saga = self._saga_of(attempt)
            step = one(self.connection, StepRow, Q.lock_step, {"saga_id": saga.saga_id, **_identity(attempt)})
            upstream = self._upstream_of(attempt, saga.saga_id)
            request = one(self.connection, RequestRow, Q.open_request, {"saga_id": saga.saga_id})
            covering = request if request and self._covers(request, step) else None
            live = step is not None and step.ti_id == attempt.ti_id and self._is_live(step)
            decision = decide_attach(attempt, saga, step, upstream, covering, live)
            if decision.go is Go.REFUSE and decision.spares_saga:
                self._note_refusal(saga, decision.message, attempt.clear_number)
            if decision.go in (Go.WAIT, Go.REFUSE):
                return Attached(decision, saga, step, request=covering or request)
            if decision.go is Go.REDO:
                assert step is not None
                return self._redo(attempt, saga, step, request)
            saga, request = self._enter(attempt, saga, request)
            if decision.go is Go.REPLAY:
                assert step is not None
                self.connection.execute(
                    Q.note_attempt_of_finished_step,
                    {"step_id": step.step_id, "clear_number": attempt.clear_number, "ti_id": attempt.ti_id},
                )
                return Attached(decision, saga, step)
            taken = self._take(attempt, saga, step, decision)
            return replace(taken, request=self._undo_removed(attempt, saga, request))

    @retried
    def note_wait(self, attempt: Attempt, attached: Attached) -> None:
        """For the timeline: this attempt waits for an undo, and why."""
        assert attached.saga is not None
        step_id = attached.step.step_id if attached.step is not None else None
        detail = f"{attempt.step_label}, try {attempt.try_number}: {attached.decision.message}"
        note(self.connection, "step waits", "airflow", detail, saga_id=attached.saga.saga_id, step_id=step_id)

    def _is_live(self, step: StepRow) -> bool:
        return bool((first(self.connection, Q.lease_is_live, {"step_id": step.step_id}) or {}).get("live"))

    def _note_refusal(self, saga: SagaRow, message: str, clear_number: int) -> None:
        """The run will fail for a reason that is no failure of its effects: the policy must not undo it for that."""
        if saga.state != SagaState.RUNNING:
            return
        values = {"saga_id": saga.saga_id, "reason": message, "clear_number": clear_number}
        self.connection.execute(Q.note_refusal, values)
        note(self.connection, "step refused", "airflow", message, saga_id=saga.saga_id)

    def _saga_of(self, attempt: Attempt) -> SagaRow:
        key = {"dag_id": attempt.dag_id, "run_id": attempt.run_id}
        row = one(self.connection, SagaRow, Q.lock_saga, key)
        if row is None:
            new = {
                "state": SagaState.RUNNING,
                "cause": None,
                "actor": None,
                "reason": None,
                "stop_clear_number": -1,
            }
            self.connection.execute(Q.insert_saga, {**key, **new})
            row = one(self.connection, SagaRow, Q.lock_saga, key)
        assert row is not None
        return row

    def _upstream_of(self, attempt: Attempt, saga_id: int) -> list[StepRow]:
        if not attempt.ancestors:
            return []
        params = {
            "saga_id": saga_id,
            "ancestors": list(attempt.ancestors),
            "mapped_group": attempt.mapped_group,
            "map_index": attempt.map_index,
        }
        return many(self.connection, StepRow, Q.upstream_steps, params)

    def _covers(self, request: RequestRow, step: StepRow | None) -> bool:
        if request.state in (RequestState.HINTED, RequestState.HELD):
            return False
        if request.whole_run:
            return True
        return step is not None and step.step_id in scope_of(self.connection, request)

    def _enter(
        self, attempt: Attempt, saga: SagaRow, request: RequestRow | None
    ) -> tuple[SagaRow, RequestRow | None]:
        """The saga runs (again): a hint that nobody has frozen is withdrawn, the DAG's policies are kept."""
        if request is not None and request.state in (RequestState.HINTED, RequestState.HELD):
            request = self._withdraw(attempt, saga, request)
        if _is_entered(saga, attempt):
            return saga, request
        entered = one(
            self.connection,
            SagaRow,
            Q.attach_saga,
            {
                "saga_id": saga.saga_id,
                "clear_number": attempt.clear_number,
                "on_failure": attempt.on_failure,
                "on_compensation_failure": attempt.on_compensation_failure,
                "cancel_deadline_seconds": attempt.cancel_deadline_seconds,
            },
        )
        assert entered is not None
        return entered, request

    def _withdraw(self, attempt: Attempt, saga: SagaRow, hint: RequestRow) -> RequestRow | None:
        """The hint ends. Where it was to undo what a late answer had shown, that is asked for on its own."""
        withdraw(
            self.connection,
            hint,
            f"{attempt.step_label} runs again, so the saga has not failed after all",
        )
        reopened = dicts(self.connection, Q.reopened_steps, {"saga_id": saga.saga_id})
        if not reopened:
            return None
        wake(self.connection, saga.saga_id, "undo")
        return insert_request(
            self.connection,
            saga,
            scope={row["step_id"]: 0 for row in reopened},
            cause=Cause.LATE,
            actor="airflow",
            reason="a late answer showed an effect that stands",
            clear_number=attempt.clear_number,
        )

    def _take(
        self, attempt: Attempt, saga: SagaRow, step: StepRow | None, decision: AttachDecision
    ) -> Attached:
        values = {
            **_identity(attempt),
            "saga_id": saga.saga_id,
            "item_fingerprint": attempt.item_fingerprint,
            "ancestors": list(attempt.ancestors),
            "mapped_group": attempt.mapped_group,
            "lease_seconds": attempt.lease_seconds,
            "ti_id": attempt.ti_id,
            "try_number": attempt.try_number,
            "max_tries": attempt.max_tries,
            "retries": attempt.retries,
            "clear_number": attempt.clear_number,
            "host": attempt.host,
            "pid": attempt.pid,
            "dag_version": attempt.dag_version,
        }
        recorded: tuple[RecordedCall, ...] = ()
        if step is None:
            taken = one(self.connection, StepRow, Q.insert_step, values)
        else:
            anew = decision.go is Go.ANEW and not self._goes_on_from_a_part(step)
            recorded = self._sweep(attempt, step, anew=anew)
            values |= {"step_id": step.step_id, "generations": int(anew)}
            taken = one(self.connection, StepRow, Q.take_step, values)
        assert taken is not None
        signals.listen(self.connection, saga.saga_id)
        note(
            self.connection,
            f"step {decision.go}",
            "airflow",
            f"{attempt.step_label}, try {attempt.try_number}, generation {taken.generation}, fence {taken.fence}"
            + (f", DAG version {attempt.dag_version}" if attempt.dag_version else ""),
            saga_id=saga.saga_id,
            step_id=taken.step_id,
        )
        return Attached(decision, saga, taken, recorded)

    def _goes_on_from_a_part(self, step: StepRow) -> bool:
        """The undo has kept what stands before the place it went back to, or at least the checkpoint of that place, in
        a generation that nobody has begun yet."""
        key = {"step_id": step.step_id, "generation": step.generation}
        kept = (first(self.connection, Q.goes_on_from_a_part, key) or {})["kept"]
        self.connection.execute(Q.let_go_of_kept, {"step_id": step.step_id})
        return bool(kept) or step.checkpoint is not None

    def _sweep(self, attempt: Attempt, step: StepRow, *, anew: bool) -> tuple[RecordedCall, ...]:
        """What the attempt before left open is in doubt, and a clear grants new tries; what there is to resume with."""
        recorded = () if anew else self._recorded(step)
        cleared = cleared_itself(attempt, step)
        if not (anew or cleared or any(call.state == ActionState.PENDING for call in recorded)):
            return recorded
        self.connection.execute(Q.sweep_step, {"step_id": step.step_id})
        if cleared:
            self.connection.execute(Q.grant_tries, {"step_id": step.step_id, "generation": step.generation})
        return () if anew else self._recorded(step)

    def _recorded(self, step: StepRow) -> tuple[RecordedCall, ...]:
        key = {"step_id": step.step_id, "generation": step.generation}
        with self.connection.cursor(row_factory=lambda _: _recorded_call) as cursor:
            return tuple(cursor.execute(Q.recorded_calls, key).fetchall())

    def _redo(self, attempt: Attempt, saga: SagaRow, step: StepRow, request: RequestRow | None) -> Attached:
        """A finished step was cleared: it, and every later step that was cleared too, is undone before it runs anew."""
        steps = many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga.saga_id})
        cleared = attempt.others_cleared or frozenset()
        later = [other for other in steps if comes_after(other, step)]
        standing = [other.label for other in later if other.label not in cleared and self._stands(other)]
        if standing:
            message = (
                f"{attempt.label}: it was cleared, but later steps that used its effects were not: "
                f"{', '.join(standing)}. Clear them too, then clear this task again."
            )
            self._note_refusal(saga, message, attempt.clear_number)
            return Attached(AttachDecision(Go.REFUSE, message), saga, step)
        if request is not None and request.state == RequestState.FROZEN:
            message = f"{attempt.label}: it was cleared after it had finished; another undo has to end first"
            return Attached(AttachDecision(Go.WAIT, message), saga, step, request=request)
        saga, request = self._enter(attempt, saga, request)
        # Other indexes that are cleared as well would each ask for an undo of its own, one after the other.
        siblings = [
            other
            for other in steps
            if other.task_id == step.task_id and other.state == StepState.SUCCEEDED and other.label in cleared
        ]
        removed = self._removed(attempt, steps)
        if removed:
            self.connection.execute(Q.note_removed, {"step_ids": [other.step_id for other in removed]})
        with_it = [*(other for other in later if other.label in cleared), *siblings, *removed]
        scope = {other.step_id: 0 for other in with_it} | {step.step_id: 0}
        ask: dict[str, Any] = {
            "scope": scope,
            "cause": Cause.REDO,
            "actor": "airflow",
            "reason": f"{attempt.step_label} was cleared",
            "clear_number": attempt.clear_number,
        }
        if request is not None:
            request = widen_request(self.connection, request, **ask)
        else:
            request = insert_request(self.connection, saga, **ask)
        wake(self.connection, saga.saga_id, "undo")
        message = f"{attempt.label}: it was cleared after it had finished; its effects are undone first"
        return Attached(AttachDecision(Go.WAIT, message), saga, step, request=request)

    @staticmethod
    def _removed(attempt: Attempt, steps: list[StepRow]) -> list[StepRow]:
        """Indexes of this mapped task that acted and are no more, since the mapping has become shorter."""
        acted = (StepState.SUCCEEDED, StepState.STOPPED)
        of_task = (step for step in steps if step.task_id == attempt.task_id and step.state in acted)
        return [step for step in of_task if step.label in attempt.others_removed]

    def _undo_removed(self, attempt: Attempt, saga: SagaRow, request: RequestRow | None) -> RequestRow | None:
        """Nobody will run them again, so nobody would ever undo what they did for this run."""
        if not attempt.others_removed:
            return None
        steps = many(self.connection, StepRow, Q.lock_steps_of_saga, {"saga_id": saga.saga_id})
        removed = [step for step in self._removed(attempt, steps) if self._stands(step)]
        if not removed or (request is not None and request.state == RequestState.FROZEN):
            return None
        ids = [step.step_id for step in removed]
        return undo_removed_indexes(self.connection, saga, request, ids, attempt.clear_number)

    def _stands(self, step: StepRow) -> bool:
        """It acted, or may be about to: an undo below its feet would break the order."""
        return step.state == StepState.RUNNING or bool(
            (first(self.connection, Q.step_has_residual, {"step_id": step.step_id}) or {}).get("stands")
        )


def _is_entered(saga: SagaRow, attempt: Attempt) -> bool:
    """An earlier attempt has left the saga as this one wants it."""
    policies = (saga.on_failure, saga.on_compensation_failure, saga.cancel_deadline_seconds)
    return (
        saga.state == SagaState.RUNNING
        and saga.clear_number >= attempt.clear_number
        and policies == (attempt.on_failure, attempt.on_compensation_failure, attempt.cancel_deadline_seconds)
    )


def _identity(attempt: Attempt) -> dict[str, Any]:
    return {"task_id": attempt.task_id, "map_index": attempt.map_index}
