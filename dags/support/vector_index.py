"""A vector index in Postgres with pgvector: what belongs to one collection, and up to which chunk it is complete.

A batch of chunks and the offset behind it are committed together, under the key of the call that wrote them. So the
offset never says more or less than there is, the same key twice is one batch, and a batch can be asked for and removed
by its key alone. The row of the offset is the lock: writers of one collection come one after the other.

``VECTOR_INDEX_URL`` says where the database is; without it, it is the one of the Airflow connection ``saga_default``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from psycopg import errors

from .documents import Chunk
from .embeddings import DIMENSIONS

CONN_ID = "saga_default"
CONNECT_SECONDS = 2
STATEMENT_SECONDS = 1
"""How long one statement, or the pause between two of them, may take: a batch has few, so it soon stands or never."""

Batch = dict[str, int]
"""``first``, the position of its first chunk, and ``rows``, how many there are."""

_TABLES = f"""
CREATE EXTENSION IF NOT EXISTS vector;
CREATE SCHEMA IF NOT EXISTS rag_demo;
CREATE TABLE IF NOT EXISTS rag_demo.progress (
    collection text PRIMARY KEY,
    next_position integer NOT NULL
);
CREATE TABLE IF NOT EXISTS rag_demo.chunk (
    collection text NOT NULL,
    position integer NOT NULL,
    key text NOT NULL,
    document text NOT NULL,
    text text NOT NULL,
    embedding vector({DIMENSIONS}) NOT NULL,
    PRIMARY KEY (collection, position)
);
CREATE INDEX IF NOT EXISTS chunk_of_key ON rag_demo.chunk (key);
"""


class Unreachable(Exception):
    """The database does not answer; nothing was sent to it."""


class OutOfStep(Exception):
    """Another batch belongs at this place of the collection; nothing was written."""


def prepare() -> None:
    """Make the tables where they are not there yet.

    :raises RuntimeError: this Postgres has no pgvector; says where there is one.
    """
    try:
        with _transaction() as connection:
            # Two that make the same table at once disturb each other, for all of "if not exists".
            connection.execute("SELECT pg_advisory_xact_lock(hashtext('rag_demo'))")
            connection.execute(_TABLES)
    except (errors.FeatureNotSupported, errors.UndefinedFile) as problem:
        raise RuntimeError(
            f"this Postgres has no pgvector ({problem}); the embedded one of 'airflow-saga[embedded]' has it"
        ) from problem


def add_batch(
    collection: str, first: int, chunks: list[Chunk], vectors: list[list[float]], *, key: str
) -> Batch:
    """Write chunks that begin at a position, and move the offset behind them; or find that this key has done so.

    :raises OutOfStep: the collection does not end at this position.
    :raises Unreachable: nothing was written.
    """
    with _transaction() as connection:
        offset = _lock(connection, collection)
        if written := _find(connection, key):
            return written
        if offset != first:
            raise OutOfStep(f"{collection} goes on at {offset}, not at {first}")
        _move_offset(connection, collection, first + len(chunks))
        _write_rows(connection, collection, first, chunks, vectors, key)
    return {"first": first, "rows": len(chunks)}


def find_batch(key: str) -> Batch | None:
    """Say what was written under a key; None: nothing was.

    :raises Unreachable: so nobody can tell.
    """
    with _transaction() as connection:
        return _find(connection, key)


def remove_batch(collection: str, *, key: str) -> int:
    """Remove exactly what was written under a key, and move the offset back; returns how many rows that were.

    :raises Unreachable: nothing was removed.
    """
    with _transaction() as connection:
        _lock(connection, collection)
        written = _find(connection, key)
        if written is not None:
            connection.execute("DELETE FROM rag_demo.chunk WHERE key = %s", (key,))
            _move_offset(connection, collection, written["first"])
        # An empty collection is as if it had never been.
        connection.execute(
            "DELETE FROM rag_demo.progress WHERE collection = %s AND next_position = 0", (collection,)
        )
    return written["rows"] if written else 0


def nearest(collection: str, vector: list[float], limit: int) -> list[dict[str, Any]]:
    """Find the chunks whose vectors lie closest, the closest first; ``likeness`` is the cosine, 1 for the same."""
    with _transaction() as connection:
        rows = connection.execute(
            "SELECT document, text, 1 - (embedding <=> %(vector)s::vector) FROM rag_demo.chunk"
            " WHERE collection = %(collection)s ORDER BY embedding <=> %(vector)s::vector LIMIT %(limit)s",
            {"vector": _literal(vector), "collection": collection, "limit": limit},
        ).fetchall()
    return [
        {"document": document, "likeness": round(likeness, 3), "text": text}
        for document, text, likeness in rows
    ]


# -- statements --------------------------------------------------------------------------------------------------


def _lock(connection: psycopg.Connection, collection: str) -> int:
    """The offset of a collection, which no other transaction can move until this one is over."""
    connection.execute("INSERT INTO rag_demo.progress VALUES (%s, 0) ON CONFLICT DO NOTHING", (collection,))
    row = connection.execute(
        "SELECT next_position FROM rag_demo.progress WHERE collection = %s FOR UPDATE", (collection,)
    ).fetchone()
    if row is None:
        raise OutOfStep(f"{collection} was emptied by another transaction just now")
    return int(row[0])


def _find(connection: psycopg.Connection, key: str) -> Batch | None:
    row = connection.execute(
        "SELECT min(position), count(*) FROM rag_demo.chunk WHERE key = %s", (key,)
    ).fetchone()
    return {"first": row[0], "rows": row[1]} if row and row[1] else None


def _move_offset(connection: psycopg.Connection, collection: str, position: int) -> None:
    connection.execute(
        "UPDATE rag_demo.progress SET next_position = %s WHERE collection = %s", (position, collection)
    )


def _write_rows(
    connection: psycopg.Connection,
    collection: str,
    first: int,
    chunks: list[Chunk],
    vectors: list[list[float]],
    key: str,
) -> None:
    rows = [
        (collection, position, key, chunk["document"], chunk["text"], _literal(vector))
        for position, (chunk, vector) in enumerate(zip(chunks, vectors, strict=True), first)
    ]
    with connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO rag_demo.chunk (collection, position, key, document, text, embedding)"
            " VALUES (%s, %s, %s, %s, %s, %s::vector)",
            rows,
        )


def _literal(vector: list[float]) -> str:
    """The vector as pgvector writes it, so that its Python package is not needed."""
    return str(vector)


# -- the database ------------------------------------------------------------------------------------------------


@contextmanager
def _transaction() -> Iterator[psycopg.Connection]:
    """One transaction on a connection of its own, which ends with it.

    :raises Unreachable: there is no connection.
    """
    try:
        connection = _connect()
    except psycopg.OperationalError as problem:
        raise Unreachable(str(problem)) from problem
    with connection:
        for setting in ("statement_timeout", "idle_in_transaction_session_timeout"):
            connection.execute(f"SET LOCAL {setting} = '{STATEMENT_SECONDS}s'")
        yield connection


def _connect() -> psycopg.Connection:
    if url := os.environ.get("VECTOR_INDEX_URL"):
        return psycopg.connect(url, connect_timeout=CONNECT_SECONDS)
    from airflow.sdk import Connection

    known = Connection.get(CONN_ID)
    return psycopg.connect(
        host=known.host,
        port=known.port,
        user=known.login,
        password=known.password,
        dbname=known.schema,
        connect_timeout=CONNECT_SECONDS,
    )
