"""The reconciler: catches what every hook missed. One pass looks at rows, asks Airflow about each, and moves it on.

It starts from the store, since nothing in a task can list runs. Each verb it calls is safe twice and anywhere; an error
with one saga is logged and the pass goes on, the next pass finds it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import psycopg

from airflow_saga.core.records import SagaRow
from airflow_saga.core.states import Cause, SagaState
from airflow_saga.runtime import accounts, observe
from airflow_saga.runtime.ports import Limits, RunPlatform
from airflow_saga.runtime.removed import undo_removed
from airflow_saga.store.decision import Decision
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.runs import RunVerbs
from airflow_saga.store.settle import SettleVerbs
from airflow_saga.store.sweep import SweepVerbs

log = logging.getLogger(__name__)

_ALIVE = frozenset({"running", "deferred", "awaiting_input"})
"""Task states in which Airflow believes that the attempt is there; the lease alone does not end it then."""
SILENT_SECONDS = 30.0
"""A request whose undo run was triggered this long ago and has not shown a lease is triggered again."""
MOST_ROWS = 10_000
"""So many are looked at in a pass. Those that cannot be moved now come first in each, and must not use up its room."""
STARTS_PER_PASS = 200
"""Airflow gets so many undo runs at once, and the others with the next pass."""
ASK_AROUND_SECONDS = 180.0
"""For so long the policy does not yet keep the effects of a failed run, where it cannot be told from here whether a
person marked it failed: the listener's thread reads Airflow's audit log each 45 seconds, and undoes it if so."""
_KEPT_UNSURE = (
    '; its effects are kept, as on_failure="keep" says. Nothing shows that a person marked it failed, but from a task '
    "that cannot be told for certain: if somebody did, undo it with airflow saga undo"
)


@dataclass
class PassReport:
    """How many rows each part of a pass moved."""

    completed: int = 0
    failed: int = 0
    stopped: int = 0
    suspended: int = 0
    asked_again: int = 0
    expired: int = 0
    held: int = 0
    triggered: int = 0
    errors: int = 0

    def __str__(self) -> str:
        counts = [(f.name.replace("_", " "), getattr(self, f.name)) for f in fields(self)]
        return ", ".join(f"{count} {name}" for name, count in counts if count) or "nothing to do"


class Reconciler:
    """See the module. The connection is in autocommit and belongs to the caller's thread."""

    def __init__(self, connection: psycopg.Connection, platform: RunPlatform, limits: Limits) -> None:
        self.platform = platform
        self.limits = limits
        self.reader = Reader(connection)
        self.requests = RequestVerbs(connection)
        self.runs = RunVerbs(connection)
        self.settle = SettleVerbs(connection)
        self.sweep = SweepVerbs(connection)
        self.overview = Overview(connection)

    def run_once(self) -> PassReport:
        """One pass over everything that is open. A lost connection ends it; the next pass finds what is left."""
        report = PassReport()
        self._stop_lost_steps(report)
        self._read_runs(report)
        self._suspend(report)
        self._expire(report)
        self._ask_again(report)
        self._hold(report)
        self._trigger(report)
        self._measure()
        return report

    def _each(self, rows: list[Any], what: str, move: Callable[[Any], bool], report: PassReport) -> int:
        moved = 0
        for row in rows:
            try:
                moved += bool(move(row))
            except psycopg.OperationalError:
                raise
            except Exception as problem:
                # Whatever it is: Airflow's own errors, which are not known here, are no common kind.
                report.errors += 1
                log.exception("%s: %s; the next pass tries again", what, problem)
        return moved

    def _stop_lost_steps(self, report: PassReport) -> None:
        def stop(row: dict[str, Any]) -> bool:
            state = self.platform.task_state(row["dag_id"], row["run_id"], row["task_id"], row["map_index"])
            if state in _ALIVE:
                return False
            return self.sweep.stop_if_lost(row["saga_id"], row["step_id"])

        lost = self.reader.lost_leases(limit=MOST_ROWS)
        report.stopped = self._each(lost, "a lost step", stop, report)

    def _read_runs(self, report: PassReport) -> None:
        """Tell the log how runs ended, and let the policy of failed ones ask for their undo."""
        after = 0
        for _ in range(1000):
            sagas = self.reader.sagas_to_read(after_id=after)
            if not sagas:
                return
            after = sagas[-1].saga_id
            self._each(
                sagas, "a saga whose run may have ended", lambda saga: self._read_run(saga, report), report
            )

    def _read_run(self, saga: SagaRow, report: PassReport) -> bool:
        state = self.platform.run_state(saga.dag_id, saga.run_id)
        clear_number = self.platform.run_clear_number(saga.dag_id, saga.run_id)
        if state == "success" and saga.state != SagaState.FAILED:
            undo_removed(self.reader, self.runs, saga, clear_number, self.platform.task_state)
            report.completed += self.runs.complete_if_over(saga.dag_id, saga.run_id) == SagaState.COMPLETED
        elif state == "failed":
            decision = self._read_failed(saga, clear_number)
            report.failed += decision is not None and decision.request is not None
        return True

    def _read_failed(self, saga: SagaRow, clear_number: int) -> Decision | None:
        """What a person marked failed is undone whatever the policy; where nobody did, the policy decides."""
        if saga.state == SagaState.FAILED:
            return self._let_policy_decide(saga, clear_number, "")
        run = self.platform.failed_run(saga.dag_id, saga.run_id)
        if run.marked:
            return self.requests.undo(
                saga.dag_id,
                saga.run_id,
                actor=run.actor or "airflow",
                cause=Cause.MARKED_FAILED,
                reason=f"the run was marked failed in Airflow: {run.evidence}",
                clear_number=clear_number,
            )
        unsure = run.marked is None
        if saga.on_failure == "compensate" or not unsure:
            return self._let_policy_decide(saga, clear_number, "")
        if run.over_seconds is not None and run.over_seconds < ASK_AROUND_SECONDS:
            return None
        return self._let_policy_decide(saga, clear_number, _KEPT_UNSURE)

    def _let_policy_decide(self, saga: SagaRow, clear_number: int, doubt: str) -> Decision:
        lost = self.reader.lost_a_worker(saga.saga_id)
        return self.runs.fail_and_hint(
            saga.dag_id,
            saga.run_id,
            cause=Cause.LOST_WORKER if lost else Cause.FAILURE,
            reason=("a worker was lost and the run failed" if lost else "the run failed") + doubt,
            clear_number=clear_number,
        )

    def _suspend(self, report: PassReport) -> None:
        report.suspended = self._each(
            self.reader.sagas_to_suspend(limit=MOST_ROWS),
            "a saga to suspend",
            lambda saga: self.sweep.suspend_if_quiet(saga.saga_id),
            report,
        )

    def _expire(self, report: PassReport) -> None:
        def expire(saga: SagaRow) -> bool:
            expired = self.settle.expire_if_past_deadline(saga.saga_id)
            if expired is not None:
                accounts.tell_expired(expired)
            return expired is not None

        past = self.reader.sagas_past_deadline(limit=MOST_ROWS)
        report.expired = self._each(past, "a saga past its deadline", expire, report)

    def _ask_again(self, report: PassReport) -> None:
        report.asked_again = self._each(
            self.reader.due_sagas(limit=MOST_ROWS),
            "a compensation that is due",
            lambda row: self.settle.ask_again_if_due(row["saga_id"]) is not None,
            report,
        )

    def _hold(self, report: PassReport) -> None:
        report.held = self.sweep.hold_if_mass_outage(
            causes=[Cause.LOST_WORKER, Cause.TIMEOUT],
            threshold=self.limits.mass_undo_threshold,
            window_seconds=self.limits.mass_undo_window_seconds,
        )

    def _trigger(self, report: PassReport) -> None:
        """Start, or start again, the undo runs of requests that nobody carries out."""

        def trigger(row: dict[str, Any]) -> bool:
            again = row["triggered_at"] is not None
            done = self.platform.trigger_undo(row["dag_id"], row["run_id"], row["request_uuid"], reset=again)
            if done:
                self.requests.note_triggered(row["request_uuid"])
            return done

        rows = self.reader.requests_to_trigger(silent_seconds=SILENT_SECONDS, limit=MOST_ROWS)
        while rows and report.triggered < STARTS_PER_PASS:
            left = STARTS_PER_PASS - report.triggered
            report.triggered += self._each(rows[:left], "an undo to start", trigger, report)
            rows = rows[left:]

    def _measure(self) -> None:
        """What is open after this pass. Asked for only where somebody listens."""
        if observe.is_measured():
            alert_seconds = self.limits.start_alert_seconds
            accounts.tell_open(self.overview.open_work(start_alert_seconds=alert_seconds))


__all__ = ["PassReport", "Reconciler"]
