"""The tasks of ``<dag_id>__compensation``: plan, undo.<task>, settle, review, apply.

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
from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
)

from airflow_saga.core import errors
from airflow_saga.core.identity import request_uuid_of
from airflow_saga.core.plan import undo_order
from airflow_saga.core.records import ActionRow, RequestRow
from airflow_saga.core.secret import set_secret_resolver
from airflow_saga.core.states import ActionState, Cause, Effect, RequestState
from airflow_saga.operators.review import OPTIONS, question_of
from airflow_saga.platform import SupervisorPlatform, reschedule_date
from airflow_saga.runtime.undo import StepUndo
from airflow_saga.settings import Settings, resolve_secret, secrets_of_this_process, store_address
from airflow_saga.store import migrate
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs
from airflow_saga.store.undo import Freeze, Settled, UndoVerbs

log = logging.getLogger(__name__)

PLAN_TASK = "plan"
SETTLE_TASK = "settle"
REVIEW_TASK = "review"
APPLY_TASK = "apply"
REVIEWED_KEY = "reviewed"
SUMMARY_KEY = "saga"
WAIT_IN_SLOT_SECONDS = 30.0
LOOK_AGAIN_SECONDS = 0.25
MOST_MAPPED = 1000
"""Fewer than Airflow's ``max_map_length``; more indexes than this share an instance."""
SETTLE_ROUNDS = 5


@contextlib.contextmanager
def _store() -> Iterator[psycopg.Connection]:
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
        with _store() as connection:
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
        verbs = UndoVerbs(connection)
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


