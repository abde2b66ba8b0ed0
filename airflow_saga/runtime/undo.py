"""The undo: plan it, undo a step action by action in reverse, settle. Runs in the tasks of the compensation DAG.

Everything is asked of the log at each turn, so that killing it anywhere loses nothing: the next attempt takes the step
over (fence + 1) and goes on at the first action of the frozen plan that is not settled. How one compensation ended
rides in the commit that begins the next.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from airflow_saga.core.actions import Action, Registry, registry, set_caller
from airflow_saga.core.decide import UndoMove, decide_undo
from airflow_saga.core.errors import (
    NestedActionError,
    NotApplied,
    StepCutOffError,
    StepInterrupted,
    StoreUnavailableError,
    UndoFencedError,
    UndoOutOfOrderError,
    ValueNotKeptError,
    ValueNotReadableError,
)
from airflow_saga.core.records import ActionRow, Applied
from airflow_saga.core.states import ActionState
from airflow_saga.runtime import codec
from airflow_saga.runtime.accounts import UndoAccount
from airflow_saga.runtime.calls import current_action
from airflow_saga.runtime.compensation import Compensations, Executor
from airflow_saga.runtime.drive import ask_probe
from airflow_saga.runtime.journal import Journal
from airflow_saga.runtime.ports import Limits
from airflow_saga.runtime.secrecy import KnownSecrets
from airflow_saga.store import migrate
from airflow_saga.store.connect import Address, first_line
from airflow_saga.store.steps import StepVerbs
from airflow_saga.store.undo import EndedTry, NextTry, UndoAttached, UndoVerbs

log = logging.getLogger(__name__)

UNDO_LEASE_SECONDS = 15.0


@dataclass
class UndoReport:
    """What one attempt to undo a step came to, for the task log and the XCom."""

    settled: int = 0
    compensated: int = 0
    standing: int = 0
    halted: bool = False


class StepUndo:
    """Undoes one step of a frozen request. ``request_kill`` may be called from a signal handler."""

    def __init__(
        self,
        address: Address,
        request_uuid: UUID,
        owner_run_id: str,
        task_id: str,
        map_index: int,
        limits: Limits,
        secrets: KnownSecrets,
        actions: Registry = registry,
        execute: Executor | None = None,
    ) -> None:
        self.address = address
        self.request_uuid = request_uuid
        self.owner_run_id = owner_run_id
        self.task_id = task_id
        self.map_index = map_index
        self.limits = limits
        self.secrets = secrets
        self.actions = actions
        self.execute = execute
        self.journal: Journal | None = None
        self._killed_early = False

    def request_kill(self) -> None:
        if self.journal is not None:
            self.journal.request_kill()
        else:
            self._killed_early = True

    def run(self) -> UndoReport:
        """Undo the step as far as it goes; every action of it is settled when this returns (unless halted).

        :raises UndoOutOfOrderError: a later step is not settled (P5); an Airflow retry tries again.
        :raises UndoFencedError: another attempt or another run owns it; an Airflow retry would find the same.
        """
        connection = self.address.open_within(self.limits.store_outage_seconds)
        try:
            migrate.check(connection)
            attached = UndoVerbs(connection).attach_undo_if_in_order(
                self.request_uuid,
                self.task_id,
                self.map_index,
                self.owner_run_id,
                lease_seconds=UNDO_LEASE_SECONDS,
                host=socket.gethostname(),
                pid=os.getpid(),
            )
        except psycopg.OperationalError as problem:
            connection.close()
            raise StoreUnavailableError(
                f"the saga store went away while the undo of {self.task_id} began ({first_line(problem)}); "
                f"nothing was called"
            ) from problem
        except BaseException:
            connection.close()
            raise
        if attached is None:
            connection.close()
            return UndoReport()
        journal = Journal(self.address, connection, attached.saga, attached.step, self.limits)
        self.journal = journal
        if self._killed_early:
            journal.request_kill()
        journal.start()
        set_caller(refuse_action)
        try:
            return _Turns(self, journal, attached).run()
        except StepCutOffError as cut:
            raise StoreUnavailableError(str(cut)) from cut
        finally:
            set_caller(None)
            journal.body_ended()
            journal.close()
            self.journal = None


def refuse_action(action: Action[Any, Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What an action does that is called inside of a probe or a compensation."""
    raise NestedActionError(
        f"{action.name} was called inside {current_action.get() or 'an undo'}; nothing was called. Nothing would undo "
        f"it: call {action.name}.fn(…) there."
    )


