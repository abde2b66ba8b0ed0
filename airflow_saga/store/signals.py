"""Wake-ups: a hint that a decision about a saga was made. The row is the truth, and polling always works.

A notification carries a word, no data (a payload over 8000 bytes would roll the decision back), and only decisions send
one, never the action path: a commit that notifies takes a lock on the whole server.
"""

from __future__ import annotations

import psycopg


def are_delivered(connection: psycopg.Connection) -> bool:
    """Not behind a transaction pooler, where only polling works."""
    return connection.prepare_threshold is not None


def listen(connection: psycopg.Connection, saga_id: int) -> None:
    """Hear of decisions about this saga on this connection, where notifications are delivered.

    In a transaction it holds from its commit on, and no decision is missed that the transaction has not seen.
    """
    if are_delivered(connection):
        connection.execute(f"LISTEN airflow_saga_{saga_id}".encode(), prepare=False)


def take(connection: psycopg.Connection) -> bool:
    """Whether something was heard since the last time; does not wait.

    :raises psycopg.OperationalError: the connection is lost.
    """
    connection.pgconn.consume_input()
    heard = False
    while connection.pgconn.notifies() is not None:
        heard = True
    return heard


def wait(connection: psycopg.Connection, seconds: float) -> bool:
    """Wait until something is heard, or for this long."""
    return any(True for _ in connection.notifies(timeout=seconds, stop_after=1))