class UndoOperator(BaseOperator):
    """Undo one step (or some indexes of a mapped one) action by action, newest first.

    :param step_task_id: the task of the saga DAG that is undone.
    :param indexes: map indexes; None for a task that is not mapped.
    """

    ui_color = "#f6dfd6"

    def __init__(self, *, step_task_id: str, indexes: Sequence[int] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step_task_id = step_task_id
        self.indexes = indexes
        self._undo: StepUndo | None = None

    template_fields: Sequence[str] = ("indexes",)

    def execute(self, context: Any) -> dict[str, Any]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            raise AirflowSkipException("this run carries out no undo")
        done = {"compensated": 0, "standing": 0}
        for index in [-1] if self.indexes is None else self.indexes:
            report = undo_step(self, context, request_uuid, self.step_task_id, int(index))
            done["compensated"] += report.compensated
            done["standing"] += report.standing
        return done

    def on_kill(self) -> None:
        if self._undo is not None:
            self._undo.request_kill()


def undo_step(operator: Any, context: Any, request_uuid: UUID, task_id: str, map_index: int) -> Any:
    """One attempt to undo one step, its errors said in Airflow's terms."""
    set_secret_resolver(resolve_secret)
    undo = StepUndo(
        store_address(),
        request_uuid,
        context["dag_run"].run_id,
        task_id,
        map_index,
        Settings.load().limits(),
        secrets_of_this_process(),
    )
    operator._undo = undo
    try:
        return undo.run()
    except errors.UndoFencedError as fenced:
        raise AirflowFailException(str(fenced)) from fenced
    except errors.StepInterrupted as stop:
        raise AirflowException(f"{stop}; the next try goes on where this one stopped") from stop
    finally:
        operator._undo = None


class IndexesOperator(BaseOperator):
    """Which indexes of a mapped step have something to undo, in as many groups as there will be instances."""

    ui_color = "#f3ead9"

    def __init__(self, *, step_task_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.step_task_id = step_task_id

    def execute(self, context: Any) -> list[list[int]]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            return []
        with _store() as connection:
            request = Reader(connection).request(request_uuid)
            assert request is not None
            indexes = Reader(connection).indexes_to_undo(request, self.step_task_id)
        size = -(-len(indexes) // MOST_MAPPED) or 1
        return [indexes[start : start + size] for start in range(0, len(indexes), size)]


class SettleOperator(BaseOperator):
    """Close the request: what no task undid (late answers, tasks that are gone) is undone here, then the end is said.

    :param notifiers: told once per request that leaves something standing.
    """

    ui_color = "#f3ead9"

    def __init__(self, *, saga_dag_id: str, notifiers: Sequence[Any] = (), **kwargs: Any) -> None:
        super().__init__(on_failure_callback=tell_stuck, **kwargs)
        self.saga_dag_id = saga_dag_id
        self.notifiers = list(notifiers)
        self._undo: StepUndo | None = None

    def execute(self, context: Any) -> list[dict[str, str]]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            return []
        settled = self._settle(context, request_uuid)
        standing = [row for row in settled.residual if needs_person(row)][:MOST_MAPPED]
        ti = context["ti"]
        ti.xcom_push(key=REVIEWED_KEY, value=[row.action_id for row in standing])
        ti.xcom_push(key=SUMMARY_KEY, value=_summary(settled))
        self.log.info("%s / %s is %s", settled.saga.dag_id, settled.saga.run_id, settled.saga.state)
        for row in settled.residual:
            self.log.warning(
                "still stands: %s (action %d) is %s: %s", row.name, row.action_id, row.state, row.error
            )
        if standing:
            tell_once(self.notifiers, context, settled.request.request_id, "standing")
        labels = self._labels(settled)
        return [question_of(settled.saga, row, labels[row.step_id]) for row in standing]

    def on_kill(self) -> None:
        if self._undo is not None:
            self._undo.request_kill()

    def _settle(self, context: Any, request_uuid: UUID) -> Settled:
        for _ in range(SETTLE_ROUNDS):
            with _store() as connection:
                try:
                    settled = UndoVerbs(connection).settle_if_all_settled(
                        request_uuid, context["dag_run"].run_id
                    )
                except errors.UndoFencedError as fenced:
                    raise AirflowFailException(str(fenced)) from fenced
                if settled is not None:
                    return settled
                left = self._left(connection, request_uuid)
            for task_id, map_index in left:
                undo_step(self, context, request_uuid, task_id, map_index)
        raise AirflowException(
            "actions of the plan are still open after several rounds; the next try goes on"
        )

    def _left(self, connection: psycopg.Connection, request_uuid: UUID) -> list[tuple[str, int]]:
        """Steps that still have an unsettled action, in the order of the undo."""
        request = Reader(connection).request(request_uuid)
        assert request is not None
        open_steps = {row.step_id for row in UndoVerbs(connection).unsettled(request)}
        steps = [step for step in Reader(connection).steps(request.saga_id) if step.step_id in open_steps]
        return [(step.task_id, step.map_index) for step in undo_order(steps)]

    def _labels(self, settled: Settled) -> dict[int, str]:
        with _store() as connection:
            return {step.step_id: step.label for step in Reader(connection).steps(settled.saga.saga_id)}


def tell_once(notifiers: Sequence[Any], context: Any, request_id: int, kind: str) -> None:
    """Call the DAG's notifiers, once per request and kind, whoever comes first; one that fails is logged."""
    if not notifiers:
        return
    with _store() as connection:
        if not RequestVerbs(connection).claim_notice(request_id, kind):
            return
    for notifier in notifiers:
        try:
            notifier(context)
        except Exception:
            log.exception("the notifier %s failed; what stands is still to be settled", notifier)


def tell_stuck(context: Any) -> None:
    """Callback of ``plan`` and ``settle``: their last try failed, so nobody carries this undo on."""
    notifiers = getattr(context["task"], "notifiers", ())
    run = context["dag_run"]
    uuid = request_uuid_of(run.run_id) or ((run.conf or {}).get("request") and UUID(run.conf["request"]))
    if not notifiers or not uuid:
        return
    with _store() as connection:
        request = Reader(connection).request(uuid)
    if request is not None and request.state not in (RequestState.SETTLED, RequestState.WITHDRAWN):
        tell_once(notifiers, context, request.request_id, "stuck")


def needs_person(row: ActionRow) -> bool:
    """Whether an action that stands waits for a person; one with a date settles by itself, or asks later."""
    return row.effect != Effect.READ_ONLY and not (row.state == ActionState.COMPENSATING and row.reconcile_at)


def _summary(settled: Settled) -> dict[str, Any]:
    return {
        "saga": f"{settled.saga.dag_id} / {settled.saga.run_id}",
        "state": settled.saga.state,
        "asked_by": settled.request.actor,
        "cause": settled.request.cause,
        "still_stands": [
            {
                "action": row.action_id,
                "name": row.name,
                "state": row.state,
                "why": row.error or row.waiting_for or "",
            }
            for row in settled.residual
        ],
    }


class ReviewOperator(HITLOperator):
    """Puts one action that still stands before a person, in Airflow's Required Actions. The store is the truth."""


class ApplyOperator(BaseOperator):
    """Write people's answers into the log, and fail while anything still stands: the run's colour tells the truth."""

    ui_color = "#f3ead9"

    def __init__(self, *, saga_dag_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.saga_dag_id = saga_dag_id

    def execute(self, context: Any) -> dict[str, Any]:
        request_uuid = planned_request(context)
        if request_uuid is None:
            raise AirflowSkipException("this run carries out no undo")
        with _store() as connection:
            request = Reader(connection).request(request_uuid)
            assert request is not None
            if request.state != RequestState.SETTLED:
                raise AirflowFailException(
                    f"the undo is {request.state}, not settled: see the log of {SETTLE_TASK}"
                )
            saga = Reader(connection).by_id(request.saga_id)
            self._apply(context, connection, saga.run_id)
            saga = Reader(connection).by_id(request.saga_id)
            standing = Reader(connection).residual(request.saga_id)
        if standing and request.whole_run:
            named = "; ".join(f"{row.name} (action {row.action_id}): {_why(row)}" for row in standing[:20])
            raise AirflowFailException(
                f"{saga.dag_id} / {saga.run_id} is {saga.state}: {len(standing)} effects still stand, or may: {named}. "
                f"Next: airflow saga show {saga.dag_id} {saga.run_id}"
            )
        return {"saga": f"{saga.dag_id} / {saga.run_id}", "state": saga.state}

    def _apply(self, context: Any, connection: psycopg.Connection, run_id: str) -> None:
        """Each answer once: what the tab, the command line or somebody else settled meanwhile is left alone."""
        ti = context["ti"]
        reviewed = ti.xcom_pull(task_ids=SETTLE_TASK, key=REVIEWED_KEY) or []
        for index, action_id in enumerate(reviewed):
            answer = ti.xcom_pull(task_ids=REVIEW_TASK, map_indexes=index)
            chosen = (answer or {}).get("chosen_options") or []
            to = OPTIONS.get(chosen[0]) if chosen else None
            if to is None:
                continue
            who = (answer.get("responded_by_user") or {}).get("name") or "somebody in Airflow"
            note = (answer.get("params_input") or {}).get("note") or chosen[0]
            try:
                decision = RequestVerbs(connection).resolve(
                    self.saga_dag_id, run_id, action_id, to=to, actor=who, note_text=note
                )
                self.log.info("%s", decision.message)
            except errors.VerbRefusedError as refused:
                self.log.warning("the answer of %s is not applied: %s", who, refused)


def _why(row: ActionRow) -> str:
    if row.state == ActionState.COMPENSATING and row.reconcile_at is not None:
        return f"waiting for {row.waiting_for}, asked for again at {row.reconcile_at:%Y-%m-%d %H:%M:%S} UTC"
    return f"{row.state}, {row.error or 'nobody knows more'}"


__all__ = [
    "ApplyOperator",
    "IndexesOperator",
    "PlanOperator",
    "ReviewOperator",
    "SettleOperator",
    "UndoOperator",
]
