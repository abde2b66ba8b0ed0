"""The tasks of ``<dag_id>__compensation``: plan, undo_gone, undo.<task>, settle, review, apply.

Here: ``plan``, and what all of them share.

They carry nothing from one to the next but the request's uuid: what is to be done, and what was done, is asked of the
log at each turn. So each of them may be killed, retried or cleared at any point.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import psycopg
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import (
    AirflowFailException,
    AirflowRescheduleException,
)

from airflow_saga.core.identity import request_uuid_of
from airflow_saga.core.records import RequestRow
from airflow_saga.core.secret import set_secret_resolver
from airflow_saga.core.states import Cause, RequestState
from airflow_saga.operators.notices import STUCK, tell_once
from airflow_saga.platform import SupervisorPlatform, reschedule_date
from airflow_saga.runtime.asking import ask_probes
from airflow_saga.settings import Settings, resolve_secret, secrets_of_this_process, store_address
from airflow_saga.store import migrate
from airflow_saga.store.freeze import Freeze, FreezeVerbs
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.resolve import ResolveVerbs

log = logging.getLogger(__name__)

PLAN_TASK = "plan"
GONE_TASK = "undo_gone"
APPLY_TASK = "apply"
SUMMARY_KEY = "saga"
WAIT_IN_SLOT_SECONDS = 30.0
LOOK_AGAIN_SECONDS = 0.25
MOST_MAPPED = 1000
"""Fewer than Airflow's ``max_map_length``; more indexes than this share an instance."""
SETTLE_ROUNDS = 5


@contextlib.contextmanager
def open_store() -> Iterator[psycopg.Connection]:
    """A connection to the store for one task of an undo, migrated or not at all."""
    connection = store_address().open_within(Settings.load().store_outage_seconds)
    try:
        migrate.check(connection)
        yield connection
    finally:
        connection.close()


