"""One try of a compensation: it is called with all that was recorded, and what came of it is said as an ``EndedTry``.

Nothing is written here: the ending rides in the commit that begins the next try, and that is the undo's.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from airflow_saga.core.actions import Action, compensation_for
from airflow_saga.core.errors import ActionTimedOut, CompensationRejected, SagaError, Unavailable
from airflow_saga.core.identity import undo_key
from airflow_saga.core.records import ActionRecord, ActionRow, Applied, Later, SagaRow, StepRow
from airflow_saga.core.states import ActionState
from airflow_saga.runtime import codec
from airflow_saga.runtime.calls import RunningCall
from airflow_saga.runtime.drive import ask_probe, resolve_awaitable, run_call
from airflow_saga.runtime.journal import Journal
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.store.undo import EndedTry, UndoAttached, UndoVerbs

log = logging.getLogger(__name__)

Executor = Callable[[Any, ActionRecord], Any]
"""Carries out what a compensation gave back if that is no plain value (an operator); the Airflow layer has one."""


def record_of(saga: SagaRow, step: StepRow, row: ActionRow, attempt: int) -> ActionRecord:
    """All that was recorded of an action, as probes and compensations get it.

    :raises ValueNotReadableError: what was recorded cannot be read here, as when its class is gone.
    """
    return ActionRecord(
        dag_id=saga.dag_id,
        run_id=saga.run_id,
        task_id=step.task_id,
        map_index=step.map_index,
        name=row.name,
        version=row.version,
        params=codec.decode(row.params),
        result=None if row.result is None or row.in_doubt else codec.decode(row.result),
        key=row.key,
        undo_key=undo_key(saga.saga_uuid, row.key, row.reopened),
        in_doubt=row.in_doubt,
        attempt=attempt,
        result_lost=row.result_lost,
        later_token=None if row.later_token is None else codec.decode(row.later_token),
        deferred=None if row.deferral is None else codec.decode(row.deferral),
    )


class Compensations:
    """The compensations of one step, as one attempt to undo it calls them."""

    def __init__(
        self, journal: Journal, attached: UndoAttached, secrets: KnownSecrets, execute: Executor | None
    ) -> None:
        self.journal = journal
        self.attached = attached
        self.secrets = secrets
        self.execute = execute

    def record_of(self, row: ActionRow, attempt: int) -> ActionRecord:
        """:raises ValueNotReadableError: what was recorded cannot be read here, as when its class is gone."""
        return record_of(self.attached.saga, self.attached.step, row, attempt)

    def undo_key(self, row: ActionRow) -> str:
        return undo_key(self.attached.saga.saga_uuid, row.key, row.reopened)

    def call(self, row: ActionRow, known: Action[Any, Any], tries: int) -> EndedTry:
        """Make the try of this number, whose intent is committed."""
        compensation = compensation_for(known, row.version)
        assert compensation is not None
        try:
            record = self.record_of(row, tries)
            call = RunningCall(f"the compensation of {row.name}", known.timeout.total_seconds())
            answer = run_call(call, lambda: self._carry_out(compensation, record), self.journal)
            return self._took(row, known, record, answer)
        except Unavailable as down:
            return self._later(row, down.after, waiting_for=down.service)
        except CompensationRejected as no:
            return EndedTry(row.action_id, ActionState.COMPENSATION_FAILED, self._text(no), failed=True)
        except (Exception, ActionTimedOut) as problem:  # noqa: BLE001 - one failed try, whatever it was
            return self._failed(row, known, problem)

    def _carry_out(self, compensation: Callable[[ActionRecord], Any], record: ActionRecord) -> Any:
        answer = resolve_awaitable(compensation(record))
        return self.execute(answer, record) if self.execute is not None else answer

    def _took(self, row: ActionRow, known: Action[Any, Any], record: ActionRecord, answer: Any) -> EndedTry:
        if isinstance(answer, Later):
            secrets = self.secrets.pattern()
            token = (
                None if answer.token is None else codec.encode(answer.token, secrets=secrets, where="token")
            )
            return self._later(row, answer.after.total_seconds(), token=token)
        if known.confirm is not None:
            seen = ask_probe(known.confirm, record, known.timeout.total_seconds(), self.journal)
            if isinstance(seen, Applied):
                raise SagaError(
                    f"the compensation of {row.name} returned, but its confirm probe still sees the effect"
                )
        return EndedTry(row.action_id, ActionState.COMPENSATED)

    def _later(
        self,
        row: ActionRow,
        after_seconds: float,
        *,
        waiting_for: str | None = None,
        token: str | None = None,
    ) -> EndedTry:
        """Not now: the action waits with a date; costs no try. Past its deadline a person is asked."""
        fresh, now = self.journal.ask(lambda c: UndoVerbs(c).read_action(row.action_id))
        if fresh.undo_deadline_at is not None and fresh.undo_deadline_at <= now:
            why = f"its undo deadline passed ({fresh.undo_deadline_at:%Y-%m-%d %H:%M} UTC)"
            why += f" while waiting for {waiting_for}" if waiting_for else " while it was still under way"
            return EndedTry(row.action_id, ActionState.COMPENSATION_FAILED, why, failed=True)
        waiting_for = None if waiting_for is None else self.secrets.scrub(waiting_for)
        jitter = random.uniform(0.9, 1.3) if waiting_for else 1.0
        return EndedTry(
            row.action_id,
            ActionState.COMPENSATING,
            reconcile_seconds=after_seconds * jitter,
            waiting_for=waiting_for or "its compensation, which is under way",
            later_token=token,
        )

    def _failed(self, row: ActionRow, known: Action[Any, Any], problem: BaseException) -> EndedTry:
        log.warning("the compensation of %s failed: %s", row.name, self._text(problem))
        failures = self.failures(row) + 1
        last = failures >= known.undo_retry.tries
        state = ActionState.COMPENSATION_FAILED if last else ActionState.COMPENSATING
        return EndedTry(row.action_id, state, self._text(problem), failed=True)

    def failures(self, row: ActionRow) -> int:
        fresh, _ = self.journal.ask(lambda c: UndoVerbs(c).read_action(row.action_id))
        return fresh.undo_failures

    def _text(self, problem: BaseException) -> str:
        return self.secrets.scrub(f"{type(problem).__name__}: {problem}")[:2000]
