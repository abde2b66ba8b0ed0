"""One attempt of a step, from attach to its end: whatever ends it, the log knows what was done and why it stopped."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import psycopg

from airflow_saga.core.actions import Registry, registry, set_caller
from airflow_saga.core.decide import Go, Killed, why_killed
from airflow_saga.core.errors import (
    SagaCancelledError,
    SagaDivergedError,
    StepFencedError,
    StepInterrupted,
    StepKilledError,
    StepRefusedError,
    StepWaitError,
    StoreUnavailableError,
    ValueNotKeptError,
    VerbRefusedError,
)
from airflow_saga.core.records import ActionRow, Attempt, RecordedCall, SagaRow, StepRow
from airflow_saga.core.states import Cause, Mode, StepState
from airflow_saga.runtime import codec
from airflow_saga.runtime.accounts import CancelClock
from airflow_saga.runtime.deferral import DeferredCallStandsError
from airflow_saga.runtime.journal import Journal
from airflow_saga.runtime.ports import Limits, TaskPlatform
from airflow_saga.runtime.recorder import Recorder
from airflow_saga.runtime.replay import Replay
from airflow_saga.runtime.saga import Saga
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.runtime.stops import Stop
from airflow_saga.store import migrate, signals
from airflow_saga.store.attach import Attached, AttachVerbs
from airflow_saga.store.connect import Address, first_line
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.rewind import RewindVerbs
from airflow_saga.store.steps import StepVerbs
from airflow_saga.store.sweep import SweepVerbs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """:ivar replayed: the body did not run, the output is the recorded one. :ivar actions: for the XCom summary."""

    output: Any
    replayed: bool
    saga: SagaRow
    step: StepRow
    actions: tuple[ActionRow, ...]


class StepGivenBack(Exception):
    """The platform wanted the process gone: what was done is kept, the task is to be run again without using a try."""


class StepCleared(Exception):
    """The task was cleared while it ran: this attempt stops, the next one resumes."""


class StepRun:
    """See the module. ``request_kill`` may be called from a signal handler at any time.

    :param on_divergence: ``"undo"``: where a resumed body asks for another action than the recorded one, what it did
        from there on is undone, and it goes on live; ``"stop"``: it fails.
    :param recorder: what records the calls; an operator's is one that can leave them to the triggerer.
    :param ends_after_seconds: the task's ``execution_timeout``, for a body that swallows the exception Airflow raises.
    """

    def __init__(
        self,
        attempt: Attempt,
        address: Address,
        platform: TaskPlatform,
        limits: Limits,
        secrets: KnownSecrets,
        actions: Registry = registry,
        ends_after_seconds: float | None = None,
        on_divergence: str = "stop",
        recorder: type[Recorder] = Recorder,
    ) -> None:
        self.attempt = replace(attempt, lease_seconds=limits.lease_seconds)
        self.address = address
        self.platform = platform
        self.limits = limits
        self.secrets = secrets
        self.actions = actions
        self.journal: Journal | None = None
        self.on_divergence = on_divergence
        self.recorder = recorder
        self._killed_early = False
        self._cancel_clock = CancelClock(attempt.dag_id)
        self._ends_by = None if ends_after_seconds is None else time.monotonic() + ends_after_seconds

    def request_kill(self) -> None:
        """Stop at the next safe point. Sets a flag only."""
        if self.journal is not None:
            self.journal.request_kill()
        else:
            self._killed_early = True

    def run(self, body: Callable[[Saga], Any]) -> StepResult:
        """Attach, run the body with its calls recorded, and end the attempt.

        :raises StepRefusedError: the log does not let it begin; no Airflow retry.
        :raises StepWaitError: an undo is under way; give the slot back and come again.
        :raises StepGivenBack, StepCleared, SagaCancelledError, StepFencedError: why the body did not end by itself.
        """
        connection = self.address.open_within(self.limits.store_outage_seconds)
        try:
            migrate.check(connection)
            attached = self._attach(connection)
            if attached.decision.go is Go.REPLAY:
                return self._replayed(connection, attached)
            assert attached.saga is not None
            assert attached.step is not None
        except psycopg.OperationalError as problem:
            connection.close()
            raise StoreUnavailableError(
                f"{self.attempt.label}: the saga store went away while the step attached "
                f"({first_line(problem)}); nothing was called"
            ) from problem
        except BaseException:
            connection.close()
            raise
        return self._run_attached(connection, attached.saga, attached.step, attached.recorded, body)

    # -- attach -------------------------------------------------------------------------------------------------------

    def _attach(self, connection: psycopg.Connection) -> Attached:
        """Attach; an undo that ends within ``wait_in_process_seconds`` is waited for in this slot."""
        deadline = time.monotonic() + self.limits.wait_in_process_seconds
        listening = False
        verbs = AttachVerbs(connection)
        while True:
            attached = verbs.attach_if_allowed(self.attempt)
            if attached.decision.go is Go.REFUSE:
                raise StepRefusedError(attached.decision.message)
            request = attached.request
            if request is not None and request.triggered_at is None:
                self.platform.trigger_undo(request.request_uuid)
                RequestVerbs(connection).note_triggered(request.request_uuid)
            if attached.decision.go is not Go.WAIT:
                return attached
            left = deadline - time.monotonic()
            if left <= 0 or self._killed_early:
                uuid = str(request.request_uuid) if request is not None else None
                raise StepWaitError(attached.decision.message, uuid)
            if not listening and attached.saga is not None:
                signals.listen(connection, attached.saga.saga_id)
                listening = True
                verbs.note_wait(self.attempt, attached)
                log.info("%s; waiting in this slot for up to %.0f s", attached.decision.message, left)
            signals.wait(connection, min(left, 1.0))

    def _replayed(self, connection: psycopg.Connection, attached: Attached) -> StepResult:
        assert attached.saga is not None
        assert attached.step is not None
        step = attached.step
        log.info("%s had finished; its recorded output is returned, nothing is called", self.attempt.label)
        output = codec.decode(step.output) if step.output is not None else None
        actions = Reader(connection).actions_of_step(step)
        connection.close()
        return StepResult(output, True, attached.saga, step, tuple(actions))

    # -- the body -----------------------------------------------------------------------------------------------------

    def _run_attached(
        self,
        connection: psycopg.Connection,
        saga: SagaRow,
        step: StepRow,
        recorded: tuple[RecordedCall, ...],
        body: Callable[[Saga], Any],
    ) -> StepResult:
        journal = Journal(self.address, connection, saga, step, self.limits, self._ends_by)
        replay = Replay(recorded, self.attempt.label)
        recorder = self.recorder(journal, saga, step, replay, self.secrets, self.limits)
        handle = Saga(journal, saga.dag_id, saga.run_id, step, self.secrets, replay)
        self.journal = journal
        if self._killed_early:
            journal.request_kill()
        self.actions.close(self.attempt.label)
        journal.on_stop(lambda: self._cancel_clock.see(journal.stop_order))
        journal.start()
        set_caller(recorder.call, recorder.recall)
        try:
            output = self._run_body(body, handle)
            if recorder.diverged is not None:
                raise recorder.diverged
            return self._end_well(journal, saga, step, output)
        except BaseException as problem:
            why = self._end_badly(journal, saga, step, problem)
            if recorder.diverged is not None and why is problem:
                why = self._diverged(journal, step, recorder.diverged)
            if why is problem:
                raise
            raise why from problem
        finally:
            set_caller(None)
            journal.close()
            self.actions.reopen()
            self.journal = None

    def _run_body(self, body: Callable[[Saga], Any], handle: Saga) -> Any:
        handle.check()
        return body(handle)

    @staticmethod
    def _end_body(journal: Journal) -> None:
        """No action is called any more; what threads of the body have begun is waited for."""
        set_caller(None)
        journal.body_ended()

    def _end_well(self, journal: Journal, saga: SagaRow, step: StepRow, output: Any) -> StepResult:
        """The body returned: its step has SUCCEEDED in any saga state; a saga being stopped still fails the task."""
        text, lost = None, False
        if output is not None:
            try:
                text, _ = codec.encode_masked(
                    output, self.secrets.pattern(), where="output", max_bytes=self.limits.max_value_bytes
                )
            except ValueNotKeptError as problem:
                log.warning("%s: its output cannot be kept for a replay: %s", self.attempt.label, problem)
                lost = True
        self._end_body(journal)
        finished = journal.ask(lambda c: StepVerbs(c).finish_if_held(step, text, lost))
        if not finished:
            raise StepFencedError(
                f"{self.attempt.label}: the body returned, but a newer attempt or the undo owns this step; "
                f"what its calls did is kept"
            )
        self._cancel_clock.stopped()
        actions = journal.ask(lambda c: Reader(c).actions_of_step(step))
        if journal.stop_order is not None and journal.stop_order.kind in (Stop.CANCELLED, Stop.OVERDUE):
            raise journal.stop_order.error()
        return StepResult(output, False, saga, replace(step, state=StepState.SUCCEEDED.value), tuple(actions))

    def _end_badly(
        self, journal: Journal, saga: SagaRow, step: StepRow, problem: BaseException
    ) -> BaseException:
        """The body did not return: stop the step, find out why, and say what Airflow should do about it."""
        self._end_body(journal)
        try:
            journal.keep_checkpoint()
            journal.ask(lambda c: StepVerbs(c).stop_if_held(step))
            self._cancel_clock.stopped()
            return self._why(journal, saga, problem)
        except StoreUnavailableError as gone:
            log.error("%s: could not say goodbye (%s); its lease runs out instead", self.attempt.label, gone)
            return gone if isinstance(problem, StepInterrupted) else problem

    def _diverged(self, journal: Journal, step: StepRow, diverged: SagaDivergedError) -> BaseException:
        """It is stopped; where the task wants that, what it did from there on is undone, and then it comes again."""
        if self.on_divergence != "undo" and not isinstance(diverged, DeferredCallStandsError):
            return diverged
        try:
            request = journal.ask(
                lambda c: RewindVerbs(c).undo_from_if_stopped(step, diverged.from_seq, str(diverged))
            )
        except VerbRefusedError as refused:
            return SagaDivergedError(
                f"{diverged} It was not undone from there: {refused}.", diverged.from_seq
            )
        uuid = request.request_uuid
        self.platform.trigger_undo(uuid)
        journal.ask(lambda c: RequestVerbs(c).note_triggered(uuid))
        return StepWaitError(
            f"{diverged} What it did from there on is undone first, then this task goes on live", str(uuid)
        )

    def _why(self, journal: Journal, saga: SagaRow, problem: BaseException) -> BaseException:
        order = journal.stop_order
        if isinstance(problem, StepFencedError):
            return problem
        if order is not None and order.kind is Stop.CANCELLED:
            if order.mode == Mode.KEEP:
                journal.ask(lambda c: SweepVerbs(c).suspend_if_quiet(saga.saga_id, "the last step"))
            return problem if isinstance(problem, SagaCancelledError) else SagaCancelledError(order.message)
        if order is not None and order.kind is Stop.KILLED:
            return self._why_killed(journal, saga, problem)
        return problem

    def _why_killed(self, journal: Journal, saga: SagaRow, problem: BaseException) -> BaseException:
        """Airflow wanted this process gone; only its own task instance tells why. See PROTOCOL 8."""
        state = self.platform.task_state()
        reason = why_killed(state)
        log.warning("%s: asked to go while its task instance is %s: %s", self.attempt.label, state, reason)
        if reason is Killed.MARKED_FAILED:
            self._undo_if_run_failed(journal, saga)
            return SagaCancelledError(f"{self.attempt.label}: its task instance was marked failed")
        if reason is Killed.CLEARED:
            return StepCleared(f"{self.attempt.label}: cleared while it ran; the next attempt resumes")
        if reason is Killed.PLATFORM and isinstance(problem, StepKilledError):
            return StepGivenBack(
                f"{self.attempt.label}: the platform stopped this process; it is run again and resumes"
            )
        if isinstance(problem, StepKilledError):
            return SagaCancelledError(f"{self.attempt.label}: its task instance is {state}")
        return problem

    def _undo_if_run_failed(self, journal: Journal, saga: SagaRow) -> None:
        """Hooks or no hooks: a run that was marked failed is undone; one marked task leaves it to the run's end."""
        if self.platform.run_state() != "failed":
            return
        decision = journal.ask(
            lambda c: RequestVerbs(c).undo(
                saga.dag_id,
                saga.run_id,
                actor="airflow",
                cause=Cause.MARKED_FAILED,
                reason="the run was marked failed",
                clear_number=self.attempt.clear_number,
            )
        )
        if decision.undoes and decision.request is not None and decision.request.triggered_at is None:
            uuid = decision.request.request_uuid
            self.platform.trigger_undo(uuid)
            journal.ask(lambda c: RequestVerbs(c).note_triggered(uuid))


__all__ = ["StepCleared", "StepGivenBack", "StepInterrupted", "StepResult", "StepRun"]
