"""Rows of a table: inserted, changed or deleted, with the old row kept, so that the undo puts it back as it was.

Each is one transaction with its receipt (see ``databases``), and so is its undo: exactly once, never in doubt. A row
that somebody has changed since is not touched by the undo: it is rejected, and a person gets it.

.. code-block:: python

    add_customer = insert_row("add_customer", conn_id="shop", table="customers")
    set_price = update_row("set_price", conn_id="shop", table="catalogue.products", key="sku")
    drop_lead = delete_row("drop_lead", conn_id="crm", table="leads", key=("campaign", "email"))

    @task.saga
    def change():
        new = add_customer({"name": "Ann"})["after"]
        set_price({"sku": "A1"}, {"price": Decimal("9.50")})
        drop_lead({"campaign": 7, "email": "ann@example.org"})

The table of receipts has to be there: ``airflow saga db migrate --receipts --conn-id CONN``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.resources import files
from typing import Any

from airflow_saga.capsules import databases
from airflow_saga.capsules.databases import Database
from airflow_saga.capsules.declare import declare
from airflow_saga.core.actions import Action
from airflow_saga.core.errors import CompensationRejected, NotApplied
from airflow_saga.core.records import ActionRecord, ProbeAnswer
from airflow_saga.runtime.statements import TIMEOUT
from airflow_saga.store.queries import Queries

Q = Queries(files("airflow_saga.capsules").joinpath("rows.sql").read_text(encoding="utf-8"))
Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
    """A table of a user's database, as one capsule changes it.

    :ivar key: the columns that tell its rows apart.
    """

    conn_id: str
    table: str
    key: tuple[str, ...]
    timeout_seconds: float

    # -- forward ------------------------------------------------------------------------------------------------------

    def do(self, key: str, work: Any) -> dict[str, Row | None]:
        result: dict[str, Row | None] = databases.do_once(
            self.conn_id, key, self.timeout_seconds, lambda database: work(_ready(database))
        )
        return result

    def insert(self, database: Database, values: Row) -> dict[str, Row | None]:
        return {"before": None, "after": self._insert(database, values)}

    def update(self, database: Database, where: Row, values: Row) -> dict[str, Row | None]:
        before = self._the_row(database, where)
        if set(values) & set(self.key):
            raise NotApplied(
                f"{self.table}: the key {', '.join(self.key)} of a row is not changed by an update"
            )
        after = self._change(database, where, values)
        return {"before": before, "after": after}

    def delete(self, database: Database, where: Row) -> dict[str, Row | None]:
        before = self._the_row(database, where)
        self._run(database, "remove", where)
        return {"before": before, "after": None}

    # -- afterwards ---------------------------------------------------------------------------------------------------

    def verify(self, record: ActionRecord) -> ProbeAnswer:
        with databases.opened(self.conn_id, self.timeout_seconds) as database:
            return database.look_up(record.key)

    def undo(self, record: ActionRecord) -> None:
        databases.undo_once(
            self.conn_id,
            record,
            self.timeout_seconds,
            lambda database, result: self._put_back(_ready(database), record, result),
        )

    def _put_back(self, database: Database, record: ActionRecord, result: dict[str, Row | None]) -> None:
        before, after = result["before"], result["after"]
        where = self._key_of(after or before or {})
        now = self._find(database, where)
        if now != after:
            raise CompensationRejected(
                f"the row {_shown(where)} of {self.table} is not as {record.name} has left it: somebody has changed it "
                f"since. It was left as it is; look at it, then resolve the action"
            )
        if before is None:
            self._run(database, "remove", where)
        elif after is None:
            self._insert(database, before)
        else:
            self._change(
                database, where, {name: value for name, value in before.items() if value != after[name]}
            )

    # -- statements ---------------------------------------------------------------------------------------------------

    def _the_row(self, database: Database, where: Row) -> Row:
        if set(where) != set(self.key):
            raise NotApplied(
                f"{self.table}: its rows are told apart by {', '.join(self.key)}, not by {', '.join(sorted(where))}"
            )
        found = self._find(database, where)
        if found is None:
            raise NotApplied(f"{self.table} has no row {_shown(where)}")
        return found

    def _find(self, database: Database, where: Row) -> Row | None:
        rows = self._run(database, "find_for_update" if database.on_postgres else "find", where)
        if len(rows) > 1:
            raise NotApplied(
                f"{self.table} has {len(rows)} rows {_shown(where)}; name the columns of its key"
            )
        return rows[0] if rows else None

    def _insert(self, database: Database, values: Row) -> Row:
        marks = ", ".join([database.placeholder] * len(values))
        statement = self._statement("insert", columns=_names(values), values=marks)
        return database.execute(statement, list(values.values()))[0]  # type: ignore[index]

    def _change(self, database: Database, where: Row, values: Row) -> Row:
        if not values:
            return self._find(database, where) or {}
        assignments = ", ".join(f"{_name(column)} = {database.placeholder}" for column in values)
        rows: list[Row] = self._run(database, "change", where, list(values.values()), assignments=assignments)
        return rows[0]

    def _run(
        self, database: Database, name: str, where: Row, before: Iterable[Any] = (), **parts: str
    ) -> Any:
        matches = " AND ".join(f"{_name(column)} = {database.placeholder}" for column in where)
        return database.execute(self._statement(name, where=matches, **parts), [*before, *where.values()])

    def _statement(self, name: str, **parts: str) -> str:
        table = ".".join(_name(part) for part in self.table.split("."))
        statement: str = getattr(Q, name).decode()
        return statement.format(table=table, **parts)

    def _key_of(self, row: Mapping[str, Any]) -> Row:
        return {column: row[column] for column in self.key}


def _ready(database: Database) -> Database:
    """On Postgres JSON comes as its text, which goes back as it came; a dict would not."""
    if database.on_postgres and hasattr(database.cursor, "adapters"):
        from psycopg.types.string import TextLoader

        for name in ("json", "jsonb"):
            database.cursor.adapters.register_loader(name, TextLoader)
    return database


def _names(columns: Iterable[str]) -> str:
    return ", ".join(map(_name, columns))


def _name(column: str) -> str:
    # A percent sign would be taken for a parameter.
    return '"' + column.replace('"', '""').replace("%", "%%") + '"'


def _shown(where: Row) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in where.items())


# -- the factories ----------------------------------------------------------------------------------------------------


def insert_row(
    name: str, *, conn_id: str, table: str, key: str | Iterable[str] = "id", **options: Any
) -> Action[Any, Any]:
    """An action ``insert(values)`` that inserts a row and gives ``{"before": None, "after": row}``.

    :param table: its name, with its schema where it is not in the connection's search path.
    :param key: the columns that tell its rows apart.
    :param options: as of :func:`airflow_saga.action`.
    """
    place = _place(conn_id, table, key, options)

    def insert(values: Row, *, key: str) -> dict[str, Row | None]:
        return place.do(key, lambda database: place.insert(database, values))

    return declare(insert, name, place, compensate=place.undo, verify=place.verify, **options)


def update_row(
    name: str, *, conn_id: str, table: str, key: str | Iterable[str] = "id", **options: Any
) -> Action[Any, Any]:
    """An action ``update(where, values)`` that changes one row and gives it as it was and as it is.

    ``where`` has the columns of the key. Parameters as of :func:`insert_row`.
    """
    place = _place(conn_id, table, key, options)

    def update(where: Row, values: Row, *, key: str) -> dict[str, Row | None]:
        return place.do(key, lambda database: place.update(database, where, values))

    return declare(update, name, place, compensate=place.undo, verify=place.verify, **options)


def delete_row(
    name: str, *, conn_id: str, table: str, key: str | Iterable[str] = "id", **options: Any
) -> Action[Any, Any]:
    """An action ``delete(where)`` that deletes one row and gives it as it was.

    ``where`` has the columns of the key. Parameters as of :func:`insert_row`.
    """
    place = _place(conn_id, table, key, options)

    def delete(where: Row, *, key: str) -> dict[str, Row | None]:
        return place.do(key, lambda database: place.delete(database, where))

    return declare(delete, name, place, compensate=place.undo, verify=place.verify, **options)


def _place(conn_id: str, table: str, key: str | Iterable[str], options: dict[str, Any]) -> Table:
    timeout: timedelta = options.setdefault("timeout", TIMEOUT)
    options.setdefault("idempotent", True)
    options.setdefault("compensate_in_doubt", True)
    columns = (key,) if isinstance(key, str) else tuple(key)
    return Table(conn_id, table, columns, timeout.total_seconds())