class PlanOperator(BaseOperator):
    """Make or join the undo request, wait until the saga is quiet, freeze the plan.

    Quiet is told by leases and fences alone, never by Airflow's states: those say "failed" while a call still runs.

    :param saga_dag_id: the DAG that is undone.
    """

    ui_color = "#f3ead9"

    def __init__(self, *, saga_dag_id: str, notifiers: Sequence[Any] = (), **kwargs: Any) -> None:
        super().__init__(on_failure_callback=tell_stuck, **kwargs)
        self.saga_dag_id = saga_dag_id
        self.notifiers = list(notifiers)
        self._killed = False

    def execute(self, context: Any) -> dict[str, Any]:
        run = context["dag_run"]
        with open_store() as connection:
            if (run.conf or {}).get("probe"):
                return self._ask(connection, run)
            request = self._request(connection, run)
            if request is None:
                return {"request": None, "why": "there is nothing to undo"}
            result = self._freeze(connection, request, run.run_id)
            if result.outcome is not Freeze.FROZEN:
                self.log.warning("not carried out by this run: %s", result.message)
                return {"request": None, "why": f"{result.outcome}: {result.message}"}
            plan = result.request.plan or {"steps": []}
            self.log.info("plan %s: %s", (result.request.plan_hash or "")[:12], result.message)
            for step in plan["steps"]:
                for action in step["actions"]:
                    self.log.info(
                        "  %s: %s (%s): %s",
                        step["task_id"],
                        action["name"],
                        action["state"],
                        action["expected"],
                    )
            return {
                "request": str(request.request_uuid),
                "saga": f"{result.saga.dag_id} / {result.saga.run_id}",
                "plan_hash": result.request.plan_hash,
                "actions": sum(len(step["actions"]) for step in plan["steps"]),
            }

    def on_kill(self) -> None:
        self._killed = True

    def _ask(self, connection: psycopg.Connection, run: Any) -> dict[str, Any]:
        """Only ask the verify probes, since a person wants to know before deciding: nothing is undone by this run."""
        set_secret_resolver(resolve_secret)
        view = Reader(connection).view(self.saga_dag_id, str(run.conf["run_id"]))
        actor = getattr(run, "triggering_user_name", None) or "airflow"
        said = {}
        for asked in ask_probes(view, Overview(connection).now(), secrets_of_this_process()):
            self.log.info("%s (action %d): %s", asked.action.name, asked.action.action_id, asked.said)
            ResolveVerbs(connection).note_probe(asked.action, asked.said, actor)
            said[str(asked.action.action_id)] = asked.said
        return {"request": None, "why": "only the verify probes were asked", "said": said}

    def _request(self, connection: psycopg.Connection, run: Any) -> RequestRow | None:
        """The request this run is named after, or the one its conf names, or a new one for ``{"run_id": …}``."""
        conf = run.conf or {}
        uuid = request_uuid_of(run.run_id) or (UUID(conf["request"]) if conf.get("request") else None)
        if uuid is not None:
            request = Reader(connection).request(uuid)
            if request is None:
                raise AirflowFailException(f"the saga store knows no undo request {uuid}")
            return request
        if not conf.get("run_id"):
            raise AirflowFailException(
                'say which run to undo: trigger this DAG with the configuration {"run_id": "<run_id of '
                f'{self.saga_dag_id}>"}}'
            )
        return self._asked_by_hand(connection, run, str(conf["run_id"]))

    def _asked_by_hand(self, connection: psycopg.Connection, run: Any, run_id: str) -> RequestRow | None:
        saga = Reader(connection).find(self.saga_dag_id, run_id)
        if saga is None:
            raise AirflowFailException(
                f"there is no saga {self.saga_dag_id} / {run_id} in the store: no step of that run has begun, "
                f"or the run_id is misspelt"
            )
        actor = getattr(run, "triggering_user_name", None) or "airflow"
        decision = RequestVerbs(connection).undo(
            self.saga_dag_id,
            run_id,
            actor=actor,
            cause=Cause.USER,
            reason=f"{run.run_id} was triggered by hand",
            clear_number=SupervisorPlatform().run_clear_number(self.saga_dag_id, run_id),
        )
        self.log.info("%s", decision.message)
        if decision.request is not None:
            RequestVerbs(connection).note_triggered(decision.request.request_uuid)
        return decision.request

    def _freeze(self, connection: psycopg.Connection, request: RequestRow, run_id: str) -> Any:
        deadline = time.monotonic() + WAIT_IN_SLOT_SECONDS
        verbs = FreezeVerbs(connection)
        said = ""
        while True:
            owner_is_over = self._owner_is_over(request, run_id)
            result = verbs.freeze_if_quiet(request.request_uuid, run_id, owner_is_over=owner_is_over)
            if result.outcome is not Freeze.NOT_QUIET:
                return result
            if result.message != said:
                self.log.info("%s", result.message)
                said = result.message
            if time.monotonic() > deadline or self._killed:
                raise AirflowRescheduleException(reschedule_date())
            time.sleep(LOOK_AGAIN_SECONDS)

    def _owner_is_over(self, request: RequestRow, run_id: str) -> bool:
        if request.state != RequestState.FROZEN or request.owner_run_id in (None, run_id):
            return False
        state = SupervisorPlatform().run_state(self.dag_id, str(request.owner_run_id))
        return state in ("success", "failed", None)


def planned_request(context: Any) -> UUID | None:
    """The request that this run's plan froze; None if the plan found that this run has nothing to do.

    :raises AirflowFailException: the plan itself failed.
    """
    planned = context["ti"].xcom_pull(task_ids=PLAN_TASK)
    if planned is None:
        raise AirflowFailException(
            "the plan of this undo failed, so nothing was undone; see its log, then clear it"
        )
    return UUID(planned["request"]) if planned["request"] else None


def tell_stuck(context: Any) -> None:
    """Callback of ``plan`` and ``settle``: their last try failed, so nobody carries this undo on."""
    notifiers = getattr(context["task"], "notifiers", ())
    run = context["dag_run"]
    uuid = request_uuid_of(run.run_id) or ((run.conf or {}).get("request") and UUID(run.conf["request"]))
    if not notifiers or not uuid:
        return
    with open_store() as connection:
        request = Reader(connection).request(uuid)
        if request is None or request.state in (RequestState.SETTLED, RequestState.WITHDRAWN):
            return
        why = context.get("exception") or "see its log"
        tell_once(
            connection,
            notifiers,
            context,
            saga_id=request.saga_id,
            request_id=request.request_id,
            kind=STUCK,
            reason=f"{context['task'].task_id} of {run.dag_id} / {run.run_id} failed: {why}",
        )
