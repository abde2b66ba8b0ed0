"""The two statements of the hot path, run straight through libpq.

A cursor looks at each parameter of each call anew, which for these costs as much as the server's own work. Here the
statement is prepared once per connection and its parameters go out as text; every type is cast in the SQL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import pq

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
        values = [_as_text(params[name]) for name in self.names]
        pgconn = connection.pgconn
        if connection.prepare_threshold is None:  # behind a pooler a prepared statement is lost
            result = pgconn.exec_params(self.text, values)
        else:
            if connection not in self._known:
                _check(pgconn.prepare(self.name, self.text), connection)
                self._known[connection] = True
            result = pgconn.exec_prepared(self.name, values)  # type: ignore[arg-type]  # None is NULL
        _check(result, connection)
        if result.ntuples == 0:
            return None
        return [result.get_value(0, column) for column in range(result.nfields)]


def _as_text(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bool):
        return b"t" if value else b"f"
    if isinstance(value, list):
        return ("{" + ",".join(map(str, value)) + "}").encode()
    return str(value).encode()


def _check(result: pq.abc.PGresult, connection: psycopg.Connection) -> None:
    if result.status in (pq.ExecStatus.TUPLES_OK, pq.ExecStatus.COMMAND_OK):
        return
    if connection.pgconn.status != pq.ConnStatus.OK:
        raise psycopg.OperationalError(connection.pgconn.get_error_message() or "the connection is lost")
    raise psycopg.errors.error_from_result(result, encoding="utf-8")