class _Turns:
    """One attempt: turn by turn, newest action first."""

    def __init__(self, undo: StepUndo, journal: Journal, attached: UndoAttached) -> None:
        self.undo = undo
        self.journal = journal
        self.attached = attached
        self.compensations = Compensations(journal, attached, undo.secrets, undo.execute)
        self.report = UndoReport()
        self.account = UndoAccount(attached.saga, attached.step, attached.request)
        self._ended: EndedTry | None = None
        """How the last compensation ended, not written yet: it rides with the next."""

    def run(self) -> UndoReport:
        try:
            return self._run()
        except BaseException:
            with suppress(
                Exception, StepInterrupted
            ):  # what ends this attempt is told; this only loses no knowledge
                self._write(None)
            raise

    def _run(self) -> UndoReport:
        halts = self.attached.saga.on_compensation_failure == "halt"
        for row in self.attached.open_actions:
            if halts and self._halted():
                self.report.halted = True
                break
            self._settle(row)
            self.report.settled += 1
        self._write(None)
        return self.report

    def _halted(self) -> bool:
        self._write(None)
        request = self.attached.request
        return self.journal.ask(lambda c: UndoVerbs(c).is_halted(request))

    def _settle(self, row: ActionRow) -> None:
        """Turn after turn with one action, until it is settled. Bounded: each turn waits, asks or uses up a try."""
        known = self.undo.actions.find(row.name, row.version)
        probed = False
        now: datetime | None = None
        while True:
            self.journal.check()
            if now is None and row.lands_by is not None:
                row, now = self._fresh(row)
            decision = decide_undo(row, known, now or row.begun_at, probed)
            match decision.move:
                case UndoMove.NOTHING:
                    return
                case UndoMove.WAIT:
                    assert decision.until is not None
                    assert now is not None
                    log.info("%s", decision.reason)
                    self._write(None)
                    self._pause((decision.until - now).total_seconds() + 0.01)
                case UndoMove.VERIFY:
                    assert known is not None
                    probed = self._verify(row, known)
                case UndoMove.COMPENSATE:
                    assert known is not None
                    if self._compensate(row, known):
                        return
                case UndoMove.STAND:
                    self._settle_as(row, ActionState.NON_COMPENSABLE, decision.reason)
                case UndoMove.HAND_OVER:
                    self._settle_as(row, ActionState.IN_DOUBT, decision.reason, probed=True)
                case UndoMove.GIVE_UP:
                    self._settle_as(row, ActionState.COMPENSATION_FAILED, decision.reason)
            row, now = self._fresh(row)

    # -- the log ------------------------------------------------------------------------------------------------------

    def _fresh(self, row: ActionRow) -> tuple[ActionRow, datetime]:
        self._write(None)
        return self.journal.ask(lambda c: UndoVerbs(c).read_action(row.action_id))

    def _write(self, begin: NextTry | None) -> int | None:
        """Commit how the last try ended and the intent of the next; the number of that try, None if refused."""
        ended = self._ended
        if ended is None and begin is None:
            return None
        taken, tries = self.journal.ask(_once_more_without_harm(self.attached, ended, begin))
        self._ended = None
        if ended is not None and not taken:
            log.warning("action %d was changed by somebody else while it was being undone", ended.action_id)
        return tries

    def _settle_as(self, row: ActionRow, state: ActionState, reason: str, *, probed: bool = False) -> None:
        self._write(None)
        log.warning("%s (action %d): %s: %s", row.name, row.action_id, state, reason)
        error = self.undo.secrets.scrub(reason)
        taken = self.journal.ask(
            lambda c: UndoVerbs(c).settle_action_if_held(
                self.attached, row, state, probed=probed, error=error
            )
        )
        if not taken:
            raise UndoFencedError(
                f"{row.name} (action {row.action_id}): another attempt of the undo owns this step, or the row moved"
            )
        self.report.standing += 1
        self.account.stands()

    def _pause(self, seconds: float) -> None:
        if self.journal.stop_event.wait(max(0.0, seconds)):
            self.journal.check()

    # -- asking the world ---------------------------------------------------------------------------------------------

    def _verify(self, row: ActionRow, known: Action[Any, Any]) -> bool:
        """Ask what became of an action in doubt; True if nobody can tell."""
        assert known.verify is not None
        self._write(None)
        try:
            record = self.compensations.record_of(row, 0)
        except ValueNotReadableError as problem:
            log.warning("%s (action %d) cannot be asked about: %s", row.name, row.action_id, problem)
            return True
        answer = ask_probe(known.verify, record, known.timeout.total_seconds(), self.journal)
        step = self.attached.step
        if isinstance(answer, Applied):
            text, lost = None, False
            if answer.result is not None:
                try:
                    text, _ = codec.encode_masked(answer.result, self.undo.secrets.pattern())
                except ValueNotKeptError:
                    lost = True
            note = "was in doubt, found done"
            self.journal.ask(
                lambda c: StepVerbs(c).verified_if_held(
                    step, row.action_id, ActionState.DONE, text, note, lost
                )
            )
            return False
        if isinstance(answer, NotApplied):
            note = "was in doubt, found not done"
            self.journal.ask(
                lambda c: StepVerbs(c).verified_if_held(step, row.action_id, ActionState.FAILED, None, note)
            )
            return False
        return True

    # -- compensating -------------------------------------------------------------------------------------------------

    def _compensate(self, row: ActionRow, known: Action[Any, Any]) -> bool:
        """One try. True if the action is settled by what will be written with the next one."""
        deadline_seconds = known.undo_deadline.total_seconds()
        tries = self._write(NextTry(row.action_id, self.compensations.undo_key(row), deadline_seconds))
        if tries is None:
            return self._refused(row)
        started = time.monotonic()
        with self.account.span(row, tries):
            self.account.began()
            self._ended = self.compensations.call(row, known, tries)
            self.account.ended(self._ended)
        log.info(
            "%s (action %d, try %d): %s after %.2f s",
            row.name,
            row.action_id,
            tries,
            self._ended.state if self._ended.reconcile_seconds is None else "under way",
            time.monotonic() - started,
        )
        return self._after_try(row, known, self._ended)

    def _after_try(self, row: ActionRow, known: Action[Any, Any], ended: EndedTry) -> bool:
        if ended.state == ActionState.COMPENSATED:
            self.report.compensated += 1
            return True
        if ended.reconcile_seconds is not None or ended.state == ActionState.COMPENSATION_FAILED:
            self.report.standing += 1
            return True
        self._write(None)
        self._pause(known.undo_retry.pause_seconds(self.compensations.failures(row)))
        return False

    def _refused(self, row: ActionRow) -> bool:
        """The log let no compensation begin: a later action opened again, or the row is settled by now."""
        fresh, _ = self.journal.ask(lambda c: UndoVerbs(c).read_action(row.action_id))
        if fresh.settled:
            return True
        raise UndoOutOfOrderError(
            f"{row.name} (action {row.action_id}) may not be undone yet: an action that came after it is not settled. "
            f"Nothing was called."
        )


def _once_more_without_harm(
    attached: UndoAttached, ended: EndedTry | None, begin: NextTry | None
) -> Callable[[psycopg.Connection], tuple[bool, int | None]]:
    """One write of the undo. Run again because its commit was not heard of, it does not ask for what it has done."""
    sent = False

    def write(connection: psycopg.Connection) -> tuple[bool, int | None]:
        nonlocal sent
        verbs = UndoVerbs(connection)
        told = ended
        if sent and ended is not None and ended.state != ActionState.COMPENSATING:
            row, _ = verbs.read_action(ended.action_id)
            told = None if row.state == ended.state else ended
        sent = True
        taken, tries = verbs.write_undo(attached, told, begin)
        return taken or told is not ended, tries

    return write


__all__ = ["StepUndo", "StoreUnavailableError", "UndoReport"]
