"""Statements in users' databases, each in one transaction with its receipt.

A receipt is taken first, so that two attempts of one action wait for each other at its key; then the work is done; both
commit together. Whatever ends the process or the connection before the COMMIT was sent has therefore changed nothing,
and whoever asks later reads the truth from the key alone. An undo marks the receipt of what it undoes, and takes one of
its own under its own key.

This module is what ``runtime.statements`` calls; ``rows`` builds on :class:`Database` too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.resources import files
from typing import Any, NamedTuple

from airflow_saga.core.errors import CompensationRejected, NotApplied, SagaError, Unavailable
from airflow_saga.core.records import ActionRecord, Applied, ProbeAnswer
from airflow_saga.core.secret import Secret
from airflow_saga.runtime import codec
from airflow_saga.runtime.statements import Params
from airflow_saga.store.connect import first_line
from airflow_saga.store.queries import Queries

Q = Queries(files("airflow_saga.capsules").joinpath("receipts.sql").read_text(encoding="utf-8"))
_LEFT = (
    "a statement has ended the transaction in the database of connection {conn_id!r} by itself (COMMIT, ROLLBACK), so "
    "it is no longer one with its receipt: nobody can promise that it takes effect once. Take that out of it"
)
_IDLE = 0
"""``psycopg.pq.TransactionStatus.IDLE``: no transaction is open."""
AWAY_SECONDS = 30.0
"""An undo asks again after so long where the database cannot be reached."""


class DatabaseAway(SagaError):
    """A user's database could not be opened; nothing was run."""


class Receipt(NamedTuple):
    """What the database knows of a key."""

    text: str | None
    undone_by: str | None

    @property
    def result(self) -> Any:
        return None if self.text is None else codec.decode(self.text)


