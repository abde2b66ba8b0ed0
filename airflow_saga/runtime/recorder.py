"""Records the calls of a step: the one way from a body to the outside world.

What happens to one call is told once, as a generator that asks for what it needs (an intent, the call itself, a
pause); a thread answers by blocking, an event loop by awaiting. So sync and async calls cannot drift apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, NamedTuple

from airflow_saga.core.actions import Action
from airflow_saga.core.errors import (
    ActionFailedError,
    ActionTimedOut,
    InDoubtError,
    NestedActionError,
    NotApplied,
    NotRegisteredError,
    ResultNotStoredError,
    SagaDivergedError,
    ValueNotKeptError,
)
from airflow_saga.core.identity import action_key, undo_key
from airflow_saga.core.records import (
    ActionRecord,
    ActionRow,
    Applied,
    Intent,
    Outcome,
    RecordedCall,
    SagaRow,
    StepRow,
)
from airflow_saga.core.states import ActionState, Effect
from airflow_saga.runtime import codec
from airflow_saga.runtime.calls import current_action
from airflow_saga.runtime.drive import (
    Ask,
    Begin,
    CallNotBegun,
    Op,
    Pause,
    Perform,
    Probe,
    Retry,
    drive,
    drive_async,
)
from airflow_saga.runtime.journal import Journal
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.replay import Replay
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.store.late import LateVerbs
from airflow_saga.store.steps import StepVerbs


class _Found(NamedTuple):
    """What the log knows of one call: the recorded action that it is, or the place it takes."""

    params: dict[str, Any]
    text: str
    fingerprint: str
    row: RecordedCall | None
    seq: int
    alone: bool


class _Call(NamedTuple):
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


class Recorder:
    """See the module. One per step process."""

    def __init__(
        self,
        journal: Journal,
        saga: SagaRow,
        step: StepRow,
        replay: Replay,
        secrets: KnownSecrets,
        limits: Limits,
    ) -> None:
        self.journal = journal
        self.saga = saga
        self.step = step
        self.replay = replay
        self.secrets = secrets
        self.limits = limits
        self.diverged: SagaDivergedError | None = None
        """The first time that the body asked for another action than the recorded one, whatever it made of that."""
        self._lock = threading.Lock()
        self._under_way = 0

    def call(self, action: Action[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What ``action(…)`` does inside a step; a coroutine for an async action."""
        inside = current_action.get()
        if inside is not None:
            raise NestedActionError(
                f"{action.name} was called inside {inside}; nothing was called. An action records one call to the "
                f"outside world: call {action.name}.fn(…) there, or call both in the body of the step."
            )
        if not action.registered:
            raise NotRegisteredError(
                f"action {action.name} was made after the DAG file was loaded, so no undo could find it; nothing was "
                f"called. Move its @action to the top level of the DAG file or of a module it imports."
            )
        if action.is_async:
            return self._call_async(action, args, kwargs)
        alone = self._enter()
        try:
            found = self._look_up(action, args, kwargs, alone)
            if found.row is not None and found.row.state == ActionState.DONE:
                return self._replayed(found.row)
            return drive(self._tell(action, args, kwargs, found), self)
        finally:
            self._leave()

    async def _call_async(
        self, action: Action[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        alone = self._enter()
        try:
            found = self._look_up(action, args, kwargs, alone)
            if found.row is not None and found.row.state == ActionState.DONE:
                return self._replayed(found.row)
            return await drive_async(self._tell(action, args, kwargs, found), self)
        finally:
            self._leave()

    def _enter(self) -> bool:
        """Whether no other call of the step is under way."""
        self.journal.check()
        with self._lock:
            self._under_way += 1
            return self._under_way == 1

    def _leave(self) -> None:
        with self._lock:
            self._under_way -= 1

    def _look_up(
        self, action: Action[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], alone: bool
    ) -> _Found:
        params = action.bind(args, kwargs)
        if alone and not self.replay.empty:
            known = self.replay.claim_expected(
                action.name, action.version, lambda row: codec.is_plainly(row.params, params)
            )
            if known is not None:
                return _Found(params, known.params, known.fingerprint, known, known.seq, alone)
        text, mark = self._recognised(action, params)
        reads = action.effect is Effect.READ_ONLY
        try:
            row, seq = self.replay.match(action.name, mark, alone=alone, read_only=reads)
        except SagaDivergedError as diverged:
            self.diverged = self.diverged or diverged
            raise
        return _Found(params, text, mark, row, seq, alone)

    # -- the story of one call ----------------------------------------------------------------------------------------

    def _tell(
        self, action: Action[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], found: _Found
    ) -> Generator[Op, Any, Any]:
        row = found.row
        intent = self._intent(action, found)
        call = _Call(action, args, kwargs, found.params, intent, row.tries_before if row is not None else 0)
        if row is None:
            if call.read_only:
                return (yield from self._read(call))
            sent = yield Begin(call.intent)
            return (yield from self._perform(call, 1, sent, ActionState.FAILED))
        return (yield from self._resume(call, row))

    def _recognised(self, action: Action[Any, Any], params: dict[str, Any]) -> tuple[str, str]:
        """The text of the parameters and the call's fingerprint; what an earlier attempt has recorded word for word
        was looked at then."""
        if not self.replay.empty:
            text = codec.plain_text(params, self.limits.max_value_bytes)
            if text is not None:
                known = self.replay.fingerprint_of(action.name, action.version, text)
                if known is not None:
                    return text, known
        text = codec.encode(params, secrets=self.secrets.pattern(), max_bytes=self.limits.max_value_bytes)
        return text, codec.fingerprint(action.name, action.version, text, params)

    def _intent(self, action: Action[Any, Any], found: _Found) -> Intent:
        row, seq = found.row, found.seq
        step = self.step
        if action.idempotent:
            self.journal.idempotent_seqs.add(seq)
        return Intent(
            seq=seq,
            name=action.name,
            version=action.version,
            effect=action.effect.value,
            fingerprint=found.fingerprint,
            key=row.key
            if row is not None
            else action_key(self.saga.saga_uuid, step.task_id, step.map_index, step.generation, seq),
            params=found.text,
            timeout_seconds=action.timeout.total_seconds(),
            settle_after_seconds=action.settle_after.total_seconds(),
            parallel=not found.alone,
            action_id=row.action_id if row is not None else None,
            idempotent=action.idempotent,
            key_lifetime_seconds=action.key_lifetime.total_seconds() if action.key_lifetime else None,
            max_tries=action.retry.tries,
        )

    def _replayed(self, row: ActionRow | RecordedCall) -> Any:
        if row.result_lost:
            raise ResultNotStoredError(
                f"{row.name} took effect in an earlier attempt, but its result could not be stored; "
                f"it is not called again. It can be undone."
            )
        return None if row.result is None else codec.decode(row.result)

    def _perform(self, call: _Call, tries: int, sent: float, was: ActionState) -> Generator[Op, Any, Any]:
        """The intent is committed: make the call, keep what became of it, try again where that is safe.

        :param sent: when the intent was sent, monotonic seconds.
        :param was: what the row is if the call is not made after all.
        """
        action = call.action
        while True:
            began = time.monotonic()
            try:
                result = yield Perform(call.action, call.args, call.kwargs, call.intent, sent, tries)
            except CallNotBegun as refused:
                own = was is ActionState.FAILED
                self._ended(call, tries, was, error=refused.why, own=own)
                raise refused.why from None
            except NotApplied as no:
                self._ended(call, tries, ActionState.FAILED, error=no, own=True)
                if call.used(tries) >= action.retry.tries:
                    raise
                yield Pause(action.retry.pause_seconds(call.used(tries)))
                was = ActionState.FAILED
                tries, sent = yield Retry(call.intent, was)
            except ActionTimedOut as late:  # the journal has written IN_DOUBT before it raised this
                if late.answered:
                    return (yield from self._answered_late(call, tries, late.result))
                self.replay.remember_doubt(action.name, call.intent.fingerprint, call.intent.seq)
                return (yield from self._find_out(call, tries, late))
            except Exception as problem:  # noqa: BLE001 - whatever it was, nobody knows what it did
                self._ended(call, tries, ActionState.IN_DOUBT, error=problem, own=False)
                return (yield from self._find_out(call, tries, problem))
            except BaseException as cut:
                self._ended(call, tries, ActionState.IN_DOUBT, error=cut, own=False)
                raise
            else:
                return self._succeeded(call, tries, result, time.monotonic() - began)

    def _succeeded(self, call: _Call, tries: int, result: Any, took_seconds: float) -> Any:
        self.replay.forget_doubt(call.action.name, call.intent.fingerprint)
        outcome, problem = self._done(call, tries, result)
        self.journal.outcome(outcome, took_seconds)
        return _result_or_raise(call, result, problem)

    def _done(self, call: _Call, tries: int, result: Any) -> tuple[Outcome, ValueNotKeptError | None]:
        """The outcome of a call that returned; if its result cannot be kept, the effect is recorded all the same."""
        try:
            text, masked = codec.encode_masked(
                result, self.secrets.pattern(), max_bytes=self.limits.max_value_bytes
            )
        except ValueNotKeptError as problem:
            lost = self.secrets.scrub(f"result not stored: {problem}")
            done = Outcome(call.intent.seq, ActionState.DONE, result_lost=True, error=lost, tries=tries)
            return done, problem
        note = f"masked: {', '.join(masked)}" if masked else None
        stored = text if result is not None else None
        return Outcome(call.intent.seq, ActionState.DONE, stored, error=note, tries=tries), None

    def _answered_late(self, call: _Call, tries: int, result: Any) -> Generator[Op, Any, Any]:
        """It was abandoned, and ended all the same: what is known for certain is kept."""
        outcome, problem = self._done(call, tries, result)
        idempotent = call.action.idempotent
        yield Ask(lambda c: LateVerbs(c).record_late(self.step, outcome, idempotent=idempotent))
        return _result_or_raise(call, result, problem)

    def _ended(self, call: _Call, tries: int, state: ActionState, *, error: BaseException, own: bool) -> None:
        if state is ActionState.IN_DOUBT:
            self.replay.remember_doubt(call.action.name, call.intent.fingerprint, call.intent.seq)
        text = self.secrets.scrub(f"{type(error).__name__}: {error}")[:2000]
        self.journal.outcome(Outcome(call.intent.seq, state, error=text, own=own, tries=tries))

    # -- in doubt -----------------------------------------------------------------------------------------------------

    def _resume(self, call: _Call, row: RecordedCall) -> Generator[Op, Any, Any]:
        """An earlier attempt began this call and did not finish it well."""
        if row.state == ActionState.FAILED:
            if call.used(row.tries) >= call.action.retry.tries:
                raise ActionFailedError(
                    f"{call.action.name} did not take effect in {row.tries} tries ({row.error}); none is left. "
                    f"Clear the task to grant new ones."
                )
            tries, sent = yield Retry(call.intent, ActionState.FAILED)
            return (yield from self._perform(call, tries, sent, ActionState.FAILED))
        self.replay.remember_doubt(call.action.name, call.intent.fingerprint, call.intent.seq)
        doubt = InDoubtError(
            f"{call.action.name} (action {row.action_id}, key {row.key}) began in an earlier attempt and nobody knows "
            f"whether it took effect ({row.error or 'no outcome was recorded'}). Look it up, then say so: airflow saga "
            f"resolve {self.saga.dag_id} {self.saga.run_id} {row.action_id} --happened | --did-not-happen --note …"
        )
        return (yield from self._find_out(call, row.tries, doubt))

    def _find_out(self, call: _Call, tries: int, problem: BaseException) -> Generator[Op, Any, Any]:
        """Wait until nothing of it can land any more, ask the world, and only then decide. See PROTOCOL 9."""
        action = call.action
        used, most = call.used(tries), action.retry.tries
        if action.verify is None and not (action.idempotent and used < most):
            raise self._unknown_for_good(call, problem)
        row = yield from self._wait_out(call)
        if row.state == ActionState.IN_DOUBT and action.verify is not None:
            answer = yield Probe(action.verify, self._record(call, row), action.timeout.total_seconds())
            if isinstance(answer, Applied):
                return (yield from self._applied(call, row, answer))
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
            return self._replayed(row)
        if used >= most:
            raise self._unknown_for_good(call, problem) if row.state == ActionState.IN_DOUBT else problem
        yield Pause(action.retry.pause_seconds(used))
        was = ActionState(row.state)
        tries, sent = yield Retry(call.intent, was)
        self.replay.forget_doubt(action.name, call.intent.fingerprint)
        return (yield from self._perform(call, tries, sent, was))

    def _unknown_for_good(self, call: _Call, problem: BaseException) -> BaseException:
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

    def _wait_out(self, call: _Call) -> Generator[Op, Any, ActionRow]:
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

    def _applied(self, call: _Call, row: ActionRow, answer: Applied) -> Generator[Op, Any, Any]:
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

    def _record(self, call: _Call, row: ActionRow) -> ActionRecord:
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

    # -- READ_ONLY ----------------------------------------------------------------------------------------------------

    def _read(self, call: _Call) -> Generator[Op, Any, Any]:
        """No intent: nothing can be left behind. Its result is written with the next intent or within half a second."""
        tries = 0
        while True:
            tries += 1
            try:
                result = yield Perform(call.action, call.args, call.kwargs, call.intent, None, tries)
            except (Exception, ActionTimedOut) as failure:
                if tries < call.action.retry.tries:
                    yield Pause(call.action.retry.pause_seconds(tries))
                    continue
                text = self.secrets.scrub(f"{type(failure).__name__}: {failure}")[:2000]
                self.journal.reading((call.intent, Outcome(call.intent.seq, ActionState.FAILED, error=text)))
                raise
            outcome, problem = self._done(call, tries, result)
            self.journal.reading((call.intent, outcome))
            return _result_or_raise(call, result, problem)


def _result_or_raise(call: _Call, result: Any, problem: ValueNotKeptError | None) -> Any:
    if problem is not None:
        raise ResultNotStoredError(
            f"{call.action.name} took effect, but its result cannot be stored: {problem}. The undo can still undo it."
        ) from problem
    return result


def _row_and_clock(verbs: StepVerbs, step: StepRow, seq: int) -> tuple[ActionRow, datetime]:
    row = verbs.recorded_action(step, seq)
    assert row is not None
    return row, verbs.clock()
