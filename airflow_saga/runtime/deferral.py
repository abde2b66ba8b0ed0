"""An operator's call that outlives its process: it waits in Airflow's triggerer, and another process ends it.

While it waits, the log holds it as PENDING and deferred: its step has no lease, so nobody takes it for lost, and
nobody waits for it either. The attempt that the trigger wakes asserts the intent again, with all of begin's guards,
and ends the same action: the same seq, the same key. Any other attempt (a clear, a retry after a lost process) finds
that it stands, and has it undone first. An undo finds it as begun for certain, with what its trigger was told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace
from typing import Any

from airflow_saga.core.actions import Action
from airflow_saga.core.errors import (
    InDoubtError,
    SagaDivergedError,
    StepFencedError,
    StepRefusedError,
    ValueNotKeptError,
)
from airflow_saga.core.records import ActionRecord, ActionRow, Intent, SagaRow, StepRow
from airflow_saga.core.states import ActionState, Effect
from airflow_saga.runtime import codec
from airflow_saga.runtime.doubt import Call, Doubts, Verdict
from airflow_saga.runtime.drive import Ask, Op, drive
from airflow_saga.runtime.journal import Journal
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.recorder import Recorder
from airflow_saga.runtime.replay import Replay
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.store.deferral import DeferralVerbs

_LONGEST_SUMMARY = 500


class CallDeferred(BaseException):
    """The call goes on in the triggerer. Raised by the function of an :class:`OperatorAction`; not an ending.

    :ivar told: what its trigger was told: the id of the remote work above all.
    :ivar signal: what the platform is to be told once the log has it.
    """

    def __init__(self, told: Mapping[str, Any], signal: BaseException) -> None:
        super().__init__(f"deferred to {told.get('trigger')}")
        self.told = told
        self.signal = signal


class DeferredCallStandsError(SagaDivergedError):
    """A call of an earlier attempt still waits in the triggerer, and this attempt did not come from there.

    It is undone before the step begins anew; the task waits for that without using up a try.
    """


class OperatorAction(Action[Any, Any]):
    """What a whole operator does, as one action.

    :ivar resumes: the call comes back from the triggerer.
    """

    resumes = False


class OperatorRecorder(Recorder):
    """Records the one call of an operator; see the module."""

    def __init__(
        self,
        journal: Journal,
        saga: SagaRow,
        step: StepRow,
        replay: Replay,
        secrets: KnownSecrets,
        limits: Limits,
    ) -> None:
        super().__init__(journal, saga, step, replay, secrets, limits)
        self.doubts = _OperatorDoubts(saga, step, replay, secrets, limits)

    def call(self, action: Action[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """As any call; one that comes back from the triggerer ends the action it began.

        :raises DeferredCallStandsError: it still waits there, and this is not the attempt that the trigger woke.
        :raises StepRefusedError: what it began was undone meanwhile.
        """
        resumes = isinstance(action, OperatorAction) and action.resumes
        if self.replay.empty:
            if resumes and action.effect is not Effect.READ_ONLY:
                raise StepRefusedError(
                    f"{self.step.label}: what this task had begun before it was deferred was undone meanwhile, so it "
                    f"is not gone on with; nothing was called. Clear the task to run it anew."
                )
            return super().call(action, args, kwargs)
        parked = self.journal.ask(lambda c: DeferralVerbs(c).parked_call(self.step))
        if parked is None:
            return super().call(action, args, kwargs)
        if not resumes:
            self.diverged = DeferredCallStandsError(
                f"{self.step.label}: an earlier attempt began {parked.name} and left it to the triggerer "
                f"({parked.note}). That was cleared or lost, and it still stands.",
                parked.seq,
            )
            raise self.diverged
        return self._end_parked(action, kwargs, parked)

    def _end_parked(self, action: Action[Any, Any], kwargs: Mapping[str, Any], row: ActionRow) -> Any:
        """Its intent is older than A1 allows, so it is asserted again before anything is called."""
        if action.idempotent:
            self.journal.idempotent_seqs.add(row.seq)
        intent = Intent(
            seq=row.seq,
            name=row.name,
            version=row.version,
            effect=row.effect,
            fingerprint=row.fingerprint,
            key=row.key,
            params=row.params,
            timeout_seconds=action.timeout.total_seconds(),
            settle_after_seconds=action.settle_after.total_seconds(),
            action_id=row.action_id,
            idempotent=action.idempotent,
            max_tries=action.retry.tries,
        )
        call = Call(action, (), kwargs, codec.decode(row.params), intent, row.tries_before)
        self._enter()
        try:
            with self.account.span(action, row.seq):
                return drive(self._perform(call, row.tries, -math.inf, ActionState.PENDING), self)
        finally:
            self._leave()

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
        if isinstance(error, CallDeferred):
            self._park(call, error)
            self.account.deferred(call.action)
        elif state is not ActionState.PENDING:  # else it was not called: it waits on, as it did
            super()._ended(call, tries, state, error=error, own=own, refused=refused)

    def _failed_reading(self, call: Call, failure: BaseException) -> None:
        if isinstance(failure, CallDeferred):
            self.account.deferred(call.action)
        else:
            super()._failed_reading(call, failure)

    def _park(self, call: Call, deferred: CallDeferred) -> None:
        told = keepable(deferred.told, self.secrets, self.limits, "deferred")
        text = codec.encode(told, max_bytes=self.limits.max_value_bytes)
        summary = self.secrets.scrub(f"waits in the triggerer: {told.get('trigger')} {told.get('kwargs')}")
        if not self.journal.park(call.intent.seq, text, summary[:_LONGEST_SUMMARY]):
            raise StepFencedError(
                f"{self.step.label}: {call.action.name} was to be left to the triggerer, but a newer attempt or the "
                f"undo owns this step; what its trigger would have been told is kept for the undo"
            )


class _OperatorDoubts(Doubts):
    """An operator that has ended in this process does nothing more: only what it had sent may still land."""

    def find_out(self, call: Call, tries: int, problem: BaseException) -> Generator[Op, Any, Verdict]:
        if not isinstance(problem, InDoubtError):
            seq, settle = call.intent.seq, call.intent.settle_after_seconds
            yield Ask(lambda c: DeferralVerbs(c).over_if_held(self.step, seq, settle))
        return (yield from super().find_out(call, tries, problem))

    def _record(self, call: Call, row: ActionRow) -> ActionRecord:
        deferred = None if row.deferral is None else codec.decode(row.deferral)
        return replace(super()._record(call, row), deferred=deferred)


def keepable(
    values: Mapping[str, Any],
    secrets: KnownSecrets,
    limits: Limits,
    where: str,
    dropped: Callable[[str], object] = lambda why: None,
) -> dict[str, Any]:
    """Those of some named values that the log can keep, each leaf with a known secret in it masked.

    :param dropped: is told of each value that cannot be kept, and why.
    """
    kept = {}
    for name, value in values.items():
        try:
            text, _ = codec.encode_masked(
                value, secrets.pattern(), where=f"{where}.{name}", max_bytes=limits.max_value_bytes
            )
        except ValueNotKeptError as problem:
            if isinstance(value, Mapping) and all(isinstance(each, str) for each in value):
                kept[name] = keepable(value, secrets, limits, f"{where}.{name}", dropped)
            else:
                dropped(str(problem))
            continue
        kept[name] = codec.decode(text)
    return kept


__all__ = [
    "CallDeferred",
    "DeferredCallStandsError",
    "OperatorAction",
    "OperatorRecorder",
    "keepable",
]
