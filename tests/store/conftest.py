"""A scene per test: an empty store, a run in it, and every verb.

Making a database costs a third of a second, so these tests share one per server and find it emptied. A test that
changes the schema, or stops the server, takes a database (`database_url`) or a server of its own.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from airflow_saga.store.migrate import upgrade
from tests.conftest import TEMPLATE
from tests.store.scene import Scene
from tests.support.postgres import PostgresServer, available_servers

_EMPTY = "DELETE FROM airflow_saga.saga; DELETE FROM airflow_saga.action; DELETE FROM airflow_saga.component"


def _shared(server: PostgresServer) -> Iterator[str]:
    name = f"shared_{uuid.uuid4().hex}"
    yield server.create_database(name, template=TEMPLATE)
    server.drop_database(name)


@pytest.fixture(scope="session")
def _shared_url(postgres_server: PostgresServer) -> Iterator[str]:
    yield from _shared(postgres_server)


@pytest.fixture(scope="session")
def _each_shared_url(each_postgres_server: PostgresServer) -> Iterator[str]:
    yield from _shared(each_postgres_server)


@pytest.fixture
def store_url(_shared_url: str) -> str:
    """The URL of an empty store."""
    return _emptied(_shared_url)


@pytest.fixture
def each_store_url(_each_shared_url: str) -> str:
    """The same, once for each version of Postgres."""
    return _emptied(_each_shared_url)


def _emptied(url: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(_EMPTY)
    return url


def _played(url: str) -> Iterator[Scene]:
    scene = Scene(url)
    yield scene
    status = scene.connection.info.transaction_status
    scene.close()
    assert status in (TransactionStatus.IDLE, TransactionStatus.UNKNOWN), (
        "a verb left its transaction open (C75)"
    )


@pytest.fixture
def scene(store_url: str) -> Iterator[Scene]:
    """A run in an empty store. No test may leave a transaction open on its connection."""
    yield from _played(store_url)


@pytest.fixture
def each_scene(each_store_url: str) -> Iterator[Scene]:
    """The same, once for each version of Postgres."""
    yield from _played(each_store_url)


@pytest.fixture
def own_scene(database_url: str) -> Iterator[Scene]:
    """A run in a database of its own, whose schema a test may change."""
    yield from _played(database_url)


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server that a test may stop, with a migrated template in it."""
    _, bin_dir = next(available_servers())
    with PostgresServer(bin_dir) as server:
        upgrade(server.create_database(TEMPLATE))
        yield server
