"""Telling people through Airflow's notifiers: each occasion once per undo request, with the saga in plain words.

The store decides who tells, so that two who see the same do not both; who has claimed it and dies tells nobody. What a
notifier does is its own affair: where it fails that is logged, and nothing else changes.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from typing import Any

import psycopg

from airflow_saga.core.identity import compensation_dag_id
from airflow_saga.plugin.link import tab_of
from airflow_saga.settings import secrets_of_this_process
from airflow_saga.store.overview import Overview
from airflow_saga.store.reader import Reader
from airflow_saga.store.requests import RequestVerbs

log = logging.getLogger(__name__)

STANDING = "standing"
STUCK = "stuck"
_WHAT = {
    STANDING: "partially cancelled",
    STUCK: "stuck",
    "unstarted": "stuck",
    "held": "stuck",
    "deadline": "deadline passed",
    "undo deadline": "deadline passed",
}
"""The kinds of notice in the store, and how a person is told of each."""
NOTICES_PER_PASS = 20
"""An outage makes many at once; the others are told with the next passes."""
MOST_NAMED = 20
MAX_REASON = 2000


def tell_once(
    connection: psycopg.Connection,
    notifiers: Sequence[Any],
    context: Any,
    *,
    saga_id: int,
    request_id: int,
    kind: str,
    reason: str | None = None,
) -> bool:
    """Call the notifiers, if nobody has told this kind of this request before.

    :param reason: in a sentence; None: it names what stands.
    """
    if not notifiers or not RequestVerbs(connection).claim_notice(request_id, kind):
        return False
    told = notice(connection, saga_id, kind, reason)
    for notifier in notifiers:
        try:
            # Airflow renders a notifier's templates into itself, and writes its fields into the context.
            copy.copy(notifier)({**context, "saga": told})
        except Exception:
            log.exception("the notifier %s failed; what there is to tell stays in the saga's tab", notifier)
    return True


def tell_untold(
    connection: psycopg.Connection, notifiers: Sequence[Any], context: Any, *, start_alert_seconds: float
) -> int:
    """What only the reconciler sees, a bounded number at a time; how many notices were told."""
    if not notifiers:
        return 0
    rows = Overview(connection).untold(start_alert_seconds=start_alert_seconds, limit=NOTICES_PER_PASS)
    return sum(
        tell_once(
            connection,
            notifiers,
            context,
            saga_id=row["saga_id"],
            request_id=row["request_id"],
            kind=row["kind"],
            reason=_reason(row),
        )
        for row in rows
    )


def notice(connection: psycopg.Connection, saga_id: int, kind: str, reason: str | None) -> dict[str, Any]:
    """The ``saga`` of a notifier's context: plain words, no value of any call, no secret."""
    saga = Reader(connection).by_id(saga_id)
    standing = [
        {"name": row["name"], "state": row["state"], "step": _label(row), "action": row["action"]}
        for row in Overview(connection).standing_names(saga_id)
    ]
    return {
        "dag_id": saga.dag_id,
        "run_id": saga.run_id,
        "state": saga.state,
        "what": _WHAT[kind],
        "reason": secrets_of_this_process().scrub(reason or _named(standing))[:MAX_REASON],
        "standing": standing,
        "url": _url(saga.dag_id, saga.run_id),
    }


def _label(row: dict[str, Any]) -> str:
    return row["task_id"] if row["map_index"] < 0 else f"{row['task_id']}[{row['map_index']}]"


def _named(standing: list[dict[str, Any]]) -> str:
    names = ", ".join(f"{row['name']} of {row['step']} ({row['state']})" for row in standing[:MOST_NAMED])
    more = f" and {len(standing) - MOST_NAMED} more" if len(standing) > MOST_NAMED else ""
    return f"{len(standing)} effects still stand, or may: {names}{more}"


def _reason(row: dict[str, Any]) -> str:
    since = f"{row['since']:%Y-%m-%d %H:%M:%S} UTC"
    undo = f"undo {row['number']}, asked for by {row['actor']}"
    if row["kind"] == "deadline":
        return f"the deadline of the cancel passed before {undo}, had ended"
    if row["kind"] == "undo deadline":
        return f"the deadline of a compensation passed at {since}, and its effect may still stand"
    if row["kind"] == "held":
        return (
            f"{undo} at {since}, is held since many sagas failed at once; it goes on with: "
            f"airflow saga release {row['dag_id']} {row['run_id']}"
        )
    return f"{undo} at {since}, is carried out by nobody: is {compensation_dag_id(row['dag_id'])} paused?"


def _url(dag_id: str, run_id: str) -> str | None:
    from airflow.configuration import conf

    base = conf.get("api", "base_url", fallback=None)
    return f"{base.rstrip('/')}{tab_of(dag_id, run_id)}" if base else None
