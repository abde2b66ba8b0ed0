"""Keeping house, the same from a command and from the API: delete what is old, catch what every hook has missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from airflow_saga.core.errors import VerbRefusedError
from airflow_saga.metadata import MetadataPlatform
from airflow_saga.runtime.reconcile import Reconciler
from airflow_saga.settings import Settings
from airflow_saga.store.overview import Overview
from airflow_saga.store.sweep import SweepVerbs
from airflow_saga.telling.display import plural


@dataclass(frozen=True)
class Done:
    """What was done: a sentence for people, numbers for programs, and what did not work, if anything."""

    message: str
    data: dict[str, Any]
    problem: str | None = None


def prune(
    connection: psycopg.Connection,
    retention_days: int | None,
    *,
    agreed: Callable[[str], bool],
    how_to_agree: str,
) -> Done:
    """Delete the actions of settled sagas that are older; nothing is asked where there is nothing to delete.

    :param retention_days: None: as ``[saga] retention_days`` has it.
    :param agreed: told what would go; whether it may.
    :raises VerbRefusedError: it may not; says what would go.
    """
    days = retention_days or Settings.load().retention_days
    sagas, actions = Overview(connection).prunable(days)
    what = f"{plural(actions, 'action')} of {plural(sagas, 'settled saga')} older than {plural(days, 'day')}"
    if actions and not agreed(what):
        raise VerbRefusedError(
            f"{what} would go; nothing was deleted. To delete without being asked: {how_to_agree}"
        )
    deleted = SweepVerbs(connection).prune(retention_days=days) if actions else 0
    message = f"deleted {plural(deleted, 'action')}; each saga itself is kept, with its end"
    if not actions:
        message = f"nothing to delete: no settled saga has been at rest for more than {plural(days, 'day')}"
    return Done(message, {"retention_days": days, "sagas": sagas, "deleted_actions": deleted})


def reconcile(connection: psycopg.Connection, *, triggered_by: str) -> Done:
    """One pass over everything that is open, as the reconciler DAG makes it.

    :param triggered_by: as Airflow shows it at the undo runs: ``cli`` or ``rest_api``.
    """
    platform = MetadataPlatform(triggered_by=triggered_by)
    report = Reconciler(connection, platform, Settings.load().limits()).run_once()
    moved = {field: count for field, count in asdict(report).items() if field != "errors"}
    problem = None
    if report.errors:
        problem = (
            f"{plural(report.errors, 'saga')} could not be moved, see the log; the next pass tries again"
        )
    return Done(
        f"looked at everything that is open: {report}", {"moved": moved, "errors": report.errors}, problem
    )
