"""Running a named statement and getting typed rows back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg.rows import RowFactory, RowMaker, dict_row

from airflow_saga.core.records import ActionRow, RequestRow, SagaRow, StepRow
from airflow_saga.store.queries import Q

Row = TypeVar("Row", SagaRow, StepRow, ActionRow, RequestRow)


def _as_row(kind: type[Row]) -> RowFactory[Row]:
    """Rows as frozen dataclasses, made without their ``__init__``: it would set each field through the freezer.

    The columns of each statement are exactly the fields; a test holds the tables to that.
    """

    def factory(cursor: psycopg.Cursor[Any]) -> RowMaker[Row]:
        names = [column.name for column in cursor.description or ()]

        def make(values: Sequence[Any]) -> Row:
            row = object.__new__(kind)
            row.__dict__.update(zip(names, values, strict=True))
            return row

        return make

    return factory


def one(
    connection: psycopg.Connection, kind: type[Row], statement: bytes, params: Mapping[str, Any]
) -> Row | None:
    with connection.cursor(row_factory=_as_row(kind)) as cursor:
        return cursor.execute(statement, params).fetchone()


def many(
    connection: psycopg.Connection, kind: type[Row], statement: bytes, params: Mapping[str, Any]
) -> list[Row]:
    with connection.cursor(row_factory=_as_row(kind)) as cursor:
        return cursor.execute(statement, params).fetchall()


def dicts(
    connection: psycopg.Connection, statement: bytes, params: Mapping[str, Any]
) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, params).fetchall()


def first(
    connection: psycopg.Connection, statement: bytes, params: Mapping[str, Any]
) -> dict[str, Any] | None:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(statement, params).fetchone()


PROBE_ASKED = "probe asked"
"""The event that keeps what a verify probe said when a person asked."""


def note(
    connection: psycopg.Connection,
    what: str,
    actor: str,
    detail: str | None = None,
    *,
    saga_id: int,
    step_id: int | None = None,
    action_id: int | None = None,
    request_id: int | None = None,
) -> None:
    """One line of a saga's history, in the transaction of the verb that makes it."""
    connection.execute(
        Q.note_event,
        {
            "saga_id": saga_id,
            "step_id": step_id,
            "action_id": action_id,
            "request_id": request_id,
            "what": what,
            "actor": actor,
            "detail": detail,
        },
    )


def wake(connection: psycopg.Connection, saga_id: int, what: str) -> None:
    """Tell whoever listens to this saga that a decision was made; delivered at commit, ids only."""
    connection.execute(Q.wake, {"saga_id": saga_id, "what": what})