class Database:
    """One connection to a user's database, in a transaction.

    :param connection: by DB-API, not in autocommit.
    :param placeholder: what the driver takes for a parameter by place, ``%s`` or ``?``.
    :param timeout_seconds: of each statement, where the database can be told, and of an effect as a whole.
    :param began_at: from when the latter counts, in monotonic seconds.
    """

    def __init__(
        self,
        connection: Any,
        placeholder: str,
        conn_id: str,
        timeout_seconds: float,
        began_at: float | None = None,
    ) -> None:
        self.connection = connection
        self.placeholder = placeholder
        self.conn_id = conn_id
        self.on_postgres = type(connection).__module__.startswith("psycopg")
        self._timeout_ms = max(1, int(timeout_seconds * 1000))
        self._ends_at = (time.monotonic() if began_at is None else began_at) + timeout_seconds
        self.cursor = connection.cursor()
        self._begin()

    # -- statements ---------------------------------------------------------------------------------------------------

    def execute(self, statement: str, params: Params | None = None) -> list[dict[str, Any]] | int:
        """The rows of a statement that gives rows, else how many it changed.

        Without parameters it is sent as it stands: a ``%`` in it means itself.
        """
        if params:
            self.cursor.execute(statement, _revealed(params))
        else:
            self.cursor.execute(statement)
        if self.cursor.description is None:
            return int(self.cursor.rowcount)
        names = [column[0] for column in self.cursor.description]
        return [dict(zip(names, row, strict=True)) for row in self.cursor.fetchall()]

    def _ask(self, name: str, *params: str | None) -> None:
        """One of our own statements."""
        self.cursor.execute(getattr(Q, name).decode().format(p=self.placeholder), params)

    def _begin(self) -> None:
        if self.on_postgres:
            self.cursor.execute(Q.limit_on_postgres.decode(), {"ms": self._timeout_ms})

    def _check_in_time(self) -> None:
        """A process that was held up for long must not land what a probe may have denied meanwhile."""
        if time.monotonic() > self._ends_at:
            raise NotApplied(
                f"rolled back in the database of connection {self.conn_id!r}: it took longer than "
                f"{self._timeout_ms / 1000:g} s"
            )

    def _left_transaction(self) -> bool:
        """Whether a statement has ended the transaction by itself; only Postgres's driver tells."""
        return self.on_postgres and getattr(self.connection.info, "transaction_status", None) == _IDLE

    def _commit(self) -> None:
        self.connection.commit()

    def _begin_anew(self) -> None:
        self.connection.rollback()
        self._begin()

    # -- receipts -----------------------------------------------------------------------------------------------------

    def find(self, key: str) -> Receipt | None:
        """:raises NotApplied: the table of receipts cannot be read; says how to make it."""
        try:
            self._ask("find", key)
            row = self.cursor.fetchone()
        except Exception as problem:
            raise NotApplied(
                f"the database of connection {self.conn_id!r} shows no table airflow_saga_receipts "
                f"({first_line(problem)}), so nothing was run. Make it once: airflow saga db migrate --receipts "
                f"--conn-id {self.conn_id}"
            ) from problem
        return None if row is None else Receipt(*row)

    def _take(self, key: str) -> Receipt | None:
        """Take the receipt of a key for this transaction; the one that is there, if somebody was first."""
        found = self.find(key)
        if found is not None:
            return found
        try:
            self._ask("take", key)
        except Exception:
            self._begin_anew()
            found = self.find(key)
            if found is None:
                raise
            return found
        return None

    def do_once(self, key: str, work: Callable[[Database], Any]) -> Any:
        """Do some work and keep its result in the receipt, in one transaction; only the result if it was done before.

        :raises NotApplied: nothing was kept: the work failed, or was undone meanwhile. What is raised otherwise comes
            from the COMMIT: then only the receipt can tell.
        """
        try:
            found = self._take(key)
            if found is not None:
                return _standing(found, key)
            result = work(self)
            if self._left_transaction():
                raise SagaError(_LEFT.format(conn_id=self.conn_id))
            self._ask("keep_result", codec.encode(result, where="result"), key)
            self._check_in_time()
        except NotApplied:
            raise
        except Exception as problem:
            if self._left_transaction():
                raise SagaError(_LEFT.format(conn_id=self.conn_id)) from problem
            raise NotApplied(
                f"rolled back in the database of connection {self.conn_id!r}: {type(problem).__name__}: "
                f"{first_line(problem)}"
            ) from problem
        self._commit()
        return result

    def look_up(self, key: str) -> ProbeAnswer:
        """Whether the effect of a key stands; waits for an attempt that is in the middle of it."""
        found = self._take(key)
        if found is None or found.undone_by is not None:
            self.connection.rollback()
            return NotApplied()
        return Applied(found.result)

    def undo_once(self, record: ActionRecord, work: Callable[[Database, Any], None]) -> None:
        """Undo an effect that stands, in one transaction with the receipt of the undo; nothing where that is there.

        :param work: called with the result that the receipt of the effect has.
        :raises CompensationRejected: this database never heard of an effect that is known to have taken place.
        """
        if self._take(record.undo_key) is not None:
            return
        self._ask("mark_undone", record.undo_key, record.key)
        claimed = self.cursor.rowcount == 1
        found = self.find(record.key)
        if found is None:
            if not record.in_doubt:
                raise CompensationRejected(
                    f"the database of connection {self.conn_id!r} has no receipt of {record.name} (key {record.key}): "
                    f"it is another database than the one that was changed, or its receipts were deleted. Nothing was "
                    f"undone there; look, then: airflow saga resolve …"
                )
            self._ask("use_up", record.key, record.undo_key)
        elif claimed:
            work(self, found.result)
            if self._left_transaction():
                raise CompensationRejected(_LEFT.format(conn_id=self.conn_id))
        self._commit()


def _standing(receipt: Receipt, key: str) -> Any:
    if receipt.undone_by is not None:
        raise NotApplied(f"what was done under the key {key} has been undone; nothing was run again")
    return receipt.result


def _revealed(params: Params) -> Params:
    if isinstance(params, Mapping):
        return {name: _plain(value) for name, value in params.items()}
    return tuple(_plain(value) for value in params)


def _plain(value: Any) -> Any:
    return value.reveal() if isinstance(value, Secret) else value


# -- opening ----------------------------------------------------------------------------------------------------------


