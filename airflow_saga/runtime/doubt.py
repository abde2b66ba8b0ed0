"""A call in doubt: wait until nothing of it can land any more, ask the world, and only then decide. See PROTOCOL 9.

Told as the recorder's story is, as a generator that asks for what it needs. What comes of it is either the result of
the call, or that it may be made again.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from airflow_saga.core.actions import Action
from airflow_saga.core.errors import (
    ActionFailedError,
    InDoubtError,
    NotApplied,
    ResultNotStoredError,
    ValueNotKeptError,
)
from airflow_saga.core.identity import undo_key
from airflow_saga.core.records import (
    ActionRecord,
    ActionRow,
    Applied,
    Intent,
    RecordedCall,
    SagaRow,
    StepRow,
)
from airflow_saga.core.states import ActionState, Effect
from airflow_saga.runtime import codec
from airflow_saga.runtime.drive import Ask, Op, Pause, Probe, Retry
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.replay import Replay
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.store.steps import StepVerbs


class Call(NamedTuple):
    """One call as the body made it, ready for the log."""

    action: Action[Any, Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    params: dict[str, Any]
    intent: Intent
    tries_before: int = 0

    @property
    def read_only(self) -> bool:
        return self.action.effect is Effect.READ_ONLY

    def used(self, tries: int) -> int:
        """How many of its tries count."""
        return tries - self.tries_before


class Known(NamedTuple):
    """What the call has come to."""

    result: Any


class Again(NamedTuple):
    """Its next try has begun. ``was``: the state of the row if that is not made after all."""

    tries: int
    sent: float
    was: ActionState


Verdict = Known | Again


class Doubts:
    """See the module. One per recorder."""

    def __init__(
        self, saga: SagaRow, step: StepRow, replay: Replay, secrets: KnownSecrets, limits: Limits
    ) -> None:
        self.saga = saga
        self.step = step
        self.replay = replay
        self.secrets = secrets
        self.limits = limits

    def resume(self, call: Call, row: RecordedCall) -> Generator[Op, Any, Verdict]:
        """An earlier attempt began this call and did not finish it well."""
        if row.state == ActionState.FAILED:
            if call.used(row.tries) >= call.action.retry.tries:
                raise ActionFailedError(
                    f"{call.action.name} did not take effect in {row.tries} tries ({row.error}); none is left. "
                    f"Clear the task to grant new ones."
                )
            tries, sent = yield Retry(call.intent, ActionState.FAILED)
            return Again(tries, sent, ActionState.FAILED)
        self.replay.remember_doubt(call.action.name, call.intent.fingerprint, call.intent.seq)
        doubt = InDoubtError(
            f"{call.action.name} (action {row.action_id}, key {row.key}) began in an earlier attempt and nobody knows "
            f"whether it took effect ({row.error or 'no outcome was recorded'}). Look it up, then say so: airflow saga "
            f"resolve {self.saga.dag_id} {self.saga.run_id} {row.action_id} --happened | --did-not-happen --note …"
        )
        return (yield from self.find_out(call, row.tries, doubt))

    def find_out(self, call: Call, tries: int, problem: BaseException) -> Generator[Op, Any, Verdict]:
        """What became of it, or another try; raises ``problem`` where nobody can tell and it may not be made again."""
        action = call.action
        used, most = call.used(tries), action.retry.tries
        if action.verify is None and not (action.idempotent and used < most):
            raise self._unknown_for_good(call, problem)
        row = yield from self._wait_out(call)
        if row.state == ActionState.IN_DOUBT and action.verify is not None:
            answer = yield Probe(action.verify, self._record(call, row), action.timeout.total_seconds())
            if isinstance(answer, Applied):
                return Known((yield from self._applied(call, row, answer)))
            if isinstance(answer, NotApplied):
                yield Ask(
                    lambda c: StepVerbs(c).verified_if_held(
                        self.step, row.action_id, "FAILED", None, "verify: no"
                    )
                )
                row = replace(row, state=ActionState.FAILED.value)
        if row.state == ActionState.IN_DOUBT and not (yield from self._may_be_called_again(action, row)):
            raise self._unknown_for_good(call, problem)
        if row.state != ActionState.IN_DOUBT:
            self.replay.forget_doubt(action.name, call.intent.fingerprint)
        if row.state == ActionState.DONE:
            return Known(recorded_result(row))
        if used >= most:
            raise self._unknown_for_good(call, problem) if row.state == ActionState.IN_DOUBT else problem
        yield Pause(action.retry.pause_seconds(used))
        was = ActionState(row.state)
        tries, sent = yield Retry(call.intent, was)
        self.replay.forget_doubt(action.name, call.intent.fingerprint)
        return Again(tries, sent, was)

    def _unknown_for_good(self, call: Call, problem: BaseException) -> BaseException:
        """The body sees what its call raised; the task is told that a retry would only stop at this call again."""
        if not isinstance(problem, InDoubtError):
            problem.saga_in_doubt = (  # type: ignore[attr-defined]
                f"nobody knows whether {call.action.name} (key {call.intent.key}) took effect, and it may not be "
                f"called again ({self.secrets.scrub(f'{type(problem).__name__}: {problem}')[:500]}). Look it up, then "
                f"say so: airflow saga show {self.saga.dag_id} {self.saga.run_id}, airflow saga resolve …"
            )
        return problem

    def _may_be_called_again(self, action: Action[Any, Any], row: ActionRow) -> Generator[Op, Any, bool]:
        """In doubt, but the service takes the same key for the same effect, and still remembers it."""
        if not action.idempotent or action.key_lifetime is None:
            return action.idempotent
        now = yield Ask(lambda c: StepVerbs(c).clock())
        return bool(row.begun_at + action.key_lifetime > now)

    def _wait_out(self, call: Call) -> Generator[Op, Any, ActionRow]:
        """Until A1 says that no attempt of this action can take effect any more."""
        deadline = (
            time.monotonic() + 2 * (call.intent.timeout_seconds + call.intent.settle_after_seconds) + 60
        )
        while True:
            row, now = yield Ask(lambda c: _row_and_clock(StepVerbs(c), self.step, call.intent.seq))
            if row.lands_by is None or row.lands_by <= now:
                return row  # type: ignore[no-any-return]
            if time.monotonic() > deadline:
                raise InDoubtError(
                    f"{call.action.name}: the wait for its last attempt did not end; it is in doubt"
                )
            yield Pause(min((row.lands_by - now).total_seconds() + 0.01, 5.0))

    def _applied(self, call: Call, row: ActionRow, answer: Applied) -> Generator[Op, Any, Any]:
        self.replay.forget_doubt(call.action.name, call.intent.fingerprint)
        text, lost = None, False
        if answer.result is not None:
            try:
                text, _ = codec.encode_masked(
                    answer.result, self.secrets.pattern(), max_bytes=self.limits.max_value_bytes
                )
            except ValueNotKeptError:
                lost = True
        yield Ask(
            lambda c: StepVerbs(c).verified_if_held(
                self.step, row.action_id, "DONE", text, "verify: yes", lost
            )
        )
        if lost:
            raise ResultNotStoredError(
                f"{call.action.name} took effect, but what its probe found cannot be stored"
            )
        return answer.result

    def _record(self, call: Call, row: ActionRow) -> ActionRecord:
        return ActionRecord(
            dag_id=self.saga.dag_id,
            run_id=self.saga.run_id,
            task_id=self.step.task_id,
            map_index=self.step.map_index,
            name=row.name,
            version=row.version,
            params=call.params,
            result=None,
            key=row.key,
            undo_key=undo_key(self.saga.saga_uuid, row.key, row.reopened),
            in_doubt=True,
        )


def recorded_result(row: ActionRow | RecordedCall) -> Any:
    """What a call that is done had returned.

    :raises ResultNotStoredError: it could not be stored.
    """
    if row.result_lost:
        raise ResultNotStoredError(
            f"{row.name} took effect in an earlier attempt, but its result could not be stored; "
            f"it is not called again. It can be undone."
        )
    return None if row.result is None else codec.decode(row.result)


def _row_and_clock(verbs: StepVerbs, step: StepRow, seq: int) -> tuple[ActionRow, datetime]:
    row = verbs.recorded_action(step, seq)
    assert row is not None
    return row, verbs.clock()
