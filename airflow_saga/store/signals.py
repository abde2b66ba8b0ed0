"""Wake-ups: a hint that a decision about a saga was made. The row is the truth, and polling always works.

A notification carries a word, no data (a payload over 8000 bytes would roll the decision back), and only decisions send
one, never the action path: a commit that notifies takes a lock on the whole server.
"""

from __future__ import annotations

import psycopg


def listen(connection: psycopg.Connection, saga_id: int) -> bool:
    """Hear of decisions about this saga on this connection; False behind a pooler, where only polling works."""
    if connection.prepare_threshold is None:
        return False
    connection.execute(f"LISTEN airflow_saga_{saga_id}".encode(), prepare=False)
    return True


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
