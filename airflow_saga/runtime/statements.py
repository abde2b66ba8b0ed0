"""The actions behind ``saga.sql``: a statement and its receipt in one transaction of the user's own database.

The receipt is a row whose key is the action's key. Statement and receipt commit together or not at all, so whoever asks
afterwards, by the key, gets an answer that is certain: such an action never stays in doubt.

Here is only what the log has to know, the declarations: this module is loaded with the handle that bodies get, and so
in every process that loads a saga's DAG file, before a step closes the registry. It opens no database itself: the
Airflow layer says who does, as it does for secrets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

from airflow_saga.core.actions import NON_COMPENSABLE, READ_ONLY, Marker
from airflow_saga.core.declare import action
from airflow_saga.core.errors import ActionDeclarationError, SagaError
from airflow_saga.core.records import ActionRecord, ProbeAnswer
from airflow_saga.core.states import Effect

TIMEOUT = timedelta(seconds=30)
"""Of one statement with its receipt; Postgres is told to end a statement by itself then, too."""

Params = Mapping[str, Any] | Sequence[Any]


class Databases(Protocol):
    """Who runs statements in users' databases."""

    def run(
        self, conn_id: str, statement: str, params: Params | None, *, key: str, timeout_seconds: float
    ) -> Any:
        """Run a statement with its receipt; what it returned, or what the receipt says it did."""

    def read(self, conn_id: str, statement: str, params: Params | None, *, timeout_seconds: float) -> Any:
        """Run a statement that keeps nothing; what it returned."""

    def look_up(self, record: ActionRecord, *, timeout_seconds: float) -> ProbeAnswer:
        """What the receipt of an action says."""

    def undo(self, record: ActionRecord, *, timeout_seconds: float) -> None:
        """Run the compensation statement of an action with a receipt of its own."""


_find: Callable[[], Databases] | None = None


def set_databases(find: Callable[[], Databases] | None) -> None:
    """Register who runs statements; the Airflow layer does it once per process, the last one counts.

    :param find: called at each statement. None takes the registration back.
    """
    global _find
    _find = find


def _databases() -> Databases:
    if _find is None:
        raise SagaError(
            "nothing in this process opens users' databases, so nothing was run; import airflow_saga"
        )
    return _find()


def undo_statement(record: ActionRecord) -> None:
    _databases().undo(record, timeout_seconds=sql.timeout.total_seconds())


def look_up_receipt(record: ActionRecord) -> ProbeAnswer:
    return _databases().look_up(record, timeout_seconds=sql.timeout.total_seconds())


@action(
    name="saga.sql",
    compensate=undo_statement,
    verify=look_up_receipt,
    timeout=TIMEOUT,
    idempotent=True,
    compensate_in_doubt=True,
)
def sql(conn_id: str, statement: str, params: Params | None, compensate: str, *, key: str) -> Any:
    """A statement that another statement undoes."""
    seconds = sql.timeout.total_seconds()
    return _databases().run(conn_id, statement, params, key=key, timeout_seconds=seconds)


@action(
    name="saga.sql_for_good",
    compensate=NON_COMPENSABLE,
    verify=look_up_receipt,
    timeout=TIMEOUT,
    idempotent=True,
)
def sql_for_good(conn_id: str, statement: str, params: Params | None, *, key: str) -> Any:
    """A statement that cannot be undone."""
    seconds = sql_for_good.timeout.total_seconds()
    return _databases().run(conn_id, statement, params, key=key, timeout_seconds=seconds)


@action(name="saga.sql_read", compensate=READ_ONLY, timeout=TIMEOUT)
def sql_read(conn_id: str, statement: str, params: Params | None) -> Any:
    """A statement that changes nothing; what it would change is rolled back."""
    return _databases().read(conn_id, statement, params, timeout_seconds=sql_read.timeout.total_seconds())


def call(conn_id: str, statement: str, params: Params | None, compensate: str | Marker) -> Any:
    """What ``saga.sql(…)`` does.

    :raises ActionDeclarationError: ``compensate`` is neither a statement nor one of the two words; nothing was run.
    """
    if isinstance(compensate, str) and compensate.strip():
        return sql(conn_id, statement, params, compensate)  # type: ignore[call-arg]  # the saga gives the key
    if isinstance(compensate, Marker):
        if compensate.effect is Effect.READ_ONLY:
            return sql_read(conn_id, statement, params)
        return sql_for_good(conn_id, statement, params)  # type: ignore[call-arg]
    raise ActionDeclarationError(
        f"saga.sql({conn_id!r}, …): compensate={compensate!r} says nothing about its undo, so nothing was run: give "
        f"the SQL statement that undoes it, or NON_COMPENSABLE, or READ_ONLY"
    )
