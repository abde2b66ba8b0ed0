"""A laboratory for capsules: sagas in one database, users' effects in real services beside it."""

from __future__ import annotations

import importlib
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from airflow_saga.capsules import databases
from airflow_saga.core.records import ActionRecord
from tests.capsules.scripted import Scripted, scripted
from tests.capsules.trials import TRIALS, Trial
from tests.runtime.conftest import lab, shared_database_url, travel_world, world
from tests.support import services
from tests.support.postgres import PostgresServer

__all__ = ["lab", "shared_database_url", "travel_world", "world"]
SetConnection = Callable[..., str]


@pytest.fixture(scope="session", autouse=True)
def _airflow_is_loaded() -> None:
    """As in a task: loading it takes seconds, and what is abandoned while it loads leaves it in pieces."""
    for name in ("airflow.models.connection", "airflow.providers.postgres.hooks.postgres"):
        importlib.import_module(name)


@pytest.fixture
def set_connection(monkeypatch: pytest.MonkeyPatch) -> SetConnection:
    """Make a connection known to Airflow, in the environment as deployments do; its id is returned."""

    def set_it(conn_id: str, conn_type: str, **parts: Any) -> str:
        text = json.dumps({"conn_type": conn_type, **parts})
        monkeypatch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", text)
        return conn_id

    return set_it


@dataclass
class Shop:
    """A user's database: things with a price, and the table of receipts."""

    url: str
    conn_id: str

    def ask(self, statement: str, *params: Any) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url, autocommit=True) as connection:
            cursor = connection.execute(statement, params or None)
            return cursor.fetchall() if cursor.description is not None else []

    def things(self) -> list[tuple[Any, ...]]:
        return self.ask("SELECT id, name, price FROM things ORDER BY id")

    def receipts(self) -> int:
        return int(self.ask("SELECT count(*) FROM airflow_saga_receipts")[0][0])


@pytest.fixture
def bare_shop(postgres_server: PostgresServer, set_connection: SetConnection) -> Iterator[Shop]:
    """Without the table of receipts."""
    name = f"shop_{uuid.uuid4().hex}"
    url = postgres_server.create_database(name)
    conn_id = set_connection(
        "shop", "postgres", host="127.0.0.1", port=postgres_server.port, login="postgres", schema=name
    )
    made = Shop(url, conn_id)
    made.ask(
        "CREATE TABLE things (id serial PRIMARY KEY, name text UNIQUE, price numeric(10,2), tags jsonb, "
        "made_at timestamptz)"
    )
    yield made
    postgres_server.drop_database(name)


@pytest.fixture
def shop(bare_shop: Shop) -> Shop:
    databases.make_table(bare_shop.conn_id)
    return bare_shop


def record_of(name: str, params: dict[str, Any], key: str, **more: Any) -> ActionRecord:
    """What a probe or a compensation gets, without a log to read it from."""
    known: dict[str, Any] = {"result": None, "key": key, "undo_key": f"undo-{key}", "in_doubt": False}
    return ActionRecord("d", "r", "t", -1, name, 1, params, **{**known, **more})


# -- third parties ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def calendars() -> Iterator[services.Server]:
    with services.calendars() as server:
        yield server


@pytest.fixture(scope="session")
def object_store() -> Iterator[services.Server]:
    with services.object_store() as server:
        yield server


@pytest.fixture(scope="session")
def payments() -> Iterator[services.Server]:
    with services.payments() as server:
        yield server


@pytest.fixture(scope="session")
def mail_system() -> Iterator[services.MailSystem]:
    with services.mail_system() as system:
        yield system


@pytest.fixture
def trial(request: pytest.FixtureRequest) -> Trial:
    """A capsule with its service, by the name in the parameter."""
    return TRIALS[request.param](request)


@pytest.fixture
def web() -> Iterator[Scripted]:
    with scripted() as service:
        yield service
