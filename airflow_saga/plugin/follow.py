"""What follows from an event: which verb the saga store is told, and whether an undo run is started at once.

Runs on the thread of `dispatch`. Everything here may happen twice, late, or in several processes at once: the verbs
decide under the lock of the saga's row, and an undo run is named after its request. A run that a hook calls ended is
looked at in Airflow's database first, since hooks fire before Airflow commits.
"""

from __future__ import annotations

import importlib
import logging
import time
from datetime import UTC, datetime, timedelta

import psycopg

from airflow_saga import metadata
from airflow_saga.core.errors import StoreNotConfiguredError, StoreNotMigratedError, StoreUnavailableError
from airflow_saga.core.states import Cause, RequestState, SagaState
from airflow_saga.metadata import MetadataUnreadableError
from airflow_saga.plugin.events import SAGA_TAG, Event, What
from airflow_saga.runtime.removed import undo_removed
from airflow_saga.settings import forget_addresses, store_address
from airflow_saga.store.connect import first_line
from airflow_saga.store.decision import Decision
from airflow_saga.store.deferral import DeferralVerbs
from airflow_saga.store.migrate import check
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.runs import RunVerbs
from airflow_saga.trigger import trigger_undo

log = logging.getLogger(__name__)

AWAY = (psycopg.OperationalError, psycopg.InterfaceError, StoreUnavailableError)
"""The store does not answer: worth another try soon."""
UNUSABLE = (StoreNotConfiguredError, StoreNotMigratedError)
"""There is no store to speak of until a person makes one."""
TIMED_OUT = "timed_out"
"""What the scheduler says of a run that ran into its dagrun_timeout."""
TAG_LIFETIME_SECONDS = 60.0
NOBODY = "airflow"
_STARTABLE = frozenset({RequestState.REQUESTED, RequestState.HINTED})
_HOOKS_TELL_WITHIN = timedelta(seconds=10)
_MARKABLE = frozenset({SagaState.PENDING, SagaState.RUNNING, SagaState.COMPLETED})
"""Where a mark still has to stop or undo something."""
# What the functions called from here import when they are called: loaded while no fork can come in between.
_LOADED_LATER = (
    "airflow.api.common.trigger_dag",
    "airflow.models.connection",
    "airflow.models.dag",
    "airflow.models.dagbag",
    "airflow.models.dagrun",
    "airflow.models.log",
    "airflow.providers.postgres.hooks.postgres",
    "airflow.sdk",
    "airflow.utils.net",
)


def load() -> None:
    for name in _LOADED_LATER:
        importlib.import_module(name)


