"""Records the calls of a step: the one way from a body to the outside world.

What happens to one call is told once, as a generator that asks for what it needs (an intent, the call itself, a
pause); a thread answers by blocking, an event loop by awaiting. So sync and async calls cannot drift apart.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from airflow_saga.core.actions import NOT_RECORDED, Action
from airflow_saga.core.errors import (
    ActionFailedError,
    ActionTimedOut,
    NestedActionError,
    NotApplied,
    NotRegisteredError,
    RefusedForGood,
    ResultNotStoredError,
    SagaDivergedError,
    ValueNotKeptError,
)
from airflow_saga.core.identity import action_key
from airflow_saga.core.records import Intent, Outcome, RecordedCall, SagaRow, StepRow
from airflow_saga.core.states import ActionState, Effect
from airflow_saga.runtime import codec
from airflow_saga.runtime.accounts import ActionAccount
from airflow_saga.runtime.calls import current_action, from_log, in_batch
from airflow_saga.runtime.doubt import Call, Doubts, Known, Verdict, recorded_result
from airflow_saga.runtime.drive import (
    Ask,
    Begin,
    CallNotBegun,
    Op,
    Pause,
    Perform,
    Retry,
    drive,
    drive_async,
)
from airflow_saga.runtime.journal import Journal
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.replay import Replay
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.store.late import LateVerbs


class _Found(NamedTuple):
    """What the log knows of one call: the recorded action that it is, or the place it takes."""

    params: dict[str, Any]
    text: str
    fingerprint: str
    row: RecordedCall | None
    seq: int
    alone: bool


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
        self.doubts = Doubts(saga, step, replay, secrets, limits)
        self.account = ActionAccount(saga, step)
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
            if found.row is not None and _is_answered(action, found.row):
                return _answer(found.row)
            with self.account.span(action, found.seq):
                return drive(self._tell(action, args, kwargs, found), self)
        finally:
            self._leave()

    def recall(self, action: Action[Any, Any], params: Mapping[str, Any]) -> Any:
        """What an earlier attempt has recorded of a call with these parameters; ``NOT_RECORDED`` if it is not done."""
        row = self.replay.done_with(action.name, lambda found: codec.is_plainly(found.params, dict(params)))
        return NOT_RECORDED if row is None or row.result_lost else recorded_result(row)

    async def _call_async(
        self, action: Action[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        alone = self._enter()
        try:
            found = self._look_up(action, args, kwargs, alone)
            if found.row is not None and _is_answered(action, found.row):
                return _answer(found.row)
            with self.account.span(action, found.seq):
                return await drive_async(self._tell(action, args, kwargs, found), self)
        finally:
            self._leave()

    def _enter(self) -> bool:
        """Whether no other call of the step is under way."""
        self.journal.check()
        with self._lock:
            self._under_way += 1
            return self._under_way == 1 and not in_batch.get()

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
            row, seq = self.replay.match(
                action.name, mark, alone=alone, read_only=reads, steers=action.steers
            )
        except SagaDivergedError as diverged:
            diverged = self._explained(diverged, action, params)
            self.diverged = self.diverged or diverged
            raise diverged from None
        return _Found(params, text, mark, row, seq, alone)

    def _explained(
        self, diverged: SagaDivergedError, action: Action[Any, Any], params: dict[str, Any]
    ) -> SagaDivergedError:
        """Where the log holds another call of the same action, what differs is said in a person's words."""
        row = self.replay.next_of(action.name)
        differs = action.what_differs(codec.decode(row.params), params) if row is not None else ""
        return SagaDivergedError(f"{differs}. {diverged}", diverged.from_seq) if differs else diverged

    # -- the story of one call ----------------------------------------------------------------------------------------

    def _tell(
        self, action: Action[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], found: _Found
    ) -> Generator[Op, Any, Any]:
        row = found.row
        intent = self._intent(action, found)
        call = Call(action, args, kwargs, found.params, intent, row.tries_before if row is not None else 0)
        if row is None:
            if call.read_only:
                return (yield from self._read(call))
            sent = yield Begin(call.intent)
            return (yield from self._perform(call, 1, sent, ActionState.FAILED))
        verdict = yield from self.doubts.resume(call, row)
        return (yield from self._follow(call, verdict))

    def _follow(self, call: Call, verdict: Verdict) -> Generator[Op, Any, Any]:
        if isinstance(verdict, Known):
            self.account.found_done()
            return verdict.result
        return (yield from self._perform(call, *verdict))

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

    def _perform(self, call: Call, tries: int, sent: float, was: ActionState) -> Generator[Op, Any, Any]:
        """The intent is committed: make the call, keep what became of it, try again where that is safe.

        :param sent: when the intent was sent, monotonic seconds.
        :param was: what the row is if the call is not made after all.
        """
        action = call.action
        while True:
            began = time.monotonic()
            self.account.began(action)
            try:
                result = yield Perform(call.action, call.args, call.kwargs, call.intent, sent, tries)
            except CallNotBegun as refused:
                own = was is ActionState.FAILED
                self._ended(call, tries, was, error=refused.why, own=own)
                raise refused.why from None
            except NotApplied as no:
                last = no.final or call.used(tries) >= action.retry.tries
                self._ended(call, tries, ActionState.FAILED, error=no, own=True, refused=last)
                if last:
                    raise
                yield Pause(action.retry.pause_seconds(call.used(tries)))
                was = ActionState.FAILED
                tries, sent = yield Retry(call.intent, was)
            except ActionTimedOut as late:  # the journal has written IN_DOUBT before it raised this
                if late.answered:
                    return (yield from self._answered_late(call, tries, late.result))
                self.replay.remember_doubt(action.name, call.intent.fingerprint, call.intent.seq)
                self.account.ended(action, ActionState.IN_DOUBT)
                verdict = yield from self.doubts.find_out(call, tries, late)
                return (yield from self._follow(call, verdict))
            except Exception as problem:  # noqa: BLE001 - whatever it was, nobody knows what it did
                self._ended(call, tries, ActionState.IN_DOUBT, error=problem, own=False)
                verdict = yield from self.doubts.find_out(call, tries, problem)
                return (yield from self._follow(call, verdict))
            except BaseException as cut:
                self._ended(call, tries, ActionState.IN_DOUBT, error=cut, own=False)
                raise
            else:
                return self._succeeded(call, tries, result, time.monotonic() - began)

    def _succeeded(self, call: Call, tries: int, result: Any, took_seconds: float) -> Any:
        self.replay.forget_doubt(call.action.name, call.intent.fingerprint)
        outcome, problem = self._done(call, tries, result)
        self.journal.outcome(outcome, took_seconds)
        self.account.ended(call.action, ActionState.DONE)
        return _result_or_raise(call, result, problem)

    def _done(self, call: Call, tries: int, result: Any) -> tuple[Outcome, ValueNotKeptError | None]:
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

    def _answered_late(self, call: Call, tries: int, result: Any) -> Generator[Op, Any, Any]:
        """It was abandoned, and ended all the same: what is known for certain is kept."""
        outcome, problem = self._done(call, tries, result)
        idempotent = call.action.idempotent
        yield Ask(lambda c: LateVerbs(c).record_late(self.step, outcome, idempotent=idempotent))
        self.account.ended(call.action, ActionState.DONE)
        return _result_or_raise(call, result, problem)

    def _ended(
        self,
        call: Call,
        tries: int,
        state: ActionState,
        *,
        error: BaseException,
        own: bool,
        refused: bool = False,
    ) -> None:
        if state is ActionState.IN_DOUBT:
            self.replay.remember_doubt(call.action.name, call.intent.fingerprint, call.intent.seq)
        text = self._told(error)
        answer = codec.encode(text) if refused and call.action.keeps_refusal else None
        self.journal.outcome(Outcome(call.intent.seq, state, answer, error=text, own=own, tries=tries))
        self.account.ended(call.action, state)

    def _told(self, error: BaseException) -> str:
        return self.secrets.scrub(f"{type(error).__name__}: {error}")[:2000]

    # -- READ_ONLY ----------------------------------------------------------------------------------------------------

    def _read(self, call: Call) -> Generator[Op, Any, Any]:
        """No intent: nothing can be left behind. Its result is written with the next intent or within half a second."""
        action = call.action
        tries = action.tries_told(
            map(_kept, self.replay.failed_readings(action.name, call.intent.fingerprint))
        )
        if tries >= action.retry.tries:
            raise ActionFailedError(
                f"{action.name} failed in all of its {tries} tries, those of earlier attempts of this task included; "
                f"an Airflow retry grants no new ones. Clear the task to try again."
            )
        while True:
            tries += 1
            self.account.began(action)
            try:
                result = yield Perform(action, call.args, call.kwargs, call.intent, None, tries)
            except (Exception, ActionTimedOut) as failure:
                if tries < action.retry.tries and not getattr(failure, "final", False):
                    self.account.ended(action, ActionState.FAILED)
                    yield Pause(action.retry.pause_seconds(tries))
                    continue
                self._failed_reading(call, failure)
                raise
            except BaseException as cut:
                order = self.journal.stop_order
                self._failed_reading(call, cut if order is None else order.error())
                self.journal.check()
                raise
            outcome, problem = self._done(call, tries, result)
            self.journal.reading((call.intent, outcome))
            self.account.ended(action, ActionState.DONE)
            return _result_or_raise(call, result, problem)

    def _failed_reading(self, call: Call, failure: BaseException) -> None:
        left = call.action.left_behind(call.kwargs)
        kept = None
        if left is not None:
            kept, _ = codec.encode_masked(left, self.secrets.pattern(), max_bytes=self.limits.max_value_bytes)
        outcome = Outcome(call.intent.seq, ActionState.FAILED, kept, error=self._told(failure))
        self.journal.reading((call.intent, outcome))
        self.account.ended(call.action, ActionState.FAILED)


def _is_answered(action: Action[Any, Any], row: RecordedCall) -> bool:
    """Whether the log has what this call comes to: its result, or that it was refused for good."""
    if row.state == ActionState.DONE:
        return True
    return action.keeps_refusal and row.state == ActionState.FAILED and row.result is not None


def _answer(row: RecordedCall) -> Any:
    if (gathered := from_log.get()) is not None:
        gathered.append(row.seq)
    if row.state == ActionState.FAILED:
        raise RefusedForGood(codec.decode(row.result or "null"))
    return recorded_result(row)


def _kept(row: RecordedCall) -> Any:
    return None if row.result is None or row.tries <= row.tries_before else codec.decode(row.result)


def _result_or_raise(call: Call, result: Any, problem: ValueNotKeptError | None) -> Any:
    if problem is not None:
        raise ResultNotStoredError(
            f"{call.action.name} took effect, but its result cannot be stored: {problem}. The undo can still undo it."
        ) from problem
    return result
