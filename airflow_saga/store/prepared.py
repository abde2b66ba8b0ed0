"""The statements of the hot path, run straight through libpq.

A cursor looks at each parameter of each call anew, which for these costs as much as the server's own work. Here the
statement is prepared once per connection and its parameters go out as text; every type is cast in the SQL.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import pq

_NOT_PREPARED = b"26000"
_PLACEHOLDER = re.compile(rb"%\((\w+)\)s")


class Prepared:
    """One statement of ``queries.sql`` that returns at most one row."""

    def __init__(self, name: str, statement: bytes) -> None:
        names: list[str] = []

        def number(found: re.Match[bytes]) -> bytes:
            wanted = found.group(1).decode()
            if wanted not in names:
                names.append(wanted)
            return b"$%d" % (names.index(wanted) + 1)

        self.name = name.encode()
        self.text = _PLACEHOLDER.sub(number, statement).replace(b"%%", b"%")
        self.names = tuple(names)
        self._known: WeakKeyDictionary[psycopg.Connection, bool] = WeakKeyDictionary()

    def run(self, connection: psycopg.Connection, params: Mapping[str, Any]) -> list[bytes | None] | None:
        """The row, as the server's text, or None if there is none.

        :raises psycopg.Error: as a cursor would.
        """
        values = [_WRITERS.get(type(value), _other)(value) for value in map(params.__getitem__, self.names)]
        pgconn = connection.pgconn
        if connection.prepare_threshold is None or pgconn.transaction_status != pq.TransactionStatus.IDLE:
            # Behind a pooler a prepared statement is lost; inside a transaction its loss could not be made good.
            result = pgconn.exec_params(self.text, values)
        else:
            result = self._run_prepared(connection, values)
        _check(result, connection)
        if result.ntuples == 0:
            return None
        return [result.get_value(0, column) for column in range(result.nfields)]

    def _run_prepared(self, connection: psycopg.Connection, values: list[bytes | None]) -> pq.abc.PGresult:
        pgconn = connection.pgconn
        for again in (False, True):
            if again or connection not in self._known:
                self._prepare(connection)
            result = pgconn.exec_prepared(self.name, values)  # type: ignore[arg-type]  # None is NULL
            if result.error_field(pq.DiagnosticField.SQLSTATE) != _NOT_PREPARED:
                break  # psycopg deallocates all there is after each rollback
        return result

    def _prepare(self, connection: psycopg.Connection) -> None:
        # It is there already if an interruption came between the server's answer and our note of it.
        with suppress(psycopg.errors.DuplicatePreparedStatement):
            _check(connection.pgconn.prepare(self.name, self.text), connection)
        self._known[connection] = True


_WRITERS: dict[type, Callable[[Any], bytes | None]] = {
    str: str.encode,
    type(None): lambda _: None,
    int: lambda value: b"%d" % value,
    bool: lambda value: b"t" if value else b"f",
    float: lambda value: repr(value).encode(),
    list: lambda value: ("{" + ",".join(map(str, value)) + "}").encode(),
}


def _other(value: Any) -> bytes:
    return str(value).encode()


def _check(result: pq.abc.PGresult, connection: psycopg.Connection) -> None:
    if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return
    if connection.pgconn.status != pq.ConnStatus.OK:
        raise psycopg.OperationalError(connection.pgconn.get_error_message() or "the connection is lost")
    raise psycopg.errors.error_from_result(result, encoding="utf-8")