def open_store() -> psycopg.Connection:
    """The store, ready to be told something.

    :raises StoreUnavailableError: it does not answer.
    :raises StoreNotConfiguredError: Airflow knows no connection to it.
    :raises StoreNotMigratedError: it has no tables, or those of another version.
    """
    try:
        connection = store_address().open()
    except StoreUnavailableError:
        forget_addresses()  # it may have moved, or its password may have changed
        raise
    try:
        check(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def host_name() -> str:
    """As Airflow names this host in its table of jobs, so that the two can be compared."""
    from airflow.utils.net import get_hostname

    return str(get_hostname())  # type: ignore[no-untyped-call]


class Follower:
    """Tells the store what happened. Remembers which DAGs are saga DAGs, nothing else."""

    def __init__(self) -> None:
        self._tagged: dict[str, tuple[float, bool]] = {}

    def follow(self, connection: psycopg.Connection, event: Event) -> bool:
        """Do what follows; False if Airflow has not committed yet what the event says: look again.

        :raises MetadataUnreadableError: Airflow's database does not answer: look again, too.
        """
        requests, runs, reader = RequestVerbs(connection), RunVerbs(connection), Reader(connection)
        if event.what is What.RUN_STARTED:
            if self._is_saga_dag(event):
                runs.open_if_new(event.dag_id, event.run_id)
            return True
        saga = reader.find(event.dag_id, event.run_id)
        if event.what is What.RUN_MARKED:
            if saga is not None or self._is_saga_dag(event):
                _undo_marked(requests, event, _who_marked(event))
            return True
        if saga is None:
            return True
        if event.what in (What.TASK_MARKED, What.TASK_PASSED):
            step = reader.step(saga.saga_id, event.task_id, event.map_index)
            if step is None or str(step.ti_id) != event.ti_id:
                return True
            if event.what is What.TASK_PASSED:
                decision = DeferralVerbs(connection).undo_parked_if_any(step, event.what.value)
                if decision is not None:
                    _start_undo(requests, decision, event)
            else:
                marked = runs.mark_step_if_running(event.dag_id, event.run_id, event.task_id, event.map_index)
                log.info("%s%s", event, "" if marked else "; nothing to stop")
            return True
        run = metadata.run_of(event.dag_id, event.run_id)
        if run is None:
            return True
        if event.what is What.RUN_SUCCEEDED:
            if run.state == "success":
                gone = undo_removed(reader, runs, saga, run.clear_number, metadata.task_state)
                if gone is not None:
                    _start_undo(requests, gone, event)
                runs.complete_if_over(event.dag_id, event.run_id)
            return run.state != "running"
        if run.state == "failed":
            lost = reader.lost_a_worker(saga.saga_id)
            self._let_policy_decide(requests, runs, event, run.clear_number, lost)
        return run.state != "running"

    def _is_saga_dag(self, event: Event) -> bool:
        if event.is_saga_dag is not None:
            return event.is_saga_dag
        now = time.monotonic()
        known = self._tagged.get(event.dag_id)
        if known is None or known[0] < now:
            known = (now + TAG_LIFETIME_SECONDS, metadata.has_tag(event.dag_id, SAGA_TAG))
            self._tagged[event.dag_id] = known
        return known[1]

    def _let_policy_decide(
        self, requests: RequestVerbs, runs: RunVerbs, event: Event, clear_number: int, lost_a_worker: bool
    ) -> None:
        timed_out = event.message == TIMED_OUT
        cause = Cause.DAGRUN_TIMEOUT if timed_out else Cause.LOST_WORKER if lost_a_worker else Cause.FAILURE
        decision = runs.fail_and_hint(
            event.dag_id,
            event.run_id,
            cause=cause,
            reason="the run took longer than its dagrun_timeout" if timed_out else event.what.value,
            clear_number=clear_number,
        )
        if cause is Cause.LOST_WORKER:
            # Many of these at once are an outage and not many wishes: the reconciler sees them together, and starts
            # them or asks a person.
            log.info("%s; a worker was lost, so the reconciler starts the undo", decision.message)
            return
        _start_undo(requests, decision, event)


def undo_missed_marks(connection: psycopg.Connection, since: datetime) -> None:
    """Undo the runs that people marked failed since then and of which no hook told, as when a process died meanwhile.

    :raises MetadataUnreadableError: Airflow's database does not answer.
    """
    requests, reader = RequestVerbs(connection), Reader(connection)
    told_by = datetime.now(UTC) - _HOOKS_TELL_WITHIN
    for mark in metadata.marks_since(since):
        saga = reader.find(mark.dag_id, mark.run_id)
        if mark.at > told_by or saga is None or saga.state not in _MARKABLE:
            continue
        event = Event(
            What.RUN_MARKED,
            "audit log",
            mark.dag_id,
            mark.run_id,
            clear_number=mark.clear_number,
            seen_at=mark.at,
        )
        log.warning("%s, and no hook told: it is undone now", event)
        _undo_marked(requests, event, mark.actor or NOBODY)


def _undo_marked(requests: RequestVerbs, event: Event, actor: str) -> None:
    decision = requests.undo(
        event.dag_id,
        event.run_id,
        actor=actor,
        cause=Cause.MARKED_FAILED,
        reason=event.what.value,
        clear_number=event.clear_number,
    )
    _start_undo(requests, decision, event)


def _start_undo(requests: RequestVerbs, decision: Decision, event: Event) -> None:
    log.info("%s (%s)", decision.message, event.hook)
    request = decision.request
    if not decision.undoes or request is None:
        return
    if request.state not in _STARTABLE or request.triggered_at is not None:
        return
    if trigger_undo(request, event.dag_id, event.run_id):
        requests.note_triggered(request.request_uuid)


def _who_marked(event: Event) -> str:
    try:
        return metadata.who_marked(event.dag_id, event.run_id, event.seen_at) or NOBODY
    except MetadataUnreadableError as problem:
        log.info("%s, by whom is not known: %s", event, first_line(problem))
        return NOBODY