@contextmanager
def opened(conn_id: str, timeout_seconds: float) -> Iterator[Database]:
    """A transaction in the database of a connection; what was not committed is rolled back.

    :raises DatabaseAway: there is no such connection, or nothing answers there.
    """
    began_at = time.monotonic()
    try:
        connection, placeholder = connect(conn_id)
    except SagaError:
        raise
    except Exception as problem:
        raise DatabaseAway(
            f"the database of connection {conn_id!r} cannot be opened, so nothing was run: "
            f"{type(problem).__name__}: {first_line(problem)}"
        ) from problem
    try:
        yield Database(connection, placeholder, conn_id, timeout_seconds, began_at)
    finally:
        with suppress(Exception):  # a connection that is lost has rolled back
            connection.rollback()
        with suppress(Exception):
            connection.close()


def connect(conn_id: str) -> tuple[Any, str]:
    """A connection as Airflow's hook makes it, and the placeholder of its driver."""
    # Loaded here: Airflow's settings are read when it is imported, and a process that only shows help needs none.
    from airflow_saga.settings import connection_of, for_hook

    found = connection_of(conn_id)
    if found is None:
        raise DatabaseAway(f"Airflow knows no connection {conn_id!r}, so nothing was run; add it")
    if found.conn_type in ("postgres", "postgresql"):
        from airflow.providers.postgres.hooks.postgres import PostgresHook

        hook: Any = PostgresHook(connection=for_hook(found))
    else:
        hook = found.get_hook()
    if not hasattr(hook, "placeholder"):
        raise DatabaseAway(
            f"the connection {conn_id!r} (type {found.conn_type}) leads to no database that takes SQL; nothing was run"
        )
    connection = hook.get_conn()
    if hook.supports_autocommit:
        hook.set_autocommit(connection, False)
    return connection, hook.placeholder


def make_table(conn_id: str) -> bool:
    """Make the table of receipts; False if it was there. From two places at once, one makes it.

    :raises DatabaseAway: the database cannot be opened, or does not let this user make a table.
    """
    with opened(conn_id, 30.0) as database:
        with suppress(NotApplied):
            database.find("")
            return False
        database._begin_anew()
        try:
            database._ask("make_table")
            database._commit()
        except Exception as problem:
            database._begin_anew()
            with suppress(NotApplied):
                database.find("")
                return False
            raise DatabaseAway(
                f"the table airflow_saga_receipts could not be made in the database of connection {conn_id!r}: "
                f"{first_line(problem)}"
            ) from problem
    return True


# -- what `saga.sql` is -----------------------------------------------------------------------------------------------


def run(conn_id: str, statement: str, params: Params | None, *, key: str, timeout_seconds: float) -> Any:
    return do_once(conn_id, key, timeout_seconds, lambda database: database.execute(statement, params))


def read(conn_id: str, statement: str, params: Params | None, *, timeout_seconds: float) -> Any:
    with opened(conn_id, timeout_seconds) as database:
        return database.execute(statement, params)


def look_up(record: ActionRecord, *, timeout_seconds: float) -> ProbeAnswer:
    with opened(record.params["conn_id"], timeout_seconds) as database:
        return database.look_up(record.key)


def undo(record: ActionRecord, *, timeout_seconds: float) -> None:
    def compensate(database: Database, result: Any) -> None:
        params = record.params["params"]
        named = dict(params) if isinstance(params, Mapping) else {}
        returned = reversed(result) if isinstance(result, list) else [{}]
        for row in returned:
            database.execute(record.params["compensate"], {**named, **row})

    undo_once(record.params["conn_id"], record, timeout_seconds, compensate)


def do_once(conn_id: str, key: str, timeout_seconds: float, work: Callable[[Database], Any]) -> Any:
    """:meth:`Database.do_once` in a database of its own; one that is away has proved that nothing was done."""
    try:
        with opened(conn_id, timeout_seconds) as database:
            return database.do_once(key, work)
    except DatabaseAway as away:
        raise NotApplied(str(away)) from away


def undo_once(
    conn_id: str, record: ActionRecord, timeout_seconds: float, work: Callable[[Database, Any], None]
) -> None:
    """:meth:`Database.undo_once` in a database of its own; for one that is away it waits."""
    try:
        with opened(conn_id, timeout_seconds) as database:
            database.undo_once(record, work)
    except DatabaseAway as away:
        raise Unavailable(f"the database of connection {conn_id!r}", AWAY_SECONDS) from away
