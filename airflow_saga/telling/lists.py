"""Many sagas, or many actions of a plan, as rows for people and for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg

from airflow_saga.core.states import RequestState, SagaState
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Plan, Reader
from airflow_saga.telling.display import Display, moment, plural
from airflow_saga.telling.story import probe_said

_NOT_STOPPED = (SagaState.RUNNING, SagaState.COMPLETED, SagaState.PENDING)


def list_sagas(
    connection: psycopg.Connection,
    display: Display,
    *,
    start_alert_seconds: float,
    dag_ids: Sequence[str] | None = None,
    states: Sequence[str] | None = None,
    limit: int = 50,
) -> list[dict[str, Any]]:
    """Sagas as rows: those that need a person first, longest waiting on top, then the others, newest first."""
    overview = Overview(connection)
    waiting = overview.needs_person(start_alert_seconds=start_alert_seconds, dag_ids=dag_ids, limit=limit)
    found = Reader(connection).sagas(dag_ids=dag_ids, states=states, limit=limit)
    first = {row["saga_id"]: row for row in waiting if not states or row["state"] in states}
    rows = [*first.values(), *(row for row in found if row["saga_id"] not in first)][:limit]
    standing = overview.standing_of([row["saga_id"] for row in rows])
    return [_listed(row, display, standing.get(row["saga_id"], 0), first.get(row["saga_id"])) for row in rows]


def _listed(
    row: dict[str, Any], display: Display, standing: int, waiting: dict[str, Any] | None
) -> dict[str, Any]:
    return {
        "dag_id": row["dag_id"],
        "run_id": row["run_id"],
        "state": row["state"],
        "since": moment(row["changed_at"]),
        "standing": 0 if row["state"] in _NOT_STOPPED else standing,
        "needs": _need(waiting) if waiting else None,
        "by": display.text(row["actor"]),
        "reason": display.text(row["reason"]) or row["cause"],
    }


def _need(row: dict[str, Any]) -> str:
    """Why a person is needed, in the order in which it matters."""
    if row["request_state"] == RequestState.HELD:
        return "undo is held: let it go on"
    if row["request_state"] is not None:
        return f"undo asked for at {moment(row['asked_at'])}, not carried out"
    if row["doubtful"]:
        return f"{plural(row['doubtful'], 'action')} in doubt: say what became of it"
    if row["state"] == SagaState.FAILED:
        return f"failed ({row['cause']}): clear or undo it"
    return f"{plural(row['standing'], 'effect')} to settle, or to undo again"


def planned(plan: Plan, display: Display) -> list[dict[str, Any]]:
    """The actions of a plan in the order in which an undo would take them back."""
    known = {action.action_id: action for action in plan.view.actions}
    rows = [(step, action) for step in plan.steps["steps"] for action in step["actions"]]
    return [
        {
            "order": order,
            "step": step["task_id"] + (f"[{step['map_index']}]" if step["map_index"] >= 0 else ""),
            "action": action["action_id"],
            "name": action["name"],
            "version": action["version"],
            "state": action["state"],
            "expected": action["expected"],
            "probe": probe_said(plan.view, action["action_id"], display),
            "params": display.value(known[action["action_id"]].params),
            "result": display.value(known[action["action_id"]].result),
        }
        for order, (step, action) in enumerate(rows, 1)
    ]
